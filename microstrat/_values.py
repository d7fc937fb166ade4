"""Per-replica values: what `run` takes and returns, held in as few tensors as possible.

MirroredStrategy's PerReplica holds N separate values, which makes every graph that touches one N times larger. The
classes here are PerReplica values too, and `values` has N entries when somebody asks, but each is held as what it is:

    BatchRows    a global batch; replica r's value is its share of the rows
    MicroBatches the same for the micro-batches of one replica
    Stacked      one tensor of shape [N, ...]
    Concatenated N tensors of different lengths, joined along their first axis
    Uniform      one value that all replicas share
    Separate     N values, for those that fit nowhere else (SeparateRows: and are batches)
    DeviceRows   a batch for each device; replica r's value is its share of its device's rows
    Symbolic     inside a trace: one tensor that stands for all replicas' values
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from microstrat import _errors, _rows, _tf


class PerReplica(_tf.PerReplica):
    """Base of the values here: a tf.distribute.DistributedValues with one entry a replica.

    Attributes:
      num_replicas: number of entries: replicas, or micro-batches of one replica.
      weights: float64 [num_replicas], what each entry weighs in a mean; None if all weigh the same. An entry of weight 0
        belongs to a replica that never ran, and is zeros, or to a micro-batch that does not exist.
      listed: "all" if `values` lists every entry, "some" if not those of weight 0. (In a graph it must list them all.)
    """

    num_replicas: int
    weights: tf.Tensor | None = None
    listed = "all"

    def __init__(self, num_replicas: int):
        # TensorFlow's own __init__ would store a tuple of N values.
        self.num_replicas = num_replicas
        self._cache: tuple[Any, ...] | None = None

    def with_weights(self, weights: tf.Tensor | None, listed: str) -> PerReplica:
        self.weights = weights
        self.listed = listed
        return self

    def _spec(self, kind: str, *parts: Any) -> PerReplicaSpec:
        return PerReplicaSpec(kind, self.num_replicas, "" if self.weights is None else self.listed, *parts)

    def _list(self, entries: Sequence[Any]) -> tuple[Any, ...]:
        if self.weights is None or self.listed == "all" or not tf.executing_eagerly():
            return tuple(entries)
        return self._that_ran(entries)

    def _that_ran(self, entries: Sequence[Any]) -> tuple[Any, ...]:
        """Outside graphs, the entries of weight > 0; in a graph nobody knows yet which they are."""
        if self.weights is None or not tf.executing_eagerly():
            return tuple(entries)
        return tuple(entry for entry, weight in zip(entries, self.weights.numpy(), strict=True) if weight > 0)

    def reduce_axis(self, is_sum: bool, axis: Any) -> Any:
        """Sum or mean over an axis (or several) of the entries and over the entries, every number weighing alike."""
        axes = [axis] if isinstance(axis, int) else list(axis)
        entries = self._that_ran(self._entries())
        total = tf.add_n([tf.reduce_sum(entry, axes) for entry in entries])
        if is_sum:
            return total
        counts = [tf.reduce_prod(tf.gather(tf.shape(entry), axes)) for entry in entries]
        return divide_by_replicas(total, tf.add_n(counts))

    def gather(self, axis: int) -> tf.Tensor:
        """All entries, concatenated along `axis`, replica 0 first."""
        entries = self._that_ran(self._entries())
        if any(isinstance(entry, tf.IndexedSlices) for entry in entries):
            raise _errors.gather_slices()
        return tf.concat(list(entries), axis)

    def count_rows(self) -> Any:
        """Rows of the batch that the entries are cut from, or what they weigh together; None if there is no batch."""
        return None if self.weights is None else tf.reduce_sum(self.weights)

    def share(self) -> Any:
        """Rows of every entry but the last; None if there is no batch."""

    def lengths_of_parts(self) -> Any:
        """Rows of every entry, where they are not worked out from `count_rows` and `share`; or what each weighs."""
        return self.weights

    def count_running(self) -> Any:
        """How many entries, from the first on, have anything to work on; None if that is not for this value to say."""
        return None if self.weights is None else tf.maximum(tf.reduce_sum(tf.cast(self.weights > 0, tf.int32)), 1)

    def parts(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def _entries(self) -> tuple[Any, ...]:
        raise NotImplementedError

    @property
    def values(self) -> tuple[Any, ...]:
        """The N values, replica 0 first."""
        if not tf.compat.v1.executing_eagerly_outside_functions():
            return self._list(self._entries())  # a session takes plain tuples only
        if not tf.executing_eagerly():
            return LocalResults(self._list(self._entries()), self)
        if self._cache is None:
            self._cache = LocalResults(self._list(self._entries()), self)
        return self._cache

    @property
    def _values(self) -> tuple[Any, ...]:  # the name tf.distribute reads
        return self.values

    def select(self, replica_id: Any) -> Any:
        """The value of one replica; `replica_id` an int or an int32 scalar."""
        raise NotImplementedError

    def stacked(self) -> tf.Tensor:
        """All values as one tensor of shape [N, ...]; they must have one shape."""
        return tf.stack(self._list(self._entries()))

    def reduce_sum(self) -> Any:
        return tf.nest.map_structure(lambda *parts: tf.add_n(parts), *self._entries())

    def reduce_mean(self) -> Any:
        if self.weights is None:
            return tf.nest.map_structure(lambda total: total / self.num_replicas, self.reduce_sum())
        weights = self.weights
        return tf.nest.map_structure(lambda *parts: weighted_mean(tf.stack(parts), weights), *self._entries())

    def __repr__(self) -> str:
        if not tf.executing_eagerly():
            return f"PerReplica({self._type_spec!r})"
        return "PerReplica:{" + ",".join(f"\n  {index}: {value!r}" for index, value in enumerate(self.values)) + "\n}"

    __str__ = __repr__


class PerReplicaSpec(_tf.PerReplicaSpec):
    """Type of a per-replica value: how it is held, N, what it lists if it has weights (else ""), and its parts' specs."""

    __slots__ = ["_hash", "_kind", "_num_replicas", "_parts", "_weighted"]

    def __init__(self, kind: str, num_replicas: int, weighted: str, *parts: Any):
        super().__init__()
        self._kind = kind
        self._num_replicas = num_replicas
        self._weighted = weighted
        self._parts = tuple(parts)
        self._hash: int | None = None

    @property
    def value_type(self) -> type:
        return _KINDS[self._kind]

    @property
    def _value_specs(self) -> tuple[Any, ...]:
        """One spec a replica, as stock PerReplicaSpec has."""
        return _KINDS[self._kind].replica_specs(self._num_replicas, self._parts)

    @_value_specs.setter
    def _value_specs(self, value: Any) -> None:
        del value  # the stock __init__ assigns it

    # What iterators in TensorFlow 1 graphs ask for.
    def _to_legacy_output_types(self) -> PerReplicaSpec:
        return self

    _to_legacy_output_shapes = _to_legacy_output_classes = _to_legacy_output_types

    def _serialize(self) -> tuple[Any, ...]:
        return (self._kind, self._num_replicas, self._weighted, *self._parts)

    @property
    def _component_specs(self) -> tuple[Any, ...]:
        return (*self._parts, tf.TensorSpec([self._num_replicas], tf.float64)) if self._weighted else self._parts

    def _to_components(self, value: PerReplica) -> tuple[Any, ...]:
        return (*value.parts(), value.weights) if self._weighted else value.parts()

    def _from_components(self, components: Sequence[Any]) -> PerReplica:
        parts = tuple(components)
        weights = parts[-1] if self._weighted else None
        value = _KINDS[self._kind].from_parts(self._num_replicas, parts[: len(self._parts)])
        return value.with_weights(weights, self._weighted)

    # What every call of a tf.function asks for. TypeSpec's own go through tf.nest, which takes longer than a small step.
    def __hash__(self) -> int:
        known = self._hash
        if known is None:
            self._hash = known = super().__hash__()
        return known

    def to_tensors(self, value: PerReplica) -> list[tf.Tensor]:
        pairs = zip(self._component_specs, self._to_components(value), strict=True)
        return [tensor for spec, part in pairs for tensor in spec.to_tensors(part)]

    def cast(self, value: Any, casting_context: Any) -> Any:
        if isinstance(value, tf.TypeSpec):
            return super().cast(value, casting_context)
        parts = self._to_components(value)
        cast = [spec.cast(part, casting_context) for spec, part in zip(self._component_specs, parts, strict=True)]
        changed = any(new is not old for new, old in zip(cast, parts, strict=True))
        return self._from_components(cast) if changed else value


