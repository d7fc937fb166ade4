"""Keras' training in micro-batches: fit, evaluate and predict must give what they give with the full batch."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.programs._registry import (
    BATCH,
    TOLERANCE_LATER,
    WHOLE_MORE,
    arrays,
    batches,
    labels,
    mlp,
    model_state,
    program,
    rows,
)

NUMBER = 2 * BATCH + 7
"""Rows of the data: two full batches and a short one."""
Build = Callable[[], keras.Model]

_program = functools.partial(program, replicas=(), whole="mean")


def _crossentropy(**options: Any) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def _sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.5)


def _compiled(strategy: tf.distribute.Strategy, build: Build = mlp, **options: Any) -> keras.Model:
    """`options` are functions: what they make is made in scope."""
    with strategy.scope():
        model = build()
        made = {name: option() if callable(option) else option for name, option in options.items()}
        model.compile(**{"optimizer": _sgd(), "loss": _crossentropy(), **made})
    return model


def _fit(
    model: keras.Model, x: Any = None, y: Any = None, weights: Any = None, *, evaluate: bool = False, **options: Any
) -> dict[str, Any]:
    x = rows(NUMBER, 6) if x is None else x
    y = labels(NUMBER) if y is None else y
    both = {"batch_size": BATCH, "verbose": 0}
    history = model.fit(x, y, **both, epochs=2, shuffle=False, sample_weight=weights, **options)
    out = {**model_state(model), "history": arrays(history.history)}
    if evaluate:
        out["evaluate"] = arrays(model.evaluate(x, y, **both, sample_weight=weights, return_dict=True))
        out["predict"] = arrays(model.predict(x, **both))
    return out


def _layers(*layers: Any, shape: tuple[int, ...] = (6,), dtype: str = "float32") -> keras.Model:
    return keras.Sequential([keras.Input(shape, dtype=dtype), *layers])


def _token_data() -> tuple[np.ndarray, np.ndarray]:
    """Tokens, of which a row has between one and five before the zeros."""
    rng = np.random.default_rng(0)
    lengths = np.sort(rng.integers(1, 6, NUMBER))
    return rng.integers(1, 9, (NUMBER, 5)) * (np.arange(5) < lengths[:, np.newaxis]), rng.integers(0, 4, (NUMBER, 5))


def _row_weights() -> np.ndarray:
    return np.sort(np.abs(rows(NUMBER, seed=5)))


# --- Losses -----------------------------------------------------------------------------------------------------------
@_program(micro_batches=WHOLE_MORE)
def whole_fit(strategy: tf.distribute.Strategy) -> Any:
    return _fit(_compiled(strategy, metrics=lambda: ["accuracy"]), evaluate=True)


@_program(whole="sum")
def whole_fit_declared_as_sums(strategy: tf.distribute.Strategy) -> Any:
    """Keras knows what its losses are, whatever was declared."""
    return _fit(_compiled(strategy, metrics=lambda: ["accuracy"]))


@_program(micro_batches=WHOLE_MORE)
def whole_fit_sum_loss(strategy: tf.distribute.Strategy) -> Any:
    return _fit(_compiled(strategy, loss=lambda: _crossentropy(reduction="sum"), optimizer=lambda: "adam"))


@_program(whole="sum")
def whole_fit_sum_loss_declared(strategy: tf.distribute.Strategy) -> Any:
    return _fit(
        _compiled(strategy, loss=lambda: _crossentropy(reduction="sum"), optimizer=lambda: "adam"), evaluate=True
    )


@_program()
def whole_fit_weighted_rows(strategy: tf.distribute.Strategy) -> Any:
    """Keras divides by the number of rows, whatever they weigh."""
    metrics = {"weighted_metrics": lambda: ["accuracy"], "metrics": lambda: ["accuracy"]}
    return _fit(_compiled(strategy, **metrics), weights=_row_weights(), evaluate=True)


@_program()
def whole_fit_mean_with_sample_weight(strategy: tf.distribute.Strategy) -> Any:
    """Keras divides by what the rows weigh."""
    loss = functools.partial(_crossentropy, reduction="mean_with_sample_weight")
    return _fit(_compiled(strategy, loss=loss), weights=_row_weights(), evaluate=True)


@_program()
def whole_fit_unreduced_loss(strategy: tf.distribute.Strategy) -> Any:
    """One loss a row: the gradient is that of their sum."""
    model = _compiled(strategy, loss=lambda: _crossentropy(reduction=None), optimizer=lambda: "adam")
    return _fit(model)


@_program()
def whole_fit_loss_functions(strategy: tf.distribute.Strategy) -> Any:
    """Functions as losses, and as metrics: one number for the batch, and one for each row."""

    def of_batch(y_true: Any, y_pred: Any) -> Any:
        return tf.reduce_mean((y_pred - tf.cast(y_true, tf.float32)) ** 2)

    def of_rows(y_true: Any, y_pred: Any) -> Any:
        return tf.reduce_max(tf.abs(y_pred - tf.cast(y_true, tf.float32)), axis=1)

    y = labels(NUMBER)[:, np.newaxis]
    return [
        _fit(_compiled(strategy, loss=lambda loss=loss: loss, metrics=lambda: [of_batch, of_rows]), y=y)
        for loss in (of_batch, of_rows)
    ]


@_program(whole="sum")
def whole_fit_mean_with_sample_weight_declared_as_sum(strategy: tf.distribute.Strategy) -> Any:
    loss = functools.partial(_crossentropy, reduction="mean_with_sample_weight")
    return _fit(_compiled(strategy, loss=loss), weights=_row_weights())


@_program()
def whole_fit_class_weights(strategy: tf.distribute.Strategy) -> Any:
    model = _compiled(strategy, weighted_metrics=lambda: ["accuracy"])
    return _fit(model, class_weight={0: 1.0, 1: 2.0, 2: 0.5, 3: 3.0})


def _fit_masked(strategy: tf.distribute.Strategy, *between: Any, weights: Any = None, **options: Any) -> Any:
    """A mask that leaves micro-batches different numbers of tokens, in the loss and in metrics."""

    def build() -> keras.Model:
        embedding = keras.layers.Embedding(9, 6, "normal", mask_zero=True)
        return _layers(embedding, *(make() for make in between), keras.layers.Dense(4), shape=(5,), dtype="int64")

    metrics = {"metrics": lambda: ["accuracy"], "weighted_metrics": lambda: ["accuracy"]}
    return _fit(_compiled(strategy, build, **metrics, **options), *_token_data(), weights, evaluate=True)


@_program(core=True, micro_batches=WHOLE_MORE)
def whole_fit_masked(strategy: tf.distribute.Strategy) -> Any:
    return _fit_masked(strategy, lambda: keras.layers.LSTM(5, return_sequences=True))


@_program(whole="sum")
def whole_fit_masked_declared_as_sums(strategy: tf.distribute.Strategy) -> Any:
    return _fit_masked(strategy, weights=np.abs(rows(NUMBER, 5, seed=5)))


@_program()
def whole_fit_masked_weighted_tokens(strategy: tf.distribute.Strategy) -> Any:
    return _fit_masked(strategy, weights=np.abs(rows(NUMBER, 5, seed=5)))


@_program()
def whole_fit_masked_sums(strategy: tf.distribute.Strategy) -> Any:
    return _fit_masked(strategy, loss=lambda: _crossentropy(reduction="sum"), optimizer=lambda: "adam")


@_program()
def whole_fit_regularizers(strategy: tf.distribute.Strategy) -> Any:
    """Penalties on weights, the same for all micro-batches, and on activations."""
    build = functools.partial(
        _layers,
        keras.layers.Dense(8, "tanh", kernel_regularizer="l2", activity_regularizer="l2"),
        keras.layers.Dense(4, bias_regularizer="l1", kernel_regularizer=keras.regularizers.OrthogonalRegularizer()),
    )
    return _fit(_compiled(strategy, build))


@_program(whole="sum")
def whole_fit_sum_loss_and_regularizers(strategy: tf.distribute.Strategy) -> Any:
    build = functools.partial(_layers, keras.layers.Dense(8, "tanh", kernel_regularizer="l2"), keras.layers.Dense(4))
    return _fit(_compiled(strategy, build, loss=lambda: _crossentropy(reduction="sum"), optimizer=lambda: "adam"))


class Penalties(keras.layers.Layer):
    """Adds losses: a mean, and one for each row, which Keras adds up."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * tf.reduce_mean(x**2))
        self.add_loss(0.01 * tf.reduce_sum(tf.abs(x), axis=1))
        return x


