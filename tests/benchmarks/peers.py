"""The programs that are compared: each trains the same model on the same batches, as its users would write it.

A program is `run(steps)`: every step takes the next global batch of N × b rows from a tf.data pipeline, computes its
mean loss and gradient in micro-batches of b rows (or in whatever way the peer does it), and updates the weights once.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

import microstrat
from tests.benchmarks.case import Case
from tests.benchmarks.models import MODELS

Run = Callable[[int], Any]


@dataclass(frozen=True)
class Program:
    """What a peer builds: `run(steps)` trains and returns the last loss (or what there is of it)."""

    model: keras.Model
    run: Run
    first_call: FirstCall | None = None


class FirstCall:
    """The compiled step of a program that has one, to take the first step apart.

    Attributes:
      function: the tf.function.
      batch: what it is called with.
    """

    def __init__(self, function: Any, batch: Any):
        self.function = function
        self.batch = batch

    def trace(self) -> None:
        self.function.get_concrete_function(*self.batch)


@dataclass(frozen=True)
class Peer:
    """A way to train.

    Attributes:
      title: what `--help` says of it.
      build: makes the program.
      min_replicas, max_replicas: the N it can do, and can do within reason.
      same_update: whether it makes the same weights as the others.
      flat: whether its memory does not grow with N.
      prepare: sets TensorFlow up before anything runs, for N replicas.
    """

    title: str
    build: Callable[[Case], Program]
    min_replicas: int = 1
    max_replicas: int | None = None
    same_update: bool = True
    flat: bool = False
    prepare: Callable[[int], None] = lambda _: None

    def can_do(self, replicas: int) -> bool:
        return self.min_replicas <= replicas and (self.max_replicas is None or replicas <= self.max_replicas)


class _Training:
    """What all programs share: the model, its built optimizer, and a compiled-step decorator."""

    def __init__(self, case: Case, **optimizer_options: Any):
        self.case = case
        self.model = MODELS[case.model].build()
        optimizers = {"sgd": keras.optimizers.SGD, "adam": keras.optimizers.Adam}
        self.optimizer = optimizers[case.optimizer](1e-3, **optimizer_options)
        self.variables = self.model.trainable_variables
        self.optimizer.build(self.variables)

    def function(self, step: Callable[..., Any]) -> Any:
        return tf.function(step, jit_compile=True) if self.case.xla else tf.function(step)

    def batches(self, rows: int) -> tf.data.Dataset:
        """Endless batches of `rows` rows out of 4 global batches in memory."""
        data = tf.data.Dataset.from_tensor_slices(MODELS[self.case.model].rows(4 * self.case.global_batch))
        return data.repeat().batch(rows, drop_remainder=True).prefetch(1)

    def gradients(self, x: tf.Tensor, y: tf.Tensor, batch: int) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The share of these rows in a batch's mean loss, and its gradients."""
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, self.model(x, training=True), from_logits=True)
            loss = tf.reduce_sum(losses) / batch
        return tape.gradient(loss, self.variables), loss

    def apply(self, gradients: list[tf.Tensor]) -> None:
        self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))

    def train(self, x: tf.Tensor, y: tf.Tensor, batch: int) -> tf.Tensor:
        gradients, loss = self.gradients(x, y, batch)
        self.apply(gradients)
        return loss

    def program(self, step: Callable[[tf.Tensor, tf.Tensor], Any], data: Any, calls: int = 1) -> Program:
        """A custom loop that calls `step` with the next batch of `data`, `calls` times for each global batch."""
        iterator = iter(data)
        first = FirstCall(step, next(iterator))
        batches = itertools.chain([first.batch], iterator)

        def run(steps: int) -> Any:
            for batch in itertools.islice(batches, steps * calls):
                loss = step(*batch)
            return loss

        return Program(self.model, run, first)


def _plain_full(case: Case) -> Program:
    training = _Training(case)
    step = training.function(lambda x, y: training.train(x, y, case.global_batch))
    return training.program(step, training.batches(case.global_batch))


def _plain_micro(case: Case, **optimizer_options: Any) -> Program:
    training = _Training(case, **optimizer_options)
    step = training.function(lambda x, y: training.train(x, y, case.micro_batch))
    return training.program(step, training.batches(case.micro_batch), calls=case.replicas)


def _keras_accumulation(case: Case) -> Program:
    return _plain_micro(case, gradient_accumulation_steps=case.replicas)


