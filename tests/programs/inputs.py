"""Datasets and values, and how batches are split over replicas."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tests.programs._registry import ALL, BATCH, WHOLE_MORE, arrays, batches, labels, local, program, rows


def _replicas(strategy: tf.distribute.Strategy, structure: Any) -> Any:
    return tf.nest.map_structure(functools.partial(local, strategy), structure)


def _dense(structure: Any) -> Any:
    return tf.nest.map_structure(
        lambda part: (
            tf.sparse.to_dense(part)
            if isinstance(part, tf.SparseTensor)
            else part.to_tensor()
            if isinstance(part, tf.RaggedTensor)
            else part
        ),
        structure,
    )


@program(replicas=ALL, core=True, whole="mean", micro_batches=WHOLE_MORE)
def split_of_batches(strategy: tf.distribute.Strategy) -> Any:
    """Which rows each replica gets: even, uneven and tiny last batches, and batch sizes that don't divide."""
    out = {}
    for number, batch in ((48, 24), (48 + 17, 24), (24 + 1, 24), (24 + 5, 24), (40, 20), (30, 7), (5, 24), (10, 1)):
        data = strategy.experimental_distribute_dataset(batches(np.arange(number), batch=batch))
        out[f"{number}/{batch}"] = [local(strategy, x) for x in data]
    return out


@program(whole="mean")
def split_of_unknown_batches(strategy: tf.distribute.Strategy) -> Any:
    """Batches whose size is not known to the pipeline."""
    data = tf.data.Dataset.range(3 * BATCH + 7).batch(BATCH).filter(lambda x: tf.shape(x)[0] > 0)
    data = data.map(lambda x: tf.py_function(lambda y: y, [x], tf.int64)).map(lambda x: tf.ensure_shape(x, [None]))
    return [local(strategy, x) for x in strategy.experimental_distribute_dataset(data)]


@program(whole="mean")
def split_with_drop_remainder(strategy: tf.distribute.Strategy) -> Any:
    data = batches(np.arange(2 * BATCH + 5), batch=BATCH, drop_remainder=True).prefetch(1).repeat(2)
    step = tf.function(lambda x: strategy.run(lambda x: x * 2, args=(x,)))
    return [local(strategy, step(x)) for x in strategy.experimental_distribute_dataset(data)]


@program(core=True, whole="mean")
def nested_inputs(strategy: tf.distribute.Strategy) -> Any:
    number = BATCH + 7
    data = tf.data.Dataset.from_tensor_slices(
        {"a": rows(number, 2), "b": (labels(number), [str(i) for i in range(number)])}
    ).batch(BATCH)

    def replica_function(x: Any) -> Any:
        return {
            "a": x["a"] * 2,
            "rows": tf.shape(x["a"])[0],
            "b": [x["b"][0] + 1, tf.strings.length(x["b"][1]), x["b"][1]],
        }

    step = tf.function(lambda x: strategy.run(replica_function, args=(x,)))
    return [
        [_replicas(strategy, x), _replicas(strategy, step(x))] for x in strategy.experimental_distribute_dataset(data)
    ]


@program(why_not_whole="it pads to the longest of the rows at hand")
def ragged_inputs(strategy: tf.distribute.Strategy) -> Any:
    ragged = tf.RaggedTensor.from_row_lengths(
        tf.range(200.0)[: sum(i % 4 for i in range(31))], [i % 4 for i in range(31)]
    )
    data = tf.data.Dataset.from_tensor_slices((ragged, np.arange(31))).batch(BATCH)

    def replica_function(x: Any, y: Any) -> Any:
        return tf.reduce_sum(x, axis=1), x.row_lengths(), y, x.to_tensor()

    step = tf.function(lambda x: strategy.run(replica_function, args=x))
    return [_replicas(strategy, step(x)) for x in strategy.experimental_distribute_dataset(data)]


@program(why_not_whole="it returns the shape of the rows at hand")
def sparse_inputs(strategy: tf.distribute.Strategy) -> Any:
    dense = rows(31, 5) * (rows(31, 5, seed=2) > 0)
    data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(dense), np.arange(31))).batch(BATCH)

    def replica_function(x: Any, y: Any) -> Any:
        return tf.sparse.to_dense(x), tf.sparse.reduce_sum(x), x.dense_shape, y

    step = tf.function(lambda x: strategy.run(replica_function, args=x))
    return [_replicas(strategy, step(x)) for x in strategy.experimental_distribute_dataset(data)]