@functools.lru_cache(maxsize=256)
def _spec_of_tensor(kind: str, num_replicas: int, dtype: tf.DType, shape: tuple[int | None, ...]) -> PerReplicaSpec:
    """The type of a value held in one tensor: one object for equal ones, which are quick to compare."""
    return PerReplicaSpec(kind, num_replicas, "", tf.TensorSpec(shape, dtype))


def _relax_rows(spec: Any) -> Any:
    if isinstance(spec, tf.TensorSpec):
        return tf.TensorSpec([None, *spec.shape[1:]] if spec.shape.rank else spec.shape, spec.dtype)
    return spec


class BatchRows(PerReplica):
    """A global batch, on the host until a replica cuts its rows out."""

    def __init__(self, num_replicas: int, batch: Any):
        super().__init__(num_replicas)
        self.batch = batch

    def parts(self) -> tuple[Any, ...]:
        return (self.batch,)

    @classmethod
    def from_parts(cls, num_replicas: int, parts: tuple[Any, ...]) -> BatchRows:
        return cls(num_replicas, *parts)

    @staticmethod
    def replica_specs(num_replicas: int, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        (spec,) = parts
        rows = spec.shape[0] if isinstance(spec, tf.TensorSpec) and spec.shape.rank else None
        if rows is None:
            return (_relax_rows(spec),) * num_replicas
        bounds = [_rows.micro_batch_bounds(rows, num_replicas, replica) for replica in range(num_replicas)]
        return tuple(tf.TensorSpec([stop - start, *spec.shape[1:]], spec.dtype) for start, stop in bounds)

    def _spec_of_batch(self, kind: str) -> PerReplicaSpec:
        batch = self.batch
        if self.weights is None and isinstance(batch, tf.Tensor) and batch.shape.rank is not None:
            return _spec_of_tensor(kind, self.num_replicas, batch.dtype, tuple(batch.shape))
        return self._spec(kind, tf.type_spec_from_value(batch))

    @property
    def _type_spec(self) -> PerReplicaSpec:
        return self._spec_of_batch("rows")

    def count_rows(self) -> Any:
        return _rows.count_rows(self.batch)

    def lengths_of_parts(self) -> Any:
        return None

    def share(self) -> Any:
        return _rows.share_of(self.count_rows(), self.num_replicas)

    def count_running(self) -> Any:
        return _rows.count_parts(self.count_rows(), self.share())

    def select(self, replica_id: Any) -> Any:
        rows = _rows.count_rows(self.batch)
        start, stop = _rows.micro_batch_bounds(rows, self.num_replicas, replica_id)
        even = isinstance(rows, int) and rows % self.num_replicas == 0
        return _rows.cut_rows(self.batch, start, stop, size=rows // self.num_replicas if even else None)

    def _entries(self) -> tuple[Any, ...]:
        if isinstance(self.batch, tf.Tensor):
            rows = _rows.count_rows(self.batch)
            if isinstance(rows, int):
                bounds = [
                    _rows.micro_batch_bounds(rows, self.num_replicas, replica) for replica in range(self.num_replicas)
                ]
                sizes: Any = [stop - start for start, stop in bounds]
            else:
                start, stop = _rows.micro_batch_bounds(rows, self.num_replicas, tf.range(self.num_replicas))
                sizes = stop - start
            return tuple(tf.split(self.batch, sizes, num=self.num_replicas))
        return tuple(self.select(replica) for replica in range(self.num_replicas))

    def _row_within_share(self) -> tuple[tf.Tensor, Any]:
        rows = _rows.count_rows(self.batch)
        share = (rows + (self.num_replicas - 1)) // self.num_replicas
        return tf.range(rows) % tf.maximum(share, 1), share

    def reduce_sum(self) -> Any:
        rows = _rows.count_rows(self.batch)
        if not isinstance(self.batch, tf.Tensor):
            raise _errors.cannot_add_composite(self.batch)
        if isinstance(rows, int):
            if rows % self.num_replicas:
                raise _errors.cannot_add_uneven(rows, self.num_replicas)
            return tf.reduce_sum(self.stacked(), axis=0)
        check = tf.debugging.assert_equal(
            rows % self.num_replicas, 0, message=str(_errors.cannot_add_uneven("?", self.num_replicas))
        )
        with tf.control_dependencies([check] if check is not None else []):
            position, share = self._row_within_share()
            return tf.math.unsorted_segment_sum(self.batch, position, share)

    def reduce_mean(self) -> Any:
        """Elementwise mean, float64 for integers. Row j of an uneven batch is the mean over the replicas that have one.

        Keras asks for it on the first batch, to build the model from; MirroredStrategy crashes there if it is uneven.
        Strings, booleans, ragged and sparse batches have no mean: replica 0's value stands in.
        """
        batch = self.batch
        if not isinstance(batch, tf.Tensor) or not (
            batch.dtype.is_floating or batch.dtype.is_complex or batch.dtype.is_integer
        ):
            return self.select(0)
        rows = _rows.count_rows(batch)
        if isinstance(rows, int) and rows % self.num_replicas == 0:
            return tf.reduce_sum(self.stacked(), axis=0) / self.num_replicas
        if batch.dtype.is_integer:
            batch = tf.cast(batch, tf.float64)
        position, share = self._row_within_share()
        return tf.math.unsorted_segment_mean(batch, position, share)

    def stacked(self) -> tf.Tensor:
        rows = _rows.count_rows(self.batch)
        if isinstance(self.batch, tf.Tensor) and isinstance(rows, int) and rows % self.num_replicas == 0:
            return tf.reshape(
                self.batch, tf.concat([[self.num_replicas, rows // self.num_replicas], tf.shape(self.batch)[1:]], 0)
            )
        return super().stacked()


class MicroBatches(BatchRows):
    """The batch of one replica, cut into micro-batches: part r has rows r·c … (r+1)·c, c = ceil(B / n).

    To everybody outside it is one replica's value: to reduce it is to have it. The number of rows of a part is never known
    while tracing, even if it could be: in Python, 16 rows of 64 are nothing but the number 16, and a count of examples
    that adds it would be taken for one that adds the same, once, for the whole batch.

    Attributes:
      even: cut into equal parts, at most n.
    """

    def __init__(self, num_replicas: int, batch: Any, *, even: bool = False):
        super().__init__(num_replicas, batch)
        self.even = even

    @staticmethod
    def replica_specs(num_replicas: int, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_relax_rows(parts[0]),) * num_replicas

    @property
    def _type_spec(self) -> PerReplicaSpec:
        return self._spec_of_batch("micro_batches")

    def share(self) -> Any:
        return (_rows.even_share if self.even else _rows.share_of)(self.count_rows(), self.num_replicas)

    def select(self, replica_id: Any) -> Any:
        share, rows = self.share(), self.count_rows()
        start = tf.cast(replica_id, tf.int32) * tf.cast(share, tf.int32)
        if self.even and isinstance(self.batch, tf.Tensor):
            # XLA wants the size as a number that does not depend on the loop.
            part = tf.slice(
                self.batch,
                tf.concat([[start], tf.zeros([tf.rank(self.batch) - 1], tf.int32)], 0),
                tf.concat([[tf.cast(share, tf.int32)], tf.shape(self.batch)[1:]], 0),
            )
        else:
            part = _rows.cut_rows(
                self.batch, start, tf.minimum(start + tf.cast(share, tf.int32), tf.cast(rows, tf.int32))
            )
        return _forget_rows(part)

    def _entries(self) -> tuple[Any, ...]:
        parts = super()._entries()
        return parts[: int(self.count_running())] if tf.executing_eagerly() else parts

    def reduce_sum(self) -> Any:
        return self.batch

    def reduce_axis(self, is_sum: bool, axis: Any) -> Any:
        return reduce_axis(self.batch, is_sum, axis)

    reduce_mean = reduce_sum


def _forget_rows(part: Any) -> Any:
    """The same rows, their number unknown while tracing."""
    if not isinstance(part, tf.Tensor) or part.shape.rank is None or part.shape[0] is None:
        return part
    return tf.raw_ops.PlaceholderWithDefault(input=part, shape=tf.TensorShape([None, *part.shape[1:]]))


class Stacked(PerReplica):
    """One tensor of shape [N, ...]."""

    def __init__(self, num_replicas: int, stack: tf.Tensor):
        super().__init__(num_replicas)
        self.stack = stack

    def parts(self) -> tuple[Any, ...]:
        return (self.stack,)

    @classmethod
    def from_parts(cls, num_replicas: int, parts: tuple[Any, ...]) -> Stacked:
        return cls(num_replicas, *parts)

    @staticmethod
    def replica_specs(num_replicas: int, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        (spec,) = parts
        return (tf.TensorSpec(spec.shape[1:], spec.dtype),) * num_replicas

    @property
    def _type_spec(self) -> PerReplicaSpec:
        return self._spec("stacked", tf.TensorSpec(self.stack.shape, self.stack.dtype))

    def select(self, replica_id: Any) -> Any:
        return tf.gather(self.stack, replica_id)

    def _entries(self) -> tuple[Any, ...]:
        return tuple(tf.unstack(self.stack, num=self.num_replicas))

    def stacked(self) -> tf.Tensor:
        if self.weights is not None and self.listed == "some" and tf.executing_eagerly():
            return tf.boolean_mask(self.stack, self.weights > 0)
        return self.stack

    def gather(self, axis: int) -> tf.Tensor:
        if self.weights is None:
            return super().gather(axis)
        stack = tf.boolean_mask(self.stack, self.weights > 0)
        if axis < 0:
            axis += stack.shape.rank - 1
        order = list(range(1, stack.shape.rank))
        order.insert(axis, 0)
        shape = tf.shape(stack)[1:]
        joined = tf.concat([shape[:axis], [-1], shape[axis + 1 :]], 0)
        return tf.reshape(tf.transpose(stack, order), joined)

    def reduce_sum(self) -> Any:
        return tf.reduce_sum(self.stack, axis=0)

    def reduce_mean(self) -> Any:
        if self.weights is None:
            return tf.reduce_sum(self.stack, axis=0) / self.num_replicas
        return weighted_mean(self.stack, self.weights)


class Concatenated(PerReplica):
    """N tensors that differ in their first dimension, joined along it, and their N lengths (int64)."""

    kind = "concatenated"

    def __init__(self, num_replicas: int, flat: tf.Tensor, lengths: tf.Tensor):
        super().__init__(num_replicas)
        self.flat = flat
        self.lengths = lengths

    def parts(self) -> tuple[Any, ...]:
        return (self.flat, self.lengths)

    @classmethod
    def from_parts(cls, num_replicas: int, parts: tuple[Any, ...]) -> Concatenated:
        return cls(num_replicas, *parts)

    @staticmethod
    def replica_specs(num_replicas: int, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_relax_rows(parts[0]),) * num_replicas

    @property
    def _type_spec(self) -> PerReplicaSpec:
        return self._spec(
            self.kind,
            tf.TensorSpec(self.flat.shape, self.flat.dtype),
            tf.TensorSpec([self.num_replicas], tf.int64),
        )

    def select(self, replica_id: Any) -> Any:
        stop = tf.cumsum(self.lengths)[replica_id]
        return _rows.cut_rows(self.flat, stop - self.lengths[replica_id], stop)

    def _entries(self) -> tuple[Any, ...]:
        return tuple(tf.split(self.flat, self.lengths, num=self.num_replicas))

    def gather(self, axis: int) -> tf.Tensor:
        return self.flat if axis == 0 else super().gather(axis)

    def count_rows(self) -> Any:
        return tf.reduce_sum(self.lengths)

    def lengths_of_parts(self) -> Any:
        return self.lengths

    def count_running(self) -> Any:
        return _last_with_rows(self.lengths)


class ConcatenatedRows(Concatenated):
    """Micro-batches' values with a row for each of theirs: together, the one value of the replica that they belong to."""

    kind = "concatenated_rows"

    def reduce_sum(self) -> Any:
        return self.flat

    def reduce_axis(self, is_sum: bool, axis: Any) -> Any:
        return reduce_axis(self.flat, is_sum, axis)

    reduce_mean = reduce_sum


class Uniform(PerReplica):
    """One value that all replicas share; a tensor or composite tensor."""

    def __init__(self, num_replicas: int, value: Any):
        super().__init__(num_replicas)
        self.value = value

    def parts(self) -> tuple[Any, ...]:
        return (self.value,)

    @classmethod
    def from_parts(cls, num_replicas: int, parts: tuple[Any, ...]) -> Uniform:
        return cls(num_replicas, *parts)

    @staticmethod
    def replica_specs(num_replicas: int, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        return parts * num_replicas

    @property
    def _type_spec(self) -> PerReplicaSpec:
        return self._spec("uniform", tf.type_spec_from_value(self.value))

    def select(self, replica_id: Any) -> Any:
        del replica_id
        return self.value

    def _entries(self) -> tuple[Any, ...]:
        return (self.value,) * self.num_replicas

    def stacked(self) -> tf.Tensor:
        return tf.repeat(self.value[tf.newaxis], self.num_replicas, axis=0)

    def reduce_sum(self) -> Any:
        ran = self.num_replicas if self.weights is None else tf.reduce_sum(tf.sign(self.weights))
        return scale_by_replicas(self.value, ran)

    def reduce_mean(self) -> Any:
        if isinstance(self.value, tf.Tensor) and self.value.dtype.is_integer:
            return tf.cast(self.value, tf.float64)  # as the mean of integers that differ
        return self.value


class Separate(PerReplica):
    """N values of any kind, as the user or the eager engine made them."""

    kind = "separate"

    def __init__(self, values: Sequence[Any]):
        super().__init__(len(values))
        self._separate = tuple(values)

    def parts(self) -> tuple[Any, ...]:
        return self._separate

    @classmethod
    def from_parts(cls, num_replicas: int, parts: tuple[Any, ...]) -> Separate:
        del num_replicas
        return cls(parts)

    @staticmethod
    def replica_specs(num_replicas: int, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        del num_replicas
        return parts

    @property
    def _type_spec(self) -> PerReplicaSpec:
        specs = [tf.type_spec_from_value(value) for value in self._separate]
        return self._spec(self.kind, *specs)

    def select(self, replica_id: Any) -> Any:
        if isinstance(replica_id, int):
            return self._separate[replica_id]
        return _select_separate(self._separate, replica_id)

    def _entries(self) -> tuple[Any, ...]:
        return self._separate

    def reduce_sum(self) -> Any:
        return add_values(self._that_ran(self._separate))

    def reduce_mean(self) -> Any:
        if self.weights is not None and not isinstance(self._separate[0], tf.IndexedSlices):
            return super().reduce_mean()
        return divide_by_replicas(add_values(self._separate), self.num_replicas)


class SeparateRows(Separate):
    """N batches that can't be joined, such as ragged ones and those padded to different lengths."""

    kind = "separate_rows"

    def count_rows(self) -> Any:
        return tf.reduce_sum(self.lengths_of_parts())

    def lengths_of_parts(self) -> Any:
        return tf.stack([tf.cast(_rows.count_rows(value), tf.int64) for value in self._separate])

    def count_running(self) -> Any:
        return _last_with_rows(self.lengths_of_parts())


class DeviceRows(SeparateRows):
    """A batch that came to this process cut for its devices; each device's part is cut again, for its replicas."""

    kind = "device_rows"

    def __init__(self, num_replicas: int, batches: Sequence[Any]):
        PerReplica.__init__(self, num_replicas)
        self._batches = [BatchRows(num_replicas // len(batches), batch) for batch in batches]

    @property
    def _separate(self) -> tuple[Any, ...]:
        return self._entries()

    def parts(self) -> tuple[Any, ...]:
        return tuple(own.batch for own in self._batches)

    @classmethod
    def from_parts(cls, num_replicas: int, parts: tuple[Any, ...]) -> DeviceRows:
        return cls(num_replicas, parts)

    @staticmethod
    def replica_specs(num_replicas: int, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        each = num_replicas // len(parts)
        return tuple(spec for part in parts for spec in BatchRows.replica_specs(each, (part,)))

    @property
    def _type_spec(self) -> PerReplicaSpec:
        return self._spec(self.kind, *(tf.type_spec_from_value(part) for part in self.parts()))

    def _entries(self) -> tuple[Any, ...]:
        return tuple(entry for own in self._batches for entry in own._entries())  # noqa: SLF001 - this module's own class

    def select(self, replica_id: Any) -> Any:
        each = self.num_replicas // len(self._batches)
        if isinstance(replica_id, int):
            return self._batches[replica_id // each].select(replica_id % each)
        cuts = [functools.partial(own.select, replica_id % each) for own in self._batches]
        return tf.switch_case(replica_id // each, cuts)


def _last_with_rows(lengths: tf.Tensor) -> tf.Tensor:
    """How many parts there are up to the last one that has rows, at least one."""
    return tf.maximum(tf.reduce_max(tf.where(lengths > 0, tf.range(1, tf.shape(lengths)[0] + 1), 0)), 1)


def reduce_axis(value: tf.Tensor, is_sum: bool, axis: Any) -> tf.Tensor:
    """Sum or mean over an axis, or several; the mean of integers is float64."""
    if is_sum:
        return tf.reduce_sum(value, axis)
    return tf.reduce_mean(tf.cast(value, tf.float64) if value.dtype.is_integer else value, axis)


def weighted_mean(stack: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """The mean over the first axis, float64 for integers; `weights` is float64 [N]."""
    if not (stack.dtype.is_floating or stack.dtype.is_complex):
        stack = tf.cast(stack, tf.float64)
    weights = tf.cast(weights, stack.dtype)
    shaped = tf.reshape(weights, tf.concat([[-1], tf.ones([tf.rank(stack) - 1], tf.int32)], 0))
    return tf.reduce_sum(stack * shaped, axis=0) / tf.reduce_sum(weights)


def _select_separate(values: Sequence[Any], replica_id: tf.Tensor) -> Any:
    """One of N separate values by a symbolic id; flat lists keep the graph from branching N times over."""
    first, *others = [tf.type_spec_from_value(value) for value in values]
    spec = first.most_specific_common_supertype(others) or first
    flat = [tf.nest.flatten(value, expand_composites=True) for value in values]
    if any(not isinstance(part, tf.Tensor) for parts in flat for part in parts):
        flat = [[tf.convert_to_tensor(part) for part in parts] for parts in flat]
    chosen = []
    for parts in zip(*flat, strict=True):
        shape = parts[0].shape
        for part in parts[1:]:
            shape = shape.most_specific_compatible_shape(part.shape)
        if shape.is_fully_defined():
            chosen.append(tf.gather(tf.stack(parts), replica_id))
            continue
        array = tf.TensorArray(parts[0].dtype, len(parts), infer_shape=False, clear_after_read=False)
        for replica, part in enumerate(parts):
            array = array.write(replica, part)
        picked = array.read(replica_id)
        picked.set_shape(shape)
        chosen.append(picked)
    if isinstance(spec, tf.TensorSpec):
        return chosen[0]
    return tf.nest.pack_sequence_as(spec, chosen, expand_composites=True)


class Symbolic(PerReplica):
    """Inside a trace: a value of the replica function, standing for all N of them."""

    def __init__(self, num_replicas: int, value: Any, unstack: Callable[[Any], tuple[Any, ...]]):
        super().__init__(num_replicas)
        self.value = value
        self._unstack_symbolic = unstack

    @property
    def dtype(self) -> tf.DType:
        return self.value.dtype

    @property
    def _type_spec(self) -> PerReplicaSpec:
        raise TypeError(_errors.SYMBOLIC_ESCAPES)

    def select(self, replica_id: Any) -> Any:
        del replica_id
        return self.value

    def _entries(self) -> tuple[Any, ...]:
        return self._unstack_symbolic(self.value)

    def __repr__(self) -> str:
        return f"PerReplica(<symbolic> {self.value!r})"

    __str__ = __repr__


_KINDS: dict[str, Any] = {
    "rows": BatchRows,
    "micro_batches": MicroBatches,
    "stacked": Stacked,
    "concatenated": Concatenated,
    "concatenated_rows": ConcatenatedRows,
    "uniform": Uniform,
    "separate": Separate,
    "separate_rows": SeparateRows,
    "device_rows": DeviceRows,
}


for _kind in (*_KINDS.values(), Symbolic):
    # How a value is held is our business: Python's own messages ("unsupported operand type") say what it is.
    _kind.__name__ = _kind.__qualname__ = "PerReplica"


def is_weighted(value: Any) -> bool:
    """Whether the entries of a value weigh differently in a mean."""
    return isinstance(value, PerReplica) and value.weights is not None


class LocalResults(tuple):
    """The N values as a tuple that TensorFlow turns into one tensor without going through the N parts."""

    source: PerReplica | None

    def __new__(cls, values: Sequence[Any], source: PerReplica | None = None) -> LocalResults:
        self = super().__new__(cls, values)
        self.source = source
        return self

    def __reduce__(self) -> Any:
        return (tuple, (list(self),))


def _local_results_to_tensor(value: LocalResults, dtype: Any = None, name: Any = None, as_ref: bool = False) -> Any:
    del as_ref
    stacked = tf.stack(list(value)) if value.source is None else value.source.stacked()
    return tf.convert_to_tensor(stacked, dtype=dtype, name=name)


_tf.register_conversion(LocalResults, _local_results_to_tensor)


def scale_by_replicas(value: Any, num_replicas: Any) -> Any:
    """The sum of N equal values."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.tile(
                value.values,
                tf.concat([[tf.cast(num_replicas, tf.int32)], tf.ones([tf.rank(value.values) - 1], tf.int32)], 0),
            ),
            tf.tile(value.indices, [tf.cast(num_replicas, tf.int32)]),
            value.dense_shape,
        )
    if isinstance(value, tf.Tensor) or isinstance(num_replicas, tf.Tensor):
        value = tf.convert_to_tensor(value)
        return value * tf.cast(num_replicas, value.dtype)
    return value * num_replicas


def add_values(values: Sequence[Any]) -> Any:
    """The sum of separate values, in replica order; sparse slices stay sparse."""
    if isinstance(values[0], tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([value.values for value in values], 0),
            tf.concat([value.indices for value in values], 0),
            values[0].dense_shape,
        )
    return tf.add_n([tf.convert_to_tensor(value) for value in values])


def divide_by_replicas(total: Any, num_replicas: Any) -> Any:
    """A mean from a sum; integers become float64."""
    if isinstance(total, tf.IndexedSlices):
        return tf.IndexedSlices(divide_by_replicas(total.values, num_replicas), total.indices, total.dense_shape)
    if isinstance(num_replicas, tf.Tensor):
        total = total if total.dtype.is_floating or total.dtype.is_complex else tf.cast(total, tf.float64)
        num_replicas = tf.cast(num_replicas, total.dtype)
    return total / num_replicas


def select_replica(structure: Any, replica_id: Any) -> Any:
    """Replaces every per-replica value in a structure by one replica's; variables stay, they know their replica."""

    def select(value: Any) -> Any:
        if isinstance(value, _tf.DistributedVariable):
            return value
        if isinstance(value, PerReplica):
            return value.select(replica_id)
        if isinstance(value, tf.distribute.DistributedValues):
            return Separate(value._values).select(replica_id)  # noqa: SLF001 - tf.distribute's protocol
        return value

    return tf.nest.map_structure(select, structure)


def may_differ(value: Any) -> bool:
    """Whether a per-replica value may differ between replicas; outside graphs, whether it does."""
    if not isinstance(value, tf.distribute.DistributedValues) or isinstance(value, _tf.DistributedVariable | Uniform):
        return False
    if not tf.executing_eagerly():
        return True
    first, *others = [tf.nest.flatten(entry, expand_composites=True) for entry in value._values]  # noqa: SLF001 - protocol
    return any(not _same(one, another) for other in others for one, another in zip(first, other, strict=True))


def _same(one: Any, another: Any) -> bool:
    one, another = np.asarray(one), np.asarray(another)
    return np.array_equal(one, another) or one.tobytes() == another.tobytes()  # NaNs are not equal, but may be the same


def regroup(
    values: Sequence[Any], *, always_wrap: bool = False, number: int | None = None, rows: Sequence[int] = ()
) -> Any:
    """Results of a replica function, replica 0 first, as one structure of per-replica values.

    With `number`, there are that many replicas, of which those after the given ones had no rows and never ran; the given
    ones had `rows`, so that what has as many is known to have a value for each.

    Follows tf.distribute: equal structures; the same object in all replicas comes back as it is, unless `always_wrap`.
    """
    first = values[0]
    if isinstance(first, Mapping):
        parts = [
            (key, regroup([value[key] for value in values], always_wrap=always_wrap, number=number, rows=rows))
            for key in first
        ]
        return type(first)(parts)  # type: ignore[call-arg]
    if isinstance(first, list | tuple) and not isinstance(first, LocalResults):
        lengths = {len(value) for value in values}
        if len(lengths) > 1:
            raise _errors.different_structures(lengths)
        items = [
            regroup([value[index] for value in values], always_wrap=always_wrap, number=number, rows=rows)
            for index in range(len(first))
        ]
        return getattr(first, "_make", type(first))(items)
    is_tensor = isinstance(first, tf.Tensor | tf.IndexedSlices | tf.RaggedTensor | tf.SparseTensor)
    alone = len(values) == 1 and is_tensor and number != 1
    if all(value is first for value in values) and not always_wrap and not alone:
        return first
    if number is None or number == len(values):
        return Separate(values)
    absent = [_absent(values, rows) if is_tensor else first] * (number - len(values))
    weights = tf.constant([1.0] * len(values) + [0.0] * len(absent), tf.float64)
    return Separate([*values, *absent]).with_weights(weights, "all")


def _absent(values: Sequence[Any], rows: Sequence[int]) -> Any:
    """What stands for the result of a replica that never ran: no rows, or zeros."""
    last = values[-1]
    if not isinstance(last, tf.IndexedSlices) and last.shape.rank:
        if isinstance(last, tf.RaggedTensor | tf.SparseTensor) or [value.shape[0] for value in values] == list(rows):
            return _rows.cut_rows(last, 0, 0)
    return tf.nest.map_structure(tf.zeros_like, last, expand_composites=True)
