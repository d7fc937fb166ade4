"""What the looped engine makes of a step: traced once, one loop, the same graph for every N."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import microstrat
from microstrat import _lower


def small_model(*, batch_norm: bool = False) -> keras.Model:
    layers: list[Any] = [keras.Input((6,)), keras.layers.Dense(8, activation="relu")]
    if batch_norm:
        layers += [keras.layers.BatchNormalization(), keras.layers.Dropout(0.2)]
    return keras.Sequential([*layers, keras.layers.Dense(3)])


class Step:
    """A compiled training step over a distributed batch of 4 rows a replica."""

    def __init__(self, number: int, build: Callable[[], keras.Model], shape: tuple[int, ...]):
        self.calls = 0
        strategy = microstrat.MicroBatchStrategy(number)
        with strategy.scope():
            model = build()
            optimizer = keras.optimizers.Adam(1e-3)
            optimizer.build(model.trainable_variables)
        rows = 4 * number

        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            self.calls += 1
            with tf.GradientTape() as tape:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
                loss = tf.nn.compute_average_loss(losses, global_batch_size=rows)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        @tf.function
        def train(x: Any, y: Any) -> tf.Tensor:
            return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)

        dataset = tf.data.Dataset.from_tensors((tf.zeros((rows, *shape)), tf.zeros((rows,), tf.int32)))
        self.batch = next(iter(strategy.experimental_distribute_dataset(dataset)))
        self.function = train.get_concrete_function(*self.batch)
        plan = _lower.last_plan()
        assert plan is not None
        self.plan = plan


def all_nodes(function: Any) -> list[Any]:
    """Every NodeDef of a function's graph and of the functions it calls."""
    graph = function.graph.as_graph_def()
    return [*graph.node, *(node for called in graph.library.function for node in called.node_def)]


@pytest.mark.core
@pytest.mark.parametrize("number", [1, 2, 8, 64])
def test_the_replica_function_is_traced_once(number: int) -> None:
    step = Step(number, lambda: small_model(batch_norm=True), (6,))
    step.function(*step.batch)
    assert step.calls == 1


@pytest.mark.core
@pytest.mark.parametrize("batch_norm", [False, True])
def test_an_ordinary_step_is_one_loop_between_two_uniform_stages(batch_norm: bool) -> None:
    step = Step(4, lambda: small_model(batch_norm=batch_norm), (6,))
    loops = [node for node in all_nodes(step.function) if node.op in ("While", "StatelessWhile")]
    assert len(loops) == 1
    assert step.plan.num_loops == 1
    assert len(step.plan.stages) == 3
    assert not step.plan.carries


def test_one_replica_needs_no_loop() -> None:
    step = Step(1, small_model, (6,))
    assert step.plan.num_loops == 0
    assert not [node for node in all_nodes(step.function) if node.op in ("While", "StatelessWhile")]


@pytest.mark.core
def test_no_marker_is_left() -> None:
    step = Step(4, lambda: small_model(batch_norm=True), (6,))
    assert not [node.name for node in all_nodes(step.function) if node.op == "PlaceholderWithDefault"]


@pytest.mark.core
def test_the_optimizer_writes_outside_the_loop() -> None:
    step = Step(4, small_model, (6,))
    graph = step.function.graph.as_graph_def()
    (loop,) = [node for node in graph.node if node.op == "While"]
    bodies = {function.signature.name: function for function in graph.library.function}
    body = bodies[loop.attr["body"].func.name]
    assert not [node.op for node in body.node_def if node.op.startswith(("Assign", "ResourceApply", "ResourceScatter"))]


@pytest.mark.core
def test_the_graph_does_not_grow_with_n() -> None:
    counts = {
        number: len(all_nodes(Step(number, lambda: small_model(batch_norm=True), (6,)).function)) for number in (2, 64)
    }
    assert counts[2] == counts[64]


def test_the_graph_of_fit_does_not_grow_with_n() -> None:
    counts = {}
    for number in (2, 64):
        rows = 4 * number
        with microstrat.scope(replicas=number) as strategy:
            model = small_model(batch_norm=True)
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        x, y = np.zeros((rows, 6), "float32"), np.zeros((rows,), "int32")
        model.fit(x, y, batch_size=rows, verbose=0)
        # The tf.function that fit calls at every step stands in the closure of Keras' train_function.
        cells = [cell.cell_contents for cell in model.train_function.__closure__]
        (function,) = [cell for cell in cells if hasattr(cell, "get_concrete_function")]
        batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(rows))
        counts[number] = len(all_nodes(function.get_concrete_function(iter(batches))))
    assert counts[2] == counts[64]


def test_densenet_is_three_stages() -> None:
    def densenet() -> keras.Model:
        base = keras.applications.DenseNet121(weights=None, include_top=False, input_shape=(32, 32, 3))
        pooled = keras.layers.GlobalAveragePooling2D()(base.output)
        return keras.Model(base.input, keras.layers.Dense(10)(pooled))

    step = Step(2, densenet, (32, 32, 3))
    assert len(step.plan.stages) == 3
    assert step.plan.num_loops == 1
    assert not step.plan.carries
    assert step.calls == 1


def deep_model() -> keras.Model:
    layers = [keras.layers.Dense(6, activation="tanh") for _ in range(24)]
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])


def loop_of(function: Any) -> Any:
    (loop,) = [node for node in all_nodes(function) if node.op == "While"]
    return loop


def test_a_large_body_is_one_call_and_its_sums_are_variables() -> None:
    function = Step(4, deep_model, (6,)).function
    loop = loop_of(function)
    assert not loop.attr["_lower_using_switch_merge"].b
    library = {called.signature.name: called for called in function.graph.as_graph_def().library.function}
    body = library[loop.attr["body"].func.name]
    (call,) = [node for node in body.node_def if node.op == "StatefulPartitionedCall"]
    called = library[call.attr["f"].func.name]
    assert called.attr["_noinline"].b
    assert not any("MatMul" in node.op for node in body.node_def)
    # One for each gradient; none outlives the step.
    made = [node for node in all_nodes(function) if node.op == "VarHandleOp"]
    assert len(made) == 50
    assert len([node for node in all_nodes(function) if node.op == "DestroyResourceOp"]) == len(made)
    assert len([node for node in called.node_def if node.op == "AssignAddVariableOp"]) == len(made)


def test_a_small_body_stays_in_the_loop() -> None:
    function = Step(4, small_model, (6,)).function
    assert loop_of(function).attr["_lower_using_switch_merge"].b
    assert not [node for node in all_nodes(function) if node.op == "VarHandleOp"]


def test_both_kinds_of_bodies_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def weights(many: int) -> list[np.ndarray]:
        monkeypatch.setattr(_lower, "_MANY_OPERATIONS", many)
        keras.utils.set_random_seed(0)
        strategy = microstrat.MicroBatchStrategy(3)
        with strategy.scope():
            model = small_model(batch_norm=True)
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        x = np.random.default_rng(0).normal(size=(33, 6)).astype(np.float32)  # the last batch is short
        model.fit(x, np.arange(33) % 3, batch_size=9, epochs=2, shuffle=False, verbose=0)
        return model.get_weights() + [variable.numpy() for variable in model.optimizer.variables]

    for apart, lowered in zip(weights(0), weights(10**6), strict=True):
        np.testing.assert_array_equal(apart, lowered)
