"""Variables where MirroredStrategy is no reference: the right values worked out by hand."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import microstrat


def replica_number() -> tf.Tensor:
    return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)


def run(strategy: microstrat.MicroBatchStrategy, function: Any, engine: str) -> Any:
    return tf.function(lambda: strategy.run(function))() if engine == "looped" else strategy.run(function)


@pytest.mark.parametrize("engine", ["looped", "eager"])
def test_a_variable_as_the_assigned_value_is_this_replicas(engine: str) -> None:
    strategy = microstrat.MicroBatchStrategy(2)
    with strategy.scope():
        own = tf.Variable(0.0, trainable=False)
        shared = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)

    def step() -> None:
        own.assign(10.0 * (replica_number() + 1.0))
        shared.assign_add(own)

    run(strategy, step, engine)
    assert shared.numpy() == 1.0 + (10.0 + 20.0) / 2


@pytest.mark.parametrize("engine", ["looped", "eager"])
def test_a_shared_write_happens_once(engine: str) -> None:
    strategy = microstrat.MicroBatchStrategy(4)
    with strategy.scope():
        weight = tf.Variable(1.0)

    def step() -> None:
        weight.assign(weight * 2.0)
        weight.assign_add(1.0)

    run(strategy, step, engine)
    assert weight.numpy() == 3.0


def test_equal_values_keep_one_value_for_all() -> None:
    strategy = microstrat.MicroBatchStrategy(1024)
    with strategy.scope():
        counter = tf.Variable([0, 7], trainable=False)
    tf.function(lambda: strategy.run(lambda: counter.assign_add([1, 0])))()
    assert counter.rows is None
    assert counter.numpy().tolist() == [1, 7]


def test_a_function_traced_before_sees_values_that_became_each_replicas_own() -> None:
    strategy = microstrat.MicroBatchStrategy(2)
    with strategy.scope():
        own = tf.Variable(0.0, trainable=False)
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(tf.zeros([2])))
    read = tf.function(lambda batch: strategy.run(lambda x: x + own, args=(batch,)))
    cross_replica = tf.function(lambda: own + 0.0)
    batch = next(iter(dataset))
    assert [value.numpy().tolist() for value in read(batch).values] == [[0.0], [0.0]]
    assert cross_replica().numpy() == 0.0
    tf.function(lambda: strategy.run(lambda: own.assign(replica_number() + 1.0)))()
    batch = next(iter(dataset))
    assert [value.numpy().tolist() for value in read(batch).values] == [[1.0], [2.0]]
    assert cross_replica().numpy() == 1.0


def test_cross_replica_assignment_reaches_every_replica() -> None:
    strategy = microstrat.MicroBatchStrategy(3)
    with strategy.scope():
        own = tf.Variable(0.0, trainable=False)
        total = tf.Variable(
            0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )
    run(strategy, lambda: (own.assign(replica_number()), total.assign(replica_number())), "looped")
    assert total.numpy() == 0.0 + 1.0 + 2.0
    own.assign(5.0)
    total.assign(6.0)
    seen = tf.function(lambda: strategy.run(lambda: (own + 0.0, total + 0.0)))()
    np.testing.assert_array_equal([value.numpy() for value in seen[0].values], [5.0, 5.0, 5.0])
    np.testing.assert_array_equal([value.numpy() for value in seen[1].values], [2.0, 2.0, 2.0])


def test_variables_and_strategies_are_collected() -> None:
    def make() -> list[weakref.ref[Any]]:
        strategy = microstrat.MicroBatchStrategy(2)
        with strategy.scope():
            variable = tf.Variable(1.0, trainable=False)
        strategy.run(lambda: variable.assign(replica_number()))
        return [weakref.ref(strategy), weakref.ref(variable)]

    references = [reference for _ in range(5) for reference in make()]
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
