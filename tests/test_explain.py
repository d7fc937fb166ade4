"""What `strategy.explain` says of programs whose stages, collectives and sizes are plain to see."""

from __future__ import annotations

import importlib.util
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import microstrat

X = np.ones([8, 4], "float32")


def _batch(strategy: microstrat.MicroBatchStrategy) -> Any:
    return next(iter(strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(X).batch(8))))


def _step(strategy: microstrat.MicroBatchStrategy, *layers: keras.layers.Layer) -> Any:
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), *layers])
        optimizer = keras.optimizers.SGD(0.1)

    def train_step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return train_step, model


def test_a_training_step(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = microstrat.MicroBatchStrategy(4)
    step, model = _step(strategy)
    before = [value.copy() for value in model.get_weights()]
    explanation = strategy.explain(step, args=(_batch(strategy),))
    assert (explanation.function, explanation.number, explanation.unit) == ("train_step", 4, "replica")
    assert [stage.repeated for stage in explanation.stages] == [False, True, False]
    assert not explanation.stages[1].writes
    written = [name.rpartition("/")[2] for name in explanation.stages[2].writes]
    assert sorted(written) == ["bias", "iteration", "kernel"]
    assert [(one.kind, one.shape, one.num_bytes, one.after_stage) for one in explanation.collectives] == [
        ("sum", "[4, 3]", 48, 1),
        ("sum", "[3]", 12, 1),
    ]
    assert all(one.where.startswith(__file__) for one in explanation.collectives)
    assert [(one.what, one.num_bytes) for one in explanation.kept] == [("returned", 4)]
    assert not explanation.warnings
    assert "train_step" in capsys.readouterr().out
    assert all(np.array_equal(old, new) for old, new in zip(before, model.get_weights(), strict=True)), "nothing ran"


def test_what_grows_with_the_number_of_replicas() -> None:
    strategy = microstrat.MicroBatchStrategy(4)
    step, _ = _step(strategy, keras.layers.BatchNormalization())

    def contrastive(x: tf.Tensor) -> tf.Tensor:
        embedded = tf.linalg.matmul(x, tf.ones([4, 400]))
        everything = tf.distribute.get_replica_context().all_gather(embedded, axis=0)
        return tf.reduce_mean(tf.linalg.matmul(embedded, everything, transpose_b=True)) + step(x)

    explanation = strategy.explain(contrastive, args=(_batch(strategy),))
    state = [one for one in explanation.kept if one.what == "variable"]
    assert sorted((one.name.rpartition("/")[2], one.num_bytes) for one in state) == [
        ("moving_mean", 12),
        ("moving_variance", 12),
    ]
    carried = [one for one in explanation.kept if one.what == "carried"]
    assert [(one.shape, one.num_bytes) for one in carried] == [("[2, 400]", 3200)]
    assert [one.name for one in explanation.collectives if one.kind == "gather"] == [carried[0].name]
    text = str(explanation)
    assert "All 4 replicas are gone through 2 times" in text
    assert f"3,200 bytes each, 12,800 in all; the largest is {carried[0].name} at {__file__}" in text
    assert "2 values are kept for all 4 replicas, so memory grows with their number: 24 bytes each" in text


def test_micro_batches_and_loops_within() -> None:
    strategy = microstrat.MicroBatchStrategy(4, semantics="whole_batch", replicas=2)
    explanation = strategy.explain(_step(strategy)[0], args=(_batch(strategy),))
    assert (explanation.unit, explanation.number) == ("replica", 2)
    assert [(part.unit, part.number) for part in explanation.parts] == [("micro-batch", 4)]

    strategy = microstrat.MicroBatchStrategy(4)
    step, _ = _step(strategy)

    def steps(x: tf.Tensor) -> tf.Tensor:
        loss = 0.0
        for _ in tf.range(3):
            loss = step(x)
        return loss

    explanation = strategy.explain(steps, args=(_batch(strategy),))
    assert [[one.kind for one in part.collectives] for part in explanation.parts] == [["sum", "sum"]]


def test_text_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rich" else find(name))
    strategy = microstrat.MicroBatchStrategy(4)
    explanation = strategy.explain(lambda x: tf.reduce_sum(x), args=(_batch(strategy),))
    assert capsys.readouterr().out.rstrip() == str(explanation)