@_program()
def whole_fit_added_losses(strategy: tf.distribute.Strategy) -> Any:
    build = functools.partial(_layers, keras.layers.Dense(8, "tanh"), Penalties(), keras.layers.Dense(4))
    return _fit(_compiled(strategy, build), evaluate=True)


@_program(core=True)
def whole_fit_two_outputs(strategy: tf.distribute.Strategy) -> Any:
    """Named outputs with losses, weights and metrics of their own, one of them weighted by rows; then batch by batch."""

    def build() -> keras.Model:
        a, b = keras.Input((6,), name="a"), keras.Input((2,), name="b")
        x = keras.layers.Dense(8, "tanh")(keras.layers.Concatenate()([a, b]))
        return keras.Model(
            {"a": a, "b": b}, {name: keras.layers.Dense(size, name=name)(x) for name, size in (("c", 4), ("d", 1))}
        )

    options = {
        "loss": lambda: {"c": _crossentropy(), "d": "mse"},
        "loss_weights": lambda: {"c": 0.3, "d": 1.0},
        "metrics": lambda: {"c": ["accuracy"], "d": ["mae"]},
        "weighted_metrics": lambda: {"c": [], "d": ["mse"]},
    }
    model = _compiled(strategy, build, **options)
    x = {"a": rows(NUMBER, 6), "b": rows(NUMBER, 2, seed=2)}
    y = {"c": labels(NUMBER), "d": 2 + rows(NUMBER, 1, seed=3)}
    out = _fit(model, x, y, {"c": np.ones(NUMBER, "float32"), "d": _row_weights()}, evaluate=True)
    model.reset_metrics()
    some = [{name: part[:11] for name, part in parts.items()} for parts in (x, y)]
    more = [model.train_on_batch(*some, return_dict=True), model.test_on_batch(*some), model.predict_on_batch(some[0])]
    return {**out, "on batch": arrays(more)}


