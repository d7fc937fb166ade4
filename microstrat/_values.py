"""Per-replica values: what `run` takes and returns, held in as few tensors as possible.

MirroredStrategy's PerReplica holds N separate values, which makes every graph that touches one N times larger. The
classes here are PerReplica values too, and `values` has N entries when somebody asks, but each is held as what it is:

    BatchRows    a global batch; replica r's value is its share of the rows
    Stacked      one tensor of shape [N, ...]
    Concatenated N tensors of different lengths, joined along their first axis
    Uniform      one value that all replicas share
    Separate     N values, for those that fit nowhere else
    Symbolic     inside a trace: one tensor that stands for all replicas' values
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from microstrat import _errors, _tf


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


class PerReplica(_tf.PerReplica):
    """Base of the values here: a tf.distribute.DistributedValues with one entry a replica."""

    num_replicas: int

    def __init__(self, num_replicas: int):
        # TensorFlow's own __init__ would store a tuple of N values.
        self.num_replicas = num_replicas
        self._cache: tuple[Any, ...] | None = None

    def _unstack(self) -> tuple[Any, ...]:
        raise NotImplementedError

    @property
    def values(self) -> tuple[Any, ...]:
        """The N values, replica 0 first."""
        if not tf.executing_eagerly():
            return LocalResults(self._unstack(), self)
        if self._cache is None:
            self._cache = LocalResults(self._unstack(), self)
        return self._cache

    @property
    def _values(self) -> tuple[Any, ...]:  # the name tf.distribute reads
        return self.values

    def select(self, replica_id: Any) -> Any:
        """The value of one replica; `replica_id` an int or an int32 scalar."""
        raise NotImplementedError

    def stacked(self) -> tf.Tensor:
        """All values as one tensor of shape [N, ...]; they must have one shape."""
        return tf.stack(self.values)

    def reduce_sum(self) -> Any:
        return tf.nest.map_structure(lambda *parts: tf.add_n(parts), *self.values)

    def reduce_mean(self) -> Any:
        return tf.nest.map_structure(lambda total: total / self.num_replicas, self.reduce_sum())

    def __repr__(self) -> str:
        if not tf.executing_eagerly():
            return f"PerReplica({self._type_spec!r})"
        return "PerReplica:{" + ",".join(f"\n  {index}: {value!r}" for index, value in enumerate(self.values)) + "\n}"

    __str__ = __repr__


class PerReplicaSpec(_tf.PerReplicaSpec):
    """Type of a per-replica value: how it is held, N, and the specs of its parts."""

    __slots__ = ["_kind", "_num_replicas", "_parts"]

    def __init__(self, kind: str, num_replicas: int, *parts: Any):
        super().__init__()
        self._kind = kind
        self._num_replicas = num_replicas
        self._parts = tuple(parts)

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

    def _serialize(self) -> tuple[Any, ...]:
        return (self._kind, self._num_replicas, *self._parts)

    @property
    def _component_specs(self) -> tuple[Any, ...]:
        return self._parts

    def _to_components(self, value: PerReplica) -> tuple[Any, ...]:
        return value.parts()

    def _from_components(self, components: Sequence[Any]) -> PerReplica:
        return _KINDS[self._kind].from_parts(self._num_replicas, tuple(components))


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
        bounds = [micro_batch_bounds(rows, num_replicas, replica) for replica in range(num_replicas)]
        return tuple(tf.TensorSpec([stop - start, *spec.shape[1:]], spec.dtype) for start, stop in bounds)

    @property
    def _type_spec(self) -> PerReplicaSpec:
        return PerReplicaSpec("rows", self.num_replicas, tf.type_spec_from_value(self.batch))

    def select(self, replica_id: Any) -> Any:
        rows = count_rows(self.batch)
        start, stop = micro_batch_bounds(rows, self.num_replicas, replica_id)
        even = isinstance(rows, int) and rows % self.num_replicas == 0
        return cut_rows(self.batch, start, stop, size=rows // self.num_replicas if even else None)

    def _unstack(self) -> tuple[Any, ...]:
        if isinstance(self.batch, tf.Tensor):
            rows = count_rows(self.batch)
            if isinstance(rows, int):
                bounds = [micro_batch_bounds(rows, self.num_replicas, replica) for replica in range(self.num_replicas)]
                sizes: Any = [stop - start for start, stop in bounds]
            else:
                start, stop = micro_batch_bounds(rows, self.num_replicas, tf.range(self.num_replicas))
                sizes = stop - start
            return tuple(tf.split(self.batch, sizes, num=self.num_replicas))
        return tuple(self.select(replica) for replica in range(self.num_replicas))

    def _row_within_share(self) -> tuple[tf.Tensor, Any]:
        rows = count_rows(self.batch)
        share = (rows + (self.num_replicas - 1)) // self.num_replicas
        return tf.range(rows) % tf.maximum(share, 1), share

    def reduce_sum(self) -> Any:
        rows = count_rows(self.batch)
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
        rows = count_rows(batch)
        if isinstance(rows, int) and rows % self.num_replicas == 0:
            return tf.reduce_sum(self.stacked(), axis=0) / self.num_replicas
        if batch.dtype.is_integer:
            batch = tf.cast(batch, tf.float64)
        position, share = self._row_within_share()
        return tf.math.unsorted_segment_mean(batch, position, share)

    def stacked(self) -> tf.Tensor:
        rows = count_rows(self.batch)
        if isinstance(self.batch, tf.Tensor) and isinstance(rows, int) and rows % self.num_replicas == 0:
            return tf.reshape(
                self.batch, tf.concat([[self.num_replicas, rows // self.num_replicas], tf.shape(self.batch)[1:]], 0)
            )
        return super().stacked()


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
        return PerReplicaSpec("stacked", self.num_replicas, tf.TensorSpec(self.stack.shape, self.stack.dtype))

    def select(self, replica_id: Any) -> Any:
        return tf.gather(self.stack, replica_id)

    def _unstack(self) -> tuple[Any, ...]:
        return tuple(tf.unstack(self.stack, num=self.num_replicas))

    def stacked(self) -> tf.Tensor:
        return self.stack

    def reduce_sum(self) -> Any:
        return tf.reduce_sum(self.stack, axis=0)

    def reduce_mean(self) -> Any:
        return tf.reduce_sum(self.stack, axis=0) / self.num_replicas


class Concatenated(PerReplica):
    """N tensors that differ in their first dimension, joined along it, and their N lengths (int64)."""

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
        return PerReplicaSpec(
            "concatenated",
            self.num_replicas,
            tf.TensorSpec(self.flat.shape, self.flat.dtype),
            tf.TensorSpec([self.num_replicas], tf.int64),
        )

    def select(self, replica_id: Any) -> Any:
        stop = tf.cumsum(self.lengths)[replica_id]
        return cut_rows(self.flat, stop - self.lengths[replica_id], stop)

    def _unstack(self) -> tuple[Any, ...]:
        return tuple(tf.split(self.flat, self.lengths, num=self.num_replicas))


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
        return PerReplicaSpec("uniform", self.num_replicas, tf.type_spec_from_value(self.value))

    def select(self, replica_id: Any) -> Any:
        del replica_id
        return self.value

    def _unstack(self) -> tuple[Any, ...]:
        return (self.value,) * self.num_replicas

    def stacked(self) -> tf.Tensor:
        return tf.repeat(self.value[tf.newaxis], self.num_replicas, axis=0)

    def reduce_sum(self) -> Any:
        return scale_by_replicas(self.value, self.num_replicas)

    def reduce_mean(self) -> Any:
        if isinstance(self.value, tf.Tensor) and self.value.dtype.is_integer:
            return tf.cast(self.value, tf.float64)  # as the mean of integers that differ
        return self.value


class Separate(PerReplica):
    """N values of any kind, as the user or the eager engine made them."""

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
        return PerReplicaSpec("separate", self.num_replicas, *specs)

    def select(self, replica_id: Any) -> Any:
        if isinstance(replica_id, int):
            return self._separate[replica_id]
        return _select_separate(self._separate, replica_id)

    def _unstack(self) -> tuple[Any, ...]:
        return self._separate

    def reduce_sum(self) -> Any:
        return add_values(self._separate)

    def reduce_mean(self) -> Any:
        return divide_by_replicas(add_values(self._separate), self.num_replicas)


def _select_separate(values: Sequence[Any], replica_id: tf.Tensor) -> Any:
    """One of N separate values by a symbolic id; flat lists keep the graph from branching N times over."""
    spec = tf.type_spec_from_value(values[0])
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
    return tf.nest.pack_sequence_as(values[0], chosen, expand_composites=True)


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

    def _unstack(self) -> tuple[Any, ...]:
        return self._unstack_symbolic(self.value)

    def __repr__(self) -> str:
        return f"PerReplica(<symbolic> {self.value!r})"

    __str__ = __repr__


_KINDS: dict[str, Any] = {
    "rows": BatchRows,
    "stacked": Stacked,
    "concatenated": Concatenated,
    "uniform": Uniform,
    "separate": Separate,
}


for _kind in (*_KINDS.values(), Symbolic):
    # How a value is held is our business: Python's own messages ("unsupported operand type") say what it is.
    _kind.__name__ = _kind.__qualname__ = "PerReplica"


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


def scale_by_replicas(value: Any, num_replicas: int) -> Any:
    """The sum of N equal values."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.tile(value.values, tf.concat([[num_replicas], tf.ones([tf.rank(value.values) - 1], tf.int32)], 0)),
            tf.tile(value.indices, [num_replicas]),
            value.dense_shape,
        )
    if isinstance(value, tf.Tensor):
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


def divide_by_replicas(total: Any, num_replicas: int) -> Any:
    if isinstance(total, tf.IndexedSlices):
        return tf.IndexedSlices(total.values / num_replicas, total.indices, total.dense_shape)
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


def regroup(values: Sequence[Any], *, always_wrap: bool = False) -> Any:
    """N results of a replica function, replica 0 first, as one structure of per-replica values.

    Follows tf.distribute: equal structures; the same object in all replicas comes back as it is, unless `always_wrap`.
    """
    first = values[0]
    if isinstance(first, Mapping):
        parts = [(key, regroup([value[key] for value in values], always_wrap=always_wrap)) for key in first]
        return type(first)(parts)  # type: ignore[call-arg]
    if isinstance(first, list | tuple) and not isinstance(first, LocalResults):
        lengths = {len(value) for value in values}
        if len(lengths) > 1:
            raise _errors.different_structures(lengths)
        items = [regroup([value[index] for value in values], always_wrap=always_wrap) for index in range(len(first))]
        return getattr(first, "_make", type(first))(items)
    if all(value is first for value in values) and not always_wrap:
        return first
    return Separate(values)
