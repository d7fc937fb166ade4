"""all_reduce, all_gather, merge_call, strategy.reduce and gather, and what run returns."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tests.programs._registry import ALL, BATCH, WHOLE_MORE, arrays, batches, local, per_replica, program, rows


def _id(dtype: Any = tf.float32) -> tf.Tensor:
    return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, dtype)


def _run(strategy: tf.distribute.Strategy, replica_function: Any, *args: Any) -> Any:
    """Runs it in a tf.function, twice; every replica's results."""
    step = tf.function(lambda *args: strategy.run(replica_function, args=args))
    return [tf.nest.map_structure(functools.partial(local, strategy), step(*args)) for _ in range(2)]


@program(replicas=ALL, core=True, whole="mean")
def all_reduce(strategy: tf.distribute.Strategy) -> Any:
    def replica_function() -> Any:
        context = tf.distribute.get_replica_context()
        value = tf.stack([1.0, _id(), _id() ** 2])
        return {
            "sum": context.all_reduce(tf.distribute.ReduceOp.SUM, value),
            "mean": context.all_reduce(tf.distribute.ReduceOp.MEAN, value),
            "strings": [context.all_reduce("sum", value), context.all_reduce("MEAN", value)],
            "structure": context.all_reduce("sum", {"a": value, "b": [value + 1, 2 * value]}),
            "integers": context.all_reduce("sum", _id(tf.int64) + 3),
            "uniform": context.all_reduce("sum", tf.constant([1.0, 2.0])),
            "chained": context.all_reduce("mean", value * context.all_reduce("sum", value)),
        }

    return _run(strategy, replica_function)


@program(whole="mean")
def all_reduce_uniform(strategy: tf.distribute.Strategy) -> Any:
    """Of what all replicas have alike, and of that in turn, beside a batch whose number of rows is not known."""

    def replica_function(x: Any) -> Any:
        context = tf.distribute.get_replica_context()
        total = context.all_reduce("sum", tf.constant([1.0, 2.0]))
        twice = context.all_reduce("sum", total)
        several = context.all_reduce("sum", [twice, twice, tf.constant(3.0)])
        return total, twice, several, context.all_gather(context.all_gather(total, 0), 0), tf.reduce_sum(x)

    return [
        _run(strategy, replica_function, x)
        for x in strategy.experimental_distribute_dataset(batches(rows(BATCH + 12, 2)))
    ]


@program(whole="mean")
def all_reduce_gradients(strategy: tf.distribute.Strategy) -> Any:
    def replica_function() -> Any:
        context = tf.distribute.get_replica_context()
        x = tf.stack([1.0, 1.0 + _id()])
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = context.all_reduce("sum", x * x)
            mean = context.all_reduce("mean", x * 3.0)
            loss = tf.reduce_sum(total * (1.0 + _id())) + tf.reduce_sum(mean * mean)
        return loss, tape.gradient(loss, x)

    return _run(strategy, replica_function)


@program(eager=(), why="tf.gradients is for graphs", whole="mean")
def all_reduce_tf_gradients(strategy: tf.distribute.Strategy) -> Any:
    """No tape records when the all-reduce is made."""

    def replica_function() -> Any:
        context = tf.distribute.get_replica_context()
        x = tf.stack([1.0 + _id(), 2.0])
        (of_sum,) = tf.gradients(context.all_reduce("sum", x**2) * (1.0 + _id()), x)
        (of_mean,) = tf.gradients(context.all_reduce("mean", x) * x, x)
        (of_both,) = tf.gradients(context.all_reduce("sum", [x, 3.0 * x]), x)
        (second,) = tf.gradients(of_sum * x, x)
        return of_sum, of_mean, of_both, second

    return _run(strategy, replica_function)


