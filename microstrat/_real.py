"""Real replicas: the devices that virtual replicas run on, and what they exchange.

Each real replica runs the loop over its virtual ones, and has its own component of every variable. Where their values meet,
the base strategy (TensorFlow's own) adds or gathers what the loops have come to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from microstrat import _tf

_SUM = tf.distribute.ReduceOp.SUM


@dataclasses.dataclass(frozen=True)
class Real:
    """The real replicas around the virtual ones.

    Attributes:
      devices: of this process, one a real replica.
      base: the strategy that they belong to; None if one device is all there is.
      workers: number of processes, each with as many devices.
      worker: which of them this one is.
      compiled: whether XLA compiles what each device does, which is as much as it can: its programs are for one device.
    """

    devices: tuple[str, ...]
    base: tf.distribute.Strategy | None = None
    workers: int = 1
    worker: int = 0
    compiled: bool = False

    @property
    def alone(self) -> bool:
        """Whether there is one real replica."""
        return len(self.devices) == 1 and self.workers == 1

    @property
    def number(self) -> int:
        """How many real replicas there are."""
        return len(self.devices) * self.workers

    @property
    def scope(self) -> str:
        """The device that a replica function is traced on: the one device, or none, where the same trace runs on several."""
        return self.devices[0] if len(self.devices) == 1 else ""

    def sums(self, tensors: Sequence[Sequence[tf.Tensor]]) -> list[Sequence[tf.Tensor]]:
        """The sums of several tensors, in one go: for each its value on every device, in and out."""
        results: dict[int, Sequence[tf.Tensor]] = {}
        # tf.distribute packs tensors into one, which takes one dtype.
        for dtype in dict.fromkeys(values[0].dtype for values in tensors):
            chosen = [index for index, values in enumerate(tensors) if values[0].dtype == dtype]
            pairs = [(_tf.PerReplica(tuple(tensors[index])),) * 2 for index in chosen]
            summed = self._batch_reduce(pairs)
            results |= {index: self._on_devices(value) for index, value in zip(chosen, summed, strict=True)}
        return [results[index] for index in range(len(tensors))]

    def _batch_reduce(self, pairs: Sequence[Any]) -> Sequence[Any]:
        assert self.base is not None
        if self.workers == 1 and (not all("GPU" in device for device in self.devices) or _tf.in_control_flow()):
            # MirroredStrategy's collectives deadlock on CPUs with few threads, and cannot run in a loop.
            return tf.distribute.ReductionToOneDevice().batch_reduce(_SUM, pairs)
        with _tf.cross_replica_context(self.base):
            return self.base.extended.batch_reduce_to(_SUM, pairs)

    def concat(self, values: Sequence[tf.Tensor], axis: int) -> Sequence[tf.Tensor]:
        """The concatenation of all real replicas' values, on every device."""
        if self.workers > 1:
            return self._on_devices(_tf.gather(self.base, values, axis))
        return self._everywhere(lambda: tf.concat(list(values), axis))

    def extreme(self, kind: str, values: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """The greatest ("max") or least ("min") of all real replicas' values, elementwise, on every device."""
        reduce = tf.reduce_max if kind == "max" else tf.reduce_min
        if self.workers > 1:
            gathered = self.concat([value[tf.newaxis] for value in values], 0)
            return [reduce(value, axis=0) for value in gathered]
        return self._everywhere(lambda: reduce(tf.stack(list(values)), axis=0))

    def first(self, values: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """The first real replica's value, on every device."""
        if self.workers > 1:
            gathered = self.concat([value[tf.newaxis] for value in values], 0)
            return [value[0] for value in gathered]
        return [values[0]] * len(self.devices)

    def sum_of_workers(self, value: Any) -> Any:
        """The sum over all processes of a value (tensor or IndexedSlices) that each has one of."""
        if self.workers == 1:
            return value
        if isinstance(value, tf.IndexedSlices):
            parts = [self.gather_of_workers(part, 0) for part in (value.values, value.indices)]
            return tf.IndexedSlices(parts[0], parts[1], value.dense_shape)
        value = tf.convert_to_tensor(value)
        ((total, *_),) = self.sums([[value, *(tf.zeros_like(value) for _ in self.devices[1:])]])
        return total

    def gather_of_workers(self, value: tf.Tensor, axis: int) -> tf.Tensor:
        """The concatenation of all processes' values, the first process' first."""
        if self.workers == 1:
            return value
        empty = tf.gather(value, tf.zeros([0], tf.int32), axis=axis)
        return self.concat([value, *(empty for _ in self.devices[1:])], axis)[0]

    def _everywhere(self, compute: Any) -> list[tf.Tensor]:
        results = []
        for device in self.devices:
            with tf.device(device):
                results.append(compute())
        return results

    def _on_devices(self, value: Any) -> Sequence[tf.Tensor]:
        values = value.values if isinstance(value, tf.distribute.DistributedValues) else (value,)
        return list(values) if len(values) == len(self.devices) else [values[0]] * len(self.devices)


def of_base(base: tf.distribute.Strategy) -> Real:
    """The real replicas of a MirroredStrategy or MultiWorkerMirroredStrategy."""
    devices = tuple(_tf.canonicalize_device(device) for device in base.extended.worker_devices)
    worker = _tf.worker_index(base)
    return Real(devices, base, base.num_replicas_in_sync // len(devices), worker)
