"""Collectives and state under tf.cond, tf.switch_case and AutoGraph's if. MirroredStrategy refuses them all.

The truth is one of two: the plain full batch, where a program is written so that it must agree; and the eager engine, for
which a condition is Python's (tests/programs compare it with MirroredStrategy).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import microstrat
from microstrat import _lower
from tests import compare
from tests.programs._registry import arrays

ROWS, STEPS = 6, 8
X = np.random.default_rng(5).normal(size=(ROWS * STEPS, 4)).astype("float32")
TOKENS = np.random.default_rng(6).integers(0, 9, size=(ROWS * STEPS, 3))
FIRST = tf.VariableAggregation.ONLY_FIRST_REPLICA
NO_DECORATOR: Callable[..., Any] = lambda fn: fn  # noqa: E731


def _train(
    strategy: tf.distribute.Strategy,
    make: Callable[[tf.distribute.Strategy], tuple[Callable[..., Any], Callable[[], Any]]],
    decorator: Callable[..., Any] = tf.function,
    data: Any = X,
) -> dict[str, Any]:
    """Runs the step that `make` gives over the batches; returns what replicas return, summed, and what is left behind."""
    keras.utils.set_random_seed(3)
    tf.random.set_seed(3)
    with strategy.scope():
        replica_step, left = make(strategy)

    @decorator
    def step(x: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(x,)), axis=None)

    batches = tf.data.Dataset.from_tensor_slices(data).batch(ROWS)
    returned = [step(x) for x in strategy.experimental_distribute_dataset(batches)]
    return arrays({"returned": returned, "left": left()})


def _counter() -> tf.Variable:
    return tf.Variable(0, dtype=tf.int64, trainable=False, aggregation=FIRST)


def _dense(features: int = 4) -> keras.Model:
    return keras.Sequential([keras.Input((features,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])


def _loss(strategy: tf.distribute.Strategy, model: keras.Model, x: tf.Tensor, **options: Any) -> tf.Tensor:
    error = model(x, **options) - tf.reduce_sum(x, 1, keepdims=True)
    return tf.reduce_mean(tf.square(error)) / strategy.num_replicas_in_sync


def accumulation(strategy: tf.distribute.Strategy) -> Any:
    """Gradients are added up in variables of the user's own; every second step applies and clears them."""
    model, optimizer, count = _dense(), keras.optimizers.Adam(0.01), _counter()
    optimizer.build(model.trainable_variables)
    sums = [tf.Variable(tf.zeros_like(v), trainable=False) for v in model.trainable_variables]

    def apply() -> bool:
        optimizer.apply_gradients([(one / 2, v) for one, v in zip(sums, model.trainable_variables, strict=True)])
        for one in sums:
            one.assign(tf.zeros_like(one))
        return True

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = _loss(strategy, model, x)
        for one, gradient in zip(sums, tape.gradient(loss, model.trainable_variables), strict=True):
            one.assign_add(gradient)
        count.assign_add(1)
        applied = tf.cond(count % 2 == 0, apply, lambda: False)
        return loss, tf.cast(applied, tf.float32) / strategy.num_replicas_in_sync

    return step, lambda: [model.weights, optimizer.variables]