# --- Metrics ----------------------------------------------------------------------------------------------------------
@_program()
def whole_fit_class_metrics(strategy: tf.distribute.Strategy) -> Any:
    def metrics() -> list[Any]:
        return [
            "accuracy",
            keras.metrics.SparseTopKCategoricalAccuracy(2),
            keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="crossentropy"),
            keras.metrics.MeanIoU(4, sparse_y_pred=False),
        ]

    return _fit(_compiled(strategy, metrics=metrics), evaluate=True)


@_program()
def whole_fit_binary_metrics(strategy: tf.distribute.Strategy) -> Any:
    def metrics() -> list[Any]:
        return [
            keras.metrics.AUC(num_thresholds=20),
            keras.metrics.Precision(),
            keras.metrics.RecallAtPrecision(0.5),
            keras.metrics.F1Score(threshold=0.5),
            keras.metrics.R2Score(),
            keras.metrics.RootMeanSquaredError(),
            keras.metrics.CosineSimilarity(),
        ]

    build = functools.partial(_layers, keras.layers.Dense(8, "tanh"), keras.layers.Dense(1, "sigmoid"))
    model = _compiled(strategy, build, loss=lambda: "binary_crossentropy", metrics=metrics)
    return _fit(model, y=labels(NUMBER, 2).astype("float32")[:, np.newaxis], evaluate=True)


class Errors(keras.metrics.Metric):
    """A metric of one's own: it counts rows and adds up their errors."""

    def __init__(self) -> None:
        super().__init__(name="errors")
        self.total = self.add_variable((4,), "zeros", name="total")
        self.number = self.add_variable((), "zeros", name="number", dtype="int32")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(tf.reduce_sum((y_pred - tf.one_hot(tf.cast(y_true, tf.int32), 4)) ** 2, axis=0))
        self.number.assign(self.number + tf.shape(y_pred)[0])

    def result(self) -> Any:
        return tf.reduce_max(self.total / tf.cast(self.number, tf.float32))


@_program()
def whole_fit_own_metric(strategy: tf.distribute.Strategy) -> Any:
    return _fit(_compiled(strategy, metrics=lambda: [Errors()]), evaluate=True)


