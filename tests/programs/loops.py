"""Custom training loops: strategy.run, strategy.reduce, an optimizer."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.programs._registry import (
    ALL,
    BATCH,
    MANY,
    OWN_DRAWS,
    OWN_STATISTICS,
    WHOLE_MORE,
    arrays,
    batches,
    by_path,
    classify,
    labels,
    local,
    mlp,
    per_replica,
    program,
    rows,
)


def _data(*shape: int, number: int = 2 * BATCH, batch: int = BATCH) -> tf.data.Dataset:
    return batches(rows(number, *(shape or (6,))), labels(number), batch=batch)


@program(replicas=MANY, core=True, whole="sum", micro_batches=WHOLE_MORE)
def loop_mlp_sgd(strategy: tf.distribute.Strategy) -> Any:
    return classify(strategy, mlp, lambda: keras.optimizers.SGD(0.1), _data())


@program(replicas=ALL, core=True, whole="sum", micro_batches=WHOLE_MORE)
def loop_mlp_adam(strategy: tf.distribute.Strategy) -> Any:
    return classify(strategy, mlp, lambda: keras.optimizers.Adam(0.01), _data())


@program(whole="sum")
def loop_momentum(strategy: tf.distribute.Strategy) -> Any:
    return classify(strategy, mlp, lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), _data())


@program(whole="sum")
def loop_rmsprop(strategy: tf.distribute.Strategy) -> Any:
    return classify(strategy, mlp, lambda: keras.optimizers.RMSprop(0.01, centered=True), _data())


@program(whole="sum")
def loop_adamw_ema_clipnorm(strategy: tf.distribute.Strategy) -> Any:
    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.AdamW(0.01, weight_decay=0.05, use_ema=True, ema_momentum=0.9, clipnorm=0.1)

    return classify(strategy, mlp, optimizer, _data())


@program(replicas=ALL, core=True, why_not_whole=OWN_STATISTICS)
def loop_batch_norm(strategy: tf.distribute.Strategy) -> Any:
    def build() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((6,)),
                # A bias would have a gradient that is zero but for rounding.
                keras.layers.Dense(8, use_bias=False),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(4),
            ]
        )

    return classify(strategy, build, lambda: keras.optimizers.SGD(0.1), _data())


@program(core=True, why_not_whole=OWN_DRAWS)
def loop_dropout(strategy: tf.distribute.Strategy) -> Any:
    def build() -> keras.Model:
        return keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(16), keras.layers.Dropout(0.4, seed=3), keras.layers.Dense(4)]
        )

    return classify(strategy, build, lambda: keras.optimizers.SGD(0.1), _data())


@program(whole="sum")
def loop_lstm(strategy: tf.distribute.Strategy) -> Any:
    def build() -> keras.Model:
        return keras.Sequential([keras.Input((5, 3)), keras.layers.LSTM(6), keras.layers.Dense(4)])

    return classify(strategy, build, lambda: keras.optimizers.Adam(0.01), _data(5, 3))


@program(replicas=(2, 4), whole="sum")
def loop_convolution(strategy: tf.distribute.Strategy) -> Any:
    def build() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((8, 8, 2)),
                keras.layers.Conv2D(4, 3, activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Flatten(),
                keras.layers.Dense(4),
            ]
        )

    return classify(strategy, build, lambda: keras.optimizers.SGD(0.05, momentum=0.9), _data(8, 8, 2))


@program(replicas=MANY, core=True, whole="sum", micro_batches=WHOLE_MORE)
def loop_uneven_last_batch(strategy: tf.distribute.Strategy) -> Any:
    return classify(strategy, mlp, lambda: keras.optimizers.SGD(0.1), _data(number=BATCH + 17))


@program(replicas=ALL, core=True, whole="sum", micro_batches=WHOLE_MORE)
def loop_fewer_rows_than_replicas(strategy: tf.distribute.Strategy) -> Any:
    return classify(strategy, mlp, lambda: keras.optimizers.SGD(0.1), _data(number=BATCH + 1))


@program(replicas=ALL, whole="sum", micro_batches=WHOLE_MORE)
def loop_batch_not_divisible(strategy: tf.distribute.Strategy) -> Any:
    return classify(strategy, mlp, lambda: keras.optimizers.SGD(0.1), _data(number=52, batch=20), batch=20)


@program(whole="sum")
def loop_embedding(strategy: tf.distribute.Strategy) -> Any:
    tokens = np.random.default_rng(0).integers(0, 11, (2 * BATCH, 5))

    def build() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((5,), dtype="int64"),
                keras.layers.Embedding(11, 4),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(4),
            ]
        )

    return classify(strategy, build, lambda: keras.optimizers.Adam(0.01), batches(tokens, labels(2 * BATCH)))


@program(core=True, whole="sum", micro_batches=WHOLE_MORE)
def loop_metrics(strategy: tf.distribute.Strategy) -> Any:
    """Keras metrics updated in the replica function, read and reset in cross-replica context."""
    with strategy.scope():
        model = mlp(classes=2)
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
        metrics = [
            keras.metrics.Mean(),
            keras.metrics.SparseCategoricalAccuracy(),
            keras.metrics.AUC(num_thresholds=20),
        ]
    data = strategy.experimental_distribute_dataset(batches(rows(2 * BATCH, 6), labels(2 * BATCH, 2)))

    def replica_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            loss = tf.reduce_sum(losses) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        metrics[0].update_state(losses)
        metrics[1].update_state(y, logits)
        metrics[2].update_state(y, tf.nn.softmax(logits)[:, 1])

    @tf.function
    def step(inputs: Any) -> None:
        strategy.run(replica_step, args=inputs)

    history = []
    for _ in range(3):
        for inputs in data:
            step(inputs)
        history.append([float(metric.result()) for metric in metrics])
        state = [by_path(metric.variables) for metric in metrics]
        own = [per_replica(strategy, metric.variables) for metric in metrics]
        for metric in metrics:
            metric.reset_state()
    after = [per_replica(strategy, metric.variables) for metric in metrics]
    return {"history": np.asarray(history), "state": state, "per replica": own, "after reset": after}


@program(whole="sum")
def loop_eager_values(strategy: tf.distribute.Strategy) -> Any:
    """strategy.run outside any tf.function."""
    with strategy.scope():
        weight = tf.Variable([1.0, 2.0])

    def replica_step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((x * weight) ** 2)
        gradient = tf.distribute.get_replica_context().all_reduce("sum", tape.gradient(loss, weight))
        return loss, gradient

    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant([1.0, 2.0]) * (1.0 + context.replica_id_in_sync_group)
    )
    out = []
    for _ in range(3):
        loss, gradient = strategy.run(replica_step, args=(values,))
        first = strategy.experimental_local_results(gradient)[0]
        with strategy.scope():
            strategy.extended.update(weight, lambda v, g: v.assign_sub(0.01 * g), args=(first,))
        out.append([local(strategy, loss), local(strategy, gradient), strategy.reduce("SUM", loss, axis=None)])
    return {"out": arrays(out), "weight": weight.numpy()}


@program(whole="mean")
def optimizers_of_tensorflow_1(strategy: tf.distribute.Strategy) -> Any:
    """Their slots are made in the first traced step, and found by the variable that `update` hands out."""
    train = tf.compat.v1.train
    data = strategy.experimental_distribute_dataset(batches(rows(2 * BATCH, 3)))

    def trained(optimizer: Any) -> Any:
        with strategy.scope():
            weights = tf.Variable([[1.0], [2.0], [3.0]])
            stepper = optimizer()

        def replica_step(x: Any) -> None:
            stepper.minimize(lambda: tf.reduce_mean(tf.square(x @ weights - 1.0)), var_list=[weights])

        step = tf.function(lambda x: strategy.run(replica_step, args=(x,)))
        out = []
        for _ in range(2):
            for x in data:
                step(x)
                out.append(weights.numpy())
        return {"weights": out, "slots": [stepper.get_slot(weights, name).numpy() for name in stepper.get_slot_names()]}

    return {
        "descent": trained(lambda: train.GradientDescentOptimizer(0.1)),
        "momentum": trained(lambda: train.MomentumOptimizer(0.1, 0.9)),
        "adam": trained(lambda: train.AdamOptimizer(0.1)),
        "rms": trained(lambda: train.RMSPropOptimizer(0.1)),
    }
