"""tf.Variables of every synchronization and aggregation, written and read in every context."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.programs._registry import ALL, UNDECLARED_SUMS, arrays, batches, local, per_replica, program, rows

METHODS = ("assign", "assign_add", "assign_sub")
AGGREGATIONS = {
    "sum": tf.VariableAggregation.SUM,
    "mean": tf.VariableAggregation.MEAN,
    "first": tf.VariableAggregation.ONLY_FIRST_REPLICA,
    "none": tf.VariableAggregation.NONE,
}
ON_READ = tf.VariableSynchronization.ON_READ


def _make(
    strategy: tf.distribute.Strategy, names: Any, dtype: Any = tf.float32, **options: Any
) -> dict[str, tf.Variable]:
    with strategy.scope():
        return {
            f"{name}-{method}": tf.Variable(
                tf.constant([1, 5], dtype), aggregation=AGGREGATIONS[name], trainable=False, **options
            )
            for name in names
            for method in METHODS
        }


def _replica_number(dtype: Any = tf.float32) -> tf.Tensor:
    return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, dtype)


def _write_in_replicas(strategy: tf.distribute.Strategy, variables: dict[str, tf.Variable], steps: int = 3) -> Any:
    """Each replica writes another value; returns what it reads before and after."""

    def replica_step(step: tf.Tensor) -> Any:
        seen = {}
        for name, variable in variables.items():
            value = tf.stack([1, 2 + 3 * _replica_number(variable.dtype)]) * tf.cast(step, variable.dtype)
            before = tf.identity(variable)
            getattr(variable, name.split("-")[1])(value)
            seen[name] = (before, tf.identity(variable))
        return seen

    @tf.function
    def step(number: tf.Tensor) -> Any:
        return strategy.run(replica_step, args=(number,))

    seen = [step(tf.constant(number + 1.0)) for number in range(steps)]
    return [tf.nest.map_structure(functools.partial(local, strategy), entry) for entry in seen]


def _cross(variables: dict[str, tf.Variable]) -> dict[str, np.ndarray]:
    return {name: variable.numpy() for name, variable in variables.items()}


@program(replicas=ALL, core=True, whole="mean")
def variables_on_write(strategy: tf.distribute.Strategy) -> Any:
    variables = _make(strategy, ("sum", "mean", "first"))
    seen = _write_in_replicas(strategy, variables)
    return {"seen": seen, "after": _cross(variables), "own": per_replica(strategy, list(variables.values()))}


@program(whole="mean")
def variables_on_write_integer(strategy: tf.distribute.Strategy) -> Any:
    variables = _make(strategy, ("sum", "first"), tf.int64)
    return {"seen": _write_in_replicas(strategy, variables), "after": _cross(variables)}


@program(replicas=ALL, core=True, whole="mean")
def variables_none(strategy: tf.distribute.Strategy) -> Any:
    """Non-trainable, aggregation NONE: every replica keeps what it wrote; others see replica 0's."""
    variables = _make(strategy, ("none",))
    seen = _write_in_replicas(strategy, variables)
    after, own = _cross(variables), per_replica(strategy, list(variables.values()))
    for name, variable in variables.items():
        getattr(variable, name.split("-")[1])([10.0, 20.0])
    return {
        "seen": seen,
        "after": after,
        "own": own,
        "cross-replica writes": _cross(variables),
        "own after them": per_replica(strategy, list(variables.values())),
        "again": _write_in_replicas(strategy, variables),
    }


@program(replicas=ALL, core=True, whole="mean")
def variables_on_read(strategy: tf.distribute.Strategy) -> Any:
    variables = _make(strategy, ("sum", "mean", "first", "none"), synchronization=ON_READ)
    seen = _write_in_replicas(strategy, variables)
    readable = {name: variable for name, variable in variables.items() if not name.startswith("none")}
    return {
        "seen": seen,
        "own": per_replica(strategy, list(variables.values())),
        "after": _cross(readable),
        "local": [local(strategy, variable) for variable in variables.values()],
    }


@program(whole="mean")
def variables_on_read_cross_replica(strategy: tf.distribute.Strategy) -> Any:
    """Assigned in cross-replica context: eagerly, and in a tf.function."""
    out = []
    for wrap in (lambda function: function, tf.function):
        variables = _make(strategy, ("sum", "mean", "first"), synchronization=ON_READ)

        def write(variables: dict[str, tf.Variable] = variables) -> None:
            with strategy.scope():
                for name, variable in variables.items():
                    # What many ways could do to a sum is not defined.
                    method = "assign" if name.startswith("sum") else name.split("-")[1]
                    getattr(variable, method)(tf.constant([8.0, 3.0]))

        wrap(write)()
        out.append([_cross(variables), per_replica(strategy, list(variables.values()))])
        _write_in_replicas(strategy, variables, 1)
        wrap(write)()
        out.append([_cross(variables), per_replica(strategy, list(variables.values()))])
    return out


