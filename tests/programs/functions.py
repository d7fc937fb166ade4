"""tf.functions around, inside and given to strategy.run; control flow; other layers and optimizers."""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.programs._registry import (
    BATCH,
    OWN_DRAWS,
    OWN_STATISTICS,
    TOLERANCE_LATER,
    UNDECLARED_SUMS,
    WHOLE_MORE,
    arrays,
    batches,
    by_path,
    classify,
    labels,
    local,
    mlp,
    per_replica,
    program,
    rows,
)


def _data(*shape: int) -> tf.data.Dataset:
    return batches(rows(2 * BATCH, *(shape or (6,))), labels(2 * BATCH))


def _loss(y: Any, logits: Any) -> tf.Tensor:
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
    return tf.reduce_sum(losses) / BATCH


def _train(model: keras.Model, optimizer: keras.optimizers.Optimizer, x: Any, y: Any) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = _loss(y, model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


def _made(strategy: tf.distribute.Strategy, *, build: bool = True) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    with strategy.scope():
        model, optimizer = mlp(), keras.optimizers.Adam(0.01)
        if build:
            optimizer.build(model.trainable_variables)
    return model, optimizer


@program(core=True, whole="sum", micro_batches=WHOLE_MORE)
def function_given_to_run(strategy: tf.distribute.Strategy) -> Any:
    model, optimizer = _made(strategy)

    @tf.function
    def step(x: Any, y: Any) -> tf.Tensor:
        return _train(model, optimizer, x, y)

    data = strategy.experimental_distribute_dataset(_data())
    losses = [strategy.run(step, args=inputs) for _ in range(5) for inputs in data]
    reduced = [strategy.reduce("SUM", loss, axis=None) for loss in losses]
    return {
        "losses": arrays(reduced),
        "per replica": [local(strategy, loss) for loss in losses],
        **by_path(model.variables),
    }


@program(core=True, whole="sum")
def optimizer_built_in_the_first_step(strategy: tf.distribute.Strategy) -> Any:
    # Stock strategies fail unless the optimizer is built before.
    model, optimizer = _made(strategy, build=isinstance(strategy, tf.distribute.MirroredStrategy))

    @tf.function
    def step(inputs: Any) -> tf.Tensor:
        return strategy.reduce("SUM", strategy.run(lambda x, y: _train(model, optimizer, x, y), args=inputs), axis=None)

    data = strategy.experimental_distribute_dataset(_data())
    losses = [step(inputs) for _ in range(5) for inputs in data]
    return {"losses": arrays(losses), "weights": by_path(model.variables), "optimizer": by_path(optimizer.variables)}


@program(core=True, why_not_whole=UNDECLARED_SUMS)
def nested_function(strategy: tf.distribute.Strategy) -> Any:
    """A tf.function inside the replica function sees each replica's id, inputs and state."""
    model, optimizer = _made(strategy)
    with strategy.scope():
        counter = tf.Variable(0.0, trainable=False)
        total = tf.Variable(
            0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )

    @tf.function
    def forward(x: Any, y: Any) -> tf.Tensor:
        return _loss(y, model(x, training=True))

    @tf.function
    def count(x: Any) -> tf.Tensor:
        counter.assign_add(tf.reduce_sum(x))
        total.assign_add(1.0)
        return counter * 1.0

    @tf.function
    def number() -> tf.Tensor:
        return tf.distribute.get_replica_context().replica_id_in_sync_group * 2

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = forward(x, y)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss, count(x), number()

    step = tf.function(lambda inputs: strategy.run(replica_step, args=inputs))
    out = []
    for _ in range(5):
        for inputs in strategy.experimental_distribute_dataset(_data()):
            out.append([local(strategy, part) for part in step(inputs)])
    return {
        "out": out,
        "weights": by_path(model.variables),
        "own": per_replica(strategy, [counter, total]),
        "cross": [counter.numpy(), total.numpy()],
    }


@program(why_not_whole="it returns the number of the replica")
def nested_function_with_shared_state(strategy: tf.distribute.Strategy) -> Any:
    """A nested function whose value differs between replicas, and that writes what all have in common."""
    with strategy.scope():
        steps = tf.Variable(0, trainable=False)
        average = tf.Variable(1.0)

    @tf.function
    def inner(x: Any) -> tf.Tensor:
        steps.assign_add(1)
        return x * average + tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)

    @tf.function
    def outer(x: Any) -> tf.Tensor:
        average.assign(0.5 * average + 1.0)
        return inner(x) + inner(x + 1.0)

    step = tf.function(lambda: strategy.run(lambda: (outer(2.0), steps + 0)))
    out = [[local(strategy, part) for part in step()] for _ in range(3)]
    return {"out": out, "steps": steps.numpy(), "average": average.numpy()}


