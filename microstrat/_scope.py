"""scope(): the one line that users add."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from microstrat import _strategy


@contextlib.contextmanager
def scope(*, replicas: int, device: str | None = None) -> Iterator[_strategy.MicroBatchStrategy]:
    """Makes a `MicroBatchStrategy`, enters its scope and yields it.

        with microstrat.scope(replicas=4):       # was: with tf.distribute.MirroredStrategy().scope():
            model = build_model()
            model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(train, epochs=3)               # batch 64 runs as 4 micro-batches of 16

    Args:
      replicas: N, the number of virtual replicas; a positive int.
      device: the device they run on. Default: the first GPU if there is one, else the CPU.

    Yields:
      The strategy, which is also `tf.distribute.get_strategy()` inside the block.

    Raises:
      ValueError: if `replicas` is not a positive int, or there is no such device.
    """
    strategy = _strategy.MicroBatchStrategy(_strategy.positive_int("replicas", replicas), device=device)
    with strategy.scope():
        yield strategy