@program(replicas=ALL, core=True, whole="mean")
def dataset_loop_in_function(strategy: tf.distribute.Strategy) -> Any:
    with strategy.scope():
        weight = tf.Variable([1.0, 1.0])
    data = strategy.experimental_distribute_dataset(batches(rows(3 * BATCH + 5, 2)))

    def replica_function(x: Any) -> tf.Tensor:
        total = tf.distribute.get_replica_context().all_reduce("sum", tf.reduce_sum(x * weight, axis=0))
        tf.distribute.get_replica_context().merge_call(
            lambda cross, t: cross.extended.update(weight, lambda v, t: v.assign_add(0.01 * t), args=(t,)),
            args=(total,),
        )
        return tf.reduce_sum(x)

    @tf.function
    def epoch() -> tf.Tensor:
        total = tf.zeros([])
        for x in data:
            total += strategy.reduce("SUM", strategy.run(replica_function, args=(x,)), axis=None)
        return total

    return arrays([epoch(), epoch(), weight])


@program(whole="mean")
def optional_in_function(strategy: tf.distribute.Strategy) -> Any:
    iterator = iter(strategy.experimental_distribute_dataset(batches(rows(BATCH + 5, 2))))

    @tf.function
    def step() -> Any:
        optional = iterator.get_next_as_optional()
        total = tf.constant(-1.0)
        if optional.has_value():
            value = strategy.run(lambda x: tf.reduce_sum(x * x), args=(optional.get_value(),))
            total = strategy.reduce("SUM", value, axis=None)
        return optional.has_value(), total

    return arrays([step() for _ in range(3)])


@program(core=True, whole="mean")
def iterator_in_function(strategy: tf.distribute.Strategy) -> Any:
    """An iterator as an argument, several steps in one tf.function, until the data ends."""
    iterator = iter(strategy.experimental_distribute_dataset(batches(rows(5 * BATCH, 2))))

    @tf.function
    def steps(iterator: Any, number: tf.Tensor) -> tf.Tensor:
        total = tf.zeros([])
        for _ in tf.range(number):
            value = strategy.run(lambda x: tf.reduce_sum(x * x), args=(next(iterator),))
            total += strategy.reduce("SUM", value, axis=None)
        return total

    out = [steps(iterator, tf.constant(2)), steps(iterator, tf.constant(3))]
    try:
        next(iterator)
        ended = False
    except StopIteration:
        ended = True
    return [arrays(out), ended]


@program(whole="mean")
def element_spec_as_signature(strategy: tf.distribute.Strategy) -> Any:
    data = strategy.experimental_distribute_dataset(batches(rows(BATCH + 5, 2), labels(BATCH + 5)))

    @tf.function(input_signature=[data.element_spec])
    def step(inputs: Any) -> Any:
        return strategy.run(lambda x, y: (tf.reduce_sum(x), y + 1), args=inputs)

    return [_replicas(strategy, step(inputs)) for inputs in data]


@program(core=True, whole="mean")
def datasets_from_function(strategy: tf.distribute.Strategy) -> Any:
    facts = []

    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        facts.append([context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync])
        facts.append([context.get_per_replica_batch_size(BATCH)])
        size = context.get_per_replica_batch_size(BATCH)
        return tf.data.Dataset.range(2 * BATCH).map(lambda x: {"x": tf.cast(x, tf.float32)}).batch(size)

    data = strategy.distribute_datasets_from_function(make)
    step = tf.function(lambda x: strategy.run(lambda x: x["x"] * 2, args=(x,)))
    return {"out": [local(strategy, step(x)) for x in data], "facts": facts}


@program(replicas=ALL, whole="mean")
def datasets_from_function_ends_early(strategy: tf.distribute.Strategy) -> Any:
    """Fewer micro-batches than replicas are left, and the last one is short."""
    data = strategy.distribute_datasets_from_function(lambda context: tf.data.Dataset.range(13).batch(2))

    @tf.function
    def total() -> tf.Tensor:
        total = tf.constant(0, tf.int64)
        for x in data:
            total += strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(x,)), axis=None)
        return total

    return arrays([[_replicas(strategy, x) for x in data], total()])


