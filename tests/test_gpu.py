"""With a GPU, it is used without being asked for, and gives what the CPU gives."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import microstrat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not tf.config.list_physical_devices("GPU"), reason="needs a GPU"),
]


def weights_after_fit(device: str | None) -> list[np.ndarray]:
    keras.utils.set_random_seed(0)
    with microstrat.scope(replicas=4, device=device):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.random.default_rng(0).normal(size=(32, 6)).astype("float32")
    model.fit(x, np.arange(32) % 3, batch_size=16, shuffle=False, verbose=0)
    return model.get_weights()


def test_the_first_gpu_is_the_default() -> None:
    strategy = microstrat.MicroBatchStrategy(2)
    assert "GPU:0" in strategy.extended.parameter_devices[0]
    with strategy.scope():
        assert "GPU:0" in tf.Variable(1.0).device


def test_the_gpu_gives_what_the_cpu_gives() -> None:
    for ours, reference in zip(weights_after_fit(None), weights_after_fit("CPU:0"), strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-5, atol=1e-6)
