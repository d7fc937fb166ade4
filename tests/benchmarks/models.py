"""The models of the benchmark, and data of their shape.

The convolutional nets take 32×32 images and enlarge them inside: the global batch stays small, so that what is measured
is the activations of one micro-batch. Images are bytes, as image files hold them; texts are rows of token numbers.

Nothing here needs TensorFlow: the JAX program trains the same models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np

CLASSES = 10
VOCABULARY = 200_000
_WORDS = 1000  # of the models whose table of embeddings is not the point


@dataclass(frozen=True)
class BenchmarkModel:
    """A model by name.

    Attributes:
      title: what `--help` says of it.
      input_shape: of one row.
      dtype: of the inputs, "float32", "uint8" or "int32" (tokens).
      layers: from the input to the logits.
      micro_batch: rows of a micro-batch, if none are asked for.
      fills_cores: whether that micro-batch gives a machine of a few cores enough to do.
      activations_dominate: whether a step's memory is that of the micro-batch, and not TensorFlow's own.
    """

    title: str
    input_shape: tuple[int, ...]
    dtype: str
    layers: Callable[[keras.KerasTensor], keras.KerasTensor]
    micro_batch: int = 16
    fills_cores: bool = False
    activations_dominate: bool = False

    def build(self) -> keras.Model:
        """A new model with the same initial weights at every call."""
        keras.utils.set_random_seed(0)
        inputs = keras.Input(self.input_shape, dtype=self.dtype)
        return keras.Model(inputs, self.layers(inputs))

    def rows(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """`number` rows of random input and their labels."""
        random = np.random.default_rng(0)
        labels = random.integers(0, CLASSES, number).astype(np.int32)
        if self.dtype == "int32":
            return random.integers(0, VOCABULARY, (number, *self.input_shape), dtype=np.int32), labels
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


def _resnet50(inputs: keras.KerasTensor) -> keras.KerasTensor:
    enlarged = keras.layers.UpSampling2D(2)(keras.layers.Rescaling(1 / 255)(inputs))
    hidden = keras.applications.ResNet50(include_top=False, weights=None, input_tensor=enlarged, pooling="avg").output
    return keras.layers.Dense(CLASSES)(hidden)


def _embed(tokens: keras.KerasTensor, width: int) -> keras.KerasTensor:
    return keras.layers.Embedding(_WORDS, width)(keras.layers.Lambda(lambda token: token % _WORDS)(tokens))


def _lstm(inputs: keras.KerasTensor) -> keras.KerasTensor:
    return keras.layers.Dense(CLASSES)(keras.layers.LSTM(128)(_embed(inputs, 64)))


def _transformer(inputs: keras.KerasTensor) -> keras.KerasTensor:
    width = 128
    positions = keras.layers.Embedding(inputs.shape[1], width)(
        keras.layers.Lambda(lambda token: keras.ops.cumsum(keras.ops.ones_like(token), 1) - 1)(inputs)
    )
    hidden = _embed(inputs, width) + positions
    for _ in range(4):
        attended = keras.layers.MultiHeadAttention(4, width // 4)(hidden, hidden)
        hidden = keras.layers.LayerNormalization()(hidden + attended)
        forward = keras.layers.Dense(width)(keras.layers.Dense(4 * width, activation="gelu")(hidden))
        hidden = keras.layers.LayerNormalization()(hidden + forward)
    return keras.layers.Dense(CLASSES)(keras.layers.GlobalAveragePooling1D()(hidden))


def _embedding(inputs: keras.KerasTensor) -> keras.KerasTensor:
    hidden = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(VOCABULARY, 64)(inputs))
    return keras.layers.Dense(CLASSES)(keras.layers.Dense(64, activation="relu")(hidden))


MODELS = {
    "mlp": BenchmarkModel("784-64-64-10 perceptron", (784,), "float32", _mlp),
    "conv64": BenchmarkModel("3 convolutions on 64×64 pixels", (32, 32, 1), "uint8", _convolutions(2, (16, 32, 64))),
    "conv128": BenchmarkModel(
        "4 convolutions on 128×128",
        (32, 32, 1),
        "uint8",
        _convolutions(4, (32, 32, 64, 64)),
        fills_cores=True,
        activations_dominate=True,
    ),
    "densenet121": BenchmarkModel(
        "DenseNet121 on 32×32×3, no top", (32, 32, 3), "uint8", _densenet121, 4, activations_dominate=True
    ),
    "resnet50": BenchmarkModel(
        "ResNet50 on 64×64×3, no top", (32, 32, 3), "uint8", _resnet50, 4, activations_dominate=True
    ),
    "lstm": BenchmarkModel("LSTM of 128 over 64 tokens", (64,), "int32", _lstm),
    "transformer": BenchmarkModel("4 layers of attention, 128 wide, over 64 tokens", (64,), "int32", _transformer, 8),
    "embedding": BenchmarkModel("200,000 × 64 embeddings, 8 tokens a row", (8,), "int32", _embedding, 32),
}