@program(whole="mean")
def variables_on_read_integer(strategy: tf.distribute.Strategy) -> Any:
    variables = _make(strategy, ("sum", "first"), tf.int64, synchronization=ON_READ)
    return {
        "seen": _write_in_replicas(strategy, variables),
        "after": _cross(variables),
        "own": per_replica(strategy, list(variables.values())),
    }


@program(whole="mean")
def variables_read_in_function(strategy: tf.distribute.Strategy) -> Any:
    """Cross-replica reads inside the tf.function that also writes them in replicas."""
    variables = {
        **_make(strategy, ("sum", "mean", "first"), synchronization=ON_READ),
        **{f"none-{key}": value for key, value in enumerate(_make(strategy, ("none",)).values())},
    }

    def replica_step() -> None:
        for variable in variables.values():
            variable.assign_add(tf.stack([1.0, 1.0 + _replica_number()]))

    @tf.function
    def step() -> Any:
        before = {name: tf.identity(variable) for name, variable in variables.items()}
        strategy.run(replica_step)
        return before, {name: tf.identity(variable) for name, variable in variables.items()}

    return arrays([step() for _ in range(3)])


@program(whole="mean")
def variables_updated_between_runs(strategy: tf.distribute.Strategy) -> Any:
    """extended.update, outside replica functions, of what each replica has for itself; and a read after it."""
    with strategy.scope():
        own = tf.Variable([1.0, 2.0], trainable=False)

    def update() -> Any:
        with strategy.scope():
            strategy.extended.update(own, lambda v, x: v.assign_add(x), args=(tf.constant([10.0, 20.0]),))
            return own + 0.0

    run = tf.function(lambda: strategy.run(lambda: own.assign_add([1.0, _replica_number()]) + 0.0))
    first = local(strategy, run())
    seen = [update(), own.numpy(), tf.function(update)(), own.numpy()]
    return {"first": first, "seen": arrays(seen), "own": per_replica(strategy, [own]), "last": local(strategy, run())}


@program(whole="mean")
def variables_updated_in_functions_traced_before(strategy: tf.distribute.Strategy) -> Any:
    """What a function does to the components of a variable that only later differs between replicas."""
    with strategy.scope():
        own = tf.Variable([1.0, 2.0], trainable=False)
    update = tf.function(lambda: strategy.extended.update(own, lambda component: component.assign_add([10.0, 20.0])))
    write = tf.function(lambda: [part.assign([5.0, 6.0]) for part in strategy.experimental_local_results(own)])
    run = tf.function(lambda: strategy.run(lambda: own.assign_add([1.0, _replica_number()]) + 0.0))
    seen = []
    for change in (update, write, update, update, write):
        change()
        seen += [local(strategy, run()), per_replica(strategy, [own]), own.numpy()]
    return arrays(seen)


@program(whole="mean")
def variables_python_values(strategy: tf.distribute.Strategy) -> Any:
    """Assigned values may be Python numbers and lists, and NumPy and Python take the variables for numbers."""
    with strategy.scope():
        mean = tf.Variable([0.0, 0.0], aggregation=tf.VariableAggregation.MEAN, trainable=False)
        none = tf.Variable(0, trainable=False)
        local_sum = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM, synchronization=ON_READ)

    def replica_step() -> None:
        mean.assign_add([1.0, 2.0])
        none.assign_add(2)
        local_sum.assign_add(1)

    step = tf.function(lambda: strategy.run(replica_step))
    for _ in range(3):
        step()
    taken = [np.asarray(none), np.array(none, np.float64), np.asarray(mean, np.float64)]
    own = per_replica(strategy, [mean, none, local_sum])
    return arrays([mean.numpy(), none.numpy(), local_sum.numpy(), own, taken])