@program(core=True, whole="mean")
def all_reduce_shared_tensors(strategy: tf.distribute.Strategy) -> Any:
    """A tensor that all replicas have from outside is one value to tf.distribute, and one made inside is N."""
    shared = tf.constant([1.0, 2.0])

    def replica_function() -> Any:
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            tape.watch(shared)
            total = context.all_reduce("sum", shared)
        return {
            "captured": total,
            "gradient": tape.gradient(total, shared),
            "mean": context.all_reduce("mean", shared),
            "copy": context.all_reduce("sum", tf.identity(shared)),
            "again": context.all_reduce("sum", context.all_reduce("sum", shared)),
            "copy, again": context.all_reduce("sum", context.all_reduce("sum", tf.identity(shared))),
            "gathered": context.all_gather(shared, 0),
            "copy, gathered": context.all_gather(tf.identity(shared), 0),
        }

    return _run(strategy, replica_function)


@program(whole="mean")
def all_reduce_slices(strategy: tf.distribute.Strategy) -> Any:
    def replica_function() -> Any:
        indices = tf.stack([0, _id(tf.int32) % 4])
        slices = tf.IndexedSlices(tf.ones([2, 3]) * (1.0 + _id()), indices, tf.constant([4, 3]))
        context = tf.distribute.get_replica_context()
        return [tf.convert_to_tensor(context.all_reduce(kind, slices)) for kind in ("sum", "mean")]

    return _run(strategy, replica_function)


@program(core=True, whole="mean")
def merge_call(strategy: tf.distribute.Strategy) -> Any:
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0])

    def merge(cross: tf.distribute.Strategy, value: Any, pair: Any, *, scale: float) -> Any:
        assert tf.distribute.in_cross_replica_context()
        total = cross.extended.reduce_to("SUM", value, variable)
        both = cross.extended.batch_reduce_to("MEAN", [(pair[0], variable), (pair[1], variable)])
        cross.extended.update(variable, lambda v, t: v.assign_add(scale * t), args=(total,))
        return total, both

    def replica_function() -> Any:
        context = tf.distribute.get_replica_context()
        value = tf.stack([1.0, _id()])
        before = variable + 0.0
        total, both = context.merge_call(merge, args=(value, (value + 1, value * 2)), kwargs={"scale": 0.5})
        nothing = context.merge_call(lambda cross: None)
        assert nothing is None
        return before, total, both, variable * _id()

    return {"out": _run(strategy, replica_function), "variable": variable.numpy()}


@program(whole="mean")
def merge_call_passes_values_on(strategy: tf.distribute.Strategy) -> Any:
    """What goes in per replica comes back per replica."""

    def replica_function() -> Any:
        context = tf.distribute.get_replica_context()
        mine, constant = context.merge_call(lambda cross, value: (value, 3.0), args=(_id() + 1,))
        return mine * 2, constant + _id()

    return _run(strategy, replica_function)


@program(eager=(), why="the eager engine's values are all for themselves", whole="mean")
def merge_call_hands_out_one_value(strategy: tf.distribute.Strategy) -> Any:
    """One tensor for all replicas is no value of each of them; what was reduced is."""

    def replica_function() -> Any:
        context = tf.distribute.get_replica_context()
        one = context.merge_call(lambda _: tf.constant(5.0))
        each = context.merge_call(lambda cross, value: cross.extended.reduce_to("SUM", value, value), args=(_id(),))
        return one, each, one + each

    @tf.function
    def run() -> Any:
        results = strategy.run(replica_function)
        found = [isinstance(result, tf.distribute.DistributedValues) for result in results]
        return [tf.constant(is_distributed and strategy.num_replicas_in_sync > 1) for is_distributed in found], results

    distributed, results = run()
    return [bool(value) for value in distributed], [local(strategy, value) for value in results]


@program(whole="mean")
def merge_call_local_results(strategy: tf.distribute.Strategy) -> Any:
    def merge(cross: tf.distribute.Strategy, value: Any) -> Any:
        parts = cross.experimental_local_results(value)
        return functools.reduce(tf.maximum, parts)

    def replica_function() -> Any:
        return tf.distribute.get_replica_context().merge_call(merge, args=(tf.stack([_id(), -_id()]),))

    return _run(strategy, replica_function)