class MeanOfBatches(keras.metrics.Metric):
    """A metric that adds one number for each batch, and counts batches."""

    def __init__(self) -> None:
        super().__init__(name="mean_of_batches")
        self.total = self.add_variable((), "zeros", name="total")
        self.batches = self.add_variable((), "zeros", name="batches")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(tf.reduce_mean(y_pred**2))
        self.batches.assign_add(1.0)

    def result(self) -> Any:
        return self.total / self.batches


@_program()
def whole_fit_own_metric_of_batches(strategy: tf.distribute.Strategy) -> Any:
    return _fit(_compiled(strategy, metrics=lambda: [MeanOfBatches()]))


# --- Layers -----------------------------------------------------------------------------------------------------------
@_program()
def whole_fit_synchronized_batch_norm(strategy: tf.distribute.Strategy) -> Any:
    build = functools.partial(
        _layers,
        keras.layers.Dense(8, use_bias=False),
        keras.layers.BatchNormalization(momentum=0.7, synchronized=True),
        keras.layers.ReLU(),
        keras.layers.Dense(4),
    )
    return _fit(_compiled(strategy, build))


@_program(core=True, micro_batches=WHOLE_MORE)
def whole_fit_batch_norm_statistics(strategy: tf.distribute.Strategy) -> Any:
    """Where batch normalization comes first, its moving statistics are those of the full batch; its outputs are not."""

    def statistics(*shape: int) -> list[np.ndarray]:
        def build() -> keras.Model:
            layer = keras.layers.BatchNormalization(momentum=0.7)
            return _layers(layer, keras.layers.Flatten(), keras.layers.Dense(4), shape=shape)

        model = _compiled(strategy, build)
        _fit(model, 2 + 3 * rows(NUMBER, *shape))
        return arrays([model.layers[0].moving_mean, model.layers[0].moving_variance])

    return [statistics(6), statistics(4, 4, 2)]


@_program()
def whole_fit_layers_with_state(strategy: tf.distribute.Strategy) -> Any:
    """Layers whose state or draws have nothing of the rows; normalisation row by row."""
    build = functools.partial(
        _layers,
        keras.layers.SpectralNormalization(keras.layers.Dense(8, "tanh")),
        keras.layers.LayerNormalization(),
        keras.layers.Dropout(0.0, seed=1),
        keras.layers.GroupNormalization(2),
        keras.layers.Dense(4),
    )
    return _fit(_compiled(strategy, build))


@_program(whole_tolerance=TOLERANCE_LATER)
def whole_fit_attention(strategy: tf.distribute.Strategy) -> Any:
    def build() -> keras.Model:
        inputs = keras.Input((5,), dtype="int64")
        x = keras.layers.Embedding(9, 8, "normal", mask_zero=True)(inputs)
        x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(2, 4, use_bias=False)(x, x))
        x = keras.layers.Bidirectional(keras.layers.GRU(3))(x)
        return keras.Model(inputs, keras.layers.Dense(4)(x))

    return _fit(_compiled(strategy, build), _token_data()[0])


@_program(whole_tolerance=TOLERANCE_LATER)
def whole_fit_convolution(strategy: tf.distribute.Strategy) -> Any:
    build = functools.partial(
        _layers,
        keras.layers.SeparableConv2D(4, 3, activation="tanh"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2DTranspose(3, 3),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(4),
        shape=(8, 8, 2),
    )
    return _fit(_compiled(strategy, build), rows(NUMBER, 8, 8, 2))


# --- Optimizers -------------------------------------------------------------------------------------------------------
@_program()
def whole_fit_accumulating_optimizer(strategy: tf.distribute.Strategy) -> Any:
    """Keras' own accumulation over steps, moving averages of the weights, clipping."""

    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.Adam(
            0.01, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3, clipnorm=0.1
        )

    return _fit(_compiled(strategy, optimizer=optimizer), evaluate=True)


@_program(one_device=True)
def whole_fit_loss_scaling(strategy: tf.distribute.Strategy) -> Any:
    """Under any strategy, and only there, Keras gives the inner optimizer's variables paths without the outer one's."""

    def optimizer() -> keras.optimizers.Optimizer:
        inner = keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.3)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0, dynamic_growth_steps=2)

    return _fit(_compiled(strategy, optimizer=optimizer))


