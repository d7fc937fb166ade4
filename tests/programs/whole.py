"""Custom loops written for one device: whole batches in micro-batches must give what the full batch gives."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import microstrat
from tests.programs._registry import (
    BATCH,
    TOLERANCE_LATER,
    WHOLE_MORE,
    arrays,
    batches,
    by_path,
    labels,
    mlp,
    program,
    rows,
)

NUMBER = 2 * BATCH + 7
"""Rows of the data: two full batches and a short one."""

_program = functools.partial(program, replicas=(), whole="mean")


def _data(*shape: int, number: int = NUMBER) -> tf.data.Dataset:
    return batches(rows(number, *(shape or (6,))), labels(number))


def _losses(y: Any, logits: Any) -> tf.Tensor:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)


def _run(
    strategy: tf.distribute.Strategy, replica_step: Callable[..., Any], data: tf.data.Dataset, epochs: int = 1
) -> list[Any]:
    """What the step returns for every batch, the mean over the replica's rows."""

    @tf.function
    def step(inputs: Any) -> Any:
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        return strategy.reduce("MEAN", strategy.run(replica_step, args=inputs), axis=None)

    return arrays([step(x) for _ in range(epochs) for x in strategy.experimental_distribute_dataset(data)])


def _made(
    strategy: tf.distribute.Strategy, build: Callable[[], keras.Model] = mlp, rate: float = 0.1
) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    with strategy.scope():
        model, optimizer = build(), keras.optimizers.SGD(rate, momentum=0.5)
        optimizer.build(model.trainable_variables)
    return model, optimizer


def _train(model: Any, optimizer: Any, x: Any, y: Any) -> tf.Tensor:
    """A step of code for one device."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(_losses(y, model(x, training=True)))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


def _state(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    return {"weights": by_path(model.variables), "optimizer": by_path(optimizer.variables)}


# --- Ways to write the loop -------------------------------------------------------------------------------------------
@_program(core=True, micro_batches=WHOLE_MORE)
def whole_loop_over_dataset(strategy: tf.distribute.Strategy) -> Any:
    model, optimizer = _made(strategy)
    losses = _run(strategy, lambda x, y: _train(model, optimizer, x, y), _data(), epochs=2)
    return {"losses": losses, **_state(model, optimizer)}


@_program(micro_batches=WHOLE_MORE)
def whole_loop_over_tensors(strategy: tf.distribute.Strategy) -> Any:
    """Batches that no strategy has made."""
    model, optimizer = _made(strategy)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        return strategy.reduce("MEAN", strategy.run(lambda x, y: _train(model, optimizer, x, y), (x, y)), axis=None)

    losses = [step(x, y) for x, y in _data()]
    losses += [step(x.numpy(), y.numpy()) for x, y in _data()]
    return {"losses": arrays(losses), **_state(model, optimizer)}


@_program(micro_batches=WHOLE_MORE, whole_tolerance=TOLERANCE_LATER)
def whole_loop_of_twenty_steps(strategy: tf.distribute.Strategy) -> Any:
    with strategy.scope():
        model, optimizer = mlp(), keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
    losses = _run(strategy, lambda x, y: _train(model, optimizer, x, y), _data(), epochs=7)
    return {"losses": losses, **_state(model, optimizer)}


@_program(core=True)
def whole_function_given_to_run(strategy: tf.distribute.Strategy) -> Any:
    model, optimizer = _made(strategy)
    step = tf.function(lambda x, y: _train(model, optimizer, x, y))
    losses = [strategy.run(step, args=inputs) for inputs in strategy.experimental_distribute_dataset(_data())]
    return {"losses": arrays([strategy.reduce("MEAN", loss, axis=None) for loss in losses]), **_state(model, optimizer)}


@_program()
def whole_loop_in_function(strategy: tf.distribute.Strategy) -> Any:
    """The loop over the batches inside the tf.function; then several steps of an iterator."""
    model, optimizer = _made(strategy)
    data = strategy.experimental_distribute_dataset(_data())

    def step(inputs: Any) -> tf.Tensor:
        loss = strategy.run(lambda x, y: _train(model, optimizer, x, y), args=inputs)
        return strategy.reduce("MEAN", loss, axis=None)

    @tf.function
    def epoch() -> tf.Tensor:
        total = tf.zeros([])
        for inputs in data:
            total += step(inputs)
        return total

    @tf.function
    def steps(iterator: Any) -> tf.Tensor:
        total = step(next(iterator))
        for _ in tf.range(2):
            total += step(next(iterator))
        return total

    return {"losses": arrays([epoch(), steps(iter(data))]), **_state(model, optimizer)}


@_program()
def whole_loop_over_static_batches(strategy: tf.distribute.Strategy) -> Any:
    """The number of rows is known while tracing; the dataset comes from a function."""
    model, optimizer = _made(strategy)

    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        size = context.get_per_replica_batch_size(BATCH)
        return batches(rows(NUMBER, 6), labels(NUMBER), batch=size, drop_remainder=True)

    @tf.function
    def step(inputs: Any) -> Any:
        return strategy.reduce("MEAN", strategy.run(lambda x, y: _train(model, optimizer, x, y), inputs), axis=None)

    data = strategy.distribute_datasets_from_function(make)
    return {"losses": arrays([step(inputs) for inputs in data]), **_state(model, optimizer)}


@_program()
def whole_loop_with_other_arguments(strategy: tf.distribute.Strategy) -> Any:
    """Beside the batch: a learning rate, an array that has no rows of it, None, a keyword; and a dict as the batch."""
    model, optimizer = _made(strategy)
    table = tf.constant(rows(4, 4))

    def replica_step(inputs: Any, rate: Any, table: Any, nothing: Any, *, scale: float) -> Any:
        assert nothing is None
        optimizer.learning_rate.assign(rate)
        with tf.GradientTape() as tape:
            logits = model(inputs["x"]) + scale * tf.gather(table, inputs["more"]["y"])
            loss = tf.reduce_mean(_losses(inputs["more"]["y"], logits))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def step(inputs: Any, rate: Any) -> Any:
        loss = strategy.run(replica_step, args=(inputs, rate, table, None), kwargs={"scale": 0.1})
        return strategy.reduce("MEAN", loss, axis=None)

    data = _data().map(lambda x, y: {"x": x, "more": {"y": y}})
    losses = [
        step(inputs, tf.constant(0.1 / (1 + number)))
        for number, inputs in enumerate(strategy.experimental_distribute_dataset(data))
    ]
    return {"losses": arrays(losses), **_state(model, optimizer)}


@_program(micro_batches=WHOLE_MORE)
def whole_loop_over_few_rows(strategy: tf.distribute.Strategy) -> Any:
    """Batches of three rows, and of one."""
    model, optimizer = _made(strategy)
    data = batches(rows(10, 6), labels(10), batch=3)
    return {"losses": _run(strategy, lambda x, y: _train(model, optimizer, x, y), data), **_state(model, optimizer)}


@_program()
def whole_nested_functions(strategy: tf.distribute.Strategy) -> Any:
    """The model, the gradient, and the whole step in tf.functions inside the replica function."""
    model, optimizer = _made(strategy)
    forward = tf.function(lambda x, y: tf.reduce_mean(_losses(y, model(x, training=True))))

    @tf.function
    def gradients_of(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = forward(x, y)
        return loss, tape.gradient(loss, model.trainable_variables)

    step = tf.function(lambda x, y: _train(model, optimizer, x, y))

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = forward(x, y)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        again, gradients = gradients_of(x, y)
        optimizer.apply(gradients, model.trainable_variables)
        return loss, again, step(x, y)

    return {"losses": _run(strategy, replica_step, _data()), **_state(model, optimizer)}


@_program()
def whole_average_loss(strategy: tf.distribute.Strategy) -> Any:
    """tf.nn's helpers, with a penalty that does not depend on the rows."""
    model, optimizer = _made(strategy)

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(_losses(y, model(x)))
            penalty = tf.add_n([tf.reduce_sum(weight**2) for weight in model.trainable_variables])
            loss += tf.nn.scale_regularization_loss(0.01 * penalty)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss, penalty

    return {"losses": _run(strategy, replica_step, _data()), **_state(model, optimizer)}


