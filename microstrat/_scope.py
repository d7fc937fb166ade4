"""scope(): the one line that users add."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from microstrat import _errors, _strategy


@contextlib.contextmanager
def scope(
    *,
    micro_batches: int | None = None,
    replicas: int | None = None,
    loss_reduction: str = "mean",
    batch_norm_statistics: str = "per_replica",
    dropout_masks: str = "mirrored",
    device: str | None = None,
) -> Iterator[_strategy.MicroBatchStrategy]:
    """Makes a `MicroBatchStrategy`, enters its scope and yields it.

        with microstrat.scope(micro_batches=4):  # code written for one device
            model = build_model()
            model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(train, epochs=3)               # batch 64 runs as 4 micro-batches of 16, with the numbers of 64

        with microstrat.scope(replicas=4):       # was: with tf.distribute.MirroredStrategy().scope():
            ...                                  # 4 virtual devices of 16 rows each, with the numbers of 4 real ones

    Args:
      micro_batches: n, the number of parts to cut each batch in; a positive int. Whole-batch semantics.
      replicas: N, the number of virtual replicas; a positive int. With `micro_batches`, each of them cuts its own batch.
      loss_reduction: with `micro_batches`, "mean" or "sum": what the losses are, over the rows of the batch.
      batch_norm_statistics: with `replicas`, "per_replica" or "averaged"; see `MicroBatchStrategy`.
      dropout_masks: with `replicas`, "mirrored" or "independent"; see `MicroBatchStrategy`.
      device: the device they run on. Default: the first GPU if there is one, else the CPU.

    Yields:
      The strategy, which is also `tf.distribute.get_strategy()` inside the block.

    Raises:
      ValueError: if neither number is given, one is not a positive int, or there is no such device.
    """
    options: Any = {
        "loss_reduction": loss_reduction,
        "batch_norm_statistics": batch_norm_statistics,
        "dropout_masks": dropout_masks,
        "device": device,
    }
    if micro_batches is not None:
        strategy = _strategy.MicroBatchStrategy(
            _strategy.positive_int("micro_batches", micro_batches),
            semantics="whole_batch",
            replicas=replicas,
            **options,
        )
    elif replicas is not None:
        strategy = _strategy.MicroBatchStrategy(_strategy.positive_int("replicas", replicas), **options)
    else:
        raise _errors.neither_replicas_nor_micro_batches()
    with strategy.scope():
        yield strategy