@program(why_not_whole="its branches go by the number of the replica")
def nested_function_in_a_branch(strategy: tf.distribute.Strategy) -> Any:
    """A tf.function that asks for the replica's id and state, called in branches and in one another."""
    with strategy.scope():
        counter = tf.Variable(1.0, trainable=False)
        total = tf.Variable(
            0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )

    @tf.function
    def count(x: Any) -> tf.Tensor:
        number = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        counter.assign_add(number + 1.0)
        total.assign_add(x)
        return counter * x + number

    @tf.function
    def count_sometimes(x: Any) -> tf.Tensor:
        return tf.cond(x > 2.0, lambda: count(x) * 2.0, lambda: count(x + 1.0))

    def replica_step(x: Any) -> Any:
        number = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        y = tf.cond(number > 0.0, lambda: count(x), lambda: x)
        z = count_sometimes(x + number)
        return y, z, tf.switch_case(tf.cast(number, tf.int32), [lambda: count(y), lambda: z, lambda: count(z)])

    step = tf.function(lambda x: strategy.run(replica_step, args=(x,)))
    out = [[local(strategy, part) for part in step(tf.constant(x))] for x in (1.0, 2.0, 3.0)]
    return {"out": out, "own": per_replica(strategy, [counter, total]), "cross": [counter.numpy(), total.numpy()]}