def _loss_objects(strategy: tf.distribute.Strategy, kind: str) -> Any:
    """Keras' losses called in a loop: means over rows, over tokens that a mask leaves, over what rows weigh; and a sum."""

    def build() -> keras.Model:
        embedding = keras.layers.Embedding(9, 6, "normal", mask_zero=True)
        return keras.Sequential([keras.Input((8,), dtype="int64"), embedding, keras.layers.Dense(4)])

    model, optimizer = _made(strategy, build)
    options = [{}, {"reduction": "mean_with_sample_weight"}, {"reduction": "sum"}]
    losses = [keras.losses.SparseCategoricalCrossentropy(from_logits=True, **option) for option in options]

    def replica_step(x: Any, y: Any) -> Any:
        weights = tf.cast(y, tf.float32)
        with tf.GradientTape() as tape:
            logits = model(x)
            values = [losses[0](y, tf.identity(logits)), losses[0](y, logits)]
            values += [loss_of(y, logits, sample_weight=weights) for loss_of in losses]
            loss = tf.add_n([*values[:-1], 0.01 * values[-1]])
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return values

    step = tf.function(lambda inputs: strategy.reduce(kind, strategy.run(replica_step, args=inputs), axis=None))
    out = [step(inputs) for inputs in strategy.experimental_distribute_dataset(batches(*_tokens()))]
    return {"losses": arrays(out), **_state(model, optimizer)}


@_program(micro_batches=WHOLE_MORE)
def whole_loss_objects(strategy: tf.distribute.Strategy) -> Any:
    return _loss_objects(strategy, "MEAN")


@_program(whole="sum")
def whole_loss_objects_declared_as_sums(strategy: tf.distribute.Strategy) -> Any:
    return _loss_objects(strategy, "SUM")


@_program(whole="sum")
def whole_sum_loss_with_penalty(strategy: tf.distribute.Strategy) -> Any:
    """Losses that are sums over rows, and a penalty that does not depend on them."""
    model, optimizer = _made(strategy, rate=0.01)

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(_losses(y, model(x)))
            loss += tf.add_n([tf.reduce_sum(weight**2) for weight in model.trainable_variables])
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    step = tf.function(lambda inputs: strategy.reduce("SUM", strategy.run(replica_step, args=inputs), axis=None))
    losses = [step(inputs) for inputs in strategy.experimental_distribute_dataset(_data())]
    return {"losses": arrays(losses), **_state(model, optimizer)}


@_program(whole_tolerance=1e-12)
def whole_loop_in_float64(strategy: tf.distribute.Strategy) -> Any:
    """Nothing on the way may round to float32."""
    with strategy.scope():
        weight = tf.Variable(rows(6, 4).astype("float64"))
        seen = tf.Variable(tf.zeros([], tf.float64), aggregation=tf.VariableAggregation.MEAN, trainable=False)

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(_losses(y, x @ weight))
        seen.assign_add(tf.reduce_mean(x))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    losses = _run(strategy, replica_step, batches(rows(NUMBER, 6).astype("float64"), labels(NUMBER)))
    return {"losses": losses, "weight": weight.numpy(), "seen": seen.numpy()}


