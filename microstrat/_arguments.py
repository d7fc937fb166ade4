"""The arguments of a replica function: which of them are the batch, and how often its loop goes round."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import tensorflow as tf

from microstrat import _errors, _rows, _tf, _values


def turns(structure: Any, number: int, *, without_batch: int | None = None) -> _rows.Turns:
    """How many replicas, or micro-batches, the per-replica values in `structure` give work to.

    Args:
      structure: arguments of a replica function.
      number: of replicas, or micro-batches at most.
      without_batch: how many turns there are if nothing in `structure` is cut; default, all.
    """
    found: list[_rows.Turns] = []
    for value in tf.nest.flatten(structure):
        if isinstance(value, _values.PerReplica) and not isinstance(value, _tf.DistributedVariable):
            running = value.count_running()
            if running is not None:
                found.append(
                    _rows.Turns(
                        value.num_replicas, running, value.count_rows(), value.share(), value.lengths_of_parts()
                    )
                )
    if not found:
        alone = without_batch or number
        return _rows.Turns(alone, alone)
    if all(isinstance(one.running, int) for one in found):
        most = max(found, key=lambda one: one.running)
        return most if without_batch is None else dataclasses.replace(most, most=most.running)
    running = functools.reduce(tf.maximum, [one.running for one in found])
    return dataclasses.replace(found[0], running=running)


def in_micro_batches(structure: Any, number: int, *, even: bool) -> Any:
    """The arguments of a replica function, with its batch marked to be cut.

    A batch of a distributed dataset is marked already. If there is none, the tensors that have rows are the batch.
    """
    flat = tf.nest.flatten(structure)
    marked = any(_is_per_replica(value) for value in flat)
    if not marked and number > 1:
        flat = [tf.convert_to_tensor(value) if isinstance(value, np.ndarray) else value for value in flat]
        batch = [value for value in flat if _has_rows(value)]
        counts = {rows for value in batch if (rows := _rows.static_rows(value)) is not None}
        if len(counts) > 1:
            raise _errors.which_is_the_batch([value.shape for value in batch], number)
        if batch:
            flat = _with_equal_rows(flat, batch, number)
    for index, value in enumerate(flat):
        if _has_rows(value) and not marked and number > 1:
            flat[index] = _values.MicroBatches(number, value)
        if isinstance(flat[index], _values.MicroBatches) and even:
            flat[index] = _values.MicroBatches(number, flat[index].batch, even=True)
    return tf.nest.pack_sequence_as(structure, flat)


def is_batch(value: Any) -> bool:
    """Whether a per-replica value is a batch, cut by rows."""
    return isinstance(value, _values.BatchRows | _values.Concatenated)


def _is_per_replica(value: Any) -> bool:
    return isinstance(value, tf.distribute.DistributedValues) and not isinstance(value, _tf.DistributedVariable)


def _has_rows(value: Any) -> bool:
    return isinstance(value, tf.Tensor | tf.RaggedTensor | tf.SparseTensor) and value.shape.rank != 0


def _with_equal_rows(flat: list[Any], batch: list[Any], number: int) -> list[Any]:
    """The values, checked to have the same number of rows when they are computed, if that is not known yet."""
    if len(batch) < 2 or all(_rows.static_rows(value) is not None for value in batch):
        return flat
    message = str(_errors.which_is_the_batch([value.shape for value in batch], number))
    checks = [
        tf.debugging.assert_equal(_rows.count_rows(batch[0]), _rows.count_rows(value), message) for value in batch[1:]
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return [
            tf.nest.map_structure(tf.identity, value, expand_composites=True) if _has_rows(value) else value
            for value in flat
        ]


def whole_values(structure: Any, num_replicas: int) -> Any:
    """The arguments of a replica function, with no batch cut in micro-batches."""

    def whole(value: Any) -> Any:
        if not isinstance(value, _values.PerReplica) or num_replicas > 1:
            return value
        if isinstance(value, _values.MicroBatches | _values.ConcatenatedRows):
            return value.reduce_sum()
        raise _errors.not_a_batch(value)

    return tf.nest.map_structure(whole, structure)