@program(whole="mean")
def variables_overloads(strategy: tf.distribute.Strategy) -> Any:
    """Variables as tensors: operators, slices, gathers, conversions, in both contexts."""
    with strategy.scope():
        mirrored = tf.Variable([[1.0, 2.0], [3.0, 4.0]], name="mirrored")
        counter = tf.Variable([[0.0, 1.0]], trainable=False, name="counter")
        total = tf.Variable([[1.0, 1.0]], synchronization=ON_READ, aggregation=tf.VariableAggregation.SUM, name="total")

    def replica_step() -> Any:
        counter.assign_add([[1.0, _replica_number()]])
        total.assign_add(counter * 2)
        return [
            [
                v + 1,
                2 * v,
                v @ [[1.0], [2.0]],
                v[0],
                v[..., 1:],
                -v,
                v.value(),
                tf.gather(v, [0]),
                tf.reduce_max(v),
                v > 1.5,
            ]
            for v in (mirrored, counter, total)
        ]

    result = tf.function(lambda: strategy.run(replica_step))()
    own = tf.nest.map_structure(functools.partial(local, strategy), result)
    with strategy.scope():
        cross = arrays([[v + 1, 2 * v, v @ [[1.0], [2.0]], v[0], -v] for v in (mirrored, counter, total)])
    facts = [[v.name, v.dtype.name, v.shape.as_list(), bool(v.trainable)] for v in (mirrored, counter, total)]
    return {"own": own, "cross": cross, "facts": facts}


@program(whole="mean")
def variables_scatter(strategy: tf.distribute.Strategy) -> Any:
    """Sparse updates of a mirrored variable."""
    with strategy.scope():
        table = tf.Variable(rows(5, 2), aggregation=tf.VariableAggregation.MEAN)

    def replica_step() -> None:
        indices = tf.stack([0, tf.distribute.get_replica_context().replica_id_in_sync_group % 5])
        table.scatter_add(tf.IndexedSlices(tf.ones([2, 2]), indices, tf.constant([5, 2])))

    step = tf.function(lambda: strategy.run(replica_step))
    for _ in range(2):
        step()
    return table.numpy()


@program(why_not_whole="its queue holds rows of replicas")
def variables_assigned_in_slices(strategy: tf.distribute.Strategy) -> Any:
    """A queue of keys and other slices, assigned alike and not, here, in branches, loops and nested functions."""
    with strategy.scope():
        queue = tf.Variable(rows(8, 2), trainable=False)
        place = tf.Variable(0, trainable=False)
        own = tf.Variable(tf.zeros([4, 2]), trainable=False)
        alike = tf.Variable(tf.zeros([4]), aggregation=tf.VariableAggregation.MEAN, trainable=False)
        weight = tf.Variable(tf.ones([4]))
        total = tf.Variable(tf.zeros([3]), synchronization=ON_READ, aggregation=tf.VariableAggregation.SUM)

    @tf.function
    def nested(x: Any) -> tf.Tensor:
        own[0].assign([x, x])
        alike[1:].assign([1.0, 2.0, 3.0])
        weight[0].assign(weight[0] * 2.0)
        return own[0, 0] + alike[1] + tf.reduce_sum(weight[weight > 1.0])

    def replica_step() -> Any:
        number = _replica_number()
        keys = tf.distribute.get_replica_context().all_gather(tf.fill([1, 2], number), axis=0)
        first, length = place + 0, tf.shape(keys)[0]
        queue[first : first + length].assign(keys)
        place.assign((place + length) % 6)
        total[1].assign(total[1] + number)
        result = nested(number + 1.0)
        own[..., 1].assign(tf.fill([4], number))
        tf.cond(number > 0.0, lambda: own[3, 0].assign(9.0), lambda: own[3, 0].assign(8.0))
        for index in tf.range(2):
            own[index, 0].assign(own[index, 0] + number + 1.0)
        return result, own.read_value(), weight[tf.newaxis], total[::2]

    step = tf.function(lambda: strategy.run(replica_step))
    seen = [tf.nest.map_structure(functools.partial(local, strategy), step()) for _ in range(3)]
    return seen, arrays([v.numpy() for v in (queue, place, own, alike, weight, total)])


@program(whole="mean")
def variables_of_changing_shape(strategy: tf.distribute.Strategy) -> Any:
    with strategy.scope():
        list_of_rows = tf.Variable(tf.zeros([0, 2]), shape=[None, 2], trainable=False)

    def replica_step() -> tf.Tensor:
        list_of_rows.assign(tf.concat([list_of_rows, [[1.0, 2.0]]], axis=0))
        return tf.shape(list_of_rows)[0]

    step = tf.function(lambda: strategy.run(replica_step))
    return [local(strategy, step()) for _ in range(3)], list_of_rows.numpy()


