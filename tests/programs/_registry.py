"""The registry of parity programs, and what many of them share.

A program is a function `strategy -> results` that builds everything from fixed seeds, trains a few steps and returns
nested dicts and lists of NumPy arrays and Python scalars. It must not know which strategy runs it.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

MANY = (1, 2, 3, 4, 8)
ALL = (1, 2, 3, 4)
CORE = (1, 2, 4)
USUAL = (4,)
"""Tracing and running the reference takes longer with every replica; most programs run with one number of them."""
EAGER = (2, 4)
"""Of these numbers of replicas, the first that a program is compared at also runs under the eager engine."""
BATCH = 24
"""Rows of a global batch: divisible by every number of replicas here."""
EXACT = (1, 2)
"""Numbers of replicas where every bit must agree: one term, or two, have one sum whatever their order.

TensorFlow's graph optimizer also fuses and reorders additions, differently inside and outside loops, so it is off there
and on for the others.
"""
TOLERANCE = 1e-6
"""For more replicas: the largest difference of two arrays, relative to the largest absolute value in the expected one.

MirroredStrategy adds the replicas' values in the order of its ring, MicroBatchStrategy in the order of the replicas.
"""
WHOLE = (5,)
WHOLE_CORE = (4, 5)
"""Numbers of micro-batches that whole batches are cut in: 24 rows in 5, 5, 5, 5 and 4; in 6 each for a few."""
WHOLE_MORE = (1, 4, 5, 16)
"""Not cut at all, too; and with 16, two rows make 12 micro-batches, and there are no more."""
TOLERANCE_LATER = 1e-5
"""Whole batches after many steps, or where long sums cancel: in float64, the same programs agree to 1e-10.

A sum over all rows rounds otherwise than the sum of micro-batches' sums.
"""
# Why a program is not about whole batches.
OWN_STATISTICS = "micro-batches are normalised with their own mean and variance, as real devices' batches are"
OWN_DRAWS = "every micro-batch draws its own dropout mask"
UNDECLARED_SUMS = "it assigns sums over rows to variables that do not declare them, which are taken for means"


@dataclasses.dataclass(frozen=True)
class Program:
    """A named program and how its results are compared."""

    name: str
    run: Callable[[tf.distribute.Strategy], Any]
    replicas: tuple[int, ...]
    eager: tuple[int, ...]
    tolerance: float
    why: str
    core: bool
    needs: str
    after: str
    whole: str
    micro_batches: tuple[int, ...]
    whole_tolerance: float
    one_device: bool


PROGRAMS: dict[str, Program] = {}


def program(
    *,
    replicas: Sequence[int] | None = None,
    eager: Sequence[int] = EAGER,
    tolerance: float = TOLERANCE,
    why: str = "",
    core: bool = False,
    needs: str = "",
    after: str = "",
    whole: str = "",
    why_not_whole: str = "",
    micro_batches: Sequence[int] | None = None,
    whole_tolerance: float = TOLERANCE,
    one_device: bool = False,
) -> Callable[[Callable[[tf.distribute.Strategy], Any]], Callable[[tf.distribute.Strategy], Any]]:
    """Registers a program under its function's name.

    Args:
        replicas: numbers of replicas to compare at; default, `USUAL` or `CORE`.
        eager: the first of these that is one of them runs with the eager engine too.
        tolerance: see `TOLERANCE`; another one needs a reason.
        why: the reason for another tolerance, or for running at fewer numbers of replicas or not eagerly.
        core: also run on the oldest supported TensorFlow.
        needs: a package without which the program is skipped.
        after: a program that must have run under all strategies before this one runs.
        whole: "mean" or "sum", what the losses of the program are, if it is also to be compared with the plain full batch.
        why_not_whole: the reason if it is not.
        micro_batches: numbers of micro-batches that the whole batch is then cut in; default, `WHOLE` or `WHOLE_CORE`.
        whole_tolerance: the tolerance of that comparison, `TOLERANCE` or `TOLERANCE_LATER`.
        one_device: whether its reference is OneDeviceStrategy: the program needs what only a strategy has.
    """
    if bool(whole) == bool(why_not_whole) or whole not in ("", "mean", "sum"):
        raise ValueError("either the whole batch's loss reduction, or a reason against the comparison")
    if tolerance != TOLERANCE and not why:
        raise ValueError("a tolerance of its own needs a reason")

    def register(function: Callable[[tf.distribute.Strategy], Any]) -> Callable[[tf.distribute.Strategy], Any]:
        name = function.__name__
        if name in PROGRAMS:
            raise ValueError(f"two programs are called {name}")
        numbers = tuple((CORE if core else USUAL) if replicas is None else replicas)
        parts = tuple(micro_batches or (WHOLE_CORE if core else WHOLE)) if whole else ()
        both = tuple(number for number in eager if number in numbers)[:1]
        PROGRAMS[name] = Program(
            name=name,
            run=function,
            replicas=numbers,
            eager=both,
            tolerance=tolerance,
            why=why,
            core=core,
            needs=needs,
            after=after,
            whole=whole,
            micro_batches=parts,
            whole_tolerance=whole_tolerance,
            one_device=one_device,
        )
        return function

    return register


def exchange_directory() -> pathlib.Path:
    """A directory that all processes of a test session share."""
    return pathlib.Path(os.environ["MICROSTRAT_EXCHANGE"])


# --- Data and models --------------------------------------------------------------------------------------------------
def rows(number: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Normally distributed float32 rows."""
    return np.random.default_rng(seed).standard_normal((number, *shape)).astype(np.float32)