def alternating(strategy: tf.distribute.Strategy) -> Any:
    """Two networks train in turn: the whole step, forward pass and all, stands in the branch of an AutoGraph if."""
    one, two = _dense(), _dense()
    optimizers, count = [keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.9)], _counter()

    def train(model: keras.Model, optimizer: keras.optimizers.Optimizer, x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = _loss(strategy, model, x + 0.1 * one(x) * two(x))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return loss

    def step(x: tf.Tensor) -> Any:
        count.assign_add(1)
        if count % 3 == 0:
            loss = train(one, optimizers[0], x)
        elif count % 3 == 1:
            loss = train(two, optimizers[1], x)
        else:
            loss = _loss(strategy, one, x)
        return loss

    return step, lambda: [one.weights, two.weights, [o.variables for o in optimizers]]


def switching(strategy: tf.distribute.Strategy) -> Any:
    """tf.switch_case over three ways to train an embedding; its gradients are slices."""
    table = keras.layers.Embedding(9, 4)
    table.build()
    optimizer, count = keras.optimizers.Adagrad(0.1), _counter()

    def train(power: int, tokens: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            values = table(tokens) if power < 3 else tf.gather(table.embeddings, tokens[:, :2])
            loss = tf.reduce_mean(tf.abs(values - 0.3) ** power) / strategy.num_replicas_in_sync
        gradients = tape.gradient(loss, table.trainable_variables)
        optimizer.apply_gradients(zip(gradients, table.trainable_variables, strict=True))
        return loss

    def step(tokens: tf.Tensor) -> Any:
        count.assign_add(1)
        which = tf.cast(count % 3, tf.int32)
        return tf.switch_case(which, [lambda power=power: train(power, tokens) for power in (1, 2, 3)])

    return step, lambda: [table.weights, optimizer.variables]


def collectives_inside(strategy: tf.distribute.Strategy) -> Any:
    """Collectives of what the branch computes; their results go on in the branch, out of it, and into variables."""
    total, count = tf.Variable(0.0, trainable=False, aggregation=FIRST), _counter()
    own = tf.Variable(0.0, trainable=False)

    def both(x: tf.Tensor) -> Any:
        context = tf.distribute.get_replica_context()
        largest = tf.reduce_max(context.all_gather(tf.linalg.matmul(x, x, transpose_b=True)[:, 0], 0))
        summed = context.all_reduce("SUM", tf.reduce_sum(tf.linalg.matmul(x, x, transpose_a=True)))
        total.assign_add(summed)
        own.assign_add(tf.reduce_sum(x) * summed)
        return summed / strategy.num_replicas_in_sync, tf.reduce_sum(x) * largest, total.read_value()

    def step(x: tf.Tensor) -> Any:
        count.assign_add(1)
        before = total.read_value()
        a, b, c = tf.cond(
            count % 2 == 0, lambda: both(x), lambda: (tf.constant(0.5), tf.reduce_sum(x), total.read_value())
        )
        return a, b, c - before, own.read_value()

    return step, lambda: [total.numpy()]


def nested(strategy: tf.distribute.Strategy) -> Any:
    """A branch in a branch, in a nested tf.function; metrics and per-replica state are written along the way."""
    model, optimizer, count = _dense(), keras.optimizers.SGD(0.1), _counter()
    mean, own = keras.metrics.Mean(), tf.Variable(0.0, trainable=False)

    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        def train() -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = _loss(strategy, model, x)
            gradients = tape.gradient(loss, model.trainable_variables)

            def apply() -> tf.Tensor:
                optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
                own.assign_add(loss)
                return own + 1.0 / strategy.num_replicas_in_sync

            mean.update_state(loss * strategy.num_replicas_in_sync)
            return tf.cond(count % 4 != 1, apply, lambda: own * 3.0)

        return tf.cond(count % 3 > 0, train, lambda: own * 2.0)

    def step(x: tf.Tensor) -> Any:
        count.assign_add(1)
        return inner(x), own.read_value()

    return step, lambda: [model.weights, optimizer.variables, mean.result()]


def through_the_branch(strategy: tf.distribute.Strategy) -> Any:
    """A tape around the branch differentiates the all-reduce that stands in it."""
    weight, count = tf.Variable([[0.5], [1.0], [-1.0], [0.25]]), _counter()
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build([weight])

    def step(x: tf.Tensor) -> Any:
        count.assign_add(1)
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            y = x @ weight
            centred = tf.cond(
                count % 2 == 0,
                lambda: y - context.all_reduce("MEAN", tf.reduce_mean(tf.linalg.matmul(x, weight) ** 2)),
                lambda: y,
            )
            loss = tf.reduce_mean(centred**2) / strategy.num_replicas_in_sync
        optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])
        return loss

    return step, lambda: [weight]


PROGRAMS = {
    "accumulation": (accumulation, X),
    "alternating": (alternating, X),
    "switching": (switching, TOKENS),
    "nested": (nested, X),
    "through_the_branch": (through_the_branch, X),
}


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_branches_equal_the_full_batch(name: str, replicas: int) -> None:
    make, data = PROGRAMS[name]
    expected = _train(tf.distribute.get_strategy(), make, data=data)
    actual = _train(microstrat.MicroBatchStrategy(replicas), make, data=data)
    assert not compare.differences(expected, actual, 2e-6)