def _train_by_nested_function(strategy: tf.distribute.Strategy, **options: Any) -> Any:
    """Training whose tape and gradient stand in a tf.function, made with `options`, inside the replica function."""
    model, optimizer = _made(strategy)

    @tf.function(**options)
    def gradients_of(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = _loss(y, model(x, training=True))
        return loss, tape.gradient(loss, model.trainable_variables)

    def replica_step(x: Any, y: Any) -> tf.Tensor:
        loss, gradients = gradients_of(x, y)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    step = tf.function(lambda inputs: strategy.run(replica_step, args=inputs))
    data = strategy.experimental_distribute_dataset(_data())
    losses = [local(strategy, step(inputs)) for _ in range(5) for inputs in data]
    return {"losses": losses, "weights": by_path(model.variables)}


@program(whole="sum")
def nested_function_with_gradient(strategy: tf.distribute.Strategy) -> Any:
    """The tape and the collective-free gradient inside the nested function."""
    return _train_by_nested_function(strategy)


@program(whole="sum")
def steps_in_one_function(strategy: tf.distribute.Strategy) -> Any:
    """A Python loop and a tf.range loop of training steps in one tf.function."""
    model, optimizer = _made(strategy)
    iterator = iter(strategy.experimental_distribute_dataset(_data().repeat()))

    @tf.function
    def steps() -> tf.Tensor:
        total = tf.zeros([])
        for _ in range(2):
            loss = strategy.run(lambda x, y: _train(model, optimizer, x, y), args=next(iterator))
            total += strategy.reduce("SUM", loss, axis=None)
        for _ in tf.range(3):
            loss = strategy.run(lambda x, y: _train(model, optimizer, x, y), args=next(iterator))
            total += strategy.reduce("SUM", loss, axis=None)
        return total

    return {"losses": arrays([steps(), steps()]), "weights": by_path(model.variables)}


@program(core=True, why_not_whole="its branches and loops go by the sum over the rows at hand, or by their number")
def control_flow(strategy: tf.distribute.Strategy) -> Any:
    """Branches and loops that go differently in each replica, and others that go alike."""
    with strategy.scope():
        switch = tf.Variable(1.0)
        counter = tf.Variable(0.0, trainable=False)

    def replica_step(x: Any) -> Any:
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        if number % 2 == 0:
            counter.assign_add(1.0)
            y = tf.reduce_sum(x)
        else:
            y = tf.reduce_max(x)
        z = tf.constant(0.0)
        for i in tf.range(number + 1):
            z += tf.cast(i, tf.float32) * x[0, 0]
        if switch > 0.0:
            z *= 2.0
        z = tf.abs(z)
        while z < 5.0:
            z = z * 2.0 + 1.0
        w = tf.map_fn(lambda row: tf.reduce_sum(row * row), x)
        v = tf.scan(lambda a, b: a * 0.5 + b, w)
        table = tf.TensorArray(tf.float32, size=3)
        for i in tf.range(3):
            table = table.write(i, tf.cast(i + number, tf.float32))
        return y, z, w, v, table.stack(), tf.vectorized_map(tf.square, x), counter + 0.0

    step = tf.function(lambda x: strategy.run(replica_step, args=(x,)))
    out = []
    for x in strategy.experimental_distribute_dataset(batches(rows(2 * BATCH, 2))):
        out.append([local(strategy, part) for part in step(x)])
    return {"out": out, "own": per_replica(strategy, [counter])}


@program(why_not_whole="it works on the first of the rows at hand")
def gradients_in_loops(strategy: tf.distribute.Strategy) -> Any:
    """A gradient through tf.while_loop and tf.cond, a persistent tape, a second derivative, a custom gradient."""
    with strategy.scope():
        weight = tf.Variable([0.5, -0.5])

    @tf.custom_gradient
    def clipped(x: Any) -> Any:
        return tf.identity(x), lambda upstream: tf.clip_by_value(upstream, -0.1, 0.1)

    def replica_step(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as outer:
            with tf.GradientTape() as tape:
                y = weight * 1.0
                for _ in tf.range(3):
                    y = tf.tanh(y) * x[0] + weight
                y = tf.cond(tf.reduce_sum(x) > 0.0, lambda: y * 2.0, lambda: y + 1.0)
                loss = tf.reduce_sum(clipped(y) ** 2)
            first = tape.gradient(loss, weight)
            norm = tf.reduce_sum(first * first)
        second = outer.gradient(norm, weight)
        context = tf.distribute.get_replica_context()
        return loss, first, second, context.all_reduce("sum", first), context.all_reduce("mean", second)

    step = tf.function(lambda x: strategy.run(replica_step, args=(x,)))
    out = []
    for x in strategy.experimental_distribute_dataset(batches(rows(2 * BATCH, 2))):
        out.append([local(strategy, part) for part in step(x)])
    return out


@program(whole="sum")
def stateful_random_draws(strategy: tf.distribute.Strategy) -> Any:
    """Their values depend on the graph; that they differ between replicas and calls does not."""

    def replica_step() -> Any:
        same = tf.random.stateless_normal([4], [1, 2])
        return tf.random.normal([4]), tf.random.uniform([4]), tf.random.shuffle(tf.range(100)), same

    step = tf.function(lambda: strategy.run(replica_step))
    drawn: list[set[bytes]] = [set(), set(), set(), set()]
    for _ in range(3):
        for kind, value in enumerate(step()):
            drawn[kind] |= {part.tobytes() for part in local(strategy, value)}
    return [len(values) for values in drawn]


@program(whole="sum", whole_tolerance=TOLERANCE_LATER)
def two_models_two_optimizers(strategy: tf.distribute.Strategy) -> Any:
    """As in adversarial training: two losses, two tapes, two optimizers in one step."""
    with strategy.scope():
        models = [mlp(6, 6), mlp(6, 1)]
        optimizers = [keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.5)]
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.build(model.trainable_variables)

    def replica_step(x: Any) -> Any:
        with tf.GradientTape() as first, tf.GradientTape() as second:
            made = models[0](x)
            real, fake = models[1](x), models[1](made)
            generator_loss = tf.reduce_sum(tf.nn.softplus(-fake)) / BATCH
            # Were both worth the same, the last bias would have a gradient that is next to nothing but rounding.
            critic_loss = tf.reduce_sum(0.5 * tf.nn.softplus(-real) + tf.nn.softplus(fake)) / BATCH
        gradients = [
            first.gradient(generator_loss, models[0].trainable_variables),
            second.gradient(critic_loss, models[1].trainable_variables),
        ]
        for model, optimizer, grads in zip(models, optimizers, gradients, strict=True):
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return generator_loss, critic_loss

    step = tf.function(lambda x: strategy.run(replica_step, args=(x,)))
    losses = []
    for _ in range(5):
        for x in strategy.experimental_distribute_dataset(batches(rows(2 * BATCH, 6))):
            losses.append([strategy.reduce("SUM", loss, axis=None) for loss in step(x)])
    return {"losses": arrays(losses), "weights": [by_path(model.variables) for model in models]}


@program(whole="sum")
def gradients_summed_by_hand(strategy: tf.distribute.Strategy) -> Any:
    """all_reduce of the gradients, clipping by their global norm, and an update of one's own."""
    with strategy.scope():
        weights = [tf.Variable(rows(6, 4)), tf.Variable(tf.zeros([4]))]
        slots = [tf.Variable(tf.zeros(weight.shape), trainable=False) for weight in weights]

    def update(cross: tf.distribute.Strategy, gradients: Any) -> None:
        for weight, slot, gradient in zip(weights, slots, gradients, strict=True):

            def move(weight: Any, gradient: Any, slot: Any = slot) -> None:
                slot.assign(0.9 * slot + gradient)
                weight.assign_sub(0.1 * slot)

            cross.extended.update(weight, move, args=(gradient,))

    def replica_step(x: Any, y: Any) -> Any:
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            loss = _loss(y, x @ weights[0] + weights[1])
        gradients = context.all_reduce("sum", tape.gradient(loss, weights))
        gradients, norm = tf.clip_by_global_norm(gradients, 0.2)
        context.merge_call(update, args=(gradients,))
        return context.all_reduce("sum", loss), norm

    step = tf.function(lambda inputs: strategy.run(replica_step, args=inputs))
    out = []
    for _ in range(5):
        for inputs in strategy.experimental_distribute_dataset(_data()):
            out.append([local(strategy, part) for part in step(inputs)])
    return {"out": out, "weights": arrays(weights), "slots": arrays(slots)}


@program(whole="sum")
def accumulated_steps(strategy: tf.distribute.Strategy) -> Any:
    """Gradients summed over three steps in local variables, then applied."""
    model, optimizer = _made(strategy)
    with strategy.scope():
        sums = [
            tf.Variable(
                tf.zeros(weight.shape),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
            for weight in model.trainable_variables
        ]

    def add(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = _loss(y, model(x, training=True))
        for total, gradient in zip(sums, tape.gradient(loss, model.trainable_variables), strict=True):
            total.assign_add(gradient)

    def apply() -> None:
        optimizer.apply_gradients(zip([total + 0.0 for total in sums], model.trainable_variables, strict=True))
        for total in sums:
            total.assign(tf.zeros(total.shape))

    add_step = tf.function(lambda inputs: strategy.run(add, args=inputs))
    apply_step = tf.function(lambda: strategy.run(apply))
    seen = []
    for _ in range(3):
        for inputs in strategy.experimental_distribute_dataset(_data().repeat(2).take(3)):
            add_step(inputs)
        seen.append(arrays([total.numpy() for total in sums]))
        apply_step()
    return {"sums": seen, "weights": by_path(model.variables), "own": per_replica(strategy, sums)}


# --- Layers and optimizers --------------------------------------------------------------------------------------------
@program(replicas=(2, 4), whole="sum")
def loop_synchronized_batch_norm(strategy: tf.distribute.Strategy) -> Any:
    def build() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, use_bias=False),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dense(4),
            ]
        )

    return classify(strategy, build, lambda: keras.optimizers.SGD(0.1), _data())


