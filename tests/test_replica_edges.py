"""Replicas semantics where MirroredStrategy gives nonsense or is silent: no rows, uneven rows, unscaled losses, options."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import microstrat
from microstrat import _plan

UNEVEN = pytest.mark.filterwarnings("ignore:A batch of")
EAGER = pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
REPLICAS = 8


def run(strategy: microstrat.MicroBatchStrategy, fn: Callable[..., Any], rows: int, eager: bool = False) -> Any:
    data = tf.data.Dataset.from_tensor_slices(tf.range(1.0, rows + 1.0)).batch(rows)
    batch = next(iter(strategy.experimental_distribute_dataset(data)))

    def step(x: Any) -> Any:
        return strategy.run(fn, args=(x,))

    return step(batch) if eager else tf.function(step)(batch)


# --- Replicas without rows --------------------------------------------------------------------------------------------
@UNEVEN
@EAGER
def test_a_replica_without_rows_never_runs(eager: bool) -> None:
    """9 rows on 8 replicas: 2, 2, 2, 2, 1, and three without any."""
    strategy = microstrat.MicroBatchStrategy(REPLICAS)
    with strategy.scope():
        aggregations = {"total": tf.VariableAggregation.SUM, "mean": tf.VariableAggregation.MEAN}
        state = {name: tf.Variable(0.0, aggregation=how, trainable=False) for name, how in aggregations.items()}
        mark = tf.Variable(
            0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )

    def step(x: tf.Tensor) -> Any:
        state["total"].assign_add(tf.reduce_sum(x))
        state["mean"].assign(tf.reduce_mean(x))
        mark.assign_add(1.0)
        context = tf.distribute.get_replica_context()
        return tf.reduce_mean(x), x, context.all_reduce("MEAN", tf.reduce_mean(x)), context.all_gather(x, axis=0), 3.0

    mean, rows, reduced, gathered, number = run(strategy, step, 9, eager)
    means = [1.5, 3.5, 5.5, 7.5, 9.0]
    assert state["total"].numpy() == 45.0
    assert state["mean"].numpy() == pytest.approx(np.mean(means))
    assert float(tf.convert_to_tensor(mark)) == 5.0
    assert float(strategy.reduce("SUM", mean, axis=None)) == pytest.approx(sum(means))
    assert float(strategy.reduce("MEAN", mean, axis=None)) == pytest.approx(np.mean(means))
    assert [float(part) for part in strategy.experimental_local_results(mean)] == [*means, 0, 0, 0]
    assert [len(part) for part in strategy.experimental_local_results(rows)] == [2, 2, 2, 2, 1, 0, 0, 0]
    np.testing.assert_array_equal(strategy.gather(rows, axis=0), np.arange(1.0, 10.0))
    assert float(strategy.reduce("MEAN", reduced, axis=None)) == pytest.approx(np.mean(means))
    np.testing.assert_array_equal(strategy.experimental_local_results(gathered)[0], np.arange(1.0, 10.0))
    assert strategy.reduce("MEAN", number, axis=None) == 3.0


def normalized(strategy: microstrat.MicroBatchStrategy, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((2,)), *layers])
        model.compile(
            "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"], **options
        )
    return model


@UNEVEN
@EAGER
@pytest.mark.parametrize("first", [1, 16], ids=["first step", "last step"])
def test_one_row_on_eight_replicas_with_batch_normalization(first: int, eager: bool) -> None:
    strategy = microstrat.MicroBatchStrategy(REPLICAS)
    model = normalized(strategy, run_eagerly=eager)
    x = np.random.default_rng(0).standard_normal((17, 2)).astype("float32")
    y = np.arange(17) % 2
    sizes = [first, 17 - first]
    for start, stop in ((0, sizes[0]), (sizes[0], 17)):
        history = model.fit(x[start:stop], y[start:stop], batch_size=16, verbose=0)
        assert np.isfinite(history.history["loss"]).all()
    loss, _ = model.evaluate(x, y, batch_size=16, verbose=0)
    predictions = model.predict(x, batch_size=16, verbose=0)
    assert predictions.shape == (17, 2)
    assert all(np.isfinite(weights).all() for weights in model.get_weights())
    log_probabilities = predictions - np.log(np.exp(predictions).sum(-1, keepdims=True))
    assert loss == pytest.approx(-log_probabilities[np.arange(17), y].mean(), rel=1e-5)


@UNEVEN
def test_one_row_trains_as_on_one_device() -> None:
    """Without the empty replicas, one row on eight replicas is one row, but for the loss scale, which counts eight."""

    def step_size(strategy: Any) -> np.ndarray:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
            model.compile(keras.optimizers.SGD(1.0), "mse")
        before = model.get_weights()[0]
        model.fit(np.ones((1, 2)), np.zeros((1, 2)), verbose=0)
        return before - model.get_weights()[0]

    alone = step_size(tf.distribute.get_strategy())
    np.testing.assert_allclose(step_size(microstrat.MicroBatchStrategy(REPLICAS)) * REPLICAS, alone, rtol=1e-6)


# --- Warnings ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("known", [True, False], ids=["static", "dynamic"])
def test_uneven_batches_are_announced_once(known: bool) -> None:
    strategy = microstrat.MicroBatchStrategy(4)
    data = tf.data.Dataset.range(11).batch(11 if known else 8, drop_remainder=known)
    distributed = strategy.experimental_distribute_dataset(data.repeat(2))

    @tf.function
    def epoch(iterator: Any) -> Any:
        return strategy.run(lambda x: tf.size(x), args=(next(iterator),))

    with pytest.warns(
        UserWarning, match=r"A batch of (11|3) rows .* over 4 replicas: .*micro_batches=n.*drop_rem"
    ) as caught:
        iterator = iter(distributed)
        for _ in range(2 if known else 4):
            epoch(iterator)
    assert len(caught) == 1


def test_even_batches_are_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(microstrat.MicroBatchStrategy(4), lambda x: x, 8)


@EAGER
def test_a_loss_that_is_one_number_is_announced(eager: bool) -> None:
    strategy = microstrat.MicroBatchStrategy(2)
    with strategy.scope():
        weight = tf.Variable(1.0)
        mean = keras.losses.MeanSquaredError()
        dice = keras.losses.Dice(name="overlap")

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = dice(x[:, tf.newaxis], weight * x[:, tf.newaxis]) + mean(x[:, tf.newaxis], weight * x[:, tf.newaxis])
        return tape.gradient(loss, weight)

    with pytest.warns(
        UserWarning, match=r"Keras loss 'overlap' .* 'step' .*2 times too large.*micro_batches=n"
    ) as caught:
        run(strategy, step, 4, eager)
        run(strategy, step, 4, eager)
    assert len(caught) == 1


# --- Options ----------------------------------------------------------------------------------------------------------
@EAGER
def test_averaged_batch_norm_statistics(eager: bool) -> None:
    strategy = microstrat.MicroBatchStrategy(2, batch_norm_statistics="averaged")
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.5)
        layer.build((None, 1))
    run(strategy, lambda x: layer(x[:, tf.newaxis], training=True), 4, eager)  # [1, 2] and [3, 4]
    np.testing.assert_allclose(layer.moving_mean, [0.5 * (1.5 + 3.5) / 2])
    np.testing.assert_allclose(layer.moving_variance, [0.5 + 0.5 * 0.25])


@EAGER
def test_independent_dropout_masks(eager: bool) -> None:
    def masks(**options: Any) -> list[list[float]]:
        keras.utils.set_random_seed(0)
        strategy = microstrat.MicroBatchStrategy(4, **options)
        with strategy.scope():
            layer = keras.layers.Dropout(0.5, seed=3)
        kept = run(strategy, lambda x: layer(tf.ones([32]) + 0 * x[0], training=True), 4, eager)
        return [part.numpy().tolist() for part in strategy.experimental_local_results(kept)]

    mirrored, independent = masks(), masks(dropout_masks="independent")
    assert all(mask == mirrored[0] for mask in mirrored)
    assert len({tuple(mask) for mask in independent}) == 4
    assert independent == masks(dropout_masks="independent")


# --- Replicas and micro-batches at once -------------------------------------------------------------------------------
def test_replicas_that_cut_their_batch() -> None:
    """8 rows: two replicas with four, in three micro-batches of 2, 2 (there is no third)."""
    strategy = microstrat.MicroBatchStrategy(3, semantics="whole_batch", replicas=2)
    with strategy.scope():
        weight = tf.Variable(1.0)
        own = tf.Variable(0.0, trainable=False)

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(weight * x)
        gradient = tape.gradient(loss, weight)
        own.assign(gradient)
        context = tf.distribute.get_replica_context()
        return loss, x, gradient, context.all_reduce("SUM", gradient), context.replica_id_in_sync_group

    loss, rows, gradient, total, number = run(strategy, step, 8)
    assert [float(part) for part in strategy.experimental_local_results(loss)] == [2.5, 6.5]
    assert [part.numpy().tolist() for part in strategy.experimental_local_results(rows)] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert [float(part) for part in strategy.experimental_local_results(gradient)] == [2.5, 6.5]
    assert [float(part) for part in strategy.experimental_local_results(total)] == [9.0, 9.0]
    assert [int(part) for part in strategy.experimental_local_results(number)] == [0, 1]
    assert own.numpy() == 2.5  # replica 0's; each has its own


def test_the_gradient_of_gathered_rows_finds_its_own() -> None:
    strategy = microstrat.MicroBatchStrategy(2, semantics="whole_batch", replicas=2)

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            rows = tf.distribute.get_replica_context().all_gather(x, axis=0)
            loss = tf.range(1.0, 9.0) * rows
        return tape.gradient(loss, x)

    gradient = run(strategy, step, 8)
    np.testing.assert_array_equal(strategy.gather(gradient, axis=0), 2 * np.arange(1.0, 9.0))  # both replicas' losses


# --- Branches ---------------------------------------------------------------------------------------------------------
def test_a_collective_in_a_branch_takes_what_the_function_around_run_was_given() -> None:
    """Stock strategies have no collectives in branches."""
    strategy = microstrat.MicroBatchStrategy(2)

    def step(x: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return tf.cond(
            x[0] > 0.0,
            lambda: context.all_reduce("SUM", x * x) + context.all_gather(x, axis=0)[:2],
            lambda: context.all_reduce("MEAN", 3.0 * x),
        )

    both = tf.function(lambda x: strategy.run(step, args=(x,)))
    for x, expected in (([1.0, 2.0], [3.0, 10.0]), ([-1.0, 2.0], [-3.0, 6.0])):
        for value in strategy.experimental_local_results(both(tf.constant(x))):
            np.testing.assert_array_equal(value, expected)


def test_a_branch_that_varies_may_read_what_was_reduced_before() -> None:
    """Also where another collective stands in a branch."""
    strategy = microstrat.MicroBatchStrategy(2)

    def step(x: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        total = context.all_reduce("SUM", tf.identity(x))
        y = tf.cond(context.replica_id_in_sync_group > 0, lambda: total + 1.0, lambda: x)
        return tf.cond(total > 1.0, lambda: context.all_reduce("SUM", x * 2.0) + y, lambda: x)

    result = tf.function(lambda x: strategy.run(step, args=(x,)))(tf.constant(3.0))
    assert [value.numpy() for value in strategy.experimental_local_results(result)] == [15.0, 19.0]


# --- The planner ------------------------------------------------------------------------------------------------------
def test_what_an_early_collective_does_not_need_waits_for_the_last_loop() -> None:
    """turn -> mask -> (sum of masks); turn -> forward -> loss, which divides by that sum; loss -> (sum of losses)."""
    nodes = [
        _plan.Node(varying=True, argument=True),
        _plan.Node((0,)),  # 1 mask
        _plan.Node((1,), collective=True),  # 2
        _plan.Node((0,), size=1000),  # 3 forward
        _plan.Node((3, 1, 2)),  # 4 loss
        _plan.Node((4,), collective=True),  # 5
        _plan.Node((5,), effect=True, required=True),  # 6 update
        _plan.Node((3,), collective=True),  # 7 a metric
        _plan.Node((7,), effect=True, required=True),  # 8
    ]
    plan = _plan.plan(nodes)
    assert [plan.stage[index] for index in (1, 3, 4, 6, 8)] == [1, 3, 3, 4, 4]
    assert plan.carries == {1}


def test_what_is_large_and_needed_early_is_not_kept_for_a_sum_of_it() -> None:
    nodes = [
        _plan.Node(varying=True, argument=True),
        _plan.Node((0,), size=1000),  # 1
        _plan.Node((1,), collective=True),  # 2 needs it early
        _plan.Node((1,)),  # 3 a sum of it
        _plan.Node((3, 2)),  # 4
        _plan.Node((4,), collective=True, required=True),  # 5
    ]
    plan = _plan.plan(nodes)
    assert plan.stage[3] == 1
    assert plan.carries == {3}