@program(why_not_whole=UNDECLARED_SUMS)
def variables_keras_layer_state(strategy: tf.distribute.Strategy) -> Any:
    """A layer with a counter and a random seed of its own, and a SeedGenerator used directly."""

    class Counting(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.seeds = keras.random.SeedGenerator(5)
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

        def call(self, x: Any) -> Any:
            self.count.assign_add(tf.reduce_sum(x))
            return x + keras.random.normal((3,), seed=self.seeds)

    with strategy.scope():
        layer = Counting()
    data = strategy.experimental_distribute_dataset(batches(rows(72, 3)))
    step = tf.function(lambda x: strategy.run(layer, args=(x,)))
    out = [local(strategy, step(x)) for x in data]
    return {
        "out": out,
        "count": np.asarray(layer.count),
        "own": per_replica(strategy, layer.variables),
        "seed": np.asarray(layer.seeds.state),
    }


@program(replicas=ALL, core=True, whole="mean", one_device=True)
def random_generator(strategy: tf.distribute.Strategy) -> Any:
    """A tf.random.Generator made in scope has a stream per replica."""
    with strategy.scope():
        generator = tf.random.Generator.from_seed(11)
    step = tf.function(lambda: strategy.run(lambda: generator.normal([3])))
    return [local(strategy, step()) for _ in range(3)]


@program(why_not_whole="it counts replicas")
def variables_of_nobody_in_merge_functions(strategy: tf.distribute.Strategy) -> Any:
    """Made outside of the scope, one for all: replicas add to it; a merge function sees what all have added, once."""
    outside = tf.Variable(1.0)

    def merge(cross: Any, factor: float) -> Any:
        del cross
        outside.assign(outside * factor)
        return outside + 0.0

    def replica_step() -> Any:
        outside.assign_add(1.0 + tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32))
        seen = tf.distribute.get_replica_context().merge_call(merge, args=(2.0,))
        outside.assign_add(seen)
        return seen, tf.distribute.get_replica_context().merge_call(merge, args=(0.5,))

    step = tf.function(lambda: strategy.run(replica_step))
    return {"seen": [[local(strategy, part) for part in step()] for _ in range(2)], "left": outside.numpy()}


@program(why_not_whole="the tensor of two entries that it gives to run is no batch")
def variables_made_in_the_replica_function(strategy: tf.distribute.Strategy) -> Any:
    """Made in the first trace, under tf.function."""
    made: list[tf.Variable] = []

    def replica_step(x: Any) -> Any:
        if not made:
            with tf.init_scope():
                pass
            made.append(tf.Variable([1.0, 2.0], aggregation=tf.VariableAggregation.MEAN))
        made[0].assign_add(x)
        return made[0] + 0.0

    # Stock MirroredStrategy runs `replica_step` once per replica: each has to make its own component.
    if isinstance(strategy, tf.distribute.MirroredStrategy):
        with strategy.scope():
            made.append(tf.Variable([1.0, 2.0], aggregation=tf.VariableAggregation.MEAN))
    step = tf.function(lambda x: strategy.run(replica_step, args=(x,)))
    return [local(strategy, step(tf.constant([1.0, 3.0]))) for _ in range(3)]


@program(core=True, whole="mean")
def variables_trainable_written_alike(strategy: tf.distribute.Strategy) -> Any:
    """Weights (trainable, aggregation NONE) to which every replica writes the same, as decay by hand does."""
    with strategy.scope():
        plain = tf.Variable([1.0, 2.0])
        layer = keras.layers.Dense(2, use_bias=False)
        layer.build((None, 2))

    def replica_step() -> Any:
        plain.assign(plain * 0.9)
        plain.assign_add([1.0, 2.0])
        layer.kernel.assign(layer.kernel * 0.5)
        return plain + 0.0, tf.convert_to_tensor(layer.kernel) * 1.0

    step = tf.function(lambda: strategy.run(replica_step))
    out = [[local(strategy, part) for part in step()] for _ in range(3)]
    return {"out": out, "plain": plain.numpy(), "kernel": np.asarray(layer.kernel)}


_SCATTERS = ("scatter_add", "scatter_sub", "scatter_mul", "scatter_div", "scatter_update", "scatter_min", "scatter_max")


