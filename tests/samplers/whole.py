"""Random programs, each run as one plain full batch and in micro-batches: `python -m tests.samplers.whole --draws 500`.

A draw composes a model, losses, weights, metrics, an optimizer and a way to train out of what plain TensorFlow and Keras
programs are made of. The draw with an index depends on nothing but the seed and that index: `--index` runs one alone.
Everything that the program can see is compared: losses, logs, metrics, weights, optimizer slots, what it evaluates and
predicts.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import microstrat
from tests import compare

AFTER_ONE_STEP = 1e-6
"""Largest difference of two arrays, relative to the largest absolute value in the expected one."""
AFTER_SEVERAL_STEPS = 1e-5
"""Later steps start from weights that differ in their last bits already."""
ROUNDING = 1e-4
"""A larger difference in float32 is never taken for rounding."""
IN_FLOAT64 = 1e-9
"""A draw that differs by more than the tolerance in float32 is run in float64. If that was rounding, less than this is left.

A sum that cancels, such as a gradient's over rows, has fewer good digits than its terms. With nine more digits it agrees all
the same, while what is put together wrongly stays as wrong as it was."""

FEATURES, CLASSES, VALUES, TOKENS, LENGTH = 6, 4, 3, 9, 6


# --- Draws ------------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Draw:
    """One program.

    Attributes:
      rows: of the batch of each step.
      style: how it trains; see `STYLES`.
      known_rows: whether the number of rows is known while the step is traced.
      target: what the model predicts; see `TARGETS`.
      every_token: whether it predicts that for every token of a sequence.
      loss: a Keras loss; its own if `by_hand` is None, else its values for rows, put together by hand.
      by_hand: "mean", "sum", or "weighted": the sum over the sum of weights, which `microstrat.set_weight` is told.
      reduction: of the Keras loss.
      weights: "rows", "tokens" or "classes"; None if all weigh the same.
      added: "mean" or "rows": whether a layer adds a loss, and of which kind.
      optimizer_options, inner layers' options: as keyword arguments.
    """

    seed: int
    index: int
    micro_batches: int
    rows: tuple[int, ...]
    style: str
    known_rows: bool
    steps_per_execution: int
    jit: bool
    model: str
    norm: str | None
    two_outputs: bool
    every_token: bool
    masked: bool
    regularizer: str | None
    activity_regularizer: bool
    added: str | None
    constraint: str | None
    target: str
    loss: str
    by_hand: str | None
    reduction: str
    loss_reduction: str
    weights: str | None
    metrics: tuple[str, ...]
    weigh_metrics: bool
    track_loss: bool
    clip_by_hand: bool
    optimizer: str
    optimizer_options: dict[str, Any]
    schedule: str | None
    scale_loss: bool
    evaluate: bool
    predict: bool

    def __str__(self) -> str:
        lines = [f"    {name}={value!r}," for name, value in dataclasses.asdict(self).items()]
        return "\n".join(["Draw(", *lines, ")"])


KERAS_STYLES = ("fit", "own_train_step", "train_on_batch")
LOOP_STYLES = ("distributed", "plain_tensors", "two_steps", "loop_inside")
STYLES = KERAS_STYLES + LOOP_STYLES
"""Keras' three; loops over a distributed dataset, and over plain tensors that are given to strategy.run; two runs in one
tf.function; the loop over the dataset inside the tf.function."""

TARGETS = {
    "classes": ("SparseCategoricalCrossentropy",),
    "one_hot": ("CategoricalCrossentropy", "CategoricalFocalCrossentropy"),
    "values": ("MeanSquaredError", "MeanAbsoluteError", "Huber", "LogCosh"),
    "binary": ("BinaryCrossentropy", "BinaryFocalCrossentropy", "SquaredHinge"),
    "distribution": ("KLDivergence", "Poisson"),
}
METRICS = {
    "classes": (
        "SparseCategoricalAccuracy",
        "SparseTopKCategoricalAccuracy",
        "SparseCategoricalCrossentropy",
        "MeanIoU",
    ),
    "one_hot": ("CategoricalAccuracy", "TopKCategoricalAccuracy", "AUC", "OneHotMeanIoU"),
    "values": ("MeanAbsoluteError", "RootMeanSquaredError", "MeanSquaredLogarithmicError"),
    "binary": ("BinaryAccuracy", "AUC", "Precision", "Recall", "F1Score", "PrecisionAtRecall", "TruePositives"),
    "distribution": ("KLDivergence", "CategoricalAccuracy"),
}
NOT_OF_TOKENS = ("MeanIoU", "OneHotMeanIoU", "AUC", "F1Score", "PrecisionAtRecall")
"""Metrics that do not take predictions of rank 3, or no mask."""
OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Lion", "Nadam", "Adamax")
PRIMES = (1, 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def draw(seed: int, index: int) -> Draw:
    """The draw number `index`."""
    rng = np.random.default_rng([seed, index])

    def one_of(options: Sequence[Any]) -> Any:
        return options[rng.integers(len(options))]

    def chance(probability: float) -> bool:
        return bool(rng.random() < probability)

    style = one_of(STYLES)
    loop = style in LOOP_STYLES
    model = one_of(("linear", "mlp", "conv", "embedding", "lstm", "gru", "attention", "shared"))
    norm = {"mlp": (None, "layer", "group", "batch"), "conv": (None, "layer", "group", "batch")}.get(model, (None,))
    norm = one_of(norm)
    rows = int(one_of(PRIMES)) if chance(0.6) else int(rng.integers(1, 41))
    if norm == "batch" and model == "mlp":
        # Normalized over one or two rows, a feature is 0 or ±1 whatever came in: its gradients are zero but for rounding.
        rows = max(rows, 4)
    steps = 1 if style != "two_steps" and chance(0.5) else 2 if style == "two_steps" else int(rng.integers(2, 4))
    last = int(rng.integers(4 if norm == "batch" else 1, rows + 1)) if steps > 1 and chance(0.6) else rows
    sequences = model in ("lstm", "gru", "attention")
    embedding = sequences or model == "embedding"
    every_token = sequences and chance(0.5)
    masked = model in ("lstm", "gru") or (model in ("embedding", "attention") and chance(0.5))
    two_outputs = not every_token and chance(0.15)

    if two_outputs and style in KERAS_STYLES:
        # Keras averages an output's loss over batches by rows if their number is known while it traces, else it does not.
        last = rows

    target = one_of(("classes", "classes", "one_hot", "values", "binary", "distribution"))
    loss = one_of(TARGETS[target])
    own = loop or style == "own_train_step"
    by_hand = one_of(("mean", "sum", "weighted")) if own and chance(0.6) else None
    reduction = one_of(("sum_over_batch_size", "sum_over_batch_size", "sum", "mean_with_sample_weight"))
    loss_reduction = {"sum": "sum", "mean": "mean", "weighted": "mean", None: one_of(("mean", "mean", "sum"))}[by_hand]
    weights = one_of((None, None, "tokens" if every_token else "rows"))
    if (
        style in ("fit", "train_on_batch")
        and target == "classes"
        and not every_token
        and not two_outputs
        and chance(0.3)
    ):
        weights = "classes"
    # A mean over rows that the program adds to its loss has no place in declared sums, or beside weights other than rows.
    means = loss_reduction == "mean" and by_hand != "weighted"
    activity_regularizer = means and model in ("mlp", "conv", "shared") and chance(0.2)
    kinds = ("mean", "rows") if means else ("rows",) if loss_reduction == "sum" else ()
    added = one_of(kinds) if kinds and model in ("mlp", "conv", "embedding") and chance(0.25) else None

    allowed = [name for name in METRICS[target] if not (every_token and name in NOT_OF_TOKENS)]
    metrics = tuple(str(name) for name in rng.permutation(allowed)[: rng.integers(0, 3)])
    optimizer = one_of(OPTIMIZERS)
    scale_loss = chance(0.15)
    return Draw(
        seed=seed,
        index=index,
        micro_batches=int(rng.integers(1, 9)),
        rows=(*[rows] * (steps - 1), last),
        style=style,
        known_rows=chance(0.5)
        and not (two_outputs and style in KERAS_STYLES)
        and (last == rows or style in ("train_on_batch", "plain_tensors", "two_steps")),
        steps_per_execution=2 if style in ("fit", "own_train_step") and steps > 1 and chance(0.25) else 1,
        jit=style == "fit" and not masked and chance(0.1),
        model=model,
        norm=norm,
        two_outputs=two_outputs,
        every_token=every_token,
        masked=masked,
        regularizer=one_of(("l1", "l2", "l1_l2")) if chance(0.3) else None,
        activity_regularizer=activity_regularizer,
        added=added,
        constraint=one_of(("NonNeg", "MaxNorm", "UnitNorm")) if chance(0.15) else None,
        target=target,
        loss=loss,
        by_hand=by_hand,
        reduction=reduction,
        loss_reduction=loss_reduction,
        weights=weights,
        metrics=metrics,
        weigh_metrics=chance(0.5),
        track_loss=own and chance(0.4),
        clip_by_hand=own and chance(0.2),
        optimizer=optimizer,
        optimizer_options=_optimizer_options(optimizer, chance, one_of, plain=scale_loss, embedding=embedding),
        schedule=one_of(("ExponentialDecay", "CosineDecay", "PiecewiseConstantDecay")) if chance(0.2) else None,
        scale_loss=scale_loss,
        evaluate=chance(0.5),
        predict=chance(0.5),
    )


def _optimizer_options(
    name: str, chance: Callable[[float], bool], one_of: Callable[[Any], Any], *, plain: bool, embedding: bool
) -> dict[str, Any]:
    """Options of the optimizer; `plain` without what LossScaleOptimizer does not allow inside.

    Keras squares the gradient of an embedding entry by entry, before it adds up those of the same row; the variance of a
    centered RMSprop can then be negative, and plain Keras fails.

    Adam and its kin divide by |gradient| + epsilon. With the usual epsilon, 1e-7, a gradient of 1e-8 makes half a step and
    its rounding another: the sign of rounding is what they would amplify. With 1e-2 they cannot. Lion takes the sign itself.
    So no draw has a gradient that is zero but for rounding: no bias before batch normalization, none of attention's keys.
    """
    options: dict[str, Any] = {}
    if name == "SGD":
        options = {"learning_rate": 0.05, "momentum": one_of((0.0, 0.9)), "nesterov": chance(0.4)}
    elif name == "RMSprop":
        options = {"learning_rate": 0.01, "momentum": one_of((0.0, 0.9)), "centered": not embedding and chance(0.4)}
    elif name == "Lion":
        options = {"learning_rate": 0.003}
    else:
        options = {"learning_rate": 0.01}
    if name in ("Adam", "AdamW", "RMSprop", "Adagrad", "Nadam", "Adamax"):
        options["epsilon"] = 1e-2
    if name in ("Adam", "AdamW") and chance(0.25):
        options["amsgrad"] = True
    if chance(0.2):
        options["weight_decay"] = 0.1
    if chance(0.35):
        options[one_of(("clipnorm", "global_clipnorm", "clipvalue"))] = one_of((0.05, 0.3))
    if chance(0.15) and not plain:
        options |= {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": one_of((None, 2))}
    if chance(0.15) and not plain:
        options["gradient_accumulation_steps"] = 2
    return options


# --- Data -------------------------------------------------------------------------------------------------------------
def data_of(one: Draw) -> tuple[Any, ...]:
    """(inputs, targets) or (inputs, targets, weights) of all steps' rows."""
    rng = np.random.default_rng([one.seed, one.index, 1])
    rows, floats = sum(one.rows), keras.config.floatx()
    if one.model == "conv":
        x = rng.standard_normal((rows, 5, 5, 2)).astype(floats)
    elif one.model in ("linear", "mlp", "shared"):
        x = rng.standard_normal((rows, FEATURES)).astype(floats)
    else:
        x = rng.integers(1, TOKENS, (rows, LENGTH))
        # Pooling over no token at all is 0/0; only a recurrent layer that answers for every token may see a row of padding.
        shortest = 0 if one.model in ("lstm", "gru") and one.every_token else 1
        lengths = rng.integers(shortest, LENGTH + 1, rows)
        x[np.arange(LENGTH) >= lengths[:, None]] = 0
    shape = (rows, LENGTH) if one.every_token else (rows,)
    y = {
        "classes": lambda: rng.integers(0, CLASSES, shape),
        "one_hot": lambda: np.eye(CLASSES)[rng.integers(0, CLASSES, shape)].astype(floats),
        "values": lambda: rng.standard_normal((*shape, VALUES)).astype(floats),
        "binary": lambda: rng.integers(0, 2, (*shape, VALUES)).astype(floats),
        "distribution": lambda: rng.dirichlet([1.0] * CLASSES, shape).astype(floats),
    }[one.target]()
    if one.two_outputs:
        y = {"first": y, "second": rng.standard_normal((rows, 2)).astype(floats)}
    if one.weights in ("rows", "tokens"):
        shape = (rows, LENGTH) if one.weights == "tokens" else (rows,)
        weights: Any = (rng.uniform(0.2, 2, shape) * (rng.random(shape) < 0.8)).astype(floats)
        return x, y, {"first": weights, "second": weights} if one.two_outputs else weights
    return x, y