# --- Gradients --------------------------------------------------------------------------------------------------------
@_program()
def whole_gradients_by_hand(strategy: tf.distribute.Strategy) -> Any:
    """Norms, clipping, decay and the update itself, without an optimizer; an all-reduce that one replica does not need."""
    model, _ = _made(strategy)
    weights = [weight.value for weight in model.trainable_variables]

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(_losses(y, model(x)))
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, weights), 0.1)
        gradients = tf.distribute.get_replica_context().all_reduce("sum", gradients)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.5 * gradient + 0.01 * weight)
        return loss, norm, [tf.norm(gradient) for gradient in gradients]

    return {"out": _run(strategy, replica_step, _data()), "weights": by_path(model.variables)}


@_program()
def whole_several_targets(strategy: tf.distribute.Strategy) -> Any:
    """A persistent tape; targets in a list, a vector, with weights of their own; a source that nothing depends on."""
    with strategy.scope():
        weights = [tf.Variable(rows(6, 4)), tf.Variable(tf.zeros([4])), tf.Variable(1.0)]

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            losses = _losses(y, x @ weights[0] + weights[1])
            loss, size = tf.reduce_mean(losses), tf.reduce_mean(tf.abs(x @ weights[0]))
            penalty = tf.reduce_sum(weights[1] ** 2) + tf.reduce_sum(weights[0] ** 2)
        both = tape.gradient([loss, size, penalty], weights[:2])
        scaled = tape.gradient([loss, penalty], weights[:2], output_gradients=[tf.constant(2.0), tf.constant(0.5)])
        weighted = tape.gradient(losses, weights[0], output_gradients=tf.cast(y, tf.float32))
        missing = tape.gradient(loss, weights[2])
        assert missing is None
        zero = tape.gradient(loss, weights[2], unconnected_gradients=tf.UnconnectedGradients.ZERO)
        named = tape.gradient({"loss": loss}, {"kernel": weights[0]})
        weights[0].assign_sub(0.1 * both[0])
        weights[1].assign_sub(0.1 * scaled[1])
        return both, scaled, weighted, zero, named

    return {"out": _run(strategy, replica_step, _data()), "weights": arrays(weights[:2])}


@_program()
def whole_gradients_of_the_graph(strategy: tf.distribute.Strategy) -> Any:
    """tf.gradients, and gradients worked out by hand, given to an optimizer."""
    model, optimizer = _made(strategy)
    with strategy.scope():
        weight, by_hand = keras.Variable(rows(6, 1)), keras.optimizers.Adam(0.1)
        by_hand.build([weight])

    def replica_step(x: Any, y: Any) -> Any:
        loss = tf.reduce_mean(_losses(y, model(x)))
        variables = model.trainable_variables
        optimizer.apply(tf.gradients(loss, [variable.value for variable in variables]), variables)
        error = x @ tf.convert_to_tensor(weight) - tf.cast(y, tf.float32)[:, tf.newaxis]
        by_hand.apply([2 * tf.reduce_mean(error * x, axis=0)[:, tf.newaxis]], [weight])
        return loss, tf.reduce_mean(error**2)

    return {"out": _run(strategy, replica_step, _data()), "weight": np.asarray(weight), **_state(model, optimizer)}


@_program(core=True)
def whole_adversarial(strategy: tf.distribute.Strategy) -> Any:
    """Two models, two optimizers; the second loss is of the first model after its update."""
    critic, critic_optimizer = _made(strategy, lambda: mlp(6, 1))
    generator, generator_optimizer = _made(strategy, lambda: mlp(3, 6))

    def replica_step(real: Any, noise: Any) -> Any:
        with tf.GradientTape() as tape:
            fake = generator(noise)
            critic_loss = tf.reduce_mean(tf.nn.softplus(-critic(real)) + 0.5 * tf.nn.softplus(critic(fake)))
        critic_optimizer.apply(tape.gradient(critic_loss, critic.trainable_variables), critic.trainable_variables)
        with tf.GradientTape() as tape:
            generator_loss = tf.reduce_mean(tf.nn.softplus(-critic(generator(noise))))
        gradients = tape.gradient(generator_loss, generator.trainable_variables)
        generator_optimizer.apply(gradients, generator.trainable_variables)
        return critic_loss, generator_loss

    losses = _run(strategy, replica_step, batches(rows(NUMBER, 6), rows(NUMBER, 3, seed=5)))
    return {"losses": losses, "a": _state(critic, critic_optimizer), "b": _state(generator, generator_optimizer)}


@_program(core=True)
def whole_gradient_penalty(strategy: tf.distribute.Strategy) -> Any:
    """The loss has in it the norms of the critic's gradients by its inputs, row by row."""
    critic, optimizer = _made(strategy, lambda: mlp(6, 1))

    def replica_step(real: Any, fake: Any, mix: Any) -> Any:
        with tf.GradientTape() as tape:
            between = mix * real + (1 - mix) * fake
            with tf.GradientTape() as inner:
                inner.watch(between)
                scores = critic(between)
            norms = tf.norm(inner.gradient(scores, between), axis=1)
            penalty = tf.reduce_mean((norms - 1) ** 2)
            loss = tf.reduce_mean(critic(fake)) - 0.5 * tf.reduce_mean(critic(real)) + 10 * penalty
        optimizer.apply(tape.gradient(loss, critic.trainable_variables), critic.trainable_variables)
        return loss, penalty

    data = batches(rows(NUMBER, 6), rows(NUMBER, 6, seed=5), np.abs(rows(NUMBER, 1, seed=6)) % 1)
    return {"losses": _run(strategy, replica_step, data), **_state(critic, optimizer)}


