"""The models of the benchmark, and data of their shape.

The convolutional nets take 32×32 images and enlarge them inside: the global batch stays small, so that what is measured
is the activations of one micro-batch. Images are bytes, as image files hold them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np

CLASSES = 10


@dataclass(frozen=True)
class BenchmarkModel:
    """A model by name.

    Attributes:
      title: what `--help` says of it.
      input_shape: of one row.
      dtype: of the inputs, "float32" or "uint8".
      layers: from the input to the logits.
    """

    title: str
    input_shape: tuple[int, ...]
    dtype: str
    layers: Callable[[keras.KerasTensor], keras.KerasTensor]

    def build(self) -> keras.Model:
        """A new model with the same initial weights at every call."""
        keras.utils.set_random_seed(0)
        inputs = keras.Input(self.input_shape, dtype=self.dtype)
        return keras.Model(inputs, self.layers(inputs))

    def rows(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """`number` rows of random input and their labels."""
        random = np.random.default_rng(0)
        labels = random.integers(0, CLASSES, number).astype(np.int32)
        if self.dtype == "uint8":
            return random.integers(0, 256, (number, *self.input_shape), dtype=np.uint8), labels
        return random.random((number, *self.input_shape), dtype=np.float32), labels


def _mlp(inputs: keras.KerasTensor) -> keras.KerasTensor:
    hidden = keras.layers.Dense(64, activation="relu")(inputs)
    hidden = keras.layers.Dense(64, activation="relu")(hidden)
    return keras.layers.Dense(CLASSES)(hidden)


def _convolutions(enlarge: int, filters: tuple[int, ...]) -> Callable[[keras.KerasTensor], keras.KerasTensor]:
    def layers(inputs: keras.KerasTensor) -> keras.KerasTensor:
        hidden = keras.layers.UpSampling2D(enlarge)(keras.layers.Rescaling(1 / 255)(inputs))
        for number in filters:
            hidden = keras.layers.Conv2D(number, 3, padding="same", activation="relu")(hidden)
            hidden = keras.layers.MaxPooling2D()(hidden)
        return keras.layers.Dense(CLASSES)(keras.layers.GlobalAveragePooling2D()(hidden))

    return layers


def _densenet121(inputs: keras.KerasTensor) -> keras.KerasTensor:
    scaled = keras.layers.Rescaling(1 / 255)(inputs)
    hidden = keras.applications.DenseNet121(include_top=False, weights=None, input_tensor=scaled, pooling="avg").output
    return keras.layers.Dense(CLASSES)(hidden)


MODELS = {
    "mlp": BenchmarkModel("784-64-64-10 perceptron", (784,), "float32", _mlp),
    "conv64": BenchmarkModel("3 convolutions on 64×64 pixels", (32, 32, 1), "uint8", _convolutions(2, (16, 32, 64))),
    "conv128": BenchmarkModel("4 convolutions on 128×128", (32, 32, 1), "uint8", _convolutions(4, (32, 32, 64, 64))),
    "densenet121": BenchmarkModel("DenseNet121 on 32×32×3, no top", (32, 32, 3), "uint8", _densenet121),
}
