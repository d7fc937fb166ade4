"""What holds of virtual replicas on the devices of a MirroredStrategy, here two logical CPUs.

test_real.py runs it in a process of its own. The one MirroredStrategy is also what it is compared with, where it can be.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import microstrat
from microstrat import _lower, _values
from tests import executed

DEVICES = 2
tf.config.threading.set_inter_op_parallelism_threads(8)
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * DEVICES
)
BASE = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(DEVICES)])
X = np.random.default_rng(0).standard_normal((24, 3)).astype("float32")
UNEVEN = pytest.mark.filterwarnings("ignore:A batch of")


@pytest.fixture
def strategy() -> Any:
    return microstrat.MicroBatchStrategy(2, base=BASE)


def batches(strategy: Any, rows: int) -> Any:
    return iter(strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(X).batch(rows)))


def local(strategy: Any, value: Any) -> list[Any]:
    return [np.asarray(entry).tolist() for entry in strategy.experimental_local_results(value)]


def run(strategy: Any, fn: Callable[..., Any], *args: Any) -> Any:
    return tf.function(lambda *inputs: strategy.run(fn, args=inputs))(*args)


def components(variable: Any) -> list[Any]:
    """What each device has of a variable."""
    return [component.numpy().tolist() for component in variable._values]


def test_ids_and_rows_are_those_of_as_many_devices(strategy: Any) -> None:
    assert strategy.num_replicas_in_sync == 4
    assert [device[-5:] for device in strategy.extended.worker_devices] == ["CPU:0", "CPU:0", "CPU:1", "CPU:1"]
    ids, rows = run(
        strategy,
        lambda x: (tf.distribute.get_replica_context().replica_id_in_sync_group, x),
        next(batches(strategy, 8)),
    )
    assert local(strategy, ids) == [0, 1, 2, 3]
    np.testing.assert_array_equal(local(strategy, rows), X[:8].reshape(4, 2, 3))


def test_each_device_runs_its_loop_and_its_optimizer(strategy: Any) -> None:
    with strategy.scope():
        weight = tf.Variable(np.ones((3, 2), "float32"))
        optimizer = keras.optimizers.Adam()
        optimizer.build([weight])
    calls = []

    def step(x: tf.Tensor) -> tf.Tensor:
        calls.append(x)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.softplus(x @ weight))
        optimizer.apply([tape.gradient(loss, weight)], [weight])
        return loss

    batch = next(batches(strategy, 8))
    graphs = executed.graphs(lambda: run(strategy, step, batch))
    assert len(calls) == 1
    plan = _lower.last_plan()
    assert plan is not None
    assert plan.num_loops == 1
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for graph in graphs:
        for part in graph.partition_graphs:
            for node in part.node:
                found[node.device[-5:]][node.op] += 1
    for device in ("CPU:0", "CPU:1"):
        assert found[device]["LoopCond"] == 1
        assert found[device]["Softplus"] == 1
        assert found[device]["AssignSubVariableOp"] == 1  # Adam's step
    first, second = components(weight)
    assert first == second
    assert first != np.ones((3, 2)).tolist()


@pytest.mark.parametrize("eager", [False, True])
def test_values_of_replicas_and_of_all(strategy: Any, eager: bool) -> None:
    with strategy.scope():
        own = tf.Variable([0.0, 0.0], trainable=False)
        count = tf.Variable(
            0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )
        mean = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)

    def step() -> Any:
        replica = tf.distribute.get_replica_context()
        number = tf.cast(replica.replica_id_in_sync_group, tf.float32)
        own.assign([number, number + 1])
        count.assign_add(number)
        mean.assign(number)
        return own.read_value() + 0.0, replica.all_gather(number[tf.newaxis], 0), replica.all_reduce("MEAN", number)

    def read() -> Any:
        return tf.convert_to_tensor(own)

    call = strategy.run if eager else lambda fn: run(strategy, fn)
    values, gathered, reduced = call(step)
    assert local(strategy, values) == [[0, 1], [1, 2], [2, 3], [3, 4]]
    assert local(strategy, gathered) == [[0, 1, 2, 3]] * 4
    assert local(strategy, reduced) == [1.5] * 4
    assert own.numpy().tolist() == [0, 1]
    assert float(count.read_value()) == 6
    assert components(count) == [[0, 1], [2, 3]]
    assert components(mean) == [1.5, 1.5]
    assert local(strategy, call(read)) == [[0, 1], [1, 2], [2, 3], [3, 4]]


def test_assignments_outside_reach_every_device(strategy: Any, tmp_path: Any) -> None:
    with strategy.scope():
        shared, own = tf.Variable([1.0, 2.0]), tf.Variable(0, trainable=False)
    run(strategy, lambda: own.assign(tf.distribute.get_replica_context().replica_id_in_sync_group))
    checkpoint = tf.train.Checkpoint(shared=shared, own=own)
    path = checkpoint.save(str(tmp_path / "saved"))
    shared.assign([3.0, 4.0])
    assert components(shared) == [[3, 4], [3, 4]]
    strategy.extended.update(shared, lambda variable: variable.assign_add([1.0, 1.0]))
    assert components(shared) == [[4, 5], [4, 5]]
    own.assign(7)
    read = lambda: own + 0  # noqa: E731
    assert local(strategy, run(strategy, read)) == [7] * 4
    checkpoint.restore(path).assert_existing_objects_matched()
    assert components(shared) == [[1, 2], [1, 2]]
    assert local(strategy, run(strategy, read)) == [0] * 4


def test_draws_differ_and_what_is_common_happens_once(strategy: Any, capfd: pytest.CaptureFixture[str]) -> None:
    tf.random.set_seed(4)
    outside = tf.Variable(0.0)
    with strategy.scope():
        generator = tf.random.Generator.from_seed(1)
        mirrored = tf.Variable(0.0)

    def once(distribution: Any, value: Any) -> None:
        del value
        drawn = tf.random.uniform([])
        tf.print("drawn")
        outside.assign_add(1.0)
        distribution.extended.update(mirrored, lambda variable: variable.assign(drawn), args=())

    def step() -> Any:
        tf.distribute.get_replica_context().merge_call(once, args=(tf.random.normal([]),))
        return tf.random.normal([]), generator.normal([])

    for values in run(strategy, step):
        assert len(set(local(strategy, values))) == 4
    first, second = components(mirrored)
    assert first == second != 0
    assert float(outside) == 1
    assert capfd.readouterr().err.count("drawn") == 1


@UNEVEN
@pytest.mark.parametrize("rows", [1, 3, 5, 7, 8])
def test_uneven_batches(strategy: Any, rows: int) -> None:
    def step(x: tf.Tensor) -> Any:
        replica = tf.distribute.get_replica_context()
        total = replica.all_reduce("SUM", tf.reduce_sum(x, 0))
        return x, total, replica.all_gather(x, 0), replica.all_reduce("MEAN", 1.0)

    x, total, gathered, one = run(strategy, step, next(batches(strategy, rows)))
    share = -(-rows // 4)
    expected = [X[min(index * share, rows) : min((index + 1) * share, rows)] for index in range(4)]
    for part, own in zip(expected, strategy.experimental_local_results(x), strict=True):
        np.testing.assert_array_equal(own, part)
    np.testing.assert_allclose(local(strategy, total)[0], X[:rows].sum(0), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(local(strategy, gathered)[0], X[:rows])
    assert local(strategy, one) == [1] * 4


@pytest.mark.parametrize("sizes", [(4, 4), (3, 2), (2, 0)])
def test_a_batch_that_came_in_two_parts(strategy: Any, sizes: tuple[int, int]) -> None:
    """As of several processes with two devices each: every device's part is cut for its replicas."""
    first, second = sizes
    parts = [tf.constant(X[:first]), tf.constant(X[first : first + second])]
    batch = _values.DeviceRows(4, parts)
    entries = [part.numpy() for part in batch.values]
    shares = [-(-first // 2), first - -(-first // 2), -(-second // 2), second - -(-second // 2)]
    assert [len(entry) for entry in entries] == shares
    rows, total = run(
        strategy,
        lambda x: (x, tf.distribute.get_replica_context().all_reduce("SUM", tf.reduce_sum(x, 0))),
        batch,
    )
    for own, entry in zip(strategy.experimental_local_results(rows), entries, strict=True):
        np.testing.assert_array_equal(own, entry)
    np.testing.assert_allclose(local(strategy, total)[0], X[: first + second].sum(0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("micro_batches", "replicas"), [(3, 1), (2, 2)])
def test_real_replicas_that_cut_their_batches(micro_batches: int, replicas: int) -> None:
    """Of 24 rows on two devices, 12 each; the losses are sums over the global batch's size, whoever cuts it."""

    def train(strategy: tf.distribute.Strategy) -> Any:
        with strategy.scope():
            weight = tf.Variable(np.linspace(-1, 1, 6, dtype="float32").reshape(3, 2))
            optimizer = keras.optimizers.Adam(0.1)
            optimizer.build([weight])

        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.softplus(x @ weight)) / 24
            optimizer.apply([tape.gradient(loss, weight)], [weight])
            return loss

        losses = []
        for batch in strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices(X).batch(24).repeat(3)
        ):
            losses.append(strategy.reduce("SUM", run(strategy, step, batch), axis=None).numpy())
        return losses, weight.numpy()

    cut = microstrat.MicroBatchStrategy(
        micro_batches, semantics="whole_batch", replicas=replicas, loss_reduction="sum", base=BASE
    )
    assert cut.num_replicas_in_sync == 2 * replicas
    for expected, found in zip(train(BASE), train(cut), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_gradients_through_run(strategy: Any) -> None:
    with strategy.scope():
        weight = tf.Variable(np.linspace(-1, 1, 6, dtype="float32").reshape(3, 2))

    def fn(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.nn.softplus(x @ weight))

    @tf.function
    def gradient(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = strategy.reduce("SUM", strategy.run(fn, args=(batch,)), axis=None)
        return tape.gradient(loss, weight)

    alone = tf.Variable(np.linspace(-1, 1, 6, dtype="float32").reshape(3, 2))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.softplus(X[:8] @ alone))
    np.testing.assert_allclose(gradient(next(batches(strategy, 8))), tape.gradient(loss, alone), rtol=1e-5)


def test_xla_compiles_what_each_device_does(strategy: Any) -> None:
    def train(**options: Any) -> Any:
        with strategy.scope():
            weight = tf.Variable(np.linspace(-1, 1, 6, dtype="float32").reshape(3, 2))
            own = tf.Variable([0.0, 0.0], trainable=False)
            optimizer = keras.optimizers.Adam(0.1)
            optimizer.build([weight])

        @tf.function(**options)
        def step(x: tf.Tensor) -> Any:
            replica = tf.distribute.get_replica_context()
            with tf.GradientTape() as tape:
                y = tf.nn.softplus(x @ weight)
                centre = replica.all_reduce("MEAN", tf.reduce_mean(y, 0))
                loss = tf.reduce_mean((y - centre) ** 2) / 4
            optimizer.apply([tape.gradient(loss, weight)], [weight])
            own.assign_add(tf.reduce_sum(y, 0))
            return loss, y, replica.all_gather(y, 1)

        iterator = batches(strategy, 8)
        results = [strategy.run(step, args=(next(iterator),)) for _ in range(3)]
        seen = [[local(strategy, value) for value in result] for result in results]
        graph = strategy.extended._around(step).get_concrete_function(next(batches(strategy, 8))).graph
        compiled = [op.device[-5:] for op in graph.get_operations() if op.node_def.attr["_XlaMustCompile"].b]
        own_values = local(strategy, run(strategy, lambda: own + 0.0))
        return collections.Counter(compiled), [seen, weight.numpy().tolist(), components(weight), own_values]

    plain, expected = train()
    compiled, found = train(jit_compile=True)
    assert not plain
    assert set(compiled) == {"CPU:0", "CPU:1"}
    assert compiled["CPU:0"] == compiled["CPU:1"] >= 3
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)


def test_xla_does_not_compile_around_devices(strategy: Any) -> None:
    around = tf.function(lambda x: strategy.run(lambda y: y, args=(x,)), jit_compile=True)
    with pytest.raises(RuntimeError, match="which has jit_compile=True, but it runs on 2 devices"):
        around(next(batches(strategy, 8)))


def test_a_collective_in_a_loop_is_refused(strategy: Any) -> None:
    def fn() -> Any:
        total = 0.0
        for _ in tf.range(3):
            total = total + tf.distribute.get_replica_context().all_reduce("SUM", total + 1.0)
        return total

    with pytest.raises(RuntimeError, match=r"all_reduce|collective"):
        run(strategy, fn)


def test_other_bases_are_refused() -> None:
    with pytest.raises(TypeError, match=r"base must be a tf\.distribute\.MirroredStrategy or MultiWorker"):
        microstrat.MicroBatchStrategy(2, base=tf.distribute.OneDeviceStrategy("CPU:0"))
    with pytest.raises(ValueError, match="exclude each other"):
        microstrat.MicroBatchStrategy(2, base=BASE, device="CPU:0")