@program(whole="mean")
def merge_call_reads_what_replicas_wrote(strategy: tf.distribute.Strategy) -> Any:
    """In cross-replica context a variable that each replica has for itself is replica 0's, or aggregated."""
    with strategy.scope():
        own = tf.Variable([1.0, 2.0], trainable=False)
        total = tf.Variable(
            1.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )

    def replica_function() -> Any:
        own.assign_add([1.0, _id() + 1.0])
        total.assign_add(1.0)
        return tf.distribute.get_replica_context().merge_call(lambda cross: (tf.identity(own), own + 0.0, total + 0.0))

    return {"out": _run(strategy, replica_function), "own": own.numpy(), "total": total.numpy()}


@program(whole="mean")
def merge_call_reads_before_replicas_write(strategy: tf.distribute.Strategy) -> Any:
    """All replicas use what was there when they met, also while they write, one after another."""
    with strategy.scope():
        total = tf.Variable(
            0.25, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )

    def replica_function() -> Any:
        seen = tf.distribute.get_replica_context().merge_call(lambda cross: tf.identity(total))
        total.assign_sub(seen)
        return seen, total + 0.0

    return {"out": [_run(strategy, replica_function) for _ in range(2)], "total": total.numpy()}


@program(core=True, why_not_whole="it gathers along another axis than the rows")
def all_gather(strategy: tf.distribute.Strategy) -> Any:
    def replica_function(x: Any) -> Any:
        context = tf.distribute.get_replica_context()
        return [
            context.all_gather(x, axis=0),
            context.all_gather(x, axis=1),
            context.all_gather({"a": x, "b": x + 1}, axis=0),
            context.all_gather(tf.stack([_id(tf.int64)]), axis=0),
        ]

    (x,) = strategy.experimental_distribute_dataset(batches(rows(BATCH, 2)))
    return _run(strategy, replica_function, x)


@program(whole="mean")
def all_gather_uneven(strategy: tf.distribute.Strategy) -> Any:
    def replica_function() -> Any:
        mine = tf.ones([1 + _id(tf.int32), 2]) * _id()
        return tf.distribute.get_replica_context().all_gather(mine, axis=0)

    return _run(strategy, replica_function)


@program(whole="mean")
def all_gather_gradient(strategy: tf.distribute.Strategy) -> Any:
    def replica_function() -> Any:
        x = tf.stack([[1.0, _id()]])
        with tf.GradientTape() as tape:
            tape.watch(x)
            everything = tf.distribute.get_replica_context().all_gather(x, axis=0)
            loss = tf.reduce_sum(everything * everything) * (1.0 + _id())
        return tape.gradient(loss, x)

    return _run(strategy, replica_function)


@program(core=True, why_not_whole="it averages sums over the rows at hand")
def strategy_reduce(strategy: tf.distribute.Strategy) -> Any:
    (x,) = strategy.experimental_distribute_dataset(batches(rows(BATCH, 3)))

    def reduce_all(value: Any) -> Any:
        return {
            "sum": strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None),
            "mean": strategy.reduce(tf.distribute.ReduceOp.MEAN, value, axis=None),
            "sum rows": strategy.reduce("SUM", value, axis=0),
            "mean rows": strategy.reduce("mean", value, axis=0),
            "sum last": strategy.reduce("sum", value, axis=-1),
        }

    doubled = strategy.run(lambda x: 2 * x, args=(x,))

    @tf.function
    def compiled(x: Any) -> Any:
        result = strategy.run(lambda x: {"a": x + 1, "b": (tf.reduce_sum(x), tf.shape(x)[0])}, args=(x,))
        return {
            "rows": reduce_all(result["a"]),
            "structure": strategy.reduce("SUM", result, axis=None),
            "scalars": strategy.reduce("MEAN", result["b"][0], axis=None),
        }

    return arrays({"batch": reduce_all(x), "run": reduce_all(doubled), "compiled": compiled(x)})


