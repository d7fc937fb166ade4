"""Many steps, many threads, many strategies: nothing is traced again, mixed up or left behind."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import microstrat

UNEVEN = pytest.mark.filterwarnings("ignore:A batch of")
X = np.random.default_rng(0).standard_normal((24, 3)).astype("float32")


class Loop:
    """A loop with a weight, a value per replica, and a count; in a tf.function and outside."""

    def __init__(self, number: int):
        self.strategy = microstrat.MicroBatchStrategy(number)
        on_read, sums = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM
        with self.strategy.scope():
            self.weight = tf.Variable(tf.ones([3]))
            self.own = tf.Variable(0.0, trainable=False)
            self.count = tf.Variable(0.0, trainable=False, synchronization=on_read, aggregation=sums)
        self.traces = 0
        self.step = tf.function(self.run)

    def replica_step(self, x: tf.Tensor) -> tf.Tensor:
        self.traces += 1
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.linalg.matvec(x, self.weight) ** 2)
        gradient = tape.gradient(loss, self.weight)
        self.weight.assign_sub(1e-4 * tf.distribute.get_replica_context().all_reduce("sum", gradient))
        self.own.assign(tf.reduce_sum(x))
        self.count.assign_add(1.0)
        return loss

    def run(self, x: Any) -> tf.Tensor:
        return self.strategy.reduce("SUM", self.strategy.run(self.replica_step, args=(x,)), axis=None)

    def batches(self, rows: np.ndarray = X) -> list[Any]:
        return list(self.strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(rows).batch(12)))

    def losses(self) -> list[float]:
        return [float(step(batch)) for _ in range(3) for step in (self.step, self.run) for batch in self.batches()]


def in_threads(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    results: list[Any] = [None] * len(functions)

    def call(index: int) -> None:
        try:
            results[index] = functions[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_threads_with_a_strategy_each() -> None:
    numbers = (2, 3, 4, 2, 3, 4)
    alone = {number: Loop(number).losses() for number in set(numbers)}
    assert in_threads([Loop(number).losses for number in numbers]) == [alone[number] for number in numbers]


def test_threads_that_share_a_strategy_and_a_function() -> None:
    loop = Loop(3)
    batch = loop.batches()[0]

    def forward(x: tf.Tensor) -> tf.Tensor:
        loop.count.assign_add(1.0)
        loop.own.assign(tf.reduce_sum(x))
        total = tf.reduce_sum(tf.linalg.matvec(x, loop.weight))
        return tf.distribute.get_replica_context().all_reduce("sum", total)

    step = tf.function(lambda x: loop.strategy.run(forward, args=(x,)))

    def many() -> list[float]:
        return [float(loop.strategy.reduce("MEAN", step(batch), axis=None)) for _ in range(10)]

    expected = float(X[:12].sum())
    for values in in_threads([many] * 4):
        np.testing.assert_allclose(values, expected, rtol=1e-5)
    assert float(tf.convert_to_tensor(loop.count)) == 4 * 10 * 3
    assert step.experimental_get_tracing_count() == 1


@UNEVEN
def test_a_loop_is_traced_once_for_full_batches_and_once_for_others() -> None:
    loop = Loop(3)
    counts = []
    for _ in range(3):
        for batch in loop.batches(X[:23]):
            loop.step(batch)
            counts.append(loop.traces)
    # One trace for the full batches, and at most one more for the short ones.
    assert counts == [counts[0], counts[1]] + [counts[1]] * 4
    assert loop.step.experimental_get_tracing_count() <= 2


@UNEVEN
def test_fit_and_evaluate_are_traced_once() -> None:
    calls = {"train": 0, "test": 0}

    class Model(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            calls["train"] += 1
            return super().train_step(data)

        def test_step(self, data: Any) -> Any:
            calls["test"] += 1
            return super().test_step(data)

    with microstrat.scope(replicas=2):
        model = Model([keras.Input((3,)), keras.layers.Dense(1), keras.layers.BatchNormalization()])
        model.compile("adam", "mse")
    data = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(10)
    for _ in range(2):
        model.fit(data, validation_data=data, epochs=2, shuffle=False, verbose=0)
        model.evaluate(data, verbose=0)
    # Once more after the first step, which gives the moving statistics a value per replica.
    assert calls["train"] <= 2
    assert calls["test"] <= 1


def test_nothing_is_left_of_strategies() -> None:
    def make(number: int) -> list[weakref.ref[Any]]:
        loop = Loop(number)
        loop.step(loop.batches()[0])
        loop.strategy.run(loop.replica_step, args=(loop.batches()[0],))
        (concrete,) = loop.step._list_all_concrete_functions()
        held = (loop, loop.strategy, loop.weight, loop.own, loop.own.rows, loop.count.rows, loop.step, concrete.graph)
        return [weakref.ref(thing) for thing in held]

    references = [reference for number in (2, 3, 4) * 2 for reference in make(number)]
    gc.collect()
    assert [reference() for reference in references if reference() is not None] == []
