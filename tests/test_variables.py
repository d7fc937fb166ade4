"""Variables where MirroredStrategy is no reference: the right values worked out by hand."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import keras
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


def test_what_is_assigned_outside_replicas_is_for_all_of_them() -> None:
    """Whatever is done with the assignment's result; MirroredStrategy's scatter_* too."""
    strategy = microstrat.MicroBatchStrategy(2)
    with strategy.scope():
        own = tf.Variable([0.0, 5.0], trainable=False)
    strategy.run(lambda: own.assign([replica_number(), 5.0]))

    @tf.function
    def scatter() -> tf.Tensor:
        own.scatter_update(tf.IndexedSlices([7.0], [1]))
        return own.assign_add([1.0, 0.0]) + 1.0

    own.scatter_add(tf.IndexedSlices([3.0], [0]))
    assert [value.numpy().tolist() for value in own.values] == [[3.0, 5.0], [4.0, 5.0]]
    assert scatter().numpy().tolist() == [5.0, 8.0]
    assert [value.numpy().tolist() for value in own.values] == [[4.0, 7.0], [5.0, 7.0]]
    own.assign([0.0, 0.0]).assign_add([1.0, 2.0])
    assert [value.numpy().tolist() for value in own.values] == [[1.0, 2.0]] * 2
    assert own.numpy().tolist() == [1.0, 2.0]


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


def test_functions_without_arguments_traced_before_are_traced_again() -> None:
    strategy = microstrat.MicroBatchStrategy(3)
    with strategy.scope():
        total = tf.Variable(0.0, trainable=False)
    reset = tf.function(lambda: strategy.run(lambda: total.assign(0.0, read_value=False)))
    reset_outside = tf.function(lambda: total.assign(0.0))
    read = tf.function(lambda: strategy.run(lambda: total + 0.0))
    train = tf.function(lambda: strategy.run(lambda: total.assign_add(replica_number() + 1.0)))
    for clear in (reset, reset_outside, reset, reset_outside):
        clear()
        train()
        train()
        assert [value.numpy() for value in read().values] == [2.0, 4.0, 6.0]
        assert total.numpy() == 2.0


def test_a_read_before_the_run_that_makes_a_variable_each_replicas_own() -> None:
    strategy = microstrat.MicroBatchStrategy(3)
    with strategy.scope():
        own = tf.Variable(1.0, trainable=False)

    @tf.function
    def both() -> Any:
        before = strategy.run(lambda: own + 0.0)
        strategy.run(lambda: own.assign(own * 2.0 + replica_number()))
        return before

    assert [value.numpy() for value in both().values] == [1.0, 1.0, 1.0]
    assert [value.numpy() for value in both().values] == [2.0, 3.0, 4.0]
    assert [value.numpy() for value in both().values] == [4.0, 7.0, 10.0]


@pytest.mark.parametrize(
    "write",
    [
        lambda own: own.assign_add([replica_number()]),
        lambda own: own.scatter_add(tf.IndexedSlices(tf.stack([replica_number()]), tf.constant([0]), tf.constant([1]))),
        # Only the plan of the whole replica function tells that this differs.
        lambda own: tf.cond(replica_number() > 0.0, lambda: own.assign_add([1.0]) + 0.0, lambda: own + 0.0),
    ],
    ids=["assigned", "scattered", "under a condition"],
)
@pytest.mark.parametrize(
    "write_before",
    [
        lambda strategy, own: own.assign([0.0]),
        lambda strategy, own: strategy.extended.update(own, lambda component: component.assign([0.0])),
        lambda strategy, own: [part.assign([0.0]) for part in strategy.experimental_local_results(own)],
        lambda strategy, own: tf.cond(
            own[0] > -1.0, lambda: [part.assign([0.0]) + 0.0 for part in own.values], lambda: [own + 0.0] * 2
        ),
    ],
    ids=["assigned", "updated", "components", "components under a condition"],
)
def test_a_write_before_the_run_that_makes_a_variable_each_replicas_own(write: Any, write_before: Any) -> None:
    strategy = microstrat.MicroBatchStrategy(2)
    with strategy.scope():
        own = tf.Variable([5.0], trainable=False)

    def replica_step() -> tf.Tensor:
        write(own)
        return own[0] + 0.0

    @tf.function
    def both() -> Any:
        write_before(strategy, own)
        return strategy.run(replica_step)

    with pytest.raises(RuntimeError, match=r"Nothing has run yet: call the tf\.function again"):
        both()
    for _ in range(2):
        assert [value.numpy() for value in both().values] == [0.0, 1.0]


def test_a_run_reads_before_the_next_run_writes() -> None:
    strategy = microstrat.MicroBatchStrategy(2)
    with strategy.scope():
        weight = tf.Variable(tf.ones([256]))

    @tf.function
    def both() -> Any:
        before = strategy.run(lambda: weight * 1.0)
        strategy.run(lambda: weight.assign_add(tf.distribute.get_replica_context().all_reduce("sum", tf.ones([256]))))
        return strategy.experimental_local_results(before)[1]

    assert [float(both()[0]) for _ in range(4)] == [1.0, 3.0, 5.0, 7.0]


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


@pytest.mark.parametrize("engine", ["looped", "eager"])
def test_state_read_and_written_in_a_loop_of_the_replica_function(engine: str) -> None:
    strategy = microstrat.MicroBatchStrategy(3)
    with strategy.scope():
        mean = tf.Variable(0.0, trainable=False)
    batch = next(iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(1, 10).batch(9))))

    def step(x: tf.Tensor) -> tf.Tensor:
        for i in tf.range(3):
            mean.assign(mean * 0.5 + tf.cast(x[i], tf.float32))
        return mean + 0.0

    step_of_batch = tf.function(step) if engine == "looped" else step
    result = strategy.run(step_of_batch, args=(batch,))
    expected = [(a * 0.5 + b) * 0.5 + c for a, b, c in ((1, 2, 3), (4, 5, 6), (7, 8, 9))]
    assert [value.numpy() for value in result.values] == expected


def test_state_written_under_a_condition_that_varies() -> None:
    strategy = microstrat.MicroBatchStrategy(3)
    with strategy.scope():
        last = tf.Variable(0.0, trainable=False)

    @tf.function
    def step() -> tf.Tensor:
        if replica_number() > 0.0:
            last.assign(last * 0.5 + replica_number())
        return last + 0.0

    assert [value.numpy() for value in strategy.run(step).values] == [0.0, 1.0, 2.0]
    assert [value.numpy() for value in strategy.run(step).values] == [0.0, 1.5, 3.0]


def test_a_variable_made_in_the_first_trace_from_a_tensor() -> None:
    strategy = microstrat.MicroBatchStrategy(2)
    made: list[tf.Variable] = []

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        if not made:
            made.append(tf.Variable(tf.random.stateless_uniform([3], seed=[1, 2]) * 0.0 + 5.0))
        return made[0] * x

    assert [value.numpy().tolist() for value in strategy.run(step, args=(2.0,)).values] == [[10.0] * 3] * 2


def test_a_variable_made_in_the_first_trace_from_a_replicas_value_is_refused() -> None:
    strategy = microstrat.MicroBatchStrategy(2)

    def step() -> Any:
        return tf.Variable(replica_number())

    with pytest.raises(RuntimeError, match="'step' creates a variable whose initial value cannot be computed outside"):
        tf.function(lambda: strategy.run(step))()


def test_the_value_of_an_assignment_is_read_when_it_is_used() -> None:
    """As tf.Variable.assign in a tf.function; an aggregated assignment's is the value it wrote."""
    strategy = microstrat.MicroBatchStrategy(2)
    with strategy.scope():
        own = tf.Variable(1.0, trainable=False)
        shared = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)

    def step() -> Any:
        a = own.assign_add(replica_number())
        own.assign_sub(100.0)
        b = shared.assign(replica_number() + 1.0)
        shared.assign_add(100.0)
        return tf.convert_to_tensor(a), tf.convert_to_tensor(b)

    a, b = tf.function(lambda: strategy.run(step))()
    assert [value.numpy() for value in a.values] == [-99.0, -98.0]
    assert [value.numpy() for value in b.values] == [1.5, 1.5]