@program(replicas=(2,), why_not_whole=OWN_DRAWS)
def loop_attention(strategy: tf.distribute.Strategy) -> Any:
    def build() -> keras.Model:
        inputs = keras.Input((5, 8))
        x = keras.layers.MultiHeadAttention(2, 4, dropout=0.2, seed=4, use_bias=False)(inputs, inputs)
        x = keras.layers.LayerNormalization()(x + inputs)
        x = keras.layers.GRU(6, dropout=0.1, seed=5)(x)
        return keras.Model(inputs, keras.layers.Dense(4)(x))

    return classify(strategy, build, lambda: keras.optimizers.SGD(0.1), _data(5, 8))


@program(
    replicas=(2, 4),
    tolerance=3e-6,
    why="betas that stay a thousand times smaller than what they are a sum of",
    why_not_whole=OWN_STATISTICS,
)
def loop_convolution_with_batch_norm(strategy: tf.distribute.Strategy) -> Any:
    def build() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((8, 8, 3)),
                keras.layers.SeparableConv2D(4, 3, use_bias=False, padding="same"),
                keras.layers.BatchNormalization(),
                keras.layers.ReLU(),
                keras.layers.SpatialDropout2D(0.2, seed=1),
                keras.layers.Conv2DTranspose(3, 3, strides=2, use_bias=False),
                keras.layers.BatchNormalization(),
                keras.layers.GlobalAveragePooling2D(),
                keras.layers.Dense(4),
            ]
        )

    return classify(strategy, build, lambda: keras.optimizers.SGD(0.05), _data(8, 8, 3))


