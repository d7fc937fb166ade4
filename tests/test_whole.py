"""Whole-batch semantics where the plain full batch can't be run beside it, and what must be refused. Values by hand."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import microstrat
from microstrat import _lower

ROWS = tf.constant([[1.0], [2.0], [5.0], [3.0], [4.0]])
"""With 4 micro-batches: [1, 2], [5, 3], [4]."""


def strategy(number: int = 4, **options: Any) -> microstrat.MicroBatchStrategy:
    return microstrat.MicroBatchStrategy(number, semantics="whole_batch", **options)


def run(ours: microstrat.MicroBatchStrategy, fn: Callable[..., Any], *args: Any) -> Any:
    return tf.function(lambda *values: ours.run(fn, args=values))(*args)


def listed(ours: microstrat.MicroBatchStrategy, value: Any) -> list[Any]:
    return [part.numpy().tolist() for part in ours.experimental_local_results(value)]


# --- Cutting ----------------------------------------------------------------------------------------------------------
@pytest.mark.core
@pytest.mark.parametrize(
    ("rows", "number", "parts"),
    [
        (8, 4, [2, 2, 2, 2]),
        (5, 4, [2, 2, 1]),
        (3, 4, [1, 1, 1]),
        (1, 4, [1]),
        (9, 8, [2, 2, 2, 2, 1]),
        (7, 1, [7]),
        (0, 3, [0]),
    ],
)
@pytest.mark.parametrize("known", [True, False], ids=["static", "dynamic"])
def test_parts_of_a_batch(rows: int, number: int, parts: list[int], known: bool) -> None:
    ours = strategy(number)
    signature = [tf.TensorSpec([rows if known else None, 2])]
    step = tf.function(lambda x: ours.run(lambda part: tf.shape(part)[0], args=(x,)), input_signature=signature)
    sizes = step(tf.zeros([rows, 2]))
    assert listed(ours, sizes) == parts
    assert ours.reduce("SUM", sizes, axis=None).numpy() == rows


def test_only_the_batch_of_a_dataset_is_cut() -> None:
    ours = strategy(2)
    batch = next(iter(ours.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(4))))
    part, whole = run(ours, lambda x, table: (tf.size(x), tf.size(table)), batch, tf.zeros([7]))
    assert listed(ours, part) == [2, 2]
    assert whole.numpy() == 7


def test_a_number_beside_the_rows_is_not_cut() -> None:
    ours = strategy(2)
    data = tf.data.Dataset.from_tensors((ROWS, tf.constant(7)))
    batch = next(iter(ours.experimental_distribute_dataset(data)))
    size, number = run(ours, lambda x, number: (tf.size(x), number), *batch)
    assert listed(ours, size) == [3, 2]
    assert number.numpy() == 7
    with pytest.raises(ValueError, match=r"split over 2 micro-batches by rows.*Capture constants"):
        next(iter(ours.experimental_distribute_dataset(tf.data.Dataset.from_tensors((ROWS, tf.zeros([3]))))))


def test_the_mean_of_integers_over_an_axis() -> None:
    ours = strategy()
    mean = ours.reduce("MEAN", run(ours, lambda x: tf.cast(x[:, 0], tf.int32) % 2, ROWS), axis=0)
    assert (mean.dtype, mean.numpy()) == (tf.float64, 0.6)


def _written(directory: pathlib.Path, step: Callable[[tf.Tensor], None], record: Any = True) -> list[tuple[str, Any]]:
    """Tags and values of the summaries that a replica function writes, of 5 rows in 3 micro-batches."""
    ours, writer = strategy(), tf.summary.create_file_writer(str(directory))
    with writer.as_default(step=0), tf.summary.record_if(record):
        run(ours, step, ROWS)
    writer.close()
    (file,) = directory.iterdir()
    events = tf.compat.v1.train.summary_iterator(str(file))
    found = [(value.tag, tf.make_ndarray(value.tensor)) for event in events for value in event.summary.value]
    return sorted((tag, value.tolist()) for tag, value in found)


def _always() -> tf.Tensor:
    return tf.random.uniform([]) >= 0


@pytest.mark.parametrize("record", [True, _always], ids=["always", "under a condition"])
def test_a_summary_of_one_number_is_the_whole_batchs(tmp_path: pathlib.Path, record: Any) -> None:
    def step(x: tf.Tensor) -> None:
        tf.summary.scalar("shared", 1.0)
        tf.summary.scalar("mean", tf.reduce_mean(x))
        tf.summary.scalar("sum", tf.reduce_sum(x))
        tf.summary.scalar("rows", tf.shape(x)[0])
        tf.summary.scalar("rms", tf.sqrt(tf.reduce_mean(x**2)))

    x = ROWS.numpy()
    of_parts = [len(part) * np.sqrt(np.mean(part**2)) for part in (x[:2], x[2:4], x[4:])]
    expected = {"shared": 1.0, "mean": x.mean(), "sum": x.sum(), "rows": 5.0, "rms": sum(of_parts) / 5}
    found = _written(tmp_path, step, record)
    assert [tag for tag, _ in found] == sorted(expected)
    np.testing.assert_allclose([value for _, value in found], [expected[tag] for tag, _ in found], rtol=1e-6)


def test_a_summary_of_rows_is_written_by_each_micro_batch(tmp_path: pathlib.Path) -> None:
    def step(x: tf.Tensor) -> None:
        tf.summary.write("rows", x[:, 0])
        tf.summary.scalar("shared", 1.0)
        tf.summary.scalar("mean", tf.reduce_mean(x))

    x = ROWS.numpy()
    (tag, mean), *rows, shared = _written(tmp_path, step)
    assert (tag, shared) == ("mean", ("shared", 1.0))
    assert mean == pytest.approx(x.mean(), rel=1e-6)
    assert rows == sorted(("rows", part.tolist()) for part in (x[:2, 0], x[2:4, 0], x[4:, 0]))


def test_a_summary_in_a_branch_or_in_a_nested_function(tmp_path: pathlib.Path) -> None:
    nested = tf.function(lambda value: tf.summary.scalar("nested", value))

    def step(x: tf.Tensor) -> None:
        mean = tf.reduce_mean(x)
        if tf.random.uniform([]) >= 0:  # the same for all
            tf.summary.scalar("branch", mean)
            tf.summary.scalar("work", tf.reduce_mean(tf.matmul(x, tf.ones([x.shape[1], 2]))))
        nested(mean)

    x = ROWS.numpy()
    found = _written(tmp_path, step)
    assert [tag.rpartition("/")[2] for tag, _ in found] == ["branch", "work", "nested"]
    np.testing.assert_allclose([value for _, value in found], [x.mean(), x.sum(1).mean(), x.mean()], rtol=1e-6)


def test_a_summary_in_a_loop_or_under_a_condition_of_a_micro_batch(tmp_path: pathlib.Path) -> None:
    def step(x: tf.Tensor) -> None:
        mean = tf.reduce_mean(x[:, 0])
        if mean > 3.0:
            tf.summary.scalar("large", mean)
        for _ in tf.range(2):
            tf.summary.scalar("turn", mean)

    x = ROWS.numpy()[:, 0]
    means = [part.mean() for part in (x[:2], x[2:4], x[4:])]
    found = _written(tmp_path, step)
    large = [value for tag, value in found if tag.endswith("large")]
    np.testing.assert_allclose(large, [x.mean()] * sum(mean > 3.0 for mean in means), rtol=1e-6)
    assert 0 < len(large) < 3
    turns = [value for tag, value in found if tag.endswith("turn")]
    np.testing.assert_allclose(turns, sorted(means * 2), rtol=1e-6)


def test_tensors_of_equal_length_are_the_batch() -> None:
    ours = strategy(2)
    sizes, scalar = run(
        ours, lambda x, y, z: (tf.size(x) + tf.size(y), z), tf.zeros([4]), tf.zeros([4, 3]), tf.constant(2)
    )
    assert listed(ours, sizes) == [8, 8]
    assert scalar.numpy() == 2


def test_tensors_of_different_length_are_ambiguous() -> None:
    with pytest.raises(ValueError, match=r"different numbers of rows .*experimental_distribute_dataset"):
        run(strategy(), lambda x, y: x, tf.zeros([4]), tf.zeros([3]))


def test_tensors_of_unknown_length_are_checked_when_they_come() -> None:
    ours, anything = strategy(2), tf.TensorSpec([None])
    step = tf.function(lambda *v: ours.run(lambda x, y: tf.size(x), args=v), input_signature=[anything, anything])
    assert listed(ours, step(tf.zeros([4]), tf.zeros([4]))) == [2, 2]
    with pytest.raises(tf.errors.InvalidArgumentError, match="different numbers of rows"):
        step(tf.zeros([4]), tf.zeros([3]))


def test_outside_a_function_the_batch_is_whole() -> None:
    ours = strategy()
    with pytest.warns(UserWarning, match=r"outside any tf\.function, so the batch is not cut"):
        assert ours.run(lambda x: int(tf.size(x).numpy()), args=(ROWS,)) == 5


def test_there_is_one_replica() -> None:
    ours = strategy()
    assert ours.num_replicas_in_sync == 1
    context = run(ours, lambda x: tf.distribute.get_replica_context().replica_id_in_sync_group, ROWS)
    assert context.numpy() == 0
    assert "4 micro-batches" in repr(ours)
    assert strategy(3, replicas=2).num_replicas_in_sync == 2


# --- Results ----------------------------------------------------------------------------------------------------------
@pytest.mark.core
def test_results() -> None:
    ours = strategy()
    mean, rows, shared = run(ours, lambda x: (tf.reduce_mean(x), x * 2, tf.constant(7.0)), ROWS)
    assert listed(ours, mean) == [1.5, 4.0, 4.0]
    assert ours.reduce("MEAN", mean, axis=None).numpy() == 3.0
    assert ours.reduce("SUM", mean, axis=None).numpy() == 9.5
    assert listed(ours, rows) == [[[2], [4]], [[10], [6]], [[8]]]
    np.testing.assert_array_equal(ours.gather(rows, 0), ROWS * 2)
    np.testing.assert_array_equal(ours.reduce("MEAN", rows, axis=None), ROWS * 2)
    np.testing.assert_array_equal(ours.reduce("SUM", rows, axis=0), [30.0])
    np.testing.assert_array_equal(ours.reduce("MEAN", rows, axis=0), [6.0])
    assert shared.numpy() == 7.0


def test_sums_of_what_is_shared_and_what_is_not() -> None:
    """With declared sums, terms that all micro-batches share count once."""
    ours = strategy(loss_reduction="sum")
    with ours.scope():
        weight = tf.Variable(3.0)

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = 2.0 * (tf.reduce_sum(weight * x) + tf.add_n([weight**2, tf.constant(1.0)]))
        both = tf.stack([tf.reduce_sum(x), weight + 0.0])
        return loss, tape.gradient(loss, weight), tf.distribute.get_replica_context().all_reduce("SUM", both)

    loss, gradient, both = run(ours, step, ROWS)
    assert ours.reduce("SUM", loss, axis=None).numpy() == 2 * (3 * 15 + 9 + 1)
    assert gradient.numpy() == 2 * (15 + 6)
    np.testing.assert_array_equal(both, [15.0, 3.0])


def test_results_go_into_run_again() -> None:
    ours = strategy()
    mean, rows = run(ours, lambda x: (tf.reduce_mean(x), x * 2), ROWS)
    doubled, total = run(ours, lambda m, r: (m * 2, tf.reduce_sum(r)), mean, rows)
    assert ours.reduce("MEAN", doubled, axis=None).numpy() == 6.0
    assert ours.reduce("SUM", total, axis=None).numpy() == 30.0


# --- State ------------------------------------------------------------------------------------------------------------
def variable(ours: microstrat.MicroBatchStrategy, value: Any, aggregation: str = "NONE", **options: Any) -> tf.Variable:
    with ours.scope():
        return tf.Variable(
            value, trainable=False, aggregation=getattr(tf.VariableAggregation, aggregation), name="state", **options
        )


def test_what_does_not_depend_on_the_micro_batch_happens_once() -> None:
    ours = strategy()
    counter, seen = variable(ours, 0), variable(ours, 0)

    def step(x: tf.Tensor) -> Any:
        before = counter.read_value()
        counter.assign_add(1)
        seen.assign_add(tf.shape(x)[0])
        return before, counter.read_value(), seen.read_value(), tf.random.uniform([])

    before, after, total, draw = run(ours, step, ROWS)
    assert (before.numpy(), after.numpy(), total.numpy()) == (0, 1, 5)
    assert (counter.numpy(), seen.numpy()) == (1, 5)
    assert draw.shape == ()


def test_variables_are_as_on_one_device() -> None:
    ours = strategy()
    state = variable(ours, 3.0)
    assert (int(state), float(state)) == (3, 3.0)
    assert ours.reduce("SUM", state, axis=None).numpy() == 3.0


@pytest.mark.parametrize(
    ("aggregation", "assign", "expected"),
    [
        ("SUM", lambda v, x: v.assign_add(tf.reduce_sum(x)), 10.0 + 15.0),
        ("SUM", lambda v, x: v.assign(v + tf.reduce_sum(x)), 10.0 + 15.0),
        ("SUM", lambda v, x: v.assign(0.5 * v + tf.reduce_sum(x)), 5.0 + 15.0),
        ("SUM", lambda v, x: v.assign(tf.reduce_sum(x)), 15.0),
        ("SUM", lambda v, x: v.assign(tf.maximum(v, 4 * tf.reduce_max(x))), 20.0),
        ("SUM", lambda v, x: v.assign(tf.minimum(v, tf.reduce_min(x))), 1.0),
        ("MEAN", lambda v, x: v.assign(tf.reduce_mean(x)), 3.0),
        ("MEAN", lambda v, x: v.assign(0.5 * v + 0.5 * tf.reduce_mean(x)), 6.5),
        ("MEAN", lambda v, x: v.assign_sub(tf.reduce_mean(x)), 7.0),
    ],
)
@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
def test_assignments_of_what_depends_on_it(
    aggregation: str, assign: Any, expected: float, synchronization: str
) -> None:
    ours = strategy()
    state = variable(ours, 10.0, aggregation, synchronization=getattr(tf.VariableSynchronization, synchronization))

    def step(x: tf.Tensor) -> tf.Tensor:
        assign(state, x)
        return tf.convert_to_tensor(state)

    assert run(ours, step, ROWS).numpy() == pytest.approx(expected)
    assert float(tf.convert_to_tensor(state)) == pytest.approx(expected)


def test_the_mean_of_a_plain_variable_is_announced_once() -> None:
    ours = strategy()
    state = variable(ours, 0.0)
    with pytest.warns(
        UserWarning, match=r"variable 'state:0' .* mean over micro-batches.*SUM; MEAN silences"
    ) as caught:
        for _ in range(2):
            run(ours, lambda x: state.assign(0.5 * state + tf.reduce_max(x)), ROWS)
    assert len(caught) == 1
    assert state.numpy() == pytest.approx(1.5 * (2 * 2 + 5 * 2 + 4) / 5)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda x: tf.reduce_sum(x), 15.0),
        (lambda x: 2.0 * tf.reduce_sum(x[:, 0]), 30.0),
        (lambda x: tf.reduce_mean(x), 3.0),
        (lambda x: tf.reduce_sum(x) / tf.cast(tf.shape(x)[0], tf.float32), 3.0),
        (lambda x: tf.reduce_sum(x / tf.cast(tf.shape(x)[0], tf.float32)), 3.0),
        (lambda x: tf.reduce_mean(x) * tf.cast(tf.size(x), tf.float32), 15.0),
        (lambda x: tf.cast(tf.shape(x)[0], tf.float32), 5.0),
    ],
)
@pytest.mark.parametrize("aggregation", ["NONE", "SUM"])
def test_sums_and_means_over_rows_are_known(change: Any, expected: float, aggregation: str) -> None:
    """The graph says which it is: a variable need not."""
    ours = strategy()
    added, assigned = variable(ours, 1.0, aggregation), variable(ours, 1.0, aggregation)

    def step(x: tf.Tensor) -> None:
        added.assign_add(change(x))
        assigned.assign(change(x))

    run(ours, step, ROWS)
    assert added.numpy() == pytest.approx(1.0 + expected)
    assert assigned.numpy() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("loss_reduction", "loss", "message"),
    [
        (
            "mean",
            lambda x: tf.reduce_sum(x) / 5.0,
            "is a sum over the rows .* declared to be means.*loss_reduction='sum'",
        ),
        ("sum", lambda x: tf.reduce_mean(x), "is a mean over the rows .* declared to be sums.*loss_reduction='mean'"),
        ("mean", lambda x: tf.reduce_sum(x * x) / tf.reduce_sum(x), r"divided by a sum .* microstrat\.set_weight"),
    ],
)
def test_losses_that_contradict_the_declaration_are_announced(loss_reduction: str, loss: Any, message: str) -> None:
    ours = strategy(loss_reduction=loss_reduction)
    with ours.scope():
        weight = tf.Variable(1.0)

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            value = loss(x) * weight
        return tape.gradient(value, weight)

    with pytest.warns(UserWarning, match=message):
        run(ours, step, ROWS)


def test_cotangents_worked_out_by_hand() -> None:
    ours = strategy()
    with ours.scope():
        weight = tf.Variable(1.0)

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            y = x * weight
        each = tf.ones_like(y)
        return (
            tape.gradient(y, weight, output_gradients=each),
            tape.gradient(y, weight, output_gradients=each / tf.cast(tf.shape(x)[0], tf.float32)),
        )

    total, mean = run(ours, step, ROWS)
    assert (total.numpy(), mean.numpy()) == (15.0, pytest.approx(3.0))


def test_a_queue_of_gathered_rows() -> None:
    ours = strategy()
    queue = variable(ours, tf.zeros([3, 1]))

    def step(x: tf.Tensor) -> None:
        queue.assign(tf.concat([queue, context().all_gather(x, axis=0)], 0)[-3:])

    run(ours, step, ROWS)
    np.testing.assert_array_equal(queue, ROWS[-3:])


@pytest.mark.parametrize(
    ("initial", "assign", "message"),
    [
        (False, lambda v, x: v.assign(tf.reduce_any(x > 3)), r"variable 'state:0' \(bool\)"),
        (1.0, lambda v, x: v.assign(v * tf.reduce_sum(x)), r"variable 'state:0' \(float32\).*Sums"),
        ([0.0] * 5, lambda v, x: v.assign(x[:, 0]), r"a value for each row .* to variable 'state:0'"),
        (0.0, lambda v, x: tf.cond(x[0, 0] > 3, lambda: v.assign_add(1.0), lambda: v + 0.0), "condition that differs"),
    ],
)
def test_assignments_that_cannot_be_put_together(initial: Any, assign: Any, message: str) -> None:
    ours = strategy()
    state = variable(ours, initial, "SUM")

    def step(x: tf.Tensor) -> None:
        assign(state, x)

    with pytest.raises(RuntimeError, match=message):
        run(ours, step, ROWS)


def test_draws_differ_between_micro_batches_and_advance_once() -> None:
    def draws() -> tuple[np.ndarray, np.ndarray, int]:
        keras.utils.set_random_seed(3)
        ours = strategy(2)
        with ours.scope():
            seeds = keras.random.SeedGenerator(5)
        rows, weights = run(
            ours,
            lambda x: (keras.random.uniform(tf.shape(x), seed=seeds), keras.random.normal((3,), seed=seeds)),
            ROWS[:4],
        )
        return ours.gather(rows, 0).numpy(), weights.numpy(), int(np.asarray(seeds.state)[1])

    rows, weights, advanced = draws()
    assert len(set(rows.ravel().tolist())) == 4
    assert weights.shape == (3,)  # noise that has no rows in it is the whole batch's
    assert advanced == 2
    again = draws()
    np.testing.assert_array_equal(rows, again[0])
    np.testing.assert_array_equal(weights, again[1])


def test_random_generators_go_on() -> None:
    ours = strategy(2)
    with ours.scope():
        generator = tf.random.Generator.from_seed(3)
    rows = run(ours, lambda x: generator.uniform(tf.shape(x)), ROWS[:4])
    assert len(set(np.ravel(ours.gather(rows, 0)).tolist())) == 4


def test_random_generators_draw_what_has_no_rows_once() -> None:
    ours = strategy(2)
    with ours.scope():
        generator = tf.random.Generator.from_seed(3)
    alone = tf.random.Generator.from_seed(3)
    alone.uniform([2])  # (its values are others: under any strategy the replica's id goes into the key)
    assert run(ours, lambda x: generator.uniform([2]), ROWS[:4]).shape == [2]
    np.testing.assert_array_equal(generator.state, alone.state)


@pytest.mark.parametrize("number", [2, 4, 5])
def test_batch_normalization_moves_by_the_statistics_of_the_whole_batch(number: int) -> None:
    ours = strategy(number)
    x = np.random.default_rng(0).normal(3.0, 2.0, (13, 3)).astype("float32")
    with ours.scope():
        layer = keras.layers.BatchNormalization(momentum=0.75)
        layer.build(x.shape)
    for _ in range(2):  # called twice a step, as on real and generated images
        run(ours, lambda x: (layer(x, training=True), layer(2 * x, training=True)), x)
    mean, variance = np.zeros(3), np.ones(3)
    for factor in (1, 2, 1, 2):
        mean = 0.75 * mean + 0.25 * factor * x.mean(0)
        variance = 0.75 * variance + 0.25 * factor**2 * x.var(0)
    np.testing.assert_allclose(layer.moving_mean, mean, rtol=2e-6)
    np.testing.assert_allclose(layer.moving_variance, variance, rtol=2e-6)


# --- Weights ----------------------------------------------------------------------------------------------------------
TOKENS = tf.constant([[1, 2, 3], [4, 0, 0], [5, 6, 0], [7, 0, 0]])


def token_gradient(number: int, weigh: bool) -> tuple[float, float]:
    ours = strategy(number)
    with ours.scope():
        weight = tf.Variable(2.0)

    def step(tokens: tf.Tensor) -> Any:
        mask = tf.cast(tokens != 0, tf.float32)
        if weigh:
            microstrat.set_weight(tf.reduce_sum(mask))
        with tf.GradientTape() as tape:
            values = tf.square(weight * tf.cast(tokens, tf.float32))
            loss = tf.reduce_sum(mask * values) / tf.reduce_sum(mask)
        return loss, tape.gradient(loss, weight)

    loss, gradient = run(ours, step, TOKENS)
    return float(ours.reduce("MEAN", loss, axis=None)), float(gradient)


@pytest.mark.core
def test_a_loss_divided_by_tokens_needs_their_number() -> None:
    squares = sum(value**2 for value in (1, 2, 3, 4, 5, 6, 7))
    whole = (2.0**2 * squares / 7, 2 * 2.0 * squares / 7)
    assert token_gradient(1, weigh=False) == pytest.approx(whole)
    assert token_gradient(2, weigh=True) == pytest.approx(whole)
    assert token_gradient(4, weigh=True) == pytest.approx(whole)
    with pytest.warns(UserWarning, match=r"divided by a sum .* microstrat\.set_weight"):
        loss, gradient = token_gradient(2, weigh=False)
    assert abs(loss / whole[0] - 1) > 0.02
    assert abs(gradient / whole[1] - 1) > 0.02


def test_set_weight_is_refused_where_it_cannot_work() -> None:
    def late(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * weight)
        tape.gradient(loss, weight)
        microstrat.set_weight(tf.reduce_sum(x))

    ours = strategy()
    with ours.scope():
        weight = tf.Variable(1.0)
    with pytest.raises(RuntimeError, match=r"'late' calls microstrat\.set_weight after"):
        run(ours, late, ROWS)
    with pytest.raises(ValueError, match="takes one number"):
        run(ours, lambda x: microstrat.set_weight(x), ROWS)
    with pytest.raises(RuntimeError, match="Between replicas the code itself"):
        run(microstrat.MicroBatchStrategy(2), lambda: microstrat.set_weight(1.0))
    microstrat.set_weight(3.0)  # on one device the batch is whole


# --- Gradients --------------------------------------------------------------------------------------------------------
def test_the_gradient_of_a_value_for_each_row_is_that_of_their_sum() -> None:
    ours = strategy()
    with ours.scope():
        weight = tf.Variable(1.0)

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            losses = x[:, 0] * weight
        return tape.gradient(losses, weight)

    assert run(ours, step, ROWS).numpy() == 15.0


def test_gradients_by_tensors_of_a_mean_are_announced() -> None:
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean(x * x)
        return tape.gradient(loss, x)

    ours = strategy()
    with pytest.warns(UserWarning, match="gradient of a single number by tensors of the micro-batch"):
        np.testing.assert_allclose(ours.gather(run(ours, step, ROWS), 0), 2 * ROWS / 5)


def test_manual_steps_of_gradient_descent() -> None:
    ours = strategy()
    with ours.scope():
        weight = tf.Variable(1.0)

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * weight)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))

    run(ours, step, ROWS)
    assert weight.numpy() == pytest.approx(0.7)


# --- Collectives ------------------------------------------------------------------------------------------------------
def context() -> Any:
    return tf.distribute.get_replica_context()


def test_collectives_keep_their_meaning_on_the_whole_batch() -> None:
    def step(x: tf.Tensor) -> Any:
        return (
            context().all_reduce("SUM", tf.reduce_sum(x)),
            context().all_reduce("MEAN", tf.reduce_mean(x)),
            context().all_gather(x, axis=0),
            context().merge_call(
                lambda distribution, value: distribution.reduce("SUM", value, axis=None), (tf.size(x),)
            ),
        )

    total, mean, rows, size = run(strategy(), step, ROWS)
    assert (total.numpy(), mean.numpy(), size.numpy()) == (15.0, 3.0, 5)
    np.testing.assert_array_equal(rows, ROWS)


def test_collectives_without_meaning() -> None:
    with pytest.raises(ValueError, match=r"all-reduces a tensor whose size depends on the micro-batch"):
        run(strategy(), lambda x: context().all_reduce("SUM", x), ROWS)
    with pytest.raises(ValueError, match="gathers along axis 1"):
        run(strategy(), lambda x: context().all_gather(x, axis=1), ROWS)


# --- Options ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"micro_batches": 0}, "micro_batches must be a positive int"),
        ({"micro_batches": 2, "loss_reduction": "max"}, "loss_reduction must be 'mean'"),
        ({"replicas": 2, "loss_reduction": "sum"}, "loss_reduction is for semantics='whole_batch'"),
        ({"micro_batches": 2, "dropout_masks": "independent"}, "dropout_masks says what replicas keep apart"),
        ({"replicas": 2, "batch_norm_statistics": "mean"}, "must be 'per_replica' or 'averaged', not 'mean'"),
    ],
)
def test_arguments_of_scope(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message), microstrat.scope(**arguments):
        pass


# --- Structure --------------------------------------------------------------------------------------------------------
def masked_step(number: int) -> tuple[int, Any]:
    """Operations of the graph of a training step whose loss needs a sum over all micro-batches first, and its plan."""
    ours = strategy(number)
    with ours.scope():
        layers = [keras.layers.Embedding(8, 4, mask_zero=True), keras.layers.LSTM(4, return_sequences=True)]
        model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers, keras.layers.Dense(8)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.optimizer.build(model.trainable_variables)
    step = tf.function(lambda x: ours.run(model.train_step, args=((x, x),)))
    graph = step.get_concrete_function(tf.TensorSpec([None, 3], tf.int32)).graph
    return len(graph.get_operations()), _lower.last_plan()


def test_graphs_do_not_grow_with_the_micro_batches() -> None:
    (few, plan), (many, _) = masked_step(2), masked_step(64)
    assert few == many
    assert plan.num_loops == 2


def test_a_sum_before_the_loss_does_not_keep_the_forward_pass() -> None:
    """The first loop counts what the mask leaves; the forward pass stands in the second, with the backward pass."""
    _, plan = masked_step(4)
    assert len(plan.stages[1].nodes) < 30 < len(plan.stages[3].nodes)
    assert len(plan.carries) <= 3


def test_scattering_into_a_variable() -> None:
    ours = strategy()
    queue = variable(ours, tf.zeros([3]))
    run(ours, lambda x: queue.scatter_nd_update([[1]], context().all_reduce("SUM", tf.reduce_sum(x))[tf.newaxis]), ROWS)
    np.testing.assert_array_equal(queue, [0.0, 15.0, 0.0])
    with pytest.raises(RuntimeError, match="by scattering"):
        run(ours, lambda x: queue.scatter_nd_update([[1]], tf.reduce_sum(x)[tf.newaxis]), ROWS)


# --- Variables made elsewhere -----------------------------------------------------------------------------------------
def test_variables_made_outside_the_scope() -> None:
    """What does not depend on the micro-batch happens once; what does cannot be put together, and is refused."""
    ours, counter = strategy(), tf.Variable(0)
    optimizer = keras.optimizers.SGD(0.1)
    with ours.scope():
        weight = keras.Variable(1.0)

    def step(x: tf.Tensor) -> None:
        counter.assign_add(1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * weight)
        optimizer.apply([tape.gradient(loss, weight.value)], [weight])

    run(ours, step, ROWS)
    assert (counter.numpy(), int(optimizer.iterations), float(weight)) == (1, 1, pytest.approx(0.7))
    with pytest.raises(RuntimeError, match=r"not made in the strategy's scope \(AssignAddVariableOp"):
        run(ours, lambda x: counter.assign_add(tf.shape(x)[0]), ROWS)


def test_tables_made_outside_the_scope() -> None:
    ours, table = strategy(), tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    def step(x: tf.Tensor) -> None:
        keys = tf.cast(x[:, 0], tf.int64)
        table.insert(keys, table.lookup(keys) + x[:, 0])

    for _ in range(2):
        run(ours, step, ROWS)
    assert dict(zip(*(part.numpy().tolist() for part in table.export()), strict=True)) == {
        1: 2,
        2: 4,
        3: 6,
        4: 8,
        5: 10,
    }


@pytest.mark.parametrize("number", [2, 8])
def test_stateful_rnns_are_refused(number: int) -> None:
    with microstrat.scope(micro_batches=number):
        layers = [keras.Input(batch_shape=(8, 4, 3)), keras.layers.LSTM(4, stateful=True, name="memory")]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
    with pytest.raises(RuntimeError, match="Layer 'memory' is a stateful RNN"):
        model.predict(np.zeros((8, 4, 3)), batch_size=8, verbose=0)


def test_slices_that_are_unique_stay_unique() -> None:
    """Sparse inputs: every column that occurs has one slice, however often it occurs."""
    ours = strategy(2)
    with ours.scope():
        table = tf.Variable(tf.ones([4, 1]))

    def step(ids: tf.Tensor) -> Any:
        unique, _ = tf.unique(ids)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, unique)) / tf.cast(tf.shape(ids)[0], tf.float32)
        gradient = tape.gradient(loss, table)
        return gradient.indices, gradient.values

    indices, values = run(ours, step, tf.constant([3, 1, 1, 2]))
    assert indices.numpy().tolist() == [3, 1, 2]
    np.testing.assert_allclose(values[:, 0], [0.25, 0.5, 0.25])