@program(replicas=ALL, core=True, whole="mean", micro_batches=WHOLE_MORE)
def strategy_reduce_uneven(strategy: tf.distribute.Strategy) -> Any:
    """Means over rows weigh every row alike, also when replicas have different numbers of rows."""
    out = []
    for x in strategy.experimental_distribute_dataset(batches(rows(BATCH + 13, 3))):
        out.append({kind: strategy.reduce(kind, x, axis=0) for kind in ("SUM", "MEAN")})
        step = tf.function(lambda x: strategy.run(lambda x: x * 2, args=(x,)))
        value = step(x)
        out.append({kind: strategy.reduce(kind, value, axis=0) for kind in ("SUM", "MEAN")})
    return arrays(out)


@program(whole="mean")
def strategy_gather(strategy: tf.distribute.Strategy) -> Any:
    out = []
    for x in strategy.experimental_distribute_dataset(batches(rows(BATCH + 13, 3))):
        step = tf.function(lambda x: strategy.run(lambda x: (x * 2, x[:1]), args=(x,)))
        out.append([strategy.gather(x, axis=0), strategy.gather(step(x)[0], axis=0)])
        out.append([tf.function(lambda x: strategy.gather(strategy.run(lambda x: x + 1, args=(x,)), axis=0))(x)])
    return arrays(out)


@program(core=True, whole="mean")
def run_results(strategy: tf.distribute.Strategy) -> Any:
    """Whatever `run` returns, every replica has a result."""

    def replica_function(x: Any) -> Any:
        return {
            "varying": x + _id(),
            "uniform": tf.constant([1.0, 2.0]),
            "nested": [(_id(), {"deep": tf.constant(True)}), (tf.shape(x)[0],)],
            "string": tf.strings.as_string(_id(tf.int32)),
        }

    (x,) = strategy.experimental_distribute_dataset(batches(rows(BATCH, 2)))
    out = _run(strategy, replica_function, x)
    step = tf.function(lambda: strategy.run(lambda: (None, 3)))
    nothing, number = step()
    assert strategy.experimental_local_results(nothing)[0] is None
    return {"out": out, "number": [int(part) for part in local(strategy, number)]}


@program(whole="mean")
def run_results_go_into_run(strategy: tf.distribute.Strategy) -> Any:
    """Per-replica values from one run are arguments of the next, in one tf.function and across two."""
    first = tf.function(lambda: strategy.run(lambda: {"a": _id() + tf.constant([1.0, 2.0]), "b": tf.constant(1.0)}))
    second = tf.function(lambda value: strategy.run(lambda value: value["a"] * 2 + value["b"], args=(value,)))

    @tf.function
    def both(value: Any) -> Any:
        once = strategy.run(lambda v: v["a"] - 1, args=(value,))
        return strategy.run(lambda v, w: v * w, args=(once,), kwargs={"w": 3.0})

    value = first()
    return [
        local(strategy, second(value)),
        local(strategy, both(value)),
        local(strategy, strategy.run(tf.square, (value["a"],))),
    ]


@program(whole="mean")
def run_arguments(strategy: tf.distribute.Strategy) -> Any:
    """Plain tensors, arrays and numbers reach every replica whole; None stays None."""

    def replica_function(tensor: Any, array: Any, number: Any, nothing: Any, *, named: Any) -> Any:
        assert nothing is None
        return tensor * _id() + number, array + _id(tf.float64), named["x"][0] + 1.0

    @tf.function
    def step(tensor: Any) -> Any:
        array = rows(2).astype("float64")
        return strategy.run(replica_function, args=(tensor, array, 2, None), kwargs={"named": {"x": [tensor]}})

    return tf.nest.map_structure(functools.partial(local, strategy), step(tf.constant([1.0, 2.0])))