def _matrix(
    strategy: tf.distribute.Strategy, *, trainable: bool
) -> dict[str, tuple[tf.Variable, list[str], list[str]]]:
    """Variables of every kind: (variable, methods for replica context, methods for updates)."""
    made: dict[str, tuple[tf.Variable, list[str], list[str]]] = {}
    for synchronization, aggregation, dtype in itertools.product(
        ("AUTO", "ON_WRITE", "ON_READ"), ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"), (tf.float32, tf.int32)
    ):
        if aggregation == "MEAN" and dtype == tf.int32:
            continue  # both refuse it
        with strategy.scope():
            variable = tf.Variable(
                [1, 2, 3],
                dtype=dtype,
                trainable=trainable,
                synchronization=getattr(tf.VariableSynchronization, synchronization),
                aggregation=getattr(tf.VariableAggregation, aggregation),
            )
        methods = ["assign", "assign_add", "assign_sub"]
        in_replicas = list(methods)
        if synchronization != "ON_READ":
            # Slices are not always aggregated.
            in_replicas += _SCATTERS[:2] if aggregation in ("SUM", "MEAN") else _SCATTERS
        made[f"{synchronization} {aggregation} {dtype.name}"] = (variable, in_replicas, [*methods, *_SCATTERS])
    return made


def _write(variable: tf.Variable, method: str, value: tf.Tensor) -> None:
    value = tf.cast(value, variable.dtype) * tf.constant([1, 2, 3], variable.dtype)
    if method.startswith("scatter"):
        getattr(variable, method)(tf.IndexedSlices(tf.stack([value[0], value[2]]), tf.constant([1, 1])))
    else:
        getattr(variable, method)(value)


def _values_of(strategy: tf.distribute.Strategy, made: Any) -> Any:
    """Each variable's values in replicas, and its components'."""
    variables = {name: variable for name, (variable, *_) in made.items()}
    read = tf.function(lambda: strategy.run(lambda: {name: v.read_value() for name, v in variables.items()}))
    in_replicas = strategy.experimental_local_results(read())
    components = {name: strategy.experimental_local_results(v) for name, v in variables.items()}
    return in_replicas, {name: [np.asarray(one) for one in parts] for name, parts in components.items()}


@program(replicas=(2,), why_not_whole=UNDECLARED_SUMS)
def variables_matrix(strategy: tf.distribute.Strategy) -> Any:
    """Every kind of variable, written in every way, in replica and in update context."""
    results = []
    for trainable, differ in ((False, True), (True, False)):
        made = _matrix(strategy, trainable=trainable)

        def replica_step(made: Any = made, differ: bool = differ) -> None:
            own = tf.distribute.get_replica_context().replica_id_in_sync_group if differ else tf.constant(1)
            for variable, methods, _ in made.values():
                for method in methods:
                    _write(variable, method, own + 1)

        step = tf.function(lambda replica_step=replica_step: strategy.run(replica_step))
        step()
        results.append(_values_of(strategy, made))

        def update(made: Any = made) -> None:
            for variable, _, methods in made.values():
                for method in methods:
                    strategy.extended.update(variable, _write, args=(method, tf.constant(3)), group=True)

        tf.function(update)()
        results.append(_values_of(strategy, made))
    return arrays(results)


@program(replicas=(2,), eager=(2,), why_not_whole="what replicas write differs")
def variables_updated_outside_replicas(strategy: tf.distribute.Strategy) -> Any:
    """`extended.update` of variables with a value per replica, as its variable and as its argument; a read in a merge."""
    with strategy.scope():
        shared = tf.Variable(1.0)
        own, equal = tf.Variable(0.0, trainable=False), tf.Variable(0.0, trainable=False)

    def merge(cross: tf.distribute.Strategy, value: Any) -> tf.Tensor:
        total = cross.extended.reduce_to("SUM", value, shared)
        cross.extended.update(shared, lambda variable, x: variable.assign_add(x), args=(total,))
        return tf.identity(own)

    def replica_step() -> Any:
        own.assign(_replica_number() + 1.0)
        equal.assign(3.0)
        return tf.distribute.get_replica_context().merge_call(merge, args=(own * 1.0,))

    @tf.function
    def add() -> None:
        strategy.extended.update(own, lambda variable: variable.assign_add(10.0))

    read = tf.function(lambda: strategy.run(lambda: (own * 1.0, equal * 1.0)))
    seen = [local(strategy, tf.function(lambda: strategy.run(replica_step))())]
    with strategy.scope():
        for change in (
            lambda: strategy.extended.update(own, lambda variable: variable.assign_add(10.0)),
            lambda: strategy.extended.update(shared, lambda variable, x: x.assign(variable - x), args=(equal,)),
            add,
        ):
            change()
            seen += [[own.numpy(), equal.numpy(), shared.numpy()], *[local(strategy, value) for value in read()]]
    return seen