@program(replicas=(2,), why_not_whole="it adds a penalty that is a mean over rows to a loss that is a sum")
def loop_regularizers_and_constraints(strategy: tf.distribute.Strategy) -> Any:
    """Regularization losses added in the replica function, constraints, a schedule, global norm clipping."""
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l1", kernel_constraint="max_norm"),
                keras.layers.Dense(4, kernel_constraint="non_neg"),
            ]
        )
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.8)
        optimizer = keras.optimizers.SGD(schedule, momentum=0.9, global_clipnorm=0.3)
        optimizer.build(model.trainable_variables)

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = _loss(y, model(x, training=True))
            loss += tf.add_n(model.losses) / tf.distribute.get_strategy().num_replicas_in_sync
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss, tf.convert_to_tensor(optimizer.learning_rate)

    step = tf.function(lambda inputs: strategy.run(replica_step, args=inputs))
    out = []
    for _ in range(5):
        for inputs in strategy.experimental_distribute_dataset(_data()):
            out.append([local(strategy, part) for part in step(inputs)])
    return {"out": out, "weights": by_path(model.variables), "optimizer": by_path(optimizer.variables)}


def _optimizer_program(name: str, make: Any) -> None:
    def run(strategy: tf.distribute.Strategy) -> Any:
        return classify(strategy, mlp, make, _data())

    run.__name__ = f"loop_{name}"
    program(replicas=(2,), eager=(), whole="sum", whole_tolerance=TOLERANCE_LATER)(run)


for _name, _make in {
    "adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "adam_amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "ftrl": lambda: keras.optimizers.Ftrl(0.05, l2_regularization_strength=0.01),
    "lion": lambda: keras.optimizers.Lion(0.001),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
}.items():
    _optimizer_program(_name, _make)