@_program()
def whole_attack_on_inputs(strategy: tf.distribute.Strategy) -> Any:
    """Adversarial examples: a gradient of the mean loss by the rows, whose sign alone counts; then its size."""
    model, optimizer = _made(strategy)

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean(_losses(y, model(x)))
        gradient = tape.gradient(loss, x)
        losses = [_train(model, optimizer, x + step, y) for step in (0.1 * tf.sign(gradient), gradient)]
        return loss, losses, tf.reduce_sum(gradient**2, axis=1)

    @tf.function
    def step(inputs: Any) -> Any:
        loss, losses, sizes = strategy.run(replica_step, args=inputs)
        return strategy.reduce("MEAN", [loss, losses], axis=None), strategy.gather(sizes, axis=0)

    out = [step(inputs) for inputs in strategy.experimental_distribute_dataset(_data())]
    return {"out": arrays(out), **_state(model, optimizer)}


@_program()
def whole_recomputed_gradients(strategy: tf.distribute.Strategy) -> Any:
    """tf.recompute_grad around layers, and around a function of variables."""
    with strategy.scope():
        weights = [tf.Variable(rows(6, 8)), tf.Variable(tf.zeros([8])), tf.Variable(rows(8, 4, seed=2))]
    hidden = tf.recompute_grad(lambda x: tf.tanh(x @ weights[0] + weights[1]))

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(_losses(y, hidden(x) @ weights[2]))
        gradients = tape.gradient(loss, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss, [tf.norm(gradient) for gradient in gradients]

    return {"out": _run(strategy, replica_step, _data()), "weights": arrays(weights)}


@_program()
def whole_meta_learning(strategy: tf.distribute.Strategy) -> Any:
    """The loss after an inner step of gradient descent, differentiated through that step."""
    with strategy.scope():
        weights = [tf.Variable(rows(6, 4)), tf.Variable(tf.zeros([4]))]

    def loss_of(x: Any, y: Any, kernel: Any, bias: Any) -> tf.Tensor:
        return tf.reduce_mean(_losses(y, x @ kernel + bias))

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = loss_of(x, y, *weights)
            gradients = inner.gradient(loss, weights)
            adapted = [weight - 0.5 * gradient for weight, gradient in zip(weights, gradients, strict=True)]
            after = loss_of(x, (y + 1) % 4, *adapted)
        for weight, gradient in zip(weights, outer.gradient(after, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss, after

    return {"losses": _run(strategy, replica_step, _data()), "weights": arrays(weights)}


@_program()
def whole_second_derivatives(strategy: tf.distribute.Strategy) -> Any:
    """A penalty on the gradient by the weights, and a product with the Hessian."""
    with strategy.scope():
        weight = tf.Variable(rows(6, 4))
    direction = tf.constant(rows(6, 4, seed=3))

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_mean(_losses(y, x @ weight))
            gradient = inner.gradient(loss, weight)
            whole = loss + 0.5 * tf.reduce_sum(gradient**2)
        step = outer.gradient(whole, weight)
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_mean(_losses(y, x @ weight))
            gradient = inner.gradient(loss, weight)
        product = outer.gradient(gradient, weight, output_gradients=direction)
        weight.assign_sub(0.1 * step)
        return whole, product

    return {"out": _run(strategy, replica_step, _data()), "weight": weight.numpy()}


@_program()
def whole_forward_derivatives(strategy: tf.distribute.Strategy) -> Any:
    """tf.autodiff.ForwardAccumulator, which itself takes gradients in functions that it keeps."""
    with strategy.scope():
        weight = tf.Variable(rows(6, 4))
    direction = tf.constant(rows(6, 4, seed=3))

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(_losses(y, x @ weight))
        gradient = tape.gradient(loss, weight)
        with tf.autodiff.ForwardAccumulator(weight, direction) as forward:
            again = tf.reduce_mean(_losses(y, x @ weight))
        weight.assign_sub(0.1 * gradient)
        return loss, forward.jvp(again)

    return {"out": _run(strategy, replica_step, _data()), "weight": weight.numpy()}


@_program()
def whole_gradients_of_each_row(strategy: tf.distribute.Strategy) -> Any:
    """Every row's gradient is clipped before their mean is taken, as differential privacy wants it; Jacobians by inputs."""
    with strategy.scope():
        weight, optimizer = keras.Variable(rows(6, 4)), keras.optimizers.SGD(0.5)
        optimizer.build([weight])

    def replica_step(x: Any, y: Any) -> Any:
        kernel = tf.convert_to_tensor(weight)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([kernel, x])
            logits = x @ kernel
            losses = _losses(y, logits)
        each = tape.jacobian(losses, kernel)
        sizes = tf.norm(each, axis=[1, 2], keepdims=True)
        by_inputs = tape.batch_jacobian(logits, x)
        optimizer.apply([tf.reduce_mean(each / tf.maximum(sizes, 1.0), axis=0)], [weight])
        with tf.GradientTape() as tape:
            again = _losses(y, x @ weight.value)
        each = tape.jacobian(again, weight.value)
        return [tf.reduce_mean(part, axis=0) for part in (losses, sizes, by_inputs**2, again, each**2)]

    return {"out": _run(strategy, replica_step, _data()), "weight": np.asarray(weight)}


@_program()
def whole_sharpness_aware(strategy: tf.distribute.Strategy) -> Any:
    """The weights move along the gradient, the gradient is taken there, and the optimizer steps from where they were."""
    model, optimizer = _made(strategy)

    def replica_step(x: Any, y: Any) -> Any:
        variables = model.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(_losses(y, model(x)))
        gradients = tape.gradient(loss, variables)
        scale = 0.05 / tf.linalg.global_norm(gradients)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_add(scale * gradient)
        with tf.GradientTape() as tape:
            there = tf.reduce_mean(_losses(y, model(x)))
        sharp = tape.gradient(there, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(scale * gradient)
        optimizer.apply(sharp, variables)
        return loss, there

    return {"losses": _run(strategy, replica_step, _data()), **_state(model, optimizer)}


@_program()
def whole_mean_teacher(strategy: tf.distribute.Strategy) -> Any:
    """A second model that follows the first's weights after every update, and is part of its loss."""
    model, optimizer = _made(strategy)
    with strategy.scope():
        teacher = mlp()

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x)
            distance = tf.reduce_mean((logits - tf.stop_gradient(teacher(x))) ** 2)
            loss = tf.reduce_mean(_losses(y, logits)) + distance
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        for mine, theirs in zip(teacher.variables, model.variables, strict=True):
            mine.assign(0.8 * mine + 0.2 * theirs)
        return loss, distance

    losses = _run(strategy, replica_step, _data())
    return {
        "losses": losses,
        "teacher": [np.asarray(variable) for variable in teacher.variables],
        **_state(model, optimizer),
    }


@_program()
def whole_control_flow(strategy: tf.distribute.Strategy) -> Any:
    """Gradients through a recurrent loop, a scan and a map over rows; an update that every other step leaves out."""
    with strategy.scope():
        weights = [tf.Variable(0.3 * rows(4, 4)), tf.Variable(rows(3, 4, seed=2))]
        steps = tf.Variable(0, trainable=False)

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            state = tf.zeros([tf.shape(x)[0], 4])
            for position in tf.range(5):
                state = tf.tanh(state @ weights[0] + x[:, position] @ weights[1])
            sums = tf.scan(lambda total, part: 0.5 * total + part, tf.transpose(x, [1, 0, 2]))[-1]
            each = tf.map_fn(lambda row: tf.reduce_sum(row @ weights[1]) ** 2, x)
            loss = tf.reduce_mean(_losses(y, state + sums @ weights[1])) + 0.01 * tf.reduce_mean(each)
        gradients = tape.gradient(loss, weights)
        if steps % 2 == 0:
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.assign_sub(0.1 * gradient)
        steps.assign_add(1)
        return loss

    # With `if` and `for` of tensors in it, the replica function must be one that AutoGraph reads.
    losses = _run(strategy, replica_step, _data(5, 3))
    return {"losses": losses, "weights": arrays(weights), "steps": steps.numpy()}


@_program()
def whole_sparse_gradients(strategy: tf.distribute.Strategy) -> Any:
    """A table looked up twice, clipped together with a dense gradient."""
    with strategy.scope():
        table, kernel = keras.Variable(rows(11, 4)), keras.Variable(rows(4, 4, seed=2))
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build([table, kernel])
    tokens = np.random.default_rng(0).integers(0, 11, (NUMBER, 5))

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            found = tf.nn.embedding_lookup(table.value, x)
            hidden = tf.reduce_mean(found, axis=1) + tf.gather(table.value, y)
            loss = tf.reduce_mean(_losses(y, hidden @ tf.convert_to_tensor(kernel)))
        gradients = tape.gradient(loss, [table.value, kernel.value])
        gradients, norm = tf.clip_by_global_norm(gradients, 0.2)
        optimizer.apply(gradients, [table, kernel])
        return loss, norm

    losses = _run(strategy, replica_step, batches(tokens, labels(NUMBER)))
    return {"losses": losses, "table": np.asarray(table), "kernel": np.asarray(kernel), **by_path(optimizer.variables)}


# --- The whole batch inside the replica function ----------------------------------------------------------------------
@_program(core=True, micro_batches=WHOLE_MORE, whole_tolerance=TOLERANCE_LATER)
def whole_contrastive_loss(strategy: tf.distribute.Strategy) -> Any:
    """Every row is told from all rows of the batch, by all_gather."""
    model, optimizer = _made(strategy)

    def replica_step(x: Any, other: Any, number: Any) -> Any:
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            mine, theirs = (tf.math.l2_normalize(model(part), axis=1) for part in (x, other))
            everyone = context.all_gather(theirs, axis=0)
            same = tf.cast(tf.equal(number[:, tf.newaxis], context.all_gather(number, axis=0)), tf.float32)
            losses = tf.nn.softmax_cross_entropy_with_logits(same, 2 * mine @ tf.transpose(everyone))
            loss = tf.reduce_mean(losses)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss, tf.shape(everyone)[0]

    data = batches(rows(NUMBER, 6), rows(NUMBER, 6) + 0.3 * rows(NUMBER, 6, seed=2), np.arange(NUMBER))
    return {"out": _run(strategy, replica_step, data), **_state(model, optimizer)}


@_program()
def whole_batch_statistics(strategy: tf.distribute.Strategy) -> Any:
    """Features normalised by the batch's mean and variance, by all_reduce: of means, and of sums and numbers."""
    model, optimizer = _made(strategy)
    with strategy.scope():
        kernel = tf.Variable(rows(6, 6))

    def replica_step(x: Any, y: Any) -> Any:
        context = tf.distribute.get_replica_context()
        total, number = context.all_reduce("sum", [tf.reduce_sum(x, 0), tf.cast(tf.shape(x)[0], tf.float32)])
        with tf.GradientTape() as tape:
            hidden = (x - total / number) @ kernel
            mean, square = context.all_reduce("mean", [tf.reduce_mean(hidden, 0), tf.reduce_mean(hidden**2, 0)])
            loss = tf.reduce_mean(_losses(y, model((hidden - mean) / tf.sqrt(square - mean**2 + 1e-3))))
        gradients = tape.gradient(loss, [kernel, *model.trainable_variables])
        kernel.assign_sub(0.1 * gradients[0])
        optimizer.apply(gradients[1:], model.trainable_variables)
        return loss, square, total, number, context.all_reduce("mean", loss)

    return {"out": _run(strategy, replica_step, _data()), "kernel": kernel.numpy(), **_state(model, optimizer)}


@_program()
def whole_codebook(strategy: tf.distribute.Strategy) -> Any:
    """Vector quantisation: codes move to the mean of the batch's rows nearest to them; straight-through gradients."""
    model, optimizer = _made(strategy)
    with strategy.scope():
        codes = tf.Variable(rows(5, 4), trainable=False)
        counts = tf.Variable(tf.ones([5]), trainable=False)

    def replica_step(x: Any, y: Any) -> Any:
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            made = model(x)
            nearest = tf.argmin(tf.reduce_sum((made[:, tf.newaxis] - codes) ** 2, axis=2), axis=1)
            code = tf.gather(codes, nearest)
            loss = tf.reduce_mean(_losses(y, made + tf.stop_gradient(code - made)))
            loss += 0.25 * tf.reduce_mean((made - tf.stop_gradient(code)) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        chosen = tf.one_hot(nearest, 5)
        number = context.all_reduce("sum", tf.reduce_sum(chosen, axis=0))
        total = context.all_reduce("sum", tf.matmul(chosen, made, transpose_a=True))
        counts.assign(0.7 * counts + 0.3 * number)
        codes.assign(0.7 * codes + 0.3 * tf.math.divide_no_nan(total, counts[:, tf.newaxis]))
        return loss

    losses = _run(strategy, replica_step, _data())
    return {"losses": losses, "codes": codes.numpy(), "counts": counts.numpy(), **_state(model, optimizer)}


def _tokens() -> tuple[np.ndarray, np.ndarray]:
    """Tokens, of which a row has between one and eight before the zeros, and labels of each."""
    rng = np.random.default_rng(0)
    lengths = np.sort(rng.integers(1, 9, NUMBER))
    return rng.integers(1, 9, (NUMBER, 8)) * (np.arange(8) < lengths[:, np.newaxis]), rng.integers(0, 4, (NUMBER, 8))


def train_on_tokens(strategy: tf.distribute.Strategy, *, weighted: bool) -> Any:
    """The loss is a mean over tokens, of which micro-batches have different numbers."""
    with strategy.scope():
        table, kernel = tf.Variable(rows(9, 5)), tf.Variable(rows(5, 4, seed=2))

    def replica_step(x: Any, y: Any) -> Any:
        mask = tf.cast(x != 0, tf.float32)
        if weighted:
            microstrat.set_weight(tf.reduce_sum(mask))
        with tf.GradientTape() as tape:
            losses = _losses(y, tf.gather(table, x) @ kernel)
            loss = tf.reduce_sum(mask * losses) / tf.reduce_sum(mask)
        gradients = tape.gradient(loss, [table, kernel])
        table.assign_sub(tf.convert_to_tensor(gradients[0]))
        kernel.assign_sub(gradients[1])
        return loss

    return {"losses": _run(strategy, replica_step, batches(*_tokens())), "weights": arrays([table, kernel])}


@_program(core=True, micro_batches=WHOLE_MORE)
def whole_mean_over_tokens(strategy: tf.distribute.Strategy) -> Any:
    return train_on_tokens(strategy, weighted=True)


# --- State ------------------------------------------------------------------------------------------------------------
@_program(core=True, micro_batches=WHOLE_MORE)
def whole_state(strategy: tf.distribute.Strategy) -> Any:
    """Counters and accumulators of every kind, and what the replica function reads of them."""
    on_read, mean = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.MEAN
    total, first = tf.VariableAggregation.SUM, tf.VariableAggregation.ONLY_FIRST_REPLICA
    with strategy.scope():
        steps = tf.Variable(0, trainable=False)
        seen = tf.Variable(0, trainable=False, aggregation=total)
        sums = tf.Variable(tf.zeros([2]), trainable=False, aggregation=total)
        assigned = tf.Variable(tf.zeros([2]), trainable=False, aggregation=total)
        means = tf.Variable(tf.zeros([2]), trainable=False, aggregation=mean)
        moving = tf.Variable(tf.ones([2]), trainable=False, aggregation=mean)
        read_sums = tf.Variable(tf.zeros([2]), trainable=False, aggregation=total, synchronization=on_read)
        read_means = tf.Variable(tf.zeros([2]), trainable=False, aggregation=mean, synchronization=on_read)
        once = tf.Variable(1.0, trainable=False, aggregation=first)
    variables = [steps, seen, sums, assigned, means, moving, read_sums, read_means, once]

    def replica_step(x: Any) -> Any:
        steps.assign_add(1)
        seen.assign_add(tf.shape(x)[0])
        sums.assign_add(tf.reduce_sum(x, axis=0))
        assigned.assign(assigned + tf.reduce_sum(x**2, axis=0))
        means.assign_sub(tf.reduce_mean(x, axis=0))
        moving.assign(0.9 * moving + 0.1 * tf.reduce_mean(x, axis=0))
        read_sums.assign_add(tf.reduce_sum(x, axis=0))
        read_means.assign_add(tf.reduce_mean(x, axis=0))
        once.assign(once * 2)
        return [variable + 0 for variable in variables] + [tf.reduce_mean(x * moving + sums)]

    out = _run(strategy, replica_step, batches(rows(NUMBER, 2)))
    return {"out": out, "after": [variable.numpy() for variable in variables]}


@_program(core=True)
def whole_metrics(strategy: tf.distribute.Strategy) -> Any:
    """Keras metrics in the replica function: of rows, of weighted rows, of one number for the batch; results on the spot."""
    model, optimizer = _made(strategy)
    with strategy.scope():
        metrics = {
            "loss": keras.metrics.Mean(),
            "losses": keras.metrics.Mean(),
            "weighted": keras.metrics.SparseCategoricalAccuracy(),
            "sum": keras.metrics.Sum(),
            "auc": keras.metrics.AUC(num_thresholds=20),
        }

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x)
            losses = _losses(y, logits)
            loss = tf.reduce_mean(losses)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        metrics["loss"].update_state(loss)
        metrics["losses"].update_state(losses)
        metrics["weighted"].update_state(y, logits, sample_weight=tf.cast(y + 1, tf.float32))
        metrics["sum"].update_state(losses)
        metrics["auc"].update_state(y > 1, tf.nn.softmax(logits)[:, 3])
        return {name: metric.result() for name, metric in metrics.items()}

    out = _run(strategy, replica_step, _data())
    state = {name: [np.asarray(variable) for variable in metric.variables] for name, metric in metrics.items()}
    return {"out": out, "state": state, **_state(model, optimizer)}


@_program()
def whole_random_state(strategy: tf.distribute.Strategy) -> Any:
    """Draws that have no rows in them are one device's; generators go on as on one device, whatever is drawn."""
    with strategy.scope():
        seeds = keras.random.SeedGenerator(3)

    def replica_step(x: Any, y: Any) -> Any:
        noise = keras.random.normal((6, 4), seed=seeds)
        noisy = x + 0.0 * keras.random.normal(tf.shape(x), seed=seeds)
        again = tf.random.stateless_uniform([4], [1, 2])
        return noise, tf.reduce_mean(_losses(y, noisy @ noise + again))

    return {"out": _run(strategy, replica_step, _data()), "state": np.asarray(seeds.state)}


@_program()
def whole_checkpoint(strategy: tf.distribute.Strategy) -> Any:
    """Written, trained on, restored into the same objects and into new ones, which train on alike."""

    def make() -> Any:
        model, optimizer = _made(strategy)
        with strategy.scope():
            sums = tf.Variable(tf.zeros([6]), trainable=False, aggregation=tf.VariableAggregation.SUM)

        def replica_step(x: Any, y: Any) -> Any:
            sums.assign_add(tf.reduce_sum(x, axis=0))
            return _train(model, optimizer, x, y)

        everything = [variable.value for variable in [*model.variables, *optimizer.variables]]
        checkpoint = tf.train.Checkpoint(keras=everything, sums=sums)
        return checkpoint, lambda: [_run(strategy, replica_step, _data()), _state(model, optimizer), sums.numpy()]

    with tempfile.TemporaryDirectory() as directory:
        checkpoint, train = make()
        out = [train()]
        path = checkpoint.save(f"{directory}/checkpoint")
        out.append(train())
        checkpoint.restore(path).assert_consumed()
        out.append(train())
        other, train = make()
        other.restore(path).assert_consumed()
        out.append(train())
        return {"out": out, "names": sorted(name for name, _ in tf.train.list_variables(path))}


# --- Values -----------------------------------------------------------------------------------------------------------
@_program(core=True, micro_batches=WHOLE_MORE)
def whole_reductions(strategy: tf.distribute.Strategy) -> Any:
    """strategy.reduce, gather and experimental_local_results of what the replica function returns."""

    def replica_step(x: Any, number: Any) -> Any:
        return {
            "rows": x * 2,
            "numbers": number + 1,
            "mean": tf.reduce_mean(x, axis=0),
            "sum": tf.reduce_sum(x),
            "count": tf.shape(x)[0],
            "same": tf.constant([1.0, 2.0]),
            "words": tf.strings.as_string(number),
        }

    def reduced(x: Any, result: Any) -> Any:
        return {
            "batch": [strategy.gather(x, axis=0)] + [strategy.reduce(kind, x, axis=0) for kind in ("SUM", "MEAN")],
            "gather": strategy.gather(result["rows"], axis=0),
            "numbers": strategy.gather(result["numbers"], axis=0),
            "sum rows": strategy.reduce("SUM", result["rows"], axis=0),
            "mean rows": strategy.reduce("MEAN", result["rows"], axis=0),
            "mean": strategy.reduce("MEAN", result["mean"], axis=None),
            "sum": strategy.reduce(tf.distribute.ReduceOp.SUM, result["sum"], axis=None),
            "count": strategy.reduce("SUM", result["count"], axis=None),
            "same": [strategy.reduce(kind, result["same"], axis=None) for kind in ("SUM", "MEAN")],
            "structure": strategy.reduce("MEAN", {"a": result["mean"], "b": [result["same"]]}, axis=None),
        }

    step = tf.function(lambda inputs: strategy.run(replica_step, args=inputs))
    inside = tf.function(lambda inputs: reduced(inputs[0], strategy.run(replica_step, args=inputs)))
    out = []
    for inputs in strategy.experimental_distribute_dataset(batches(rows(NUMBER, 3), np.arange(NUMBER))):
        result = step(inputs)
        parts = strategy.experimental_local_results
        joined = {name: np.concatenate(arrays(parts(result[name]))) for name in ("rows", "numbers", "words")}
        joined["sum"] = np.sum(arrays(parts(result["sum"])), keepdims=True)
        out.append([arrays(reduced(inputs[0], result)), arrays(inside(inputs)), joined])
    return out


@_program(micro_batches=WHOLE_MORE)
def whole_sequences_of_unknown_length(strategy: tf.distribute.Strategy) -> Any:
    """Batches padded to their longest row, so that two sizes are unknown while tracing; results that are like them."""
    with strategy.scope():
        table, kernel = tf.Variable(rows(9, 5)), tf.Variable(rows(5, 4, seed=2))
    lengths = np.random.default_rng(1).integers(1, 9, NUMBER)
    data = tf.data.Dataset.from_generator(
        lambda: ((np.arange(length) % 9, length % 4) for length in lengths),
        output_signature=(tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.int64)),
    ).padded_batch(BATCH)

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            each = tf.gather(table, x) @ kernel
            loss = tf.reduce_mean(_losses(y, tf.reduce_sum(each, axis=1)))
        gradients = tape.gradient(loss, [table, kernel])
        table.assign_sub(0.01 * tf.convert_to_tensor(gradients[0]))
        kernel.assign_sub(0.01 * gradients[1])
        return loss, each, tf.argmax(each, axis=-1)

    @tf.function
    def step(inputs: Any) -> Any:
        loss, each, best = strategy.run(replica_step, args=inputs)
        mean = [strategy.reduce("MEAN", loss, axis=None), strategy.reduce("MEAN", each, axis=0)]
        return mean, strategy.gather(each, axis=0), strategy.reduce("SUM", best, axis=None)

    out = [step(inputs) for inputs in strategy.experimental_distribute_dataset(data)]
    return {"out": arrays(out), "weights": arrays([table, kernel])}


@_program()
def whole_ragged_inputs(strategy: tf.distribute.Strategy) -> Any:
    with strategy.scope():
        table, kernel = tf.Variable(rows(9, 5)), tf.Variable(rows(5, 4, seed=2))
    lengths = [1 + number % 4 for number in range(NUMBER)]
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(sum(lengths)) % 9, lengths)
    data = tf.data.Dataset.from_tensor_slices((ragged, labels(NUMBER))).batch(BATCH)

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            found = tf.reduce_mean(tf.ragged.map_flat_values(lambda flat: tf.gather(table, flat), x), axis=1)
            loss = tf.reduce_mean(_losses(y, found @ kernel))
        gradients = tape.gradient(loss, [table, kernel])
        table.assign_sub(0.1 * tf.convert_to_tensor(gradients[0]))
        kernel.assign_sub(0.1 * gradients[1])
        return loss, x.row_lengths(), x

    step = tf.function(lambda inputs: strategy.run(replica_step, args=inputs))
    out = []
    for inputs in strategy.experimental_distribute_dataset(data):
        loss, found, same = step(inputs)
        values = [part.flat_values for part in strategy.experimental_local_results(same)]
        out.append([strategy.reduce("MEAN", loss, axis=None), strategy.gather(found, axis=0), tf.concat(values, 0)])
    return {"out": arrays(out), "weights": arrays([table, kernel])}


@_program()
def whole_sparse_inputs(strategy: tf.distribute.Strategy) -> Any:
    with strategy.scope():
        kernel = tf.Variable(rows(5, 4))
    dense = rows(NUMBER, 5) * (rows(NUMBER, 5, seed=2) > 0)
    data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(dense), labels(NUMBER))).batch(BATCH)

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(_losses(y, tf.sparse.sparse_dense_matmul(x, kernel)))
        kernel.assign_sub(tape.gradient(loss, kernel))
        return loss

    return {"losses": _run(strategy, replica_step, data), "kernel": kernel.numpy()}