def _two_functions(case: Case) -> Program:
    training = _Training(case)
    sums = [tf.Variable(tf.zeros(variable.shape), trainable=False) for variable in training.variables]
    total_loss = tf.Variable(0.0, trainable=False)

    @training.function
    def accumulate(x: tf.Tensor, y: tf.Tensor) -> None:
        gradients, loss = training.gradients(x, y, case.global_batch)
        for variable, gradient in zip([*sums, total_loss], [*gradients, loss], strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                variable.scatter_add(gradient)
            else:
                variable.assign_add(gradient)

    @training.function
    def apply() -> tf.Tensor:
        training.apply([tf.convert_to_tensor(variable) for variable in sums])
        loss = tf.identity(total_loss)
        for variable in [*sums, total_loss]:
            variable.assign(tf.zeros_like(variable))
        return loss

    iterator = iter(training.batches(case.micro_batch))

    def run(steps: int) -> tf.Tensor:
        for _ in range(steps):
            for batch in itertools.islice(iterator, case.replicas):
                accumulate(*batch)
            loss = apply()
        return loss

    return Program(training.model, run)


def _micro_batch(case: Case, batch: tuple[tf.Tensor, ...], index: Any) -> tuple[tf.Tensor, ...]:
    start, rows = index * case.micro_batch, case.micro_batch
    rests = [[0] * (tensor.shape.rank - 1) for tensor in batch]
    cut = [
        tf.slice(tensor, [start, *rest], [rows, *tensor.shape[1:]]) for tensor, rest in zip(batch, rests, strict=True)
    ]
    return tuple(cut)


def _while_loop(case: Case) -> Program:
    training = _Training(case)

    @training.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        def body(index: tf.Tensor, total: list[tf.Tensor], loss: tf.Tensor) -> tuple[Any, ...]:
            gradients, part = training.gradients(*_micro_batch(case, (x, y), index), case.global_batch)
            dense = [tf.convert_to_tensor(gradient) for gradient in gradients]  # a loop carries nothing else
            return index + 1, [a + b for a, b in zip(total, dense, strict=True)], loss + part

        start = (tf.constant(0), [tf.zeros(variable.shape) for variable in training.variables], tf.constant(0.0))
        _, total, loss = tf.while_loop(lambda index, *_: index < case.replicas, body, start, parallel_iterations=1)
        training.apply(total)
        return loss

    return training.program(step, training.batches(case.global_batch))


def _add(a: Any, b: Any) -> Any:
    if isinstance(a, tf.IndexedSlices):
        return tf.IndexedSlices(tf.concat([a.values, b.values], 0), tf.concat([a.indices, b.indices], 0), a.dense_shape)
    return a + b


def _unrolled(case: Case) -> Program:
    training = _Training(case)

    @training.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        total, loss = training.gradients(*_micro_batch(case, (x, y), 0), case.global_batch)
        for index in range(1, case.replicas):
            gradients, part = training.gradients(*_micro_batch(case, (x, y), index), case.global_batch)
            total, loss = [_add(a, b) for a, b in zip(total, gradients, strict=True)], loss + part
        training.apply(total)
        return loss

    return training.program(step, training.batches(case.global_batch))


def _distributed(case: Case, strategy: tf.distribute.Strategy) -> Program:
    """The same custom loop for every strategy."""
    with strategy.scope():
        training = _Training(case)

    @training.function
    def step(x: Any, y: Any) -> tf.Tensor:
        losses = strategy.run(training.train, args=(x, y, case.global_batch))
        return strategy.reduce("SUM", losses, axis=None)

    data = strategy.experimental_distribute_dataset(training.batches(case.global_batch))
    return training.program(step, data)


def _fit(case: Case, strategy: tf.distribute.Strategy | None) -> Program:
    with strategy.scope() if strategy else contextlib.nullcontext():
        training = _Training(case)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        training.model.compile(training.optimizer, loss, jit_compile=case.xla)
    data = training.batches(case.global_batch)

    def run(steps: int) -> float:
        return training.model.fit(data, steps_per_epoch=steps, verbose=0).history["loss"][-1]

    return Program(training.model, run)


def _microstrat(replicas: int) -> tf.distribute.Strategy:
    return microstrat.MicroBatchStrategy(replicas)


def _whole(micro_batches: int) -> tf.distribute.Strategy:
    # The loss of `_Training` is a sum over rows, divided by a constant.
    return microstrat.MicroBatchStrategy(micro_batches, semantics="whole_batch", loss_reduction="sum")


def _mirrored(replicas: int) -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy([f"CPU:{replica}" for replica in range(replicas)])


def _logical_cpus(replicas: int) -> None:
    # With few inter-op threads, MirroredStrategy's collectives on logical CPUs can wait for each other for ever.
    tf.config.threading.set_inter_op_parallelism_threads(max(8, 2 * replicas))
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)


def _elsewhere(case: Case) -> Program:
    raise NotImplementedError(f"{case.peer} is made by jax_peer.py, where Keras runs on JAX")


PEERS = {
    "microstrat": Peer(
        "MicroBatchStrategy(N), custom loop", lambda case: _distributed(case, _microstrat(case.replicas))
    ),
    "microstrat-whole": Peer(
        "MicroBatchStrategy(N, semantics='whole_batch'), the same loop",
        lambda case: _distributed(case, _whole(case.replicas)),
    ),
    "plain-full": Peer("plain TensorFlow, the global batch at once", _plain_full),
    "plain-micro": Peer(
        "plain TensorFlow, N steps of one micro-batch, an update each", _plain_micro, same_update=False
    ),
    "two-functions": Peer(
        "accumulator variables, one tf.function adds to them, one applies", _two_functions, 2, flat=True
    ),
    "while-loop": Peer("tf.while_loop over micro-batches in one tf.function", _while_loop, 2, flat=True),
    "unrolled": Peer("Python loop over micro-batches in one tf.function (N up to 8)", _unrolled, 2, 8),
    "keras-accumulation": Peer("Keras' gradient_accumulation_steps=N", _keras_accumulation, 2, flat=True),
    "mirrored": Peer(
        "MirroredStrategy on N logical CPUs, the same custom loop (N up to 8)",
        lambda case: _distributed(case, _mirrored(case.replicas)),
        2,
        8,
        prepare=_logical_cpus,
    ),
    "jax-scan": Peer("Keras' JAX backend, lax.scan over micro-batches in one jax.jit", _elsewhere, same_update=False),
    "microstrat-fit": Peer("MicroBatchStrategy(N), Keras fit", lambda case: _fit(case, _microstrat(case.replicas))),
    "microstrat-whole-fit": Peer(
        "MicroBatchStrategy(N, semantics='whole_batch'), Keras fit", lambda case: _fit(case, _whole(case.replicas))
    ),
    "plain-fit": Peer("plain Keras fit, the global batch at once", lambda case: _fit(case, None)),
}
