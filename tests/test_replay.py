"""Gradients through strategy.run, by tapes around it.

MirroredStrategy is no reference: it gives None to a tape in the function that calls `run`, and to one around that
function the gradient by replica 0's copy of a variable. Here a variable is one, and the reference is the whole batch on one
device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import microstrat
from tests import executed

UNEVEN = pytest.mark.filterwarnings("ignore:A batch of")
X = np.random.default_rng(0).standard_normal((7, 3)).astype("float32")
TOKENS = np.arange(7) % 4


class Parts:
    """Weights, and functions of rows that use them."""

    def __init__(self, strategy: Any):
        with strategy.scope():
            self.table = tf.Variable(np.linspace(1.0, 4.0, 12, dtype="float32").reshape(4, 3))
            self.weight = tf.Variable(np.linspace(-1.0, 1.0, 6, dtype="float32").reshape(3, 2))
        self.scale: Any = None
        self.variables = [self.table, self.weight]

    def rows(self, x: tf.Tensor, tokens: tf.Tensor) -> tf.Tensor:
        y = tf.gather(self.table, tokens) * x * self.scale
        for _ in tf.range(2):
            y = tf.tanh(y) + x
        return y @ self.weight

    def total(self, x: tf.Tensor, tokens: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(self.rows(x, tokens) ** 2)


def cubed_rows(strategy: Any, parts: Parts, inputs: Any) -> tf.Tensor:
    return tf.reduce_sum(strategy.gather(strategy.run(parts.rows, args=inputs), axis=0) ** 3)


def total(strategy: Any, parts: Parts, inputs: Any) -> tf.Tensor:
    return strategy.reduce("SUM", strategy.run(parts.total, args=inputs), axis=None)


def square_of_all_reduced(strategy: Any, parts: Parts, inputs: Any) -> tf.Tensor:
    def step(x: tf.Tensor, tokens: tf.Tensor) -> tf.Tensor:
        return tf.distribute.get_replica_context().all_reduce("sum", parts.total(x, tokens)) ** 2

    return strategy.experimental_local_results(strategy.run(step, args=inputs))[0]


def square_of_total(strategy: Any, parts: Parts, inputs: Any) -> tf.Tensor:
    return total(strategy, parts, inputs) ** 2


def rows_into_another_run(strategy: Any, parts: Parts, inputs: Any) -> tf.Tensor:
    rows = strategy.run(parts.rows, args=inputs)
    return strategy.reduce("SUM", strategy.run(lambda y: tf.reduce_sum(tf.sin(y)), args=(rows,)), axis=None)


def around_the_run(strategy: Any, loss: Callable[..., Any]) -> Any:
    parts = Parts(strategy)

    @tf.function
    def step(inputs: Any, scale: tf.Tensor) -> Any:
        parts.scale = scale
        with tf.GradientTape() as tape:
            tape.watch(scale)
            value = loss(strategy, parts, inputs)
        return value, tape.gradient(value, [*parts.variables, scale])

    return step(batch(strategy), tf.constant(0.5))


def around_the_function(strategy: Any, loss: Callable[..., Any], *, jit: bool = False) -> Any:
    parts = Parts(strategy)
    inputs, scale = batch(strategy), tf.constant(0.5)

    @tf.function(jit_compile=jit)
    def step(inputs: Any, scale: tf.Tensor) -> tf.Tensor:
        parts.scale = scale
        return loss(strategy, parts, inputs)

    with tf.GradientTape() as tape:
        tape.watch(scale)
        value = step(inputs, scale)
    return value, tape.gradient(value, [*parts.variables, scale])


def twice(strategy: Any, loss: Callable[..., Any]) -> Any:
    parts = Parts(strategy)
    parts.scale = 0.5
    step = tf.function(lambda inputs: loss(strategy, parts, inputs))
    inputs = batch(strategy)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            value = step(inputs)
        norm = tf.reduce_sum(tape.gradient(value, parts.weight) ** 2)
    return norm, outer.gradient(norm, [parts.table, parts.weight])


def batch(strategy: Any) -> Any:
    data = tf.data.Dataset.from_tensor_slices((X, TOKENS)).batch(len(X))
    return next(iter(strategy.experimental_distribute_dataset(data)))


@UNEVEN
@pytest.mark.parametrize(
    ("way", "loss", "number"),
    [
        (around_the_run, cubed_rows, 1),
        (around_the_run, rows_into_another_run, 3),
        (around_the_run, square_of_all_reduced, 3),
        (around_the_function, cubed_rows, 3),
        (around_the_function, total, 1),
        (around_the_function, square_of_all_reduced, 3),
    ],
)
def test_gradients_are_those_of_the_whole_batch(way: Any, loss: Any, number: int) -> None:
    # Under stock strategies all_reduce has a gradient in its replica context only.
    expected = square_of_total if loss is square_of_all_reduced else loss
    compare(way(microstrat.MicroBatchStrategy(number), loss), way(tf.distribute.OneDeviceStrategy("CPU:0"), expected))


def compare(ours: Any, expected: Any) -> None:
    for value, wanted in zip(tf.nest.flatten(ours), tf.nest.flatten(expected), strict=True):
        largest = np.abs(tf.convert_to_tensor(wanted)).max()
        np.testing.assert_allclose(
            tf.convert_to_tensor(value), tf.convert_to_tensor(wanted), atol=2e-6 * largest, rtol=0
        )


def test_gradients_of_gradients_and_compiled_ones() -> None:
    one = tf.distribute.OneDeviceStrategy("CPU:0")
    # One row a replica: XLA needs parts of one size.
    ours = microstrat.MicroBatchStrategy(7)
    compare(twice(ours, total), twice(one, total))
    compare(around_the_function(ours, total, jit=True), around_the_function(one, total))


@UNEVEN
@pytest.mark.parametrize("way", [around_the_run, around_the_function])
def test_effects_do_not_happen_twice(way: Any) -> None:
    strategy = microstrat.MicroBatchStrategy(3)
    with strategy.scope():
        count = tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.SUM)

    def counted(strategy: Any, parts: Parts, inputs: Any) -> tf.Tensor:
        def counting(x: tf.Tensor, tokens: tf.Tensor) -> tf.Tensor:
            count.assign_add(1.0)
            return parts.total(x, tokens)

        return strategy.reduce("SUM", strategy.run(counting, args=inputs), axis=None)

    with pytest.raises(
        (RuntimeError, tf.errors.InvalidArgumentError), match=r"'?counting.* again; .*Assign.*test_replay"
    ):
        way(strategy, counted)
    # Asked for or not, TensorFlow makes a gradient for a function that is called under a tape.
    with tf.GradientTape():
        parts = Parts(strategy)
        parts.scale = 0.5
        tf.function(lambda inputs: counted(strategy, parts, inputs))(batch(strategy))
    assert count.numpy() in (3.0, 6.0)


def test_micro_batches_have_none() -> None:
    strategy = microstrat.MicroBatchStrategy(3, semantics="whole_batch")
    with pytest.raises(RuntimeError, match=r"'total' runs in micro-batches.* inside the replica function"):
        around_the_run(strategy, lambda strategy, parts, inputs: strategy.run(parts.total, args=inputs).values[0])


# --- The order of what stands around a run, once the graph is optimized ---------------------------------------------------
class Ordered:
    """A run that writes `state` between two reads of it, and what follows writes it again, from the first read."""

    def __init__(self) -> None:
        self.strategy = microstrat.MicroBatchStrategy(2)
        with self.strategy.scope():
            self.state = tf.Variable([1.0, 2.0])
            self.other = tf.Variable([1.0, 2.0])

    def replica(self, x: tf.Tensor, outside: tf.Tensor) -> Any:
        self.state.assign([3.0, 4.0])
        first = tf.convert_to_tensor(self.state)
        self.state.assign_sub(tf.distribute.get_replica_context().all_reduce("MEAN", first * 0.5))
        return x * 2.0, first, tf.convert_to_tensor(self.state), outside * x

    def step(self, x: Any) -> Any:
        varying, first, second, _ = self.strategy.run(self.replica, (x, self.other * 2.0))
        self.state.assign(self.strategy.reduce("MEAN", first, axis=None) * 0.7)
        self.other.assign(self.strategy.reduce("MEAN", first, axis=None) * 0.3)
        return [self.strategy.reduce("SUM", value, axis=None) for value in (varying, first, second)]


def optimized(function: Any, *args: Any) -> dict[str, Any]:
    """The nodes of the largest graph that runs in a call of a tf.function, by name."""
    graphs = [found.post_optimization_graph for found in executed.graphs(lambda: function(*args))]
    return {node.name: node for node in max(graphs, key=lambda graph: len(graph.node)).node}


def before(nodes: dict[str, Any], name: str) -> set[str]:
    """The nodes that run before a node."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        sources = {source.lstrip("^").split(":")[0] for source in nodes[waiting.pop()].input}
        waiting.extend(sources - found)
        found |= sources
    return found