def steps_of(one: Draw, data: Any) -> list[Any]:
    """The data cut into the batches of the steps."""
    stops = np.cumsum(one.rows)
    return [
        tf.nest.map_structure(lambda array, rows=rows, stop=stop: array[stop - rows : stop], data)
        for rows, stop in zip(one.rows, stops, strict=True)
    ]


# --- Models -----------------------------------------------------------------------------------------------------------
class AddLoss(keras.layers.Layer):
    """Adds a loss: one number, or one for each row."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def call(self, inputs: Any) -> Any:
        squares = keras.ops.mean(keras.ops.square(inputs), axis=tuple(range(1, len(inputs.shape))))
        self.add_loss(0.1 * keras.ops.mean(squares) if self.kind == "mean" else 0.02 * squares)
        return inputs


def away_from_zero() -> Any:
    """Initial biases. Those that start at zero are sums of steps alone, and have no more good digits than gradients have."""
    return keras.initializers.RandomUniform(-1, 1)


class Bricks:
    """The layers of one draw's model."""

    def __init__(self, one: Draw):
        self.one = one
        self.weights: dict[str, Any] = {"bias_initializer": away_from_zero()}
        if one.regularizer is not None:
            strength = {"l1_l2": {"l1": 0.01, "l2": 0.02}, "l1": {"l1": 0.01}, "l2": {"l2": 0.02}}[one.regularizer]
            self.weights["kernel_regularizer"] = keras.regularizers.L1L2(**strength)
        if one.constraint is not None:
            self.weights["kernel_constraint"] = one.constraint

    def _options(self, layer_is_normalized: bool) -> dict[str, Any]:
        options = dict(self.weights)
        if layer_is_normalized and self.one.norm == "batch":
            options["use_bias"] = False
        if self.one.activity_regularizer:
            options["activity_regularizer"] = "l2"
        return options

    def dense(self, units: int, activation: str | None = None, *, normalized: bool = False) -> Any:
        return keras.layers.Dense(units, activation, **self._options(normalized))

    def conv(self, filters: int) -> Any:
        return keras.layers.Conv2D(filters, 3, **self._options(True))

    def norm(self, x: Any) -> Any:
        layers = {
            "layer": lambda: keras.layers.LayerNormalization(beta_initializer=away_from_zero()),
            "group": lambda: keras.layers.GroupNormalization(2, beta_initializer=away_from_zero()),
            "batch": lambda: keras.layers.BatchNormalization(
                momentum=0.8, synchronized=True, beta_initializer=away_from_zero()
            ),
        }
        return layers[self.one.norm]()(x) if self.one.norm else x

    def embedding(self, x: Any) -> Any:
        return keras.layers.Embedding(TOKENS, 8, mask_zero=self.one.masked, embeddings_initializer=away_from_zero())(x)

    def body(self) -> tuple[Any, Any]:
        """The input, and features for each row or token."""
        one, layers = self.one, keras.layers
        if one.model == "conv":
            start = keras.Input((5, 5, 2))
            x = self.added(keras.activations.tanh(self.norm(self.conv(4)(start))))
            return start, layers.Flatten()(layers.AveragePooling2D(2, padding="same")(x))
        if one.model in ("linear", "mlp", "shared"):
            start = x = keras.Input((FEATURES,))
            if one.model == "mlp":
                x = self.added(layers.ReLU()(self.norm(self.dense(8, normalized=True)(x))))
                x = self.dense(8, "tanh")(x)
            if one.model == "shared":
                layer = self.dense(FEATURES, "tanh")
                x = layer(layer(x) + 0.5 * x)
            return start, x
        start = keras.Input((LENGTH,), dtype="int64")
        x = self.added(self.embedding(start))
        if one.model in ("lstm", "gru"):
            kind = layers.LSTM if one.model == "lstm" else layers.GRU
            forget = {"unit_forget_bias": False} if one.model == "lstm" else {}
            return start, kind(5, return_sequences=one.every_token, **self.weights, **forget)(x)
        if one.model == "attention":
            x = x + layers.MultiHeadAttention(2, 4, use_bias=False)(x, x)
            x = layers.LayerNormalization(beta_initializer=away_from_zero())(x)
        return start, x if one.every_token else layers.GlobalAveragePooling1D()(x)

    def added(self, x: Any) -> Any:
        return AddLoss(self.one.added)(x) if self.one.added else x

    def model(self, kind: Callable[..., keras.Model], **options: Any) -> keras.Model:
        start, x = self.body()
        units = {"classes": CLASSES, "one_hot": CLASSES, "distribution": CLASSES}.get(self.one.target, VALUES)
        activation = {"one_hot": "softmax", "distribution": "softmax", "binary": "sigmoid"}.get(self.one.target)
        options_of_first = {"name": "first", **self._options(False)}
        outputs: Any = keras.layers.Dense(units, activation, **options_of_first)(x)
        if self.one.two_outputs:
            outputs = {"first": outputs, "second": keras.layers.Dense(2, name="second", **self._options(False))(x)}
        return kind(start, outputs, **options)


