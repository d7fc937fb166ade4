"""What tf.distribute documents of a strategy, and libraries ask: types, facts, options, and what is refused.

What is computed with them is compared with MirroredStrategy in tests/programs/collectives.py and inputs.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import microstrat

NUMBER = 2
distributed = tf.types.experimental.distributed


@pytest.fixture
def strategy() -> microstrat.MicroBatchStrategy:
    return microstrat.MicroBatchStrategy(NUMBER)


def per_replica(strategy: tf.distribute.Strategy, make: Callable[[int], Any]) -> Any:
    return strategy.experimental_distribute_values_from_function(lambda context: make(context.replica_id_in_sync_group))


def context() -> Any:
    return tf.distribute.get_replica_context()


def test_types(strategy: microstrat.MicroBatchStrategy) -> None:
    with strategy.scope():
        weight = tf.Variable(1.0)
        metric = tf.Variable(1.0, synchronization=tf.VariableSynchronization.ON_READ)
    value = per_replica(strategy, lambda replica: tf.constant(replica))
    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.range(8).batch(4))
    assert isinstance(value, distributed.PerReplica) and not isinstance(value, distributed.Mirrored)
    assert isinstance(weight, distributed.Mirrored) and isinstance(weight, tf.Variable)
    for made in (value, weight, metric):
        assert isinstance(made, tf.distribute.DistributedValues)
        assert isinstance(made.values, tuple) and len(made.values) == NUMBER
    for made in (
        batches,
        strategy.distribute_datasets_from_function(lambda context: tf.data.Dataset.range(8).batch(2)),
    ):
        assert isinstance(made, tf.distribute.DistributedDataset)
        iterator = iter(made)
        assert isinstance(iterator, tf.distribute.DistributedIterator)
        assert iterator.element_spec == made.element_spec
        assert [len(spec._value_specs) for spec in tf.nest.flatten(made.element_spec)] == [NUMBER]
        assert [spec.dtype for spec in made.element_spec._value_specs] == [tf.int64] * NUMBER
    assert isinstance(strategy.run(lambda: isinstance(context(), tf.distribute.ReplicaContext)), bool)


def test_facts(strategy: microstrat.MicroBatchStrategy) -> None:
    extended = strategy.extended
    with strategy.scope():
        weight = tf.Variable(1.0)
    assert strategy.cluster_resolver is None
    assert len(extended.worker_devices) == NUMBER and len(set(extended.worker_devices)) == 1
    assert extended.parameter_devices == extended.non_slot_devices([weight]) == extended.worker_devices[:1]
    assert extended.should_checkpoint and extended.should_save_summary and extended.experimental_should_init
    assert not extended.experimental_between_graph and not extended.experimental_require_static_shapes
    assert extended.value_container(weight) is weight and extended.value_container(3) == 3
    assert extended.value_container(strategy.experimental_local_results(weight)[0]) is weight
    assert strategy.run(lambda: len(context().devices)) == 1
    config = tf.compat.v1.ConfigProto()
    assert strategy.update_config_proto(config).isolate_session_state and not config.isolate_session_state
    (batch,) = extended.experimental_make_numpy_dataset((np.arange(4), np.ones([4, 2]))).batch(4)
    assert [part.shape for part in batch] == [[4], [4, 2]]
    with pytest.raises(RuntimeError, match="Must only deepcopy"):
        copy.copy(strategy)


def test_colocation(strategy: microstrat.MicroBatchStrategy) -> None:
    outside = tf.Variable(1.0)
    with strategy.scope():
        first = tf.Variable(1.0)
        with strategy.extended.colocate_vars_with(first):
            second = tf.Variable(2.0)
        with pytest.raises(
            RuntimeError, match=r"colocate_vars_with got variable 'Variable:0', which was made outside any"
        ):
            strategy.extended.colocate_vars_with(outside)
    made = [strategy.extended.variable_created_in_scope(variable) for variable in (first, second, outside)]
    assert made == [True, True, False] and second.device == first.device
    with pytest.raises(RuntimeError, match=r"scope"):
        strategy.extended.colocate_vars_with(first)


@pytest.mark.parametrize("traced", [False, True])
def test_options_that_change_nothing(strategy: microstrat.MicroBatchStrategy, traced: bool) -> None:
    value = per_replica(strategy, lambda replica: tf.constant([1.0, 2.0]) * (replica + 1))
    options = tf.distribute.RunOptions(experimental_enable_dynamic_batch_size=False)
    communication = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=1)

    def run() -> Any:
        return strategy.run(
            lambda x: context().all_reduce("SUM", x, options=communication), args=(value,), options=options
        )

    total = (tf.function(run) if traced else run)()
    np.testing.assert_array_equal(strategy.experimental_local_results(total), [[3.0, 6.0]] * NUMBER)
    np.testing.assert_array_equal(
        strategy.extended.reduce_to(tf.distribute.ReduceOp.SUM, value, "CPU:0", options=communication), [3.0, 6.0]
    )


@pytest.mark.parametrize("fetch", [False, True])
def test_input_options(strategy: microstrat.MicroBatchStrategy, fetch: bool) -> None:
    modes = tf.distribute.InputReplicationMode
    seen: list[tuple[int, int, int]] = []

    def make(of: tf.distribute.InputContext) -> tf.data.Dataset:
        assert of.get_per_replica_batch_size(4) == 2
        with pytest.raises(ValueError, match="not divisible"):
            of.get_per_replica_batch_size(5)
        seen.append((of.num_input_pipelines, of.input_pipeline_id, of.num_replicas_in_sync))
        return tf.data.Dataset.range(4).batch(2)

    def values(mode: Any) -> list[Any]:
        options = tf.distribute.InputOptions(experimental_fetch_to_device=fetch, experimental_replication_mode=mode)
        data = strategy.distribute_datasets_from_function(make, options)
        return [[part.numpy().tolist() for part in strategy.experimental_local_results(batch)] for batch in data]

    assert values(modes.PER_WORKER) == [[[0, 1], [2, 3]]]
    assert values(modes.PER_REPLICA) == [[[0, 1], [0, 1]], [[2, 3], [2, 3]]]
    assert seen == [(1, 0, 2), (2, 0, 2), (2, 1, 2)]
    with pytest.raises(NotImplementedError, match="PER_REPLICA"):
        strategy.experimental_distribute_dataset(
            tf.data.Dataset.range(4).batch(2),
            tf.distribute.InputOptions(experimental_replication_mode=modes.PER_REPLICA),
        )


@pytest.mark.parametrize("traced", [False, True])
def test_merge_functions_of_users(strategy: microstrat.MicroBatchStrategy, traced: bool) -> None:
    value = per_replica(strategy, lambda replica: tf.constant([1.0, 2.0]) * (replica + 1))

    def merge(cross: tf.distribute.Strategy, x: Any, scale: float = 1.0) -> Any:
        assert cross is strategy and tf.distribute.in_cross_replica_context()
        return {
            "total": scale * cross.extended.reduce_to("SUM", x, x),
            "mine": x,
            "again": cross.extended.call_for_each_replica(lambda part: part * 10.0, args=(x,)),
            "gathered": cross.gather(x, axis=0),
        }

    def run() -> Any:
        return strategy.run(lambda x: context().merge_call(merge, args=(x,), kwargs={"scale": 2.0}), args=(value,))

    found = (tf.function(run) if traced else run)()
    expected = {
        "total": [[6.0, 12.0], [6.0, 12.0]],
        "mine": [[1.0, 2.0], [2.0, 4.0]],
        "again": [[10.0, 20.0], [20.0, 40.0]],
        "gathered": [[1.0, 2.0, 2.0, 4.0]] * 2,
    }
    assert {
        name: np.asarray(strategy.experimental_local_results(part)).tolist() for name, part in found.items()
    } == expected


def test_update_with_a_value_per_replica_is_refused(strategy: microstrat.MicroBatchStrategy) -> None:
    with strategy.scope():
        weight = tf.Variable([1.0, 2.0], name="weight")
    gradient = per_replica(strategy, lambda replica: tf.constant([1.0, 1.0]) * replica)

    def update(cross: tf.distribute.Strategy, gradient: Any) -> None:
        cross.extended.update(weight, lambda variable, g: variable.assign_sub(g), args=(gradient,))

    for call in (
        lambda: update(strategy, gradient),
        lambda: strategy.run(lambda g: context().merge_call(update, args=(g,)), args=(gradient,)),
        lambda: tf.function(
            lambda: strategy.run(lambda g: context().merge_call(update, args=(g,)), args=(gradient,))
        )(),
    ):
        with pytest.raises(RuntimeError, match=r"would write different values to variable 'weight"):
            call()
        np.testing.assert_array_equal(weight, [1.0, 2.0])


@pytest.mark.parametrize(
    "method",
    [
        "experimental_assign_to_logical_device",
        "experimental_split_to_logical_devices",
        "experimental_replicate_to_logical_devices",
    ],
)
def test_what_only_tpus_have_is_not_there(strategy: microstrat.MicroBatchStrategy, method: str) -> None:
    assert not hasattr(strategy, method)
    with pytest.raises(AttributeError, match=f"MicroBatchStrategy has no {method}: .* cores of a TPU"):
        getattr(strategy, method)
