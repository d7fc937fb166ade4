"""tf_keras, the Keras 2 that TensorFlow up to 2.15 had."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import tensorflow as tf

from tests.programs._registry import BATCH, OWN_STATISTICS, batches, labels, local, program, rows


def _build() -> Any:
    tf_keras = importlib.import_module("tf_keras")
    return tf_keras.Sequential(
        [
            tf_keras.Input((6,)),
            tf_keras.layers.Dense(8, use_bias=False),
            tf_keras.layers.BatchNormalization(),
            tf_keras.layers.Dense(4),
        ]
    )


def _values(variables: Any) -> list[np.ndarray]:
    return [variable.numpy() for variable in variables]


@program(core=True, needs="tf_keras", why_not_whole=OWN_STATISTICS)
def legacy_loop(strategy: tf.distribute.Strategy) -> Any:
    tf_keras = importlib.import_module("tf_keras")
    tf_keras.backend.clear_session()
    with strategy.scope():
        model, optimizer = _build(), tf_keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        metric = tf_keras.metrics.SparseCategoricalAccuracy()

    def replica_step(x: Any, y: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        metric.update_state(y, logits)
        return loss

    step = tf.function(lambda inputs: strategy.run(replica_step, args=inputs))
    data = strategy.experimental_distribute_dataset(batches(rows(2 * BATCH, 6), labels(2 * BATCH)))
    losses = [local(strategy, step(inputs)) for _ in range(5) for inputs in data]
    variables = [*model.variables, *optimizer.variables, *metric.variables]
    return {"losses": losses, "values": _values(variables), "metric": metric.result().numpy()}


@program(core=True, needs="tf_keras", why_not_whole=OWN_STATISTICS)
def legacy_fit(strategy: tf.distribute.Strategy) -> Any:
    tf_keras = importlib.import_module("tf_keras")
    tf_keras.backend.clear_session()
    with strategy.scope():
        model = _build()
        loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf_keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    number = BATCH + 17
    data = batches(rows(number, 6), labels(number))
    history = model.fit(data, epochs=4, validation_data=data, verbose=0)
    return {
        "values": _values([*model.variables, *model.optimizer.variables]),
        "history": {key: np.asarray(value) for key, value in history.history.items()},
        "evaluate": model.evaluate(data, verbose=0),
        "predict": model.predict(data, verbose=0),
    }


@program(
    eager=(), needs="tf_keras", why="the eager engine's values are all for themselves", why_not_whole=OWN_STATISTICS
)
def legacy_on_batch_methods(strategy: tf.distribute.Strategy) -> Any:
    """Logs of one batch: a metric's result is one value for all replicas, and counts once."""
    tf_keras = importlib.import_module("tf_keras")
    tf_keras.backend.clear_session()
    with strategy.scope():
        model = _build()
        loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf_keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    x, y = rows(BATCH, 6), labels(BATCH)
    logs: list[Any] = []
    keep = tf_keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, values: logs.append(dict(values)))
    model.fit(batches(rows(2 * BATCH, 6), labels(2 * BATCH)), verbose=0, callbacks=[keep])
    return [logs, *(method(x, y) for method in (model.train_on_batch, model.test_on_batch))]


@program(
    replicas=(2,), eager=(2,), needs="tf_keras", why_not_whole="every replica's gradients are checked by themselves"
)
def legacy_mixed_float16(strategy: tf.distribute.Strategy) -> Any:
    """One row overflows: its step is left out, and the scale halved."""
    tf_keras = importlib.import_module("tf_keras")
    tf_keras.backend.clear_session()
    tf_keras.utils.set_random_seed(3)
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        with strategy.scope():
            layers = [tf_keras.layers.Dense(8, activation="relu"), tf_keras.layers.Dense(4, dtype="float32")]
            model = tf_keras.Sequential([tf_keras.Input((6,)), *layers])
            loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(tf_keras.optimizers.SGD(0.1, momentum=0.5), loss)
        x = rows(4 * BATCH, 6)
        x[BATCH + 1] = 65000.0
        history = model.fit(batches(x, labels(4 * BATCH)), epochs=2, verbose=0)
    finally:
        tf_keras.mixed_precision.set_global_policy("float32")
    values = _values([*model.variables, *model.optimizer.variables])
    return {"loss": history.history["loss"], "values": values, "scale": np.asarray(model.optimizer.loss_scale)}
