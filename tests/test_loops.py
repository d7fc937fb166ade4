"""Collectives in tf.while_loop and AutoGraph loops, which MirroredStrategy refuses; the truth is as in test_conditionals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import microstrat
from tests import compare
from tests.programs._registry import arrays

ROWS = 6
X = np.random.default_rng(5).normal(size=(ROWS * 3, 4)).astype("float32")
Make = Callable[[tf.distribute.Strategy], tuple[Callable[..., Any], Callable[[], Any]]]


def _train(strategy: Any, make: Make, decorator: Any = tf.function, data: Any = X, mean: bool = False) -> Any:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        replica_step, left = make(strategy)

    @decorator
    def step(x: Any) -> Any:
        returned = strategy.run(replica_step, args=(x,))
        return strategy.reduce("MEAN" if mean else "SUM", returned, axis=None)

    batches = tf.data.Dataset.from_tensor_slices(data).batch(ROWS)
    returned = [step(x) for x in strategy.experimental_distribute_dataset(batches)]
    return arrays({"returned": returned, "left": left()})


def _dense() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])


def _gradients(strategy: Any, model: keras.Model, x: tf.Tensor) -> tuple[tf.Tensor, Any]:
    with tf.GradientTape() as tape:
        error = model(x) - tf.reduce_sum(x, 1, keepdims=True)
        loss = tf.reduce_mean(tf.square(error)) / strategy.num_replicas_in_sync
    return loss, zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)


def several_steps(strategy: Any) -> Any:
    """The optimizer steps in an AutoGraph for; what is returned adds up over the loop."""
    model, optimizer = _dense(), keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

    def step(x: tf.Tensor) -> tf.Tensor:
        total = 0.0
        for _ in tf.range(3):
            loss, gradients = _gradients(strategy, model, x)
            optimizer.apply_gradients(gradients)
            total += loss
        return total

    return step, lambda: [model.weights, optimizer.variables]


def until_it_fits(strategy: Any) -> Any:
    """A while whose condition comes out of a collective, with an if and a loop in it."""
    model, optimizer = _dense(), keras.optimizers.SGD(0.05)
    optimizer.build(model.trainable_variables)
    context = tf.distribute.get_replica_context

    def step(x: tf.Tensor) -> tf.Tensor:
        number, error = 0, tf.constant(10.0)
        while number < 4 and error > 0.5:
            loss, gradients = _gradients(strategy, model, x)
            error = context().all_reduce("SUM", loss)
            if number % 2 == 0:
                optimizer.apply_gradients(gradients)
            for _ in tf.range(number):
                error -= 0.01 * context().all_reduce("SUM", loss * error)
            number += 1
        return error / strategy.num_replicas_in_sync

    return step, lambda: [model.weights]


def own_state(strategy: Any) -> Any:
    """What differs between replicas lives through the turns: loop variables, with rows too, and variables."""
    own, total = (
        tf.Variable(0.0, trainable=False),
        tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.SUM),
    )
    mean = keras.metrics.Mean()
    context = tf.distribute.get_replica_context

    def step(x: tf.Tensor) -> Any:
        replica = tf.cast(context().replica_id_in_sync_group, tf.float32)

        def turn(number: tf.Tensor, rows: tf.Tensor, scalar: tf.Tensor, kept: tf.TensorArray) -> Any:
            gathered = context().all_gather(rows, 0)
            summed = context().all_reduce("MEAN", tf.reduce_sum(rows) * scalar)
            own.assign_add(replica * summed + tf.reduce_sum(x))
            total.assign_add(scalar)
            mean.update_state(rows)
            rows = tf.tanh(rows + own * tf.reduce_mean(gathered)) + replica
            return number + 1, rows, scalar + replica + own, kept.write(number, summed)

        kept = tf.TensorArray(tf.float32, 3, element_shape=[])
        _, rows, scalar, kept = tf.while_loop(
            lambda number, *_: number < 3,
            turn,
            (0, x, tf.constant(1.0), kept),
            shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, 4]), tf.TensorShape([]), None),
        )
        return tf.reduce_sum(rows, 0), scalar, kept.stack(), own.read_value()

    return step, lambda: [total.numpy(), mean.result()]


def what_was_there_before(strategy: Any) -> Any:
    """A turn hands on what was computed before the loop, which differs between replicas; what it does, it does once."""
    own = tf.Variable(
        0.0,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )
    context = tf.distribute.get_replica_context

    def step(x: tf.Tensor) -> Any:
        before = tf.reduce_sum(x, 0)
        now, inside, number = before, before, 0
        goes_on = context().all_reduce("SUM", before[0]) < 1e9
        while goes_on and number < 3:
            summed = context().all_reduce("SUM", now)
            own.assign_add(1.0)
            for _ in tf.range(2):
                inside = summed * context().all_reduce("MEAN", inside)
                own.assign_add(10.0)
                inside = before
            if number > 1:
                now = context().all_reduce("SUM", inside)
                own.assign_add(100.0)
            else:
                now = before
            number += 1
        return now, inside

    return step, lambda: [own.numpy()]


def in_a_function(strategy: Any) -> Any:
    """The loop stands in a nested tf.function, and draws by a generator."""
    generator = tf.random.Generator.from_seed(5)
    weight = tf.Variable([1.0, 2.0])
    context = tf.distribute.get_replica_context

    @tf.function
    def loop(x: tf.Tensor) -> tf.Tensor:
        found = tf.zeros([2])
        for number in tf.range(3):
            noise = generator.normal([2])
            found += context().all_reduce("SUM", noise * tf.reduce_sum(x)) * weight * tf.cast(number, tf.float32)
            weight.assign_add(context().all_reduce("MEAN", found))
        return found

    return loop, lambda: [weight.numpy()]


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("make", [several_steps, until_it_fits])
def test_loops_equal_the_full_batch(make: Make, replicas: int) -> None:
    expected = _train(tf.distribute.get_strategy(), make)
    assert not compare.differences(expected, _train(microstrat.MicroBatchStrategy(replicas), make), 2e-6)


@pytest.mark.parametrize("micro_batches", [1, 4, 5])
def test_loops_over_a_whole_batch(micro_batches: int) -> None:
    strategy = microstrat.MicroBatchStrategy(micro_batches, semantics="whole_batch")
    expected = _train(tf.distribute.get_strategy(), several_steps)
    assert not compare.differences(expected, _train(strategy, several_steps, mean=True), 2e-6)


def test_replicas_that_cut_their_batches_do_not_meet_in_a_loop() -> None:
    strategy = microstrat.MicroBatchStrategy(2, semantics="whole_batch", replicas=2)
    with pytest.raises(RuntimeError, match="replicas that cut their batches in micro-batches cannot meet there"):
        _train(strategy, several_steps)


@pytest.mark.filterwarnings("ignore:A batch of")
@pytest.mark.parametrize("make", [several_steps, until_it_fits, own_state, what_was_there_before])
def test_loops_equal_the_eager_engine(make: Make) -> None:
    """With a short last batch, and one that leaves a replica without rows."""
    data = np.concatenate([X[:ROWS], X[: ROWS - 2]])
    expected = _train(microstrat.MicroBatchStrategy(3), make, lambda fn: fn, data)
    assert not compare.differences(expected, _train(microstrat.MicroBatchStrategy(3), make, data=data), 1e-6)


def _effects(place: str, decorator: Any) -> Any:
    """What is left of effects of many kinds, in a turn (or in what stands in it) and around the loop."""
    strategy = microstrat.MicroBatchStrategy(3)
    outside, table = tf.Variable(1.0), tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
    called: list[tuple[str, float]] = []
    with strategy.scope():
        kinds = tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN, tf.VariableAggregation.ONLY_FIRST_REPLICA
        aggregated = [tf.Variable(0.0, trainable=False, aggregation=kind) for kind in kinds]
        own, shared, mean = tf.Variable(0.0, trainable=False), tf.Variable(0.0), keras.metrics.Mean()
    context = tf.distribute.get_replica_context

    def act(name: str, value: tf.Tensor) -> None:
        for variable in aggregated:
            variable.assign_add(value)
        own.assign_add(value)
        shared.assign_add(1.0)
        mean.update_state(value)
        outside.assign_add(value)
        outside.assign(1.5 * outside)
        table.insert([1, 2], table.lookup(tf.constant([1, 2], tf.int64)) + tf.stack([1.0, value]))
        tf.numpy_function(lambda value: called.append((name, float(value))), [value], [])

    def step(x: tf.Tensor) -> tf.Tensor:
        before = tf.reduce_sum(x)
        value = before
        act("before", value)
        for number in tf.range(3):
            value = context().all_reduce("SUM", value) + before
            if place == "turn":
                act(place, value)
            elif place == "loop":
                for _ in tf.range(number):
                    act(place, before)
            elif number == 1:
                act(place, value)
            value = before
        act("after", value)
        return value

    @decorator
    def run(x: Any) -> Any:
        return strategy.run(step, args=(x,))

    x = strategy.experimental_distribute_values_from_function(lambda c: tf.constant([c.replica_id_in_sync_group + 1.0]))
    returned = run(x).values
    left = [variable.numpy() for variable in (*aggregated, *own.values, shared, outside, *table.export())]
    return arrays([returned, left, mean.result()]), called


@pytest.mark.parametrize("place", ["turn", "loop", "branch"])
def test_effects_happen_once_a_turn(place: str) -> None:
    expected, expected_calls = _effects(place, lambda fn: fn)
    actual, calls = _effects(place, tf.function)
    assert not compare.differences(expected, actual, 1e-6)
    assert sorted(calls) == sorted(expected_calls)  # TensorFlow does not order them with what has resources


def test_a_loop_in_a_nested_function() -> None:
    """The same, put down turn by turn."""

    def unrolled(strategy: Any) -> Any:
        generator = tf.random.Generator.from_seed(5)
        weight = tf.Variable([1.0, 2.0])
        context = tf.distribute.get_replica_context

        def step(x: tf.Tensor) -> tf.Tensor:
            found = tf.zeros([2])
            for number in range(3):
                noise = generator.normal([2])
                found += context().all_reduce("SUM", noise * tf.reduce_sum(x)) * weight * float(number)
                weight.assign_add(context().all_reduce("MEAN", found))
            return found

        return step, lambda: [weight.numpy()]

    expected = _train(microstrat.MicroBatchStrategy(2), unrolled)
    assert not compare.differences(expected, _train(microstrat.MicroBatchStrategy(2), in_a_function), 2e-6)


def test_a_loop_compiles() -> None:
    def compiled(fn: Any) -> Any:
        return tf.function(fn, jit_compile=True)

    expected = _train(microstrat.MicroBatchStrategy(2), several_steps)
    assert not compare.differences(expected, _train(microstrat.MicroBatchStrategy(2), several_steps, compiled), 2e-6)


def _all_reduce(value: Any) -> tf.Tensor:
    return tf.distribute.get_replica_context().all_reduce("SUM", value)


def _looping(cond: Callable[..., Any], body: Callable[..., Any]) -> Make:
    return lambda strategy: (lambda x: tf.while_loop(cond, body, [tf.reduce_sum(x)])[0], lambda: [])


def test_replicas_that_turn_a_different_number_of_times_are_refused() -> None:
    with pytest.raises(RuntimeError, match="under a condition that may differ between replicas"):
        _train(microstrat.MicroBatchStrategy(2), _looping(lambda x: x < 10, lambda x: x + _all_reduce(x)))


@pytest.mark.parametrize("differs", ["condition", "limit"])
def test_limits_from_before_the_loop_that_differ_are_refused(differs: str) -> None:
    def make(strategy: Any) -> Any:
        def step(x: tf.Tensor) -> Any:
            value = tf.reduce_sum(x)
            goes_on, most = (value > 0, 3) if differs == "condition" else (True, tf.cast(value, tf.int32))
            return tf.while_loop(lambda _: goes_on, lambda x: [_all_reduce(x)], [value], maximum_iterations=most)[0]

        return step, lambda: []

    with pytest.raises(RuntimeError, match="under a condition that may differ between replicas"):
        _train(microstrat.MicroBatchStrategy(2), make)


def test_a_gradient_through_the_loop_is_refused() -> None:
    def make(strategy: Any) -> Any:
        weight = tf.Variable(1.0)

        def step(x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                value = tf.while_loop(lambda v: v < 10, lambda v: (_all_reduce(v),), [weight * 1.0])
            return tape.gradient(value, weight)

        return step, lambda: []

    with pytest.raises(RuntimeError, match=r"'step', a GradientTape records a tf\.while_loop .* use a Python loop"):
        _train(microstrat.MicroBatchStrategy(2), make)


def test_what_cannot_be_kept_for_all_replicas_is_refused() -> None:
    def make(strategy: Any) -> Any:
        def step(x: tf.Tensor) -> Any:
            kept = tf.TensorArray(tf.float32, 0, dynamic_size=True)
            for number in tf.range(2):
                kept = kept.write(
                    number, tf.reduce_sum(x) * _all_reduce(tf.reduce_sum(x) + tf.cast(number, tf.float32))
                )
            return kept.stack()

        return step, lambda: []

    with pytest.raises(RuntimeError, match=r"a tf\.TensorArray must be written what is the same in all"):
        _train(microstrat.MicroBatchStrategy(2), make)
