"""Bad input is refused at once, with a message that names the user's thing, the rule and the way out."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import microstrat

NUMBER = 2
UNEVEN = pytest.mark.filterwarnings("ignore:A batch of")
"""For batches that are uneven on purpose."""


def strategy() -> microstrat.MicroBatchStrategy:
    return microstrat.MicroBatchStrategy(NUMBER)


def replica_id() -> tf.Tensor:
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def all_reduce(value: Any) -> Any:
    return tf.distribute.get_replica_context().all_reduce("sum", value)


@pytest.mark.core
@pytest.mark.parametrize("number", [0, -1, 2.0, "2", True, None])
def test_number_of_micro_batches(number: Any) -> None:
    with pytest.raises(ValueError, match=r"num_micro_batches must be a positive int, not " + re.escape(repr(number))):
        microstrat.MicroBatchStrategy(number)


def test_number_of_replicas() -> None:
    with pytest.raises(ValueError, match=r"replicas must be a positive int, not 2\.0"), microstrat.scope(replicas=2.0):
        pass
    assert microstrat.MicroBatchStrategy(np.int64(2)).num_replicas_in_sync == 2


def test_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"no device 'GPU:77' here. TensorFlow sees: /device:CPU:0"):
        microstrat.MicroBatchStrategy(2, device="GPU:77")


def test_sum_of_a_value_that_is_reduced_already() -> None:
    with pytest.raises(ValueError, match=r"is one value and not one per replica"):
        strategy().reduce("SUM", tf.constant(3.0), axis=None)


def test_sum_of_a_tensor_that_all_replicas_share() -> None:
    shared = tf.constant([1.0, 2.0])
    for wrap in (tf.function, lambda function: function):
        ours = strategy()
        with pytest.warns(
            UserWarning, match=r"all 2 replicas have the very same tensor, and it counts once.*tf\.identity"
        ):
            wrap(lambda ours=ours: ours.run(lambda: all_reduce(shared)))()


@pytest.mark.parametrize("method", ["distribute_datasets_from_function", "make_input_fn_iterator"])
def test_function_that_returns_no_dataset(method: str) -> None:
    with pytest.raises(TypeError, match=rf"The function given to {method} returned list, not a tf\.data\.Dataset"):
        getattr(strategy(), method)(lambda context: [1, 2])


def test_a_branch_that_some_replicas_take() -> None:
    def build(ours: microstrat.MicroBatchStrategy) -> Callable[[], Any]:
        with ours.scope():
            weight = tf.Variable(1.0, name="weight")

        def step() -> None:
            if replica_id() == 1:
                weight.assign_sub(1.0)

        return step

    with pytest.raises(RuntimeError, match=r"'step', a branch .* writes variable 'weight:0'.* condition, or what it"):
        in_function(build)


def test_semantics_that_do_not_exist_and_a_base_that_is_none() -> None:
    with pytest.raises(ValueError, match="semantics must be 'replicas' or 'whole_batch', not 'both'"):
        microstrat.MicroBatchStrategy(2, semantics="both")
    with pytest.raises(
        TypeError, match=r"base must be a tf\.distribute\.MirroredStrategy or MultiWorkerMirroredStrategy"
    ):
        microstrat.MicroBatchStrategy(2, base=tf.distribute.get_strategy())


def test_dataset_that_is_not_batched() -> None:
    dataset = tf.data.Dataset.from_tensors({"image": tf.zeros([4, 2]), "label": tf.zeros([])})
    with pytest.raises(ValueError, match=r"component label is .* no batch dimension .* Call dataset.batch"):
        strategy().experimental_distribute_dataset(dataset)


def test_batch_with_different_numbers_of_rows() -> None:
    dataset = tf.data.Dataset.from_tensors((tf.zeros([4, 2]), tf.zeros([3])))
    with pytest.raises(ValueError, match=r"different numbers of rows in one batch \(\{'0': 4, '1': 3\}\)"):
        next(iter(strategy().experimental_distribute_dataset(dataset)))


def test_run_under_another_strategy() -> None:
    ours = strategy()
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        with pytest.raises(RuntimeError, match=r"strategy\.run was called under the scope of another strategy"):
            ours.run(lambda: tf.constant(1))


def test_run_inside_a_replica_function() -> None:
    ours = strategy()
    with pytest.raises(RuntimeError, match=r"strategy\.run was called inside a replica function"):
        ours.run(lambda: ours.run(lambda: tf.constant(1)))


def test_next_inside_a_replica_function() -> None:
    ours = strategy()
    iterator = iter(ours.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(4)))
    with pytest.raises(ValueError, match=r"strategy\.run\(replica_fn, args=\(next\(iterator\),\)\)"):
        ours.run(lambda: next(iterator))


@pytest.mark.parametrize("owner", ["none", "other"])
def test_variable_made_elsewhere(owner: str) -> None:
    ours = strategy()
    with strategy().scope() if owner == "other" else ours.scope():
        elsewhere = tf.Variable(1.0, name="elsewhere")
    if owner == "none":
        elsewhere = tf.Variable(1.0, name="elsewhere")
    with ours.scope(), pytest.raises(RuntimeError, match=r"'elsewhere:0', which was made .*strategy\.scope\(\)"):
        ours.extended.update(elsewhere, lambda variable: variable.assign_add(1.0))


def test_model_made_outside_the_scope() -> None:
    ours = strategy()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with ours.scope():
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.ones([2, 3])))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    with pytest.raises(
        RuntimeError, match=r"made outside any strategy's scope. Make the model and its optimizer inside"
    ):
        tf.function(lambda: ours.run(step))()


def in_function(build: Callable[[microstrat.MicroBatchStrategy], Callable[[], Any]]) -> None:
    ours = strategy()
    function = build(ours)
    tf.function(lambda: ours.run(function))()


@pytest.mark.core
def test_different_values_for_a_trainable_variable() -> None:
    def build(ours: microstrat.MicroBatchStrategy) -> Callable[[], Any]:
        with ours.scope():
            weight = tf.Variable(1.0, name="weight")

        def diverge() -> None:
            weight.assign(tf.cast(replica_id(), tf.float32))

        return diverge

    message = (
        r"In replica function 'diverge'.*different values to variable 'weight:0' .*test_errors\.py:\d+.*all_reduce"
    )
    with pytest.raises(RuntimeError, match=message):
        in_function(build)


def test_unreduced_gradients_in_an_update() -> None:
    def build(ours: microstrat.MicroBatchStrategy) -> Callable[[], Any]:
        with ours.scope():
            weight = tf.Variable(1.0, name="weight")

        def merge(distribution: Any, gradient: Any) -> None:
            distribution.extended.update(weight, lambda variable, g: variable.assign_sub(g), args=(gradient,))

        def apply_unreduced() -> None:
            gradient = tf.cast(replica_id(), tf.float32)
            tf.distribute.get_replica_context().merge_call(merge, args=(gradient,))

        return apply_unreduced

    with pytest.raises(
        RuntimeError, match=r"'apply_unreduced', the replicas would write different values to variable 'weight:0'"
    ):
        in_function(build)


@pytest.mark.core
def test_collective_under_a_varying_condition() -> None:
    def build(ours: microstrat.MicroBatchStrategy) -> Callable[[], Any]:
        def sometimes() -> tf.Tensor:
            one = tf.ones([])
            return tf.cond(replica_id() > 0, lambda: all_reduce(one * 2.0), lambda: one)

        return sometimes

    with pytest.raises(
        RuntimeError, match=r"'sometimes', a collective .* under a condition that may differ .*all_reduce it"
    ):
        in_function(build)


def test_integer_variable_with_mean() -> None:
    def build(ours: microstrat.MicroBatchStrategy) -> Callable[[], Any]:
        with ours.scope():
            return lambda: tf.Variable(1, aggregation=tf.VariableAggregation.MEAN)

    with pytest.raises(ValueError, match="aggregation=MEAN and a non-floating dtype"):
        in_function(build)


def test_on_read_variable_without_aggregation_has_no_cross_replica_value() -> None:
    ours = strategy()
    with ours.scope():
        variable = tf.Variable(1.0, synchronization=tf.VariableSynchronization.ON_READ, name="own")
        with pytest.raises(ValueError, match=r"'own:0' has synchronization=ON_READ and aggregation=NONE"):
            variable.read_value()


def test_sum_of_a_mirrored_variable() -> None:
    ours = strategy()
    with ours.scope():
        variable = tf.Variable(1.0, name="weight")
        with pytest.raises(ValueError, match=r"reduce\('SUM', \.\.\.\) of variable 'weight:0'"):
            ours.reduce("SUM", variable, axis=None)


@UNEVEN
def test_elementwise_sum_of_uneven_shares() -> None:
    ours = strategy()
    batch = next(iter(ours.experimental_distribute_dataset(tf.data.Dataset.range(5).batch(5))))
    with pytest.raises(ValueError, match=r"batch of 5 rows over 2 replicas.*axis=0"):
        ours.reduce("SUM", batch, axis=None)


def test_a_restored_function_that_writes_a_value_per_replica(tmp_path: pathlib.Path) -> None:
    module = tf.Module()
    on_read, mean = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.MEAN
    module.own = tf.Variable(1.0, synchronization=on_read, aggregation=mean, name="own")
    module.move = tf.function(lambda: module.own.assign_add(1.0), input_signature=[])
    tf.saved_model.save(module, str(tmp_path))

    def build(ours: microstrat.MicroBatchStrategy) -> Callable[[], Any]:
        with ours.scope():
            restored: Any = tf.saved_model.load(str(tmp_path))
        return lambda: restored.move()

    with pytest.raises(RuntimeError, match=r"may write variable 'own:0', which has a value per replica, by its handle"):
        in_function(build)


class TestEager:
    """The eager engine sees what a replica does when it does it."""

    def test_replicas_that_do_not_meet(self) -> None:
        def skip() -> Any:
            return all_reduce(1.0) if replica_id() == 0 else 0.0

        with pytest.raises(RuntimeError, match=r"Replicas \[1\] returned while replicas \[0\] wait at a collective"):
            strategy().run(skip)

    def test_replicas_that_meet_at_different_collectives(self) -> None:
        def differ() -> Any:
            if replica_id() == 0:
                return all_reduce(1.0)
            return tf.distribute.get_replica_context().merge_call(lambda distribution: None)

        with pytest.raises(RuntimeError, match="Replicas met at different collectives: all_reduce, merge_call"):
            strategy().run(differ)

    def test_collective_in_a_nested_function(self) -> None:
        @tf.function
        def nested() -> Any:
            return all_reduce(tf.ones([]))

        with pytest.raises(RuntimeError, match=r"calls all_reduce inside the nested tf\.function .* in eager mode"):
            strategy().run(lambda: nested())

    def test_an_error_of_the_user_comes_through(self) -> None:
        def fail() -> None:
            if replica_id() == 1:
                raise KeyError("mine")
            all_reduce(1.0)

        with pytest.raises(KeyError, match="mine"):
            strategy().run(fail)

    def test_different_values_for_a_trainable_variable(self) -> None:
        ours = strategy()
        with ours.scope():
            weight = tf.Variable(1.0, name="weight")
        with pytest.raises(RuntimeError, match="replicas would write different values to variable 'weight:0'"):
            ours.run(lambda: weight.assign(tf.cast(replica_id(), tf.float32)))