@program(eager=(), why_not_whole="its results are of unknown rank, so nobody knows whether they have rows")
def host_functions(strategy: tf.distribute.Strategy) -> Any:
    """numpy_function, lookup tables, strings and assertions in the replica function."""
    with strategy.scope():
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([1, 2], tf.int64)), default_value=-1
        )

    def replica_step(x: Any, words: Any) -> Any:
        tf.debugging.assert_all_finite(x, "not finite")
        with tf.control_dependencies([tf.debugging.assert_greater(tf.shape(words)[0], 0)]):
            found = table.lookup(words)
        doubled = tf.numpy_function(lambda v: v * 2, [x], tf.float32)
        return found, doubled, tf.strings.join([words, words]), tf.py_function(lambda v: v + 1, [x], tf.float32)

    words = np.array(["a", "b", "c"] * (BATCH // 3))
    step = tf.function(lambda inputs: strategy.run(replica_step, args=inputs))
    out = []
    for inputs in strategy.experimental_distribute_dataset(batches(rows(BATCH, 2), words)):
        out.append([local(strategy, part) for part in step(inputs)])
    return out


@program(core=True, why_not_whole=UNDECLARED_SUMS)
def local_state_across_collectives(strategy: tf.distribute.Strategy) -> Any:
    """Replica state written and read on both sides of collectives, carries, and random draws after them.

    The numbers are such that float64 holds them exactly, in whatever order they are added.
    """
    with strategy.scope():
        zero = tf.constant(0.0, tf.float64)
        counter = tf.Variable(zero, trainable=False)
        total = tf.Variable(
            zero, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )
        shared = tf.Variable(zero + 1.0, trainable=False, aggregation=tf.VariableAggregation.SUM)
        seeds = keras.random.SeedGenerator(3)

    def replica_step(x: Any) -> Any:
        context = tf.distribute.get_replica_context()
        seen = [shared + 0.0]
        mask = keras.random.uniform((2,), seed=seeds)
        counter.assign_add(tf.reduce_sum(x))
        first = context.all_reduce("sum", counter + shared)
        seen += [counter + 0.0, first]
        counter.assign(counter * 0.5 + first)
        total.assign_add(counter * tf.reduce_max(x))
        shared.assign(total * 0.25)
        second = context.all_reduce("sum", total + shared)
        mask += keras.random.uniform((2,), seed=seeds)
        counter.assign_sub(second)
        shared.assign_add(zero + 1.0)
        shared.assign_add(counter + 0.0)
        return [*seen, second, counter + 0.0, total + 0.0, shared + 0.0, mask, x * second]

    step = tf.function(lambda x: strategy.run(replica_step, args=(x,)))
    out = []
    for x in strategy.experimental_distribute_dataset(batches(rows(3 * BATCH, 2).round().astype("float64"))):
        out.append([local(strategy, part) for part in step(x)])
    own = per_replica(strategy, [counter, total, shared])
    return {"out": out, "own": own, "cross": [counter.numpy(), total.numpy(), shared.numpy()]}


@program(why_not_whole="it returns and counts what each replica has seen")
def local_state_beside_a_shared_counter(strategy: tf.distribute.Strategy) -> Any:
    """A loop counts alike in all replicas, and keeps a maximum of each, which makes the whole loop vary."""
    with strategy.scope():
        count = tf.Variable(0, trainable=False)
        largest = tf.Variable(-9.0, trainable=False)
        total = tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.SUM)

    def replica_step(x: Any) -> Any:
        for index in tf.range(tf.shape(x)[0]):
            count.assign_add(1)
            if x[index] > largest:
                largest.assign(x[index])
        everywhere = tf.distribute.get_replica_context().all_reduce("sum", tf.reduce_sum(x))
        total.assign_add(tf.reduce_sum(x))
        if everywhere > 0.0:
            count.assign(count * 2)
        return count + 0, largest + 0.0, total + 0.0

    step = tf.function(lambda x: strategy.run(replica_step, args=(x,)))
    data = strategy.experimental_distribute_dataset(batches(rows(BATCH), batch=8))
    out = [[local(strategy, part) for part in step(x)] for x in data]
    return {"out": out, "cross": [count.numpy(), largest.numpy(), total.numpy()]}


@program(why_not_whole="it writes state in a branch and a loop, which one write cannot do for all micro-batches")
def local_state_in_control_flow(strategy: tf.distribute.Strategy) -> Any:
    """Replica state written inside tf.while_loop and tf.cond, uniform and varying."""
    with strategy.scope():
        counter = tf.Variable(0.0, trainable=False)
        metric = keras.metrics.Mean()
        switch = tf.Variable(1.0, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

    def replica_step(x: Any) -> Any:
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        for i in tf.range(number + 2):
            counter.assign_add(tf.cast(i, tf.float32))
            metric.update_state(x * tf.cast(i, tf.float32))
        if switch > 0.5:
            counter.assign(counter * 2.0)
        if number > 0:
            counter.assign_add(100.0)
        return counter + 0.0, metric.count + 0.0

    step = tf.function(lambda x: strategy.run(replica_step, args=(x,)))
    out = []
    for x in strategy.experimental_distribute_dataset(batches(rows(3 * BATCH, 2))):
        out.append([local(strategy, part) for part in step(x)])
        switch.assign(1.0 - switch)
    return {"out": out, "own": per_replica(strategy, [counter]), "metric": np.asarray(metric.result())}


@program(replicas=(2,), eager=(), why="run eagerly, it is not compiled, and rounds differently", whole="sum")
def nested_compiled_function(strategy: tf.distribute.Strategy) -> Any:
    """XLA inside the replica function."""
    return _train_by_nested_function(strategy, jit_compile=True)


@program(
    replicas=(2,), eager=(2,), core=True, why_not_whole="whole batches write summaries by other rules, see test_whole"
)
def summaries(strategy: tf.distribute.Strategy) -> Any:
    """Replica 0 writes them, once; also under conditions, and with a step that is a variable."""
    with tempfile.TemporaryDirectory() as directory:
        writer = tf.summary.create_file_writer(directory)
        with strategy.scope():
            count = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

        def replica_step(x: Any) -> None:
            tf.summary.scalar("mean", tf.reduce_mean(x), step=count)
            tf.summary.scalar("constant", 3.0, step=count)
            with tf.summary.record_if(lambda: tf.equal(count % 2, 0)):
                tf.summary.histogram("even", x, buckets=3, step=count)
            total = tf.distribute.get_replica_context().all_reduce("sum", tf.reduce_sum(x))
            tf.summary.scalar("total", total, step=count)

        @tf.function
        def step(x: Any) -> None:
            with writer.as_default():
                strategy.run(replica_step, args=(x,))

        for x in strategy.experimental_distribute_dataset(batches(rows(3 * BATCH, 2))):
            step(x)
            count.assign_add(1)
        writer.close()
        (path,) = pathlib.Path(directory).iterdir()
        events = [event for event in tf.compat.v1.train.summary_iterator(str(path)) if event.summary.value]
        values = [
            (value.tag, event.step, tf.make_ndarray(value.tensor)) for event in events for value in event.summary.value
        ]
        return sorted(values, key=lambda value: value[:2])


@program(why_not_whole=OWN_DRAWS)
def generators_in_control_flow(strategy: tf.distribute.Strategy) -> Any:
    """Each replica's generator goes on where it was: in a loop, in a branch that not all take, by sizes that differ."""
    with strategy.scope():
        generator = tf.random.Generator.from_seed(5)

    def replica_step() -> Any:
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        drawn = tf.cast(number, tf.float32)
        for _ in tf.range(3):
            drawn += generator.normal([])
        if number % 2 == 1:
            drawn += generator.uniform([])
        return drawn, tf.reduce_sum(generator.normal([300 * (number + 1)])), generator.normal([2])

    step = tf.function(lambda: strategy.run(replica_step))
    return [[local(strategy, value) for value in step()] for _ in range(2)]


@program(replicas=(2,), eager=(2,), why_not_whole=OWN_DRAWS)
def random_sources(strategy: tf.distribute.Strategy) -> Any:
    """Generators made in scope, restored and outside of it; stateless draws; Keras' seeds and layers of noise."""
    outside = tf.random.Generator.from_seed(5)
    with strategy.scope():
        inside = tf.random.Generator.from_seed(5)
        reset = tf.random.Generator.from_non_deterministic_state()
        reset.reset_from_seed(4)
        seeds, noise = keras.random.SeedGenerator(3), keras.layers.GaussianNoise(0.5, seed=4)

    def replica_step(x: Any) -> Any:
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        seed = tf.random.experimental.stateless_fold_in([1, 2], number)
        generators = [outside.normal([2]), inside.uniform([2]), inside.binomial([2], 3.0, 0.5), reset.make_seeds(2)]
        stateless = [tf.random.stateless_normal([3], seed), tf.random.experimental.stateless_shuffle(tf.range(9), seed)]
        return [*generators, *stateless, keras.random.normal((2,), seed=seeds), noise(x, training=True)]

    step = tf.function(lambda x: strategy.run(replica_step, args=(x,)))
    (x,) = strategy.experimental_distribute_dataset(batches(rows(BATCH, 2)))
    with tempfile.TemporaryDirectory() as directory:
        path = tf.train.Checkpoint(inside=inside).write(f"{directory}/generator")
        out = [[local(strategy, value) for value in step(x)] for _ in range(2)]
        with strategy.scope():
            tf.train.Checkpoint(inside=inside).read(path)
        out.append([local(strategy, value) for value in step(x)])
    return {"out": out, "outside": outside.state.numpy(), "seeds": np.asarray(seeds.state)}