@_program()
def whole_host_functions(strategy: tf.distribute.Strategy) -> Any:
    """numpy_function, py_function, a lookup table and strings."""
    with strategy.scope():
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([1, 2], tf.int64)), default_value=-1
        )

    def replica_step(x: Any, words: Any) -> Any:
        doubled = tf.numpy_function(lambda v: v * 2, [x], tf.float32)
        more = tf.py_function(lambda v: v + 1, [x], tf.float32)
        for made in (doubled, more):
            made.set_shape(x.shape)
        return table.lookup(words), doubled, more, tf.strings.join([words, words])

    @tf.function
    def step(inputs: Any) -> Any:
        return [strategy.gather(part, axis=0) for part in strategy.run(replica_step, args=inputs)]

    data = batches(rows(NUMBER, 2), np.array(["a", "b", "c", "d", "e"])[np.arange(NUMBER) % 5])
    return arrays([step(inputs) for inputs in strategy.experimental_distribute_dataset(data)])


@_program()
def whole_results_go_into_run(strategy: tf.distribute.Strategy) -> Any:
    """Rows of one run, and numbers that have none, are arguments of the next; in one tf.function and across two."""
    model, optimizer = _made(strategy)

    def first(x: Any, y: Any) -> Any:
        return {"x": tf.tanh(x), "y": y, "same": tf.constant(0.5)}

    def second(made: Any) -> tf.Tensor:
        return _train(model, optimizer, made["x"] * made["same"], made["y"])

    make = tf.function(lambda inputs: strategy.run(first, args=inputs))
    train = tf.function(lambda made: strategy.reduce("MEAN", strategy.run(second, args=(made,)), axis=None))
    both = tf.function(lambda inputs: train(strategy.run(first, args=inputs)))
    data = strategy.experimental_distribute_dataset(_data())
    return {"losses": arrays([[train(make(inputs)), both(inputs)] for inputs in data]), **_state(model, optimizer)}