@_program()
def whole_fit_mixed_float16(strategy: tf.distribute.Strategy) -> Any:
    """A batch of which one row overflows, so that its step is left out; then numbers that float16 holds exactly."""

    def build() -> keras.Model:
        dense = keras.layers.Dense(2, use_bias=False, kernel_initializer="ones", dtype="mixed_float16")
        return _layers(dense, shape=(3,))

    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.25), initial_scale=32.0)

    model = _compiled(strategy, build, optimizer=optimizer, loss=lambda: "mse")
    x = np.random.default_rng(0).integers(-2, 3, (16, 3)).astype("float32")
    y = np.random.default_rng(1).integers(-2, 3, (16, 2)).astype("float32")
    large = np.where(np.arange(16)[:, np.newaxis] == 5, np.float32(60000), x)
    model.train_on_batch(large, y)
    skipped = model_state(model)
    model.reset_metrics()
    return {"skipped": skipped, "loss": np.asarray(model.train_on_batch(x, y)), **model_state(model)}


@_program()
def whole_fit_schedule_and_constraints(strategy: tf.distribute.Strategy) -> Any:
    build = functools.partial(
        _layers,
        keras.layers.Dense(8, "tanh", kernel_constraint="max_norm"),
        keras.layers.Dense(4, kernel_constraint="non_neg"),
    )

    def optimizer() -> keras.optimizers.Optimizer:
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.8)
        return keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True, clipvalue=0.05)

    return _fit(_compiled(strategy, build, optimizer=optimizer))


# --- Ways to train ----------------------------------------------------------------------------------------------------
@_program(whole_tolerance=TOLERANCE_LATER)
def whole_fit_steps_per_execution(strategy: tf.distribute.Strategy) -> Any:
    model = _compiled(strategy, steps_per_execution=2, metrics=lambda: ["accuracy"])
    out = _fit(model, evaluate=True)
    data = batches(rows(NUMBER, 6), labels(NUMBER)).repeat()
    more = model.fit(data, steps_per_epoch=5, epochs=3, verbose=0, validation_data=data, validation_steps=3)
    return {**out, "more": arrays(more.history), "after": model_state(model)}


@_program(core=True)
def whole_fit_compiled_by_xla(strategy: tf.distribute.Strategy) -> Any:
    """Twice 24 rows: XLA takes parts of one size, so they are 6 each for n = 4 and for n = 5."""
    model = _compiled(strategy, jit_compile=True, metrics=lambda: ["accuracy"])
    return _fit(model, rows(2 * BATCH, 6), labels(2 * BATCH), evaluate=True)


@_program()
def whole_fit_compiled_by_xla_uneven(strategy: tf.distribute.Strategy) -> Any:
    """The last batch has 7 rows, which only parts of one row share out evenly."""
    model = _compiled(strategy, jit_compile=True)
    return _fit(model, rows(BATCH + 7, 6), labels(BATCH + 7))


class OwnSteps(keras.Model):
    """Overridden steps as for one device: own clipping, raw losses returned, counters and averages of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.tracker = keras.metrics.Mean(name="tracker")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps", dtype="int32")
        self.seen = tf.Variable(0, trainable=False, aggregation=tf.VariableAggregation.SUM)
        self.average = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="average", aggregation="mean"
        )

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker, self.accuracy]

    def call(self, x: Any, training: bool | None = None) -> Any:
        return self.inner(x, training=training)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.3)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.tracker.update_state(loss)
        self.accuracy.update_state(y, logits)
        self.steps.assign_add(1)
        self.seen.assign_add(tf.shape(x)[0])
        self.average.assign(0.9 * self.average + 0.1 * loss)
        results = {metric.name: metric.result() for metric in self.metrics}
        state = {"steps": self.steps, "seen": self.seen + 0, "average": self.average}
        return {"loss": loss, "norm": norm, **results, **state}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        losses = keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)
        self.tracker.update_state(losses)
        return {"raw": tf.reduce_mean(losses), "tracker": self.tracker.result()}

    def predict_step(self, data: Any) -> Any:
        logits = self(data)
        return {"logits": logits, "best": tf.argmax(logits, axis=1)}


@_program(core=True, micro_batches=WHOLE_MORE)
def whole_fit_own_steps(strategy: tf.distribute.Strategy) -> Any:
    with strategy.scope():
        model = OwnSteps()
        model.build((None, 6))
        model.compile(_sgd())
    return _fit(model, validation_data=batches(rows(BATCH + 5, 6, seed=7), labels(BATCH + 5)), evaluate=True)


class OwnLoss(keras.Model):
    """compute_loss and compute_metrics overridden, the usual train_step kept."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.penalty = keras.metrics.Mean(name="penalty")

    def call(self, x: Any, training: bool | None = None) -> Any:
        return self.inner(x, training=training)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ):
        loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))
        penalty = 0.1 * tf.reduce_mean(y_pred**2)
        self.penalty.update_state(penalty)
        return loss + penalty

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "penalty": self.penalty.result()}