@program(whole="mean", one_device=True)
def replica_context_facts(strategy: tf.distribute.Strategy) -> Any:
    seen: dict[str, Any] = {}

    def replica_function() -> Any:
        context = tf.distribute.get_replica_context()
        seen["inside"] = [
            context.num_replicas_in_sync,
            context.strategy is strategy,
            tf.distribute.get_strategy() is strategy,
            tf.distribute.has_strategy(),
            tf.distribute.in_cross_replica_context(),
        ]
        return context.replica_id_in_sync_group

    ids = tf.function(lambda: strategy.run(replica_function))()
    outside = [strategy.num_replicas_in_sync, tf.distribute.has_strategy(), tf.distribute.in_cross_replica_context()]
    with strategy.scope():
        scope = [
            tf.distribute.has_strategy(),
            tf.distribute.in_cross_replica_context(),
            tf.distribute.get_replica_context() is None,
            tf.distribute.get_strategy() is strategy,
        ]
    return {**seen, "outside": outside, "scope": scope, "ids": local(strategy, ids)}


@program(whole="mean", one_device=True)
def extended_methods(strategy: tf.distribute.Strategy) -> Any:
    """The hooks of strategy.extended that libraries call."""
    other = tf.Variable(1.0)
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0])
        near: list[tf.Variable] = []
        with strategy.extended.colocate_vars_with(variable):
            near.append(tf.Variable(3.0))
        extended = strategy.extended
        made = [extended.variable_created_in_scope(v) for v in (variable, near[0], other)]
        extended.update(variable, lambda v, x: v.assign_add(x), args=(tf.constant([1.0, 1.0]),))
        facts = {
            "made": made,
            "devices": len(extended.worker_devices),
            "read": extended.read_var(variable),
            "values": [part.numpy() for part in strategy.experimental_local_results(variable)],
            "global batch": extended._global_batch_size,
            "reduced": extended.reduce_to("MEAN", variable, variable),
        }
    return {key: arrays(value) for key, value in facts.items()}


@program(whole="mean", one_device=True)
def extended_update(strategy: tf.distribute.Strategy) -> Any:
    """What `update` gives to its function and returns, and what it does with a value per replica."""
    with strategy.scope():
        weight = tf.Variable([1.0, 2.0])
        state = tf.Variable([1.0, 2.0], trainable=False)
        metric = tf.Variable(
            1.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )
    extended = strategy.extended
    own = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant([1.0, 1.0]) * (1 + context.replica_id_in_sync_group)
    )
    same = strategy.experimental_distribute_values_from_function(lambda context: tf.constant([1.0, float("nan")]))

    def results(variable: tf.Variable, function: Any, *args: Any, **kwargs: Any) -> Any:
        given = extended.update(variable, function, args=args, kwargs=kwargs, group=False)
        return arrays({key: [value.numpy() for value in values] for key, values in given.items()})

    with strategy.scope():
        return {
            "tensors": results(
                weight, lambda v, x, y: {"sum": v + x, "y": y * 1.0}, tf.constant(1.0), y=tf.constant(2.0)
            ),
            "written": results(weight, lambda v, x: {"v": v.assign_add(x), "x": x + 1.0}, tf.constant([1.0, 1.0])),
            "mirrored": results(weight, lambda v, other: {"sum": v + other}, weight),
            "the same in all": results(weight, lambda v, x: {"sum": v + x}, same),
            "per replica": results(state, lambda v, x: {"v": v.assign_add(x) + 0.0}, own),
            "after": [per_replica(strategy, [weight, state]), weight.numpy(), state.numpy()],
            "metric": results(metric, lambda v, x: {"v": v.assign_add(x) + 0.0}, tf.constant(2.0)),
            "metric, after": metric.numpy(),
            "broadcast": extended.broadcast_to(metric, "CPU:0").numpy(),
        }


@program(whole="mean")
def run_returns_variables_and_arguments(strategy: tf.distribute.Strategy) -> Any:
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0])
    (x,) = strategy.experimental_distribute_dataset(batches(rows(BATCH, 2)))
    step = tf.function(lambda x: strategy.run(lambda x: (variable, x, variable.value()), args=(x,)))
    return [local(strategy, part) for part in step(x)]