def labels(number: int, classes: int = 4, seed: int = 1) -> np.ndarray:
    """Integer labels, int64."""
    return np.random.default_rng(seed).integers(0, classes, number)


def mlp(features: int = 6, classes: int = 4) -> keras.Model:
    """A small classifier that returns logits."""
    return keras.Sequential(
        [keras.Input((features,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(classes)]
    )


def batches(*arrays: Any, batch: int = BATCH, drop_remainder: bool = False) -> tf.data.Dataset:
    """A dataset of global batches."""
    data = tf.data.Dataset.from_tensor_slices(arrays if len(arrays) > 1 else arrays[0])
    return data.batch(batch, drop_remainder=drop_remainder)


# --- Results ----------------------------------------------------------------------------------------------------------
def by_path(variables: Sequence[Any]) -> dict[str, np.ndarray]:
    """Cross-replica values of Keras variables."""
    return {variable.path: np.asarray(variable) for variable in variables}


def model_state(model: keras.Model) -> dict[str, Any]:
    """Weights, slots and metrics of a compiled model, as seen in cross-replica context."""
    return {
        "weights": by_path(model.variables),
        "optimizer": by_path(model.optimizer.variables),
        "metrics": by_path(model.metrics_variables),
    }


def per_replica(strategy: tf.distribute.Strategy, variables: Sequence[Any]) -> list[list[np.ndarray]]:
    """What each replica sees when it reads the variables."""

    @tf.function
    def read() -> Any:
        return strategy.run(lambda: [tf.identity(tf.convert_to_tensor(variable)) for variable in variables])

    return [local(strategy, value) for value in read()]


def local(strategy: tf.distribute.Strategy, value: Any) -> list[np.ndarray]:
    """A per-replica value as a list of N arrays."""
    parts = [np.asarray(part) for part in strategy.experimental_local_results(value)]
    if len(parts) > strategy.num_replicas_in_sync:
        # Of micro-batches, which one replica's value is made of: rows are joined, all else is added up.
        return [np.asarray(strategy.reduce("SUM", value, axis=None))]
    if isinstance(strategy, tf.distribute.MirroredStrategy) and len(parts) == 1:
        # Where all replicas return the same Python object, stock strategies keep one of them.
        return parts * strategy.num_replicas_in_sync
    if strategy.num_replicas_in_sync > 1:  # the default strategy knows no devices
        assert len(parts) == len(strategy.extended.worker_devices)  # of this process
    return parts


def arrays(structure: Any) -> Any:
    """The structure with every tensor as an array."""
    if isinstance(structure, Mapping):
        return {key: arrays(value) for key, value in structure.items()}
    if isinstance(structure, list | tuple):
        return [arrays(value) for value in structure]
    return np.asarray(structure)


# --- Training ---------------------------------------------------------------------------------------------------------
def classify(
    strategy: tf.distribute.Strategy,
    build: Callable[[], keras.Model],
    optimizer: Callable[[], keras.optimizers.Optimizer],
    data: tf.data.Dataset,
    *,
    batch: int = BATCH,
    epochs: int = 5,
) -> dict[str, Any]:
    """The usual custom loop: `data` yields (inputs, labels); the loss is the sum over the examples / `batch`."""
    with strategy.scope():
        model = build()
        stepper = optimizer()
        stepper.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    distributed = strategy.experimental_distribute_dataset(data)

    def replica_step(x: Any, y: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_of(y, model(x, training=True))) / batch
        gradients = tape.gradient(loss, model.trainable_variables)
        stepper.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(inputs: Any) -> tf.Tensor:
        per_replica_loss = strategy.run(replica_step, args=inputs)
        return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_loss, axis=None)

    losses = [step(inputs) for _ in range(epochs) for inputs in distributed]
    extra = [variable for variable in model.variables if not variable.trainable]
    return {
        "losses": np.asarray(losses),
        "weights": by_path(model.variables),
        "optimizer": by_path(stepper.variables),
        "local": per_replica(strategy, extra) if extra else [],
    }