# --- Losses, metrics, optimizers --------------------------------------------------------------------------------------
def loss_of(one: Draw) -> keras.losses.Loss:
    """The Keras loss."""
    options: dict[str, Any] = {"from_logits": True} if one.target == "classes" else {}
    if one.loss in ("CategoricalCrossentropy", "BinaryCrossentropy"):
        options["label_smoothing"] = 0.1
    return getattr(keras.losses, one.loss)(reduction=one.reduction, **options)


def metrics_of(one: Draw) -> list[keras.metrics.Metric]:
    """New metrics."""
    options: dict[str, dict[str, Any]] = {
        "SparseTopKCategoricalAccuracy": {"k": 2},
        "TopKCategoricalAccuracy": {"k": 2},
        "SparseCategoricalCrossentropy": {"from_logits": True},
        "MeanIoU": {"num_classes": CLASSES, "sparse_y_pred": False},
        "OneHotMeanIoU": {"num_classes": CLASSES},
        "AUC": {"num_thresholds": 20, "curve": "PR" if one.index % 2 else "ROC", "multi_label": one.index % 3 == 0},
        "F1Score": {"threshold": 0.5},
        "PrecisionAtRecall": {"recall": 0.5, "num_thresholds": 20},
    }
    # TensorFlow's in_top_k takes float32 only.
    names = [name for name in one.metrics if not ("TopK" in name and keras.config.floatx() == "float64")]
    return [getattr(keras.metrics, name)(name=f"m{at}", **options.get(name, {})) for at, name in enumerate(names)]


