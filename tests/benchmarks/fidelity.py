"""python -m tests.benchmarks.fidelity: how near training in micro-batches comes to training on the full batch.

A convolutional net with BatchNormalization and dropout learns the shipped digits, on the full batch and in the ways to cut
it that `microstrat.scope` has, from the same initial weights on the same batches. The weights of each are then judged
outside of any strategy, and compared with the full batch's of the same seed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import keras
import numpy as np
import tensorflow as tf

import microstrat
from examples import digits
from tests.benchmarks import report

_BATCH = 128
_LEARNING_RATE = 3e-3
_MOMENTUM = 0.9  # Keras' 0.99 takes longer than this training to forget the initial statistics
_OTHER_DROPOUT = 1000  # added to the seed of the dropout masks only

_EXPLANATION = """\
what is measured
  validation   accuracy (%) and loss of 1,000 digits after training; the difference is taken seed by seed before its mean
  distance     ‖a - b‖ / ‖b‖ of what training left (a) from what the full batch of the same seed left (b): all weights, all
               moving means, all moving variances
  first step   the same distance, of the batch's mean and variance that the first BatchNormalization put into its moving
               statistics at step 1. All programs have the same weights and the same rows there, and no dropout before it:
               what differs is only how the statistics of micro-batches became one. (Taking them out of the moving
               statistics again costs digits: in float32 up to 1e-4 is rounding.)

All figures are means ± standard deviations over the seeds. Two of the ways are the full batch again, with another seed for
its dropout masks, or with the same rows in another order within each batch: differences of their size mean nothing. Where
replicas differ, what counts is what `get_weights` gives: replica 0's.

With --dropout 0 all that is left of chance is rounding, which training makes grow: Adam divides small gradients by their
own size. --floatx float64 takes that away, too.
"""


@dataclass(frozen=True)
class Configuration:
    """A way to train.

    Attributes:
      title: what tables call it.
      scope: what to build the model in, given the number of micro-batches.
      synchronized: whether BatchNormalization takes its statistics from all micro-batches.
      dropout_seed: added to the seed of the dropout masks.
      reordered: whether the rows stand in another order within each batch.
    """

    title: str
    scope: Callable[[int], contextlib.AbstractContextManager[Any]]
    synchronized: bool = False
    dropout_seed: int = 0
    reordered: bool = False


def _no_scope(number: int) -> contextlib.AbstractContextManager[Any]:
    del number
    return contextlib.nullcontext()


def _whole(number: int) -> contextlib.AbstractContextManager[Any]:
    return microstrat.scope(micro_batches=number)


def _replicas(**options: str) -> Callable[[int], contextlib.AbstractContextManager[Any]]:
    return lambda number: microstrat.scope(replicas=number, **options)  # type: ignore[arg-type]


_AVERAGED = {"batch_norm_statistics": "averaged"}
_INDEPENDENT = {"dropout_masks": "independent"}

CONFIGURATIONS = {
    "full": Configuration("full batch", _no_scope),
    "full-other": Configuration("full batch, other dropout masks", _no_scope, dropout_seed=_OTHER_DROPOUT),
    "full-reordered": Configuration("full batch, other order of its rows", _no_scope, reordered=True),
    "whole": Configuration("whole batch", _whole),
    "whole-sync": Configuration("whole batch, synchronized=True", _whole, synchronized=True),
    "replicas": Configuration("replicas", _replicas()),
    "replicas-averaged": Configuration("replicas, averaged statistics", _replicas(**_AVERAGED)),
    "replicas-independent": Configuration("replicas, independent masks", _replicas(**_INDEPENDENT)),
    "replicas-both": Configuration("replicas, averaged and independent", _replicas(**_AVERAGED, **_INDEPENDENT)),
}
_REFERENCE = "full"
# What a training leaves, by its name in an outcome.
_LEFT = {"weights": "weights", "means": "moving means", "variances": "moving variances"}


@dataclass(frozen=True)
class Data:
    """The digits, and the rows of each training batch: [steps, batch]."""

    x: np.ndarray
    y: np.ndarray
    x_validation: np.ndarray
    y_validation: np.ndarray
    batches: np.ndarray

    def training(self, *, reordered: bool = False) -> tf.data.Dataset:
        order = np.random.default_rng(0).permuted(self.batches, axis=1) if reordered else self.batches
        rows = tf.data.Dataset.from_tensor_slices(order.ravel()).batch(_BATCH, drop_remainder=True)
        return rows.map(lambda rows: (tf.gather(self.x, rows), tf.gather(self.y, rows)))


Moments = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Outcome:
    """What a training came to.

    Attributes:
      accuracy, loss: of the validation digits; accuracy in percent.
      first: mean and variance that the first BatchNormalization saw at step 1, by what it made of its moving statistics.
      weights, means, variances: all trainable weights, moving means and moving variances at the end.
    """

    accuracy: float
    loss: float
    first: Moments
    weights: np.ndarray
    means: np.ndarray
    variances: np.ndarray


# --- One training -----------------------------------------------------------------------------------------------------
def _load(seed: int, epochs: int, limit: int | None) -> Data:
    (x, y), (x_validation, y_validation) = digits.load(limit=limit)
    random = np.random.default_rng(seed)
    per_epoch = len(x) // _BATCH * _BATCH
    order = np.concatenate([random.permutation(len(x))[:per_epoch] for _ in range(epochs)])
    x, x_validation = (images[..., np.newaxis].astype(keras.config.floatx()) for images in (x, x_validation))
    return Data(x, y, x_validation, y_validation, order.reshape(-1, _BATCH))


def _build(configuration: Configuration, seed: int, dropout: float) -> keras.Model:
    """A model with the same initial weights for the same seed."""
    keras.utils.set_random_seed(seed)
    layers: list[Any] = [keras.Input((28, 28, 1))]
    for filters, size, strides in ((16, 5, 2), (32, 3, 2), (32, 3, 1)):
        layers += [
            keras.layers.Conv2D(filters, size, strides=strides, use_bias=False),
            keras.layers.BatchNormalization(momentum=_MOMENTUM, synchronized=configuration.synchronized),
            keras.layers.ReLU(),
        ]
    layers += [
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dropout(dropout, seed=seed + configuration.dropout_seed),
        keras.layers.Dense(10),
    ]
    return keras.Sequential(layers)


def _normalizations(model: keras.Model) -> list[Any]:
    return [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]


class _FirstStep(keras.callbacks.Callback):
    """Keeps the batch's statistics of the first step: m = (new - momentum · initial) / (1 - momentum)."""

    moments: Moments

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            layer = _normalizations(self.model)[0]
            mean, variance = _flat([layer.moving_mean]), _flat([layer.moving_variance])
            self.moments = mean / (1 - _MOMENTUM), (variance - _MOMENTUM) / (1 - _MOMENTUM)