@pytest.mark.parametrize("make", [accumulation, alternating, collectives_inside, through_the_branch])
def test_branches_equal_the_eager_engine(make: Callable[..., Any]) -> None:
    """Uneven batches: nothing but N replicas can tell what is right."""
    data = X[: ROWS * 4 - 3]
    expected = _train(microstrat.MicroBatchStrategy(3), make, NO_DECORATOR, data)
    assert not compare.differences(expected, _train(microstrat.MicroBatchStrategy(3), make, data=data), 1e-6)


@pytest.mark.parametrize("make", [accumulation, alternating])
def test_branches_compile(make: Callable[..., Any]) -> None:
    def compiled(fn: Callable[..., Any]) -> Any:
        return tf.function(fn, jit_compile=True)

    expected = _train(microstrat.MicroBatchStrategy(2), make)
    assert not compare.differences(expected, _train(microstrat.MicroBatchStrategy(2), make, compiled), 2e-6)


def test_accumulation_keeps_nothing_for_all_replicas() -> None:
    """The optimizer steps once, and each replica's own sums are written in the loop of its backward pass."""
    _train(microstrat.MicroBatchStrategy(3), accumulation)
    plan = _lower.last_plan()
    assert plan is not None
    assert plan.num_loops == 1
    assert not plan.carries


def _fit(strategy: Any, rows: int, data: np.ndarray, eagerly: bool = False, **options: Any) -> tuple[keras.Model, Any]:
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = _dense()
        model.compile(keras.optimizers.Adam(0.01, **options), "mse", run_eagerly=eagerly)
    history = model.fit(data, data.sum(1, keepdims=True), batch_size=rows, epochs=2, shuffle=False, verbose=0)
    return model, history.history["loss"]


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "use_ema": True}], ids=["plain", "ema"])
def test_keras_accumulation_equals_that_of_one_device(options: dict[str, Any], eagerly: bool) -> None:
    plain, _ = _fit(tf.distribute.get_strategy(), ROWS, X, gradient_accumulation_steps=2, **options)
    strategy = microstrat.MicroBatchStrategy(3)
    model, _ = _fit(strategy, ROWS, X, eagerly, gradient_accumulation_steps=2, **options)
    assert int(model.optimizer.iterations) == int(plain.optimizer.iterations)
    assert not compare.differences(arrays(plain.get_weights()), arrays(model.get_weights()), 2e-6)
    if not options:
        bigger, _ = _fit(tf.distribute.get_strategy(), 2 * ROWS, X)
        assert not compare.differences(arrays(bigger.get_weights()), arrays(model.get_weights()), 2e-6)
    if not eagerly:  # one copy of the gradient, whatever the number of replicas
        assert not [v for v in strategy.extended.local_variables() if "accumulator" in v.name and v.rows is not None]


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("clip", [{"clipnorm": 0.5}, {"global_clipnorm": 0.5}, {"clipvalue": 0.1}])
def test_accumulation_clips_what_each_replica_has_accumulated(clip: dict[str, float], eagerly: bool) -> None:
    """As on real devices whose batch is bigger: a replica's own rows of both steps come next to each other there."""
    order = np.arange(len(X)).reshape(-1, 2, 2, ROWS // 2).transpose(0, 2, 1, 3).reshape(-1)
    bigger, _ = _fit(microstrat.MicroBatchStrategy(2), 2 * ROWS, X[order], **clip)
    model, _ = _fit(microstrat.MicroBatchStrategy(2), ROWS, X, eagerly, gradient_accumulation_steps=2, **clip)
    assert not compare.differences(arrays(bigger.get_weights()), arrays(model.get_weights()), 2e-6)


def test_a_condition_that_differs_is_refused() -> None:
    def make(strategy: tf.distribute.Strategy) -> Any:
        model, optimizer = _dense(), keras.optimizers.SGD(0.1)

        def train(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = _loss(strategy, model, x)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: train(x), lambda: 0.0), lambda: []

    with pytest.raises(RuntimeError, match="under a condition that may differ between replicas"):
        _train(microstrat.MicroBatchStrategy(2), make)