def test_fit_takes_a_distributed_dataset() -> None:
    with microstrat.scope(replicas=2) as strategy:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile("sgd", "mse")
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(4))
    assert isinstance(batches, tf.distribute.DistributedDataset)
    history = model.fit(batches, epochs=1, shuffle=False, verbose=0)
    # Weights 0: the first batch's loss is 1. Each of 4 weights has gradient -2, so they become 0.02: the prediction 0.08.
    assert history.history["loss"][0] == pytest.approx((1.0 + 0.92**2) / 2, rel=1e-6)
    assert model.predict(batches, verbose=0).shape == (8, 1)


def test_a_collective_of_rows_in_a_branch_that_writes() -> None:
    """Their number is not known while tracing. Stock strategies have no collectives in branches."""
    strategy = microstrat.MicroBatchStrategy(2)
    with strategy.scope():
        total = tf.Variable([0.0, 0.0], aggregation=tf.VariableAggregation.SUM)
        switch = tf.Variable(0)

    def replica_step(x: tf.Tensor) -> None:
        tf.cond(switch > 0, lambda: total.assign_add(tf.reduce_sum(x, axis=0)) + 0.0, lambda: total + 0.0)

    step = tf.function(lambda x: strategy.run(replica_step, args=(x,)))
    data = tf.data.Dataset.from_tensor_slices([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]).batch(4)
    for x in strategy.experimental_distribute_dataset(data.repeat(2)):
        step(x)
        switch.assign_add(1)
    np.testing.assert_array_equal(total, [16.0, 20.0])