def _flat(variables: Sequence[Any]) -> np.ndarray:
    return np.concatenate([keras.ops.convert_to_numpy(variable).ravel().astype(np.float64) for variable in variables])


def train(configuration: Configuration, seed: int, number: int, dropout: float, data: Data) -> Outcome:
    """Trains as the configuration says and judges the weights on one device, without a strategy."""
    keras.utils.clear_session()
    with configuration.scope(number):
        model = _build(configuration, seed, dropout)
        decay = keras.optimizers.schedules.CosineDecay(_LEARNING_RATE, len(data.batches))
        model.compile(keras.optimizers.Adam(decay), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    first = _FirstStep()
    model.fit(data.training(reordered=configuration.reordered), verbose=0, shuffle=False, callbacks=[first])
    judge = _build(configuration, seed, dropout)
    judge.set_weights(model.get_weights())
    logits = judge(data.x_validation, training=False)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(data.y_validation, logits)
    layers = _normalizations(judge)
    return Outcome(
        accuracy=100 * float(np.mean(np.argmax(logits, axis=1) == data.y_validation)),
        loss=float(tf.reduce_mean(losses)),
        first=first.moments,
        weights=_flat(judge.trainable_variables),
        means=_flat([layer.moving_mean for layer in layers]),
        variances=_flat([layer.moving_variance for layer in layers]),
    )


def _first_averaged(seed: int, number: int, data: Data) -> Moments:
    """What the first step would put in if the micro-batches' variances were averaged like their means; worked out here."""
    convolution = _build(CONFIGURATIONS[_REFERENCE], seed, 0.0).layers[0]
    seen = np.array(convolution(data.x[data.batches[0]]), np.float64)
    parts = seen.reshape(number, -1, seen.shape[-1])
    return parts.mean(axis=1).mean(axis=0), parts.var(axis=1).mean(axis=0)


# --- Tables -----------------------------------------------------------------------------------------------------------
Row = Sequence[str]
Table = tuple[str, Row, Sequence[Row]]


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def _spread(values: Sequence[float], form: str) -> str:
    deviation = f" ± {statistics.stdev(values):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{deviation}"


def _validation(ours: Sequence[Outcome], full: Sequence[Outcome]) -> Row:
    cells = []
    for figure, form in (("accuracy", ".2f"), ("loss", ".4f")):
        values = [getattr(outcome, figure) for outcome in ours]
        less = [value - getattr(other, figure) for value, other in zip(values, full, strict=True)]
        cells += [_spread(values, form), "" if ours is full else _spread(less, f"+{form}")]
    return cells


def _end(ours: Sequence[Outcome], full: Sequence[Outcome]) -> Row:
    pairs = list(zip(ours, full, strict=True))
    return [_spread([_distance(getattr(a, what), getattr(b, what)) for a, b in pairs], ".2g") for what in _LEFT]


def _first(ours: Sequence[Moments], full: Sequence[Moments]) -> Row:
    pairs = list(zip(ours, full, strict=True))
    return [_spread([_distance(a[moment], b[moment]) for a, b in pairs], ".2g") for moment in (0, 1)]


def tables(outcomes: dict[str, list[Outcome]], averaged: Sequence[Moments]) -> list[Table]:
    """All configurations next to the full batch; of each, and of `averaged`, one for every seed."""
    full = outcomes[_REFERENCE]
    titled = {CONFIGURATIONS[name].title: ours for name, ours in outcomes.items()}
    others = {title: ours for title, ours in titled.items() if ours is not full}
    first = {title: [outcome.first for outcome in ours] for title, ours in others.items()}
    first["variances averaged (worked out)"] = list(averaged)
    full_first = [outcome.first for outcome in full]
    return [
        (
            "Validation",
            ("training", "accuracy, %", "less full batch's", "loss", "less full batch's"),
            [(title, *_validation(ours, full)) for title, ours in titled.items()],
        ),
        (
            "End of training: distance from the full batch",
            ("training", *_LEFT.values()),
            [(title, *_end(ours, full)) for title, ours in others.items()],
        ),
        (
            "First step: distance of the first layer's statistics",
            ("training", "mean", "variance"),
            [(title, *_first(ours, full_first)) for title, ours in first.items()],
        ),
    ]


def _markdown(heading: str, content: Sequence[Table]) -> str:
    lines = [heading]
    for title, header, rows in content:
        lines += ["", f"**{title}**", ""]
        lines += [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines) + "\n"


# --- Command ----------------------------------------------------------------------------------------------------------
def _positive_int(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    listed = "\n".join(f"  {name:<22}{one.title}" for name, one in CONFIGURATIONS.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.fidelity",
        description=f"Measures how near training in micro-batches comes to training on the full batch of {_BATCH}.",
        epilog=f"ways to train\n{listed}\n\n{_EXPLANATION}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seeds", type=_positive_int, default=5, metavar="S", help="trainings of each (5)")
    add("--micro-batches", type=_positive_int, default=8, metavar="N", help=f"a divisor of {_BATCH} (8)")
    add("--epochs", type=_positive_int, default=6, metavar="E", help="of each training (6)")
    add("--dropout", type=float, default=0.3, metavar="P", help="rate of dropout (0.3)")
    add("--floatx", choices=("float32", "float64"), default="float32", help="precision of everything (float32)")
    add(
        "--train",
        nargs="+",
        choices=CONFIGURATIONS,
        default=list(CONFIGURATIONS),
        metavar="WAY",
        help="which ways to train, next to the full batch (all)",
    )
    add("--limit", type=_positive_int, metavar="ROWS", help="train on at most this many digits")
    add("--markdown", type=pathlib.Path, metavar="FILE", help="also write the tables as Markdown")
    options = parser.parse_args(arguments)
    if _BATCH % options.micro_batches:
        parser.error(f"--micro-batches {options.micro_batches} does not divide the batch of {_BATCH}")
    if options.limit is not None and options.limit < _BATCH:
        parser.error(f"--limit {options.limit} is less than one batch of {_BATCH}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Trains, prints the tables, and writes them where it was told to."""
    options = _parse(arguments)
    keras.config.set_floatx(options.floatx)
    number, chosen = options.micro_batches, [name for name in CONFIGURATIONS if name in {_REFERENCE, *options.train}]
    outcomes: dict[str, list[Outcome]] = {name: [] for name in chosen}
    averaged: list[Moments] = []
    for seed in range(options.seeds):
        data = _load(seed, options.epochs, options.limit)
        averaged.append(_first_averaged(seed, number, data))
        for name in chosen:
            start = time.perf_counter()
            outcome = train(CONFIGURATIONS[name], seed, number, options.dropout, data)
            outcomes[name].append(outcome)
            gc.collect()
            print(
                f"[{seed + 1}/{options.seeds}] {CONFIGURATIONS[name].title}: accuracy {outcome.accuracy:.1f} %, "
                f"loss {outcome.loss:.4f}, {time.perf_counter() - start:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    content = tables(outcomes, averaged)
    for table in content:
        report._print_table(*table)
    if options.markdown:
        heading = (
            f"{options.seeds} seed{'s' * (options.seeds > 1)}, batch of {_BATCH} as {number} × {_BATCH // number}, "
            f"{options.epochs} × {len(data.batches) // options.epochs} steps, dropout {options.dropout:g}, "
            f"{options.floatx}; TensorFlow {tf.__version__}, Keras {keras.__version__}."
        )
        options.markdown.write_text(_markdown(heading, content), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
