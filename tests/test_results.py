"""Reductions and traces where a worked-out value says more than a comparison."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import microstrat


@pytest.mark.filterwarnings("ignore:A batch of 13 rows")
def test_the_mean_of_integers_is_float64_whether_or_not_they_differ() -> None:
    strategy = microstrat.MicroBatchStrategy(3)
    for rows, mean in ((12, 4.0), (13, 13 / 3)):
        dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.range(rows).batch(rows))
        count = tf.function(lambda x: strategy.run(lambda part: tf.shape(part)[0], args=(x,)))
        result = strategy.reduce("MEAN", count(next(iter(dataset))), axis=None)
        assert result.dtype == tf.float64
        assert result.numpy() == mean


def test_a_python_number_stands_for_one_value_a_replica() -> None:
    strategy = microstrat.MicroBatchStrategy(3)
    assert strategy.experimental_local_results(strategy.run(lambda: 2)) == (2, 2, 2)
    assert strategy.reduce("SUM", strategy.run(lambda: 2), axis=None) == 6
    assert strategy.reduce("MEAN", strategy.run(lambda: 2), axis=None) == 2


def test_evaluation_traced_before_training_sees_each_replicas_statistics() -> None:
    """BatchNormalization that takes over a batch's statistics at once: each replica must see its own batch's."""
    strategy = microstrat.MicroBatchStrategy(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization(momentum=0.0, epsilon=0.0)])
    x = np.array([[0.0], [2.0], [10.0], [14.0]], "float32")
    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(x).batch(4))
    kept = list(batches)

    def normalised(batch: Any) -> Any:
        return strategy.run(lambda part: model(part, training=False), args=(batch,))

    @tf.function
    def evaluate(dataset: Any) -> tf.Tensor:
        total = tf.zeros([])
        for batch in dataset:
            total += strategy.reduce(
                "SUM", strategy.run(lambda part: tf.reduce_sum(model(part)), args=(batch,)), axis=None
            )
        return total

    @tf.function
    def train(dataset: Any) -> None:
        for batch in dataset:
            strategy.run(lambda part: model(part, training=True), args=(batch,))

    one_batch = tf.function(normalised)
    one_batch(kept[0])
    assert evaluate(batches).numpy() == x.sum()  # statistics 0 and 1
    train(batches)
    train(batches)
    # Means 1 and 12, deviations 1 and 2.
    for value in one_batch(kept[0]).values:
        np.testing.assert_allclose(value.numpy(), [[-1.0], [1.0]], atol=1e-6)
    np.testing.assert_allclose(evaluate(batches).numpy(), 0.0, atol=1e-6)
