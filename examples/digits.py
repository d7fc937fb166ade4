"""The digits that the examples train on: 5,000 that lie beside this file, or the whole of MNIST."""

from __future__ import annotations

import pathlib

import numpy as np

_SHIPPED = pathlib.Path(__file__).parent / "data" / "mnist_5k.npz"

Split = tuple[np.ndarray, np.ndarray]


def load(*, full: bool = False, limit: int | None = None, seed: int = 0) -> tuple[Split, Split]:
    """Returns (images, labels) for training and for validation, shuffled: the same split for the same seed.

    Args:
        full: 50,000 + 10,000 digits from `keras.datasets.mnist`, which downloads them once; else 4,000 + 1,000.
        limit: use at most this many digits for training, and at most a quarter as many for validation.
        seed: of the shuffle.

    Returns:
        Two pairs of images (float32 [n, 28, 28], 0 to 1) and labels (int32 [n], 0 to 9).

    Raises:
        SystemExit: `full` was asked for, and the download failed.
    """
    images, labels = _download() if full else _shipped()
    num_validation = 10_000 if full else 1_000
    order = np.random.default_rng(seed).permutation(len(images))
    train, validation = order[num_validation:][:limit], order[:num_validation][: limit and max(1, limit // 4)]

    def take(rows: np.ndarray) -> Split:
        return images[rows].astype(np.float32) / 255, labels[rows].astype(np.int32)

    return take(train), take(validation)


def _shipped() -> Split:
    with np.load(_SHIPPED) as file:
        return file["images"], file["labels"]


def _download() -> Split:
    import keras

    try:
        return keras.datasets.mnist.load_data()[0]
    except Exception as error:  # Keras raises a plain Exception when a download fails
        raise SystemExit(
            f"--full downloads MNIST (11 MB) through keras.datasets.mnist, and that failed: {error}\n"
            f"Leave out --full to train on the 5,000 digits in {_SHIPPED}."
        ) from error
