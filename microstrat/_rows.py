"""Rows: how a batch is cut into parts, and how often a loop over the parts goes round."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Turns:
    """How often a loop over replicas, or over micro-batches, goes round.

    Attributes:
      most: at most; known while tracing.
      running: really: an int, or an int32 scalar if that is only known when the loop runs. A replica without rows never
        runs, and a micro-batch without rows does not exist; the first one always runs.
      rows: of the batch that is cut: an int, a scalar, or None if there is no batch.
      share: rows of every part but the last, likewise.
      lengths: rows of every part, [most], where they are given and not worked out from `rows` and `share`.
    """

    most: int
    running: Any
    rows: Any = None
    share: Any = None
    lengths: Any = None

    def rows_of_turn(self, turn: tf.Tensor) -> tf.Tensor:
        """How many rows the part of a turn has; `turn` is int32."""
        if self.lengths is not None:
            return tf.gather(self.lengths, turn)
        rows, share = tf.cast(self.rows, tf.int32), tf.cast(self.share, tf.int32)
        return tf.clip_by_value(rows - turn * share, 0, share)

    def on_device(self, index: int, laps: int) -> Any:
        """How many turns go round on one device, where each device has `laps` of them."""
        if isinstance(self.running, int):
            return min(max(self.running - index * laps, 0), laps)
        return tf.clip_by_value(self.running - index * laps, 0, laps)

    def happen(self) -> tf.Tensor | None:
        """Float64 [most]: 1 for every turn that runs and 0 for the others; None if all run."""
        if isinstance(self.running, int) and self.running == self.most:
            return None
        return tf.cast(tf.range(self.most) < self.running, tf.float64)


def share_of(rows: Any, number: int) -> Any:
    """Rows of every part but the last when a batch is cut in (at most) `number`: ceil(rows / number), at least 1."""
    share = (rows + (number - 1)) // number
    return max(share, 1) if isinstance(rows, int) else tf.maximum(share, 1)


def even_share(rows: Any, number: int) -> Any:
    """Rows of every part when a batch is cut in at most `number` equal parts: what XLA, with its fixed shapes, can do."""
    if isinstance(rows, int):
        return rows // next(parts for parts in range(number, 0, -1) if rows % parts == 0)
    parts = tf.range(1, number + 1, dtype=rows.dtype)
    return rows // tf.reduce_max(tf.where(rows % parts == 0, parts, 1))


def count_parts(rows: Any, share: Any) -> Any:
    """How many parts of `share` rows have any; the first counts always."""
    if isinstance(rows, int) and isinstance(share, int):
        return max(-(-rows // max(share, 1)), 1)
    share = tf.maximum(share, 1)
    return tf.cast(tf.maximum((rows + share - 1) // share, 1), tf.int32)


def micro_batch_bounds(rows: Any, num_replicas: int, replica_id: Any) -> tuple[Any, Any]:
    """First and last-plus-one row of a replica's share, as tf.distribute splits a batch: ceil(rows / N) rows each."""
    share = (rows + (num_replicas - 1)) // num_replicas
    if isinstance(rows, int) and isinstance(replica_id, int):
        return min(replica_id * share, rows), min((replica_id + 1) * share, rows)
    rows = tf.convert_to_tensor(rows)
    start = tf.minimum(tf.cast(replica_id, rows.dtype) * share, rows)
    return start, tf.minimum(start + share, rows)


def static_rows(batch: Any) -> int | None:
    """Number of rows of a tensor, ragged or sparse tensor, if it is known while tracing."""
    return batch.shape[0] if batch.shape.rank else None


def count_rows(batch: Any) -> Any:
    """Number of rows, an int if known, else an int32 or int64 scalar."""
    rows = static_rows(batch)
    if rows is not None:
        return rows
    if isinstance(batch, tf.SparseTensor):
        return batch.dense_shape[0]
    if isinstance(batch, tf.RaggedTensor):
        return batch.nrows()
    return tf.shape(batch)[0]


def cut_rows(batch: Any, start: Any, stop: Any, *, size: int | None = None) -> Any:
    """Rows start … stop of a tensor, ragged or sparse tensor. `size`, if given, is the static number of rows."""
    if isinstance(batch, tf.SparseTensor):
        tail = batch.dense_shape[1:]
        begin = tf.concat([[tf.cast(start, tf.int64)], tf.zeros_like(tail)], axis=0)
        lengths = tf.concat([[tf.cast(stop - start, tf.int64)], tail], axis=0)
        cut = tf.sparse.slice(batch, begin, lengths)
        return tf.SparseTensor(cut.indices, cut.values, tf.ensure_shape(lengths, [batch.shape.rank]))
    if isinstance(batch, tf.RaggedTensor):
        return batch[start:stop]
    rank = batch.shape.rank
    if size is None or rank is None:
        cut = batch[start:stop]
        cut.set_shape([size, *batch.shape[1:]] if rank is not None else None)
        return cut
    zeros = [0] * (rank - 1)
    cut = tf.slice(batch, [tf.cast(start, tf.int32), *zeros], [size] + [-1] * (rank - 1))
    cut.set_shape([size, *batch.shape[1:]])
    return cut