@_program()
def whole_fit_own_loss(strategy: tf.distribute.Strategy) -> Any:
    with strategy.scope():
        model = OwnLoss()
        model.build((None, 6))
        model.compile(_sgd(), metrics=["accuracy"])
    return _fit(model)


@_program(core=True, micro_batches=WHOLE_MORE)
def whole_evaluate_and_predict(strategy: tf.distribute.Strategy) -> Any:
    """The order of what predict returns; weighted evaluation; several outputs."""

    def build() -> keras.Model:
        inputs = keras.Input((6,))
        x = keras.layers.Dense(4)(inputs)
        return keras.Model(inputs, [x, keras.layers.Softmax()(x)])

    x, y = rows(NUMBER, 6), labels(NUMBER)
    both = {"batch_size": BATCH, "verbose": 0}
    model = _compiled(strategy, metrics=lambda: ["accuracy"], weighted_metrics=lambda: ["accuracy"])
    pair = _compiled(strategy, build, loss=lambda: [_crossentropy(), None])
    return arrays(
        {
            "evaluate": model.evaluate(x, y, **both),
            "weighted": model.evaluate(x, y, **both, sample_weight=_row_weights(), return_dict=True),
            "dataset": model.evaluate(batches(x, y, _row_weights()), verbose=0),
            "predict": model.predict(x, **both),
            "predict dataset": model.predict(batches(x, batch=10), verbose=0),
            "pair": pair.predict(x, **both),
            "call": model(x),
        }
    )


# --- tf_keras ---------------------------------------------------------------------------------------------------------
def _tf_keras() -> Any:
    tf_keras = importlib.import_module("tf_keras")
    tf_keras.backend.clear_session()
    return tf_keras


def _values(variables: Any) -> list[np.ndarray]:
    return [variable.numpy() for variable in variables]