@program(core=True, why_not_whole="a number is no batch that could be cut")
def datasets_from_function_of_any_elements(strategy: tf.distribute.Strategy) -> Any:
    """What is left at the end of each makes no full step for 2 replicas, and some not for 3."""
    numbers = tf.data.Dataset.range(1, 8)
    lists = tf.ragged.constant([[1], [2, 3], [], [4, 5, 6], [7], [8]])
    ragged = tf.data.Dataset.from_tensor_slices(lists).batch(2)
    padded = numbers.map(lambda number: (tf.fill([number], number), number)).padded_batch(2, ([None], []))
    elements = {
        "numbers": numbers,
        "strings": numbers.map(tf.strings.as_string),
        "of known shape": numbers.batch(2, drop_remainder=True),
        "padded": padded,
        "a number beside rows": numbers.batch(2).map(lambda x: {"rows": x, "sum": tf.reduce_sum(x)}),
        "ragged": ragged,
        "ragged beside rows": tf.data.Dataset.zip((ragged, numbers.take(6).batch(2))),
        "sparse": tf.data.Dataset.from_tensor_slices(tf.sparse.from_dense(np.eye(6))).batch(2),
        "None": numbers.map(lambda number: (number, None)),
    }

    def row_by_row(value: Any) -> Any:
        # The width of a result without rows is nobody's business.
        if isinstance(value, tf.SparseTensor):
            value = tf.sparse.to_dense(value)
        if isinstance(value, tf.RaggedTensor):
            value = value.to_tensor(0)
        if value.shape.rank < 2:
            return tf.identity(value)
        return tf.reduce_sum(value * tf.cast(tf.range(1, 1 + tf.shape(value)[1]), value.dtype), axis=1)

    @tf.function
    def step(values: Any) -> Any:
        return strategy.run(
            lambda values: [row_by_row(value) for value in tf.nest.flatten(values) if value is not None], args=(values,)
        )

    def steps(data: tf.data.Dataset) -> Any:
        distributed = strategy.distribute_datasets_from_function(lambda context: data)
        return [_replicas(strategy, step(values)) for values in distributed]

    return {name: steps(data) for name, data in elements.items()}


@program(core=True, whole="mean")
def values_from_function(strategy: tf.distribute.Strategy) -> Any:
    def make(context: Any) -> Any:
        number = context.replica_id_in_sync_group
        return {
            "scalar": tf.constant(float(number)),
            "array": np.arange(3) + number,
            "count": context.num_replicas_in_sync,
        }

    values = strategy.experimental_distribute_values_from_function(make)
    step = tf.function(lambda v: strategy.run(lambda v: {"s": v["scalar"] + 1, "a": v["array"] * 2}, args=(v,)))
    return {"values": _replicas(strategy, values), "run": _replicas(strategy, step(values))}


@program(whole="mean")
def values_of_different_lengths(strategy: tf.distribute.Strategy) -> Any:
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.range(1 + context.replica_id_in_sync_group)
    )
    step = tf.function(lambda v: strategy.run(lambda v: (v * 2, tf.reduce_sum(v)), args=(v,)))
    return [local(strategy, values), _replicas(strategy, step(values))]


@program(whole="mean")
def none_in_datasets(strategy: tf.distribute.Strategy) -> Any:
    data = tf.data.Dataset.from_tensor_slices(rows(BATCH + 5, 2)).batch(BATCH).map(lambda x: (x, None, {"a": x}))

    def replica_function(x: Any, nothing: Any, rest: Any) -> Any:
        assert nothing is None
        return x + rest["a"]

    step = tf.function(lambda inputs: strategy.run(replica_function, args=inputs))
    return [local(strategy, step(inputs)) for inputs in strategy.experimental_distribute_dataset(data)]


@program(whole="mean")
def batches_of_several_dtypes(strategy: tf.distribute.Strategy) -> Any:
    number = BATCH + 7
    kinds = ("float16", "float64", "int8", "uint8", "int32", "bool", "complex64")
    data = batches(*[rows(number, 2).astype("float32").clip(0).astype(kind) for kind in kinds])
    step = tf.function(lambda inputs: strategy.run(lambda *parts: [tf.identity(part) for part in parts], args=inputs))
    out = []
    for inputs in strategy.experimental_distribute_dataset(data):
        out.append([_replicas(strategy, inputs), _replicas(strategy, step(inputs))])
    return out