def optimizer_of(one: Draw) -> keras.optimizers.Optimizer:
    """A new optimizer."""
    options = dict(one.optimizer_options)
    rate = options["learning_rate"]
    schedules = keras.optimizers.schedules
    if one.schedule == "ExponentialDecay":
        options["learning_rate"] = schedules.ExponentialDecay(rate, 2, 0.7)
    elif one.schedule == "CosineDecay":
        options["learning_rate"] = schedules.CosineDecay(rate, 5)
    elif one.schedule == "PiecewiseConstantDecay":
        options["learning_rate"] = schedules.PiecewiseConstantDecay([1], [rate, rate / 3])
    optimizer = getattr(keras.optimizers, one.optimizer)(**options)
    return keras.optimizers.LossScaleOptimizer(optimizer, dynamic_growth_steps=2) if one.scale_loss else optimizer


class Own:
    """What a program by hand adds to a model: its loss, its step."""

    def __init__(self, one: Draw, model: keras.Model, optimizer: Any):
        self.one, self.model, self.optimizer = one, model, optimizer
        self.keras_loss = loss_of(one)
        self.second = keras.losses.MeanSquaredError(reduction=one.reduction)
        self.metrics = metrics_of(one)
        self.tracker = keras.metrics.Mean(name="tracked")

    def _loss(self, keras_loss: Any, x: Any, y: Any, predictions: Any, weights: Any) -> Any:
        """The loss of one output."""
        if self.one.by_hand is None:
            return keras_loss(y, predictions, sample_weight=weights)
        floats = keras.config.floatx()
        values = keras_loss.call(y if y.dtype.is_integer else tf.cast(y, floats), predictions)
        weighted = values if weights is None else values * _like(weights, values)
        if self.one.by_hand == "mean":
            return tf.reduce_mean(weighted)
        if self.one.by_hand == "sum":
            return tf.reduce_sum(weighted)
        weights = self._weights(x, values, weights)
        return tf.math.divide_no_nan(tf.reduce_sum(values * weights), tf.reduce_sum(weights))

    def declare(self, x: Any, weights: Any) -> None:
        """Says what this batch weighs, where a loss is divided by something else than rows."""
        if self.one.by_hand == "weighted":
            values = tf.ones(tf.shape(x) if self.one.every_token else tf.shape(x)[:1], keras.config.floatx())
            weights = weights["first"] if isinstance(weights, dict) else weights
            microstrat.set_weight(tf.reduce_sum(self._weights(x, values, weights)))

    def _weights(self, x: Any, values: Any, weights: Any) -> Any:
        """Of the values in a loss that is divided by the sum of weights: those given, and none for padding."""
        weights = tf.ones_like(values) if weights is None else _like(weights, values)
        return weights * tf.cast(x != 0, values.dtype) if self.one.every_token else weights

    def loss(self, x: Any, y: Any, predictions: Any, weights: Any) -> Any:
        """The loss of the batch."""
        if self.one.two_outputs:
            of = [None, None] if weights is None else [weights["first"], weights["second"]]
            loss = 0.3 * self._loss(self.keras_loss, x, y["first"], predictions["first"], of[0])
            loss += self._loss(self.second, x, y["second"], predictions["second"], of[1])
        else:
            loss = self._loss(self.keras_loss, x, y, predictions, weights)
        together = tf.reduce_sum if self.one.loss_reduction == "sum" else tf.reduce_mean
        return tf.add_n([loss, *(together(added) for added in self.model.losses)])

    def update_metrics(self, y: Any, predictions: Any, weights: Any) -> None:
        if self.one.two_outputs:
            y, predictions = y["first"], predictions["first"]
            weights = None if weights is None else weights["first"]
        for metric in self.metrics:
            metric.update_state(y, predictions, weights if self.one.weigh_metrics else None)

    def train(self, x: Any, y: Any, weights: Any = None) -> dict[str, Any]:
        """One step; the loss and what else is one number for the batch."""
        self.declare(x, weights)
        with tf.GradientTape() as tape:
            predictions = self.model(x, training=True)
            loss = self.loss(x, y, predictions, weights)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.model.trainable_variables)
        results = {"loss": loss}
        if self.one.clip_by_hand:
            gradients, results["norm"] = tf.clip_by_global_norm(gradients, 0.2)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        self.update_metrics(y, predictions, weights)
        if self.one.track_loss:
            self.tracker.update_state(loss)
        return results

    def test(self, x: Any, y: Any, weights: Any = None) -> Any:
        """The loss, without a step."""
        self.declare(x, weights)
        predictions = self.model(x, training=False)
        self.update_metrics(y, predictions, weights)
        return self.loss(x, y, predictions, weights)


