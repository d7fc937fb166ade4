"""Keras' own training: compile, fit, evaluate, predict."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.programs._registry import BATCH, batches, labels, mlp, model_state, program, rows

LOSS = "sparse_categorical_crossentropy"


def _loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _compiled(strategy: tf.distribute.Strategy, optimizer: Any = "adam", **compile_options: Any) -> keras.Model:
    with strategy.scope():
        model = mlp()
        model.compile(optimizer, _loss(), metrics=["accuracy"], **compile_options)
    return model


def _outcome(model: keras.Model, history: Any) -> dict[str, Any]:
    return {**model_state(model), "history": {key: np.asarray(value) for key, value in history.history.items()}}


@program(core=True)
def fit_mlp(strategy: tf.distribute.Strategy) -> Any:
    model = _compiled(strategy)
    history = model.fit(batches(rows(2 * BATCH, 6), labels(2 * BATCH)), epochs=5, verbose=0)
    return _outcome(model, history)