def test_what_follows_a_run_stays_after_all_of_it() -> None:
    ordered = Ordered()
    values = ordered.strategy.experimental_distribute_values_from_function(lambda _: tf.constant(1.0))
    nodes = optimized(tf.function(ordered.step), values)
    after = [name for name, node in nodes.items() if node.op == "AssignVariableOp" and "PartitionedCall" not in name]
    inside = [name for name, node in nodes.items() if "VariableOp" in node.op and "PartitionedCall" in name]
    assert len(after) == 2
    assert len(inside) >= 4
    outside = [name for name, node in nodes.items() if node.op == "ReadVariableOp" and name not in inside]
    assert len(outside) == 1
    for name in after:
        assert before(nodes, name) >= {*inside, *outside}


def test_what_follows_a_run_stays_after_it_though_a_result_is_a_constant() -> None:
    """Grappler drops the constant, and with it what nothing but the constant came after."""
    strategy = microstrat.MicroBatchStrategy(2)
    with strategy.scope():
        state, other = tf.Variable([1.0, 2.0], trainable=False), tf.Variable(1.0, trainable=False)

    def replica(x: tf.Tensor) -> Any:
        number = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        state.assign([3.0, 4.0])

        def turn(number: tf.Tensor, value: tf.Tensor) -> Any:
            tf.identity(other)
            return number + 1, value

        return 2.0 * number, tf.constant(1.0), tf.while_loop(lambda number, _: number < 2, turn, (0, 1.0))[1]

    @tf.function
    def step(x: Any) -> Any:
        results = strategy.run(replica, (x,))
        state.assign_sub([1.0, 2.0] * strategy.reduce("MEAN", results[0], axis=None))
        results = [*results, strategy.run(lambda *_: tf.constant(1.0), (x, results[0]))]
        return [strategy.reduce("SUM", value, axis=None) for value in results]

    nodes = optimized(step, strategy.experimental_distribute_values_from_function(lambda _: tf.constant([1.0])))
    (after,) = (name for name, node in nodes.items() if node.op == "AssignSubVariableOp")
    assert before(nodes, after) >= {name for name, node in nodes.items() if node.op == "AssignVariableOp"}
    np.testing.assert_array_equal(state.numpy(), [2.0, 2.0])