def _like(weights: Any, values: Any) -> Any:
    weights = tf.cast(weights, values.dtype)
    return tf.broadcast_to(
        weights[:, tf.newaxis] if values.shape.rank == 2 > weights.shape.rank else weights, tf.shape(values)
    )


class OwnModel(keras.Model):
    """A model with a train_step of its own."""

    own: Own

    def train_step(self, data: Any) -> Any:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        logs = self.own.train(x, y, weights)
        if self.own.one.track_loss:
            logs["tracked"] = self.own.tracker.result()
        return {**logs, **{metric.name: metric.result() for metric in self.own.metrics}}

    def test_step(self, data: Any) -> Any:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        logs = {"loss": self.own.test(x, y, weights)}
        return {**logs, **{metric.name: metric.result() for metric in self.own.metrics}}


# --- Programs ---------------------------------------------------------------------------------------------------------
def run(one: Draw, strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """Runs the program. It does not know which strategy it runs under."""
    results = (_run_keras if one.style in KERAS_STYLES else _run_loop)(one, strategy)
    return tf.nest.map_structure(np.asarray, results)


def _state(model: keras.Model, optimizer: Any, metrics: Sequence[keras.metrics.Metric]) -> dict[str, Any]:
    return {
        "weights": {variable.path: np.asarray(variable) for variable in model.variables},
        "slots": {f"{at} {_name(slot)}": np.asarray(slot) for at, slot in enumerate(optimizer.variables)},
        "metrics": [[np.asarray(variable) for variable in metric.variables] for metric in metrics],
    }


def _name(slot: Any) -> str:
    # Nadam's product has no name of its own, so it is "variable_7", say, with or without the optimizer's name before it.
    return slot.path.split("/")[-1].rstrip("_0123456789")


def _dataset(one: Draw, data: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(data).batch(one.rows[0], drop_remainder=one.known_rows)


def _run_keras(one: Draw, strategy: tf.distribute.Strategy) -> dict[str, Any]:
    own = one.style == "own_train_step"
    with strategy.scope():
        model = Bricks(one).model(OwnModel if own else keras.Model)
        optimizer = optimizer_of(one)
        common = {"jit_compile": one.jit, "steps_per_execution": one.steps_per_execution}
        metrics: Any = metrics_of(one)
        if own:
            model.compile(optimizer, **common)
            model.own = Own(one, model, optimizer)
        else:
            loss: Any = loss_of(one)
            options: dict[str, Any] = {}
            if one.two_outputs:
                loss = {"first": loss, "second": keras.losses.MeanSquaredError(reduction=one.reduction)}
                metrics, options = {"first": metrics}, {"loss_weights": {"first": 0.3, "second": 1.0}}
            options["weighted_metrics" if one.weigh_metrics else "metrics"] = metrics
            model.compile(optimizer, loss, **common, **options)
    data = data_of(one)
    class_weights = {label: 0.5 + label / 3 for label in range(CLASSES)} if one.weights == "classes" else None
    results: dict[str, Any] = {}
    if one.style == "train_on_batch":
        steps = steps_of(one, data)
        results["logs"] = [model.train_on_batch(*step, class_weight=class_weights) for step in steps]
        results |= _state(model, optimizer, [])
        if one.evaluate:
            results["evaluate"] = [model.test_on_batch(*step) for step in steps]
        if one.predict:
            results["predict"] = [model.predict_on_batch(step[0]) for step in steps]
        return results
    validate = one.index % 4 == 0
    if one.index % 2:
        given = {"x": _dataset(one, data)}
    else:
        given = dict(zip(("x", "y", "sample_weight"), data, strict=False)) | {"batch_size": one.rows[0]}
    more: dict[str, Any] = {"validation_data": data, "validation_batch_size": one.rows[0]} if validate else {}
    history = model.fit(**given, epochs=1, shuffle=False, verbose=0, class_weight=class_weights, **more)
    results["logs"] = history.history
    # What Keras keeps for each of several losses counts rows or batches, depending on whether it knows their number.
    results |= _state(model, optimizer, [] if one.two_outputs else model.metrics)
    if one.evaluate:
        results["evaluate"] = model.evaluate(**given, verbose=0, return_dict=True)
    if one.predict:
        results["predict"] = model.predict(data[0], batch_size=one.rows[0], verbose=0)
    return results


def _run_loop(one: Draw, strategy: tf.distribute.Strategy) -> dict[str, Any]:
    with strategy.scope():
        model = Bricks(one).model(keras.Model)
        optimizer = optimizer_of(one)
        own = Own(one, model, optimizer)
        optimizer.build(model.trainable_variables)
    operation = "SUM" if one.loss_reduction == "sum" else "MEAN"
    data = data_of(one)
    tensors = tf.nest.map_structure(tf.constant, steps_of(one, data))
    signature = None
    if not one.known_rows:
        signature = [tf.nest.map_structure(lambda part: tf.TensorSpec([None, *part.shape[1:]], part.dtype), tensors[0])]

    def train(batch: Any) -> Any:
        results = strategy.run(own.train, args=batch)
        # The norm of the gradient is one for the whole batch, so its mean is the norm itself.
        return {
            name: strategy.reduce("MEAN" if name == "norm" else operation, value, axis=None)
            for name, value in results.items()
        }

    results: dict[str, Any] = {}
    if one.style == "plain_tensors":
        step = tf.function(train, input_signature=signature)
        results["losses"] = [step(batch) for batch in tensors]
    elif one.style == "two_steps":
        step = tf.function(
            lambda first, second: [train(first), train(second)], input_signature=signature and signature * 2
        )
        results["losses"] = step(*tensors)
    else:
        batches = strategy.experimental_distribute_dataset(_dataset(one, data))
        if one.style == "distributed":
            step = tf.function(train)
            results["losses"] = [step(batch) for batch in batches]
        else:
            results["losses"] = _loop_inside(train, batches)
    trackers = [own.tracker] if one.track_loss else []
    metrics = [*own.metrics, *trackers]
    results |= _state(model, optimizer, metrics) | {"results": [metric.result() for metric in metrics]}
    if one.evaluate:
        for metric in own.metrics:
            metric.reset_state()

        @tf.function
        def test(batch: Any) -> Any:
            return strategy.reduce(operation, strategy.run(own.test, args=batch), axis=None)

        losses = [test(batch) for batch in strategy.experimental_distribute_dataset(_dataset(one, data))]
        results["evaluate"] = [losses, [metric.result() for metric in own.metrics]]
    if one.predict:

        @tf.function
        def predict(x: Any) -> Any:
            return strategy.run(model, args=(x,))

        local = strategy.experimental_local_results
        outputs = predict(tensors[0][0])
        results["predict"] = tf.nest.map_structure(
            lambda value: np.concatenate([np.asarray(part) for part in local(value)]), outputs
        )
    return results


def _loop_inside(train: Callable[..., Any], batches: Any) -> Any:
    @tf.function
    def epoch(batches: Any) -> Any:
        total = tf.zeros([], keras.config.floatx())
        for batch in batches:
            total += train(batch)["loss"]
        return total

    return epoch(batches)


# --- Comparing --------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a draw.

    Attributes:
      found: what differs between the plain full batch and micro-batches, one line each.
      rounding: whether that is rounding alone: small, and gone in float64.
    """

    found: list[str]
    rounding: bool = False

    @property
    def agrees(self) -> bool:
        return not self.found or self.rounding


def check(one: Draw) -> Outcome:
    """Runs the draw both ways and compares."""
    plain, ours = both(one, "float32")
    found = compare.differences(plain, ours, AFTER_ONE_STEP if len(one.rows) == 1 else AFTER_SEVERAL_STEPS)
    if not found or compare.differences(plain, ours, ROUNDING):
        return Outcome(found)
    return Outcome(found, rounding=not compare.differences(*both(one, "float64"), IN_FLOAT64))


def both(one: Draw, floats: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results of the plain full batch, and of micro-batches."""
    plain = _fresh(one, floats, tf.distribute.get_strategy)
    ours = _fresh(
        one,
        floats,
        lambda: microstrat.MicroBatchStrategy(
            one.micro_batches, semantics="whole_batch", loss_reduction=one.loss_reduction
        ),
    )
    return plain, ours


def _fresh(one: Draw, floats: str, make_strategy: Callable[[], tf.distribute.Strategy]) -> dict[str, Any]:
    """Runs the program as if it were the first of the process."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(one.index)
    before = keras.config.floatx()
    keras.config.set_floatx(floats)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(one, make_strategy())
    finally:
        keras.config.set_floatx(before)


# --- Command line -----------------------------------------------------------------------------------------------------
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs draws; 0 if all agree."""
    parser = argparse.ArgumentParser(prog="python -m tests.samplers.whole", description=__doc__)
    parser.add_argument("--draws", type=int, default=100, help="how many, from index 0 (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all draws (default: %(default)s)")
    parser.add_argument("--index", type=int, nargs="+", help="run these draws only, and describe them")
    options = parser.parse_args(arguments)
    tf.get_logger().setLevel("ERROR")
    indices = options.index or range(options.draws)
    start, wrong, rounding = time.perf_counter(), 0, 0
    for count, index in enumerate(indices, 1):
        if count % 10 == 1:
            # Plain TensorFlow keeps graphs of finished sessions, and each new session looks at all there is to collect.
            gc.collect()
            gc.freeze()
        one = draw(options.seed, index)
        if options.index:
            print(one)
        try:
            outcome = check(one)
        except Exception:
            outcome = Outcome([traceback.format_exc()])
        if outcome.rounding:
            rounding += 1
            print(f"draw {index}: rounding, gone in float64: {'; '.join(outcome.found)}", flush=True)
        elif outcome.found:
            wrong += 1
            print(
                "\n".join([f"MISMATCH in draw {index} of seed {options.seed}:", str(one), *outcome.found]), flush=True
            )
        if count % 25 == 0 and count < len(indices):
            seconds = (time.perf_counter() - start) / count
            print(f"{count} of {len(indices)}, {seconds:.1f} s each, {wrong} mismatches", flush=True)
    print(f"{rounding} differ by more than the tolerance in float32, but not in float64")
    print(f"{len(indices)} draws, {wrong} mismatches")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