@_program(core=True, needs="tf_keras")
def whole_legacy_fit(strategy: tf.distribute.Strategy) -> Any:
    """A mask, row weights, a penalty, metrics, clipping; then weighted evaluation and predict."""
    tf_keras = _tf_keras()
    with strategy.scope():
        layers = tf_keras.layers
        model = tf_keras.Sequential(
            [
                tf_keras.Input((5,), dtype="int64"),
                layers.Embedding(9, 6, "normal", mask_zero=True),
                layers.Dense(5, "tanh"),
                layers.Dense(4, kernel_regularizer="l2"),
            ]
        )
        loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = tf_keras.optimizers.Adam(0.01, global_clipnorm=0.3)
        model.compile(optimizer, loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    x, y = _token_data()
    both = {"batch_size": BATCH, "verbose": 0}
    history = model.fit(x, y, sample_weight=_row_weights(), epochs=2, shuffle=False, **both)
    return {
        "history": arrays(history.history),
        "values": _values([*model.variables, *model.optimizer.variables]),
        "evaluate": model.evaluate(x, y, sample_weight=_row_weights(), **both),
        "predict": model.predict(x, **both),
    }


@_program(needs="tf_keras")
def whole_legacy_fit_own_step(strategy: tf.distribute.Strategy) -> Any:
    """A train_step of one's own; the optimizers that Keras 2.11 replaced; a sum as the loss of another model."""
    tf_keras = _tf_keras()

    class Own(tf_keras.Sequential):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                logits = self(x, training=True)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
            self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
            self.compiled_metrics.update_state(y, logits)
            return {"loss": loss, **{metric.name: metric.result() for metric in self.metrics}}

    with strategy.scope():
        layers = [tf_keras.Input((6,)), tf_keras.layers.Dense(8, "tanh"), tf_keras.layers.Dense(4)]
        model = Own(layers)
        model.compile(tf_keras.optimizers.legacy.SGD(0.1, momentum=0.5), metrics=["accuracy"])
        other = tf_keras.Sequential([tf_keras.Input((6,)), tf_keras.layers.Dense(1)])
        other.compile(tf_keras.optimizers.Adam(0.01), tf_keras.losses.MeanSquaredError(reduction="sum"))
    both = {"batch_size": BATCH, "verbose": 0, "epochs": 2, "shuffle": False}
    histories = [
        model.fit(rows(NUMBER, 6), labels(NUMBER), **both).history,
        other.fit(rows(NUMBER, 6), rows(NUMBER, 1, seed=3), **both).history,
    ]
    variables = [*model.variables, *model.optimizer.variables(), *other.variables, *other.optimizer.variables]
    return {"histories": arrays(histories), "values": _values(variables)}


def _legacy_statistics(strategy: tf.distribute.Strategy, *shape: int) -> Any:
    """Moving statistics of a batch normalization that comes first."""
    tf_keras = _tf_keras()
    with strategy.scope():
        layers = [tf_keras.Input(shape), tf_keras.layers.BatchNormalization(momentum=0.7), tf_keras.layers.Flatten()]
        model = tf_keras.Sequential([*layers, tf_keras.layers.Dense(4)])
        loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf_keras.optimizers.SGD(0.1), loss)
    model.fit(batches(2 + 3 * rows(NUMBER, *shape), labels(NUMBER)), epochs=2, verbose=0)
    return _values([model.layers[0].moving_mean, model.layers[0].moving_variance])


@_program(core=True, needs="tf_keras")
def whole_legacy_batch_norm_statistics(strategy: tf.distribute.Strategy) -> Any:
    return _legacy_statistics(strategy, 6)


@_program(core=True, needs="tf_keras")
def whole_legacy_loop(strategy: tf.distribute.Strategy) -> Any:
    tf_keras = _tf_keras()
    with strategy.scope():
        model = tf_keras.Sequential([tf_keras.Input((6,)), tf_keras.layers.Dense(8, "tanh"), tf_keras.layers.Dense(4)])
        optimizer = tf_keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        metrics = [tf_keras.metrics.Mean(), tf_keras.metrics.SparseCategoricalAccuracy(), tf_keras.metrics.Mean()]

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_mean(tf_keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        metrics[0].update_state(loss)
        metrics[1].update_state(y, logits)
        metrics[2].update_state(logits)
        return loss, metrics[0].result()

    step = tf.function(lambda inputs: strategy.reduce("MEAN", strategy.run(replica_step, args=inputs), axis=None))
    data = strategy.experimental_distribute_dataset(batches(rows(NUMBER, 6), labels(NUMBER)))
    out = arrays([step(inputs) for _ in range(2) for inputs in data])
    variables = [*model.variables, *optimizer.variables, *(one for metric in metrics for one in metric.variables)]
    return {"out": out, "values": _values(variables), "metrics": [metric.result().numpy() for metric in metrics]}


@_program(needs="tf_keras")
def whole_legacy_losses_in_a_loop(strategy: tf.distribute.Strategy) -> Any:
    """Loss objects as one device's code calls them, with the reduction that they have unless told otherwise."""
    tf_keras = _tf_keras()
    with strategy.scope():
        kernel = tf.Variable(rows(6, 4))
    loss_of = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, x @ kernel, sample_weight=tf.cast(y, tf.float32))
        kernel.assign_sub(0.1 * tape.gradient(loss, kernel))
        return loss

    step = tf.function(lambda inputs: strategy.reduce("MEAN", strategy.run(replica_step, args=inputs), axis=None))
    data = strategy.experimental_distribute_dataset(batches(rows(NUMBER, 6), labels(NUMBER)))
    return {"losses": arrays([step(inputs) for inputs in data]), "kernel": kernel.numpy()}
