"""Distributed datasets: they hand out whole global batches, which the replicas cut their rows from.

tf.distribute's own datasets rebatch and copy every batch to N devices. Here the batch stays one tensor on the host, as
the user's pipeline made it, and a micro-batch goes to the device when its turn comes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from microstrat import _errors, _rows, _tf, _values

_UNEVEN = "uneven batch"
_PLAIN_VALUES = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)
_PLAIN_SPECS = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)


def _wrap(strategy: Any, element: Any) -> Any:
    """One global batch as per-replica values; None and other non-tensors stay. If it is not cut, it stays plain tensors.

    Of several processes, each has its own part of the global batch, which tf.distribute may have cut for its devices.
    """
    extended = strategy.extended
    num_parts = extended.num_parts
    if num_parts == 1 and extended.real.alone:
        return element
    leaves = tf.nest.flatten(element)
    wrapped, rows = [], set()
    for value in leaves:
        if isinstance(value, tf.distribute.DistributedValues) and not isinstance(value, _values.PerReplica):
            value = _values.DeviceRows(num_parts, value._values)  # noqa: SLF001 - tf.distribute's protocol
        elif num_parts > 1 and isinstance(value, _PLAIN_VALUES) and value.shape.rank != 0:
            rows.add(_rows.static_rows(value))
            value = extended.cut(value)
        wrapped.append(value)
    if len(rows - {None}) > 1:
        raise _errors.no_common_rows(_rows_by_name(element), num_parts, strategy.num_replicas_in_sync)
    if type(element) is tuple and len(element) == len(leaves) and all(map(operator.is_, element, leaves)):
        return tuple(wrapped)  # pack_sequence_as takes longer than all the rest
    return tf.nest.pack_sequence_as(element, wrapped)


def _rows_by_name(element: Any) -> dict[str, int]:
    values = [(path, value) for path, value in _tf.flatten_with_paths(element) if isinstance(value, _PLAIN_VALUES)]
    rows = {_path_name(path): _rows.static_rows(value) for path, value in values if value.shape.rank != 0}
    return {name: count for name, count in rows.items() if count is not None}


def _announce_uneven(strategy: Any, batch: Any) -> None:
    """Warns once of a batch that does not divide evenly over the replicas, when it comes."""
    num_replicas, extended = strategy.extended.replicas_here, strategy.extended
    if extended.has_announced(_UNEVEN):
        return
    first = next((part for part in tf.nest.flatten(batch) if isinstance(part, tf.Tensor) and part.shape.rank), None)
    if first is None:
        return
    rows = _rows.count_rows(first)

    def announce(count: Any) -> None:
        extended.announce(_UNEVEN, _errors.uneven_batch(int(count), num_replicas))

    if tf.executing_eagerly() or isinstance(rows, int):
        if int(rows) % num_replicas:
            announce(rows)
        return
    tf.cond(
        tf.equal(rows % num_replicas, 0),
        lambda: tf.no_op(),
        lambda: tf.group(tf.numpy_function(announce, [rows], [], stateful=True)),
    )


def _path_name(path: Sequence[Any]) -> str:
    return "/".join(str(part) for part in path) or "batch"


def _is_cut(spec: Any) -> bool:
    return isinstance(spec, _PLAIN_SPECS) and spec.shape.rank != 0


def _wrap_spec(strategy: Any, element_spec: Any) -> Any:
    num_parts, kind = strategy.extended.num_parts, strategy.extended.kind_of_cut

    def wrapped(spec: Any) -> Any:
        if isinstance(spec, _tf.PerReplicaSpec) and not isinstance(spec, _values.PerReplicaSpec):
            return _values.PerReplicaSpec("device_rows", num_parts, "", *spec._value_specs)  # noqa: SLF001 - protocol
        return _values.PerReplicaSpec(kind, num_parts, "", spec) if _is_cut(spec) else spec

    return element_spec if num_parts == 1 else tf.nest.map_structure(wrapped, element_spec)


class VirtualDistributedIterator(_tf.CompositeTensor, _tf.DistributedIteratorInterface):
    """Iterator over global batches: a tf.distribute.DistributedIterator."""

    def __init__(self, strategy: Any, source: Any):
        self._strategy = strategy
        self._source = source

    @property
    def _type_spec(self) -> VirtualDistributedIteratorSpec:
        return VirtualDistributedIteratorSpec(self._strategy, tf.type_spec_from_value(self._source))

    @property
    def element_spec(self) -> Any:
        """Specs of what the iterator yields."""
        return _wrap_spec(self._strategy, self._source.element_spec)

    def __iter__(self) -> VirtualDistributedIterator:
        return self

    def __next__(self) -> Any:
        try:
            return self.get_next()
        except tf.errors.OutOfRangeError:
            raise StopIteration from None

    def next(self) -> Any:
        return self.__next__()

    def get_next(self, name: Any = None) -> Any:
        """The next global batch, as per-replica values."""
        del name
        if _tf.get_replica_context_of(self._strategy) is not None:
            raise _errors.next_in_replica_context()
        batch = self._source.get_next()
        if self._strategy.num_replicas_in_sync > 1:
            _announce_uneven(self._strategy, batch)
        return _wrap(self._strategy, batch)

    def get_next_as_optional(self) -> tf.experimental.Optional:
        """The next global batch as a tf.experimental.Optional, empty at the end."""
        # A per-replica batch has the flat tensors of the batch itself, so an Optional of one is an Optional of the other.
        return _tf.optional_with_spec(self._source.get_next_as_optional(), self.element_spec)


class _DistributedInputSpec(tf.TypeSpec):
    """What the types of distributed iterators and datasets share: the strategy, and the tf.data type inside."""

    __slots__ = ["_source", "_strategy"]

    def __init__(self, strategy: Any, source: Any):
        self._strategy = strategy
        self._source = source

    def _serialize(self) -> tuple[Any, ...]:
        return (id(self._strategy), self._source)

    # The base class builds relaxed copies from _serialize(), which can't hold the strategy itself: it must be hashable.
    def _with_tensor_ranks_only(self) -> Any:
        return type(self)(self._strategy, self._source._with_tensor_ranks_only())  # noqa: SLF001 - TypeSpec's protocol

    def _without_tensor_names(self) -> Any:
        return type(self)(self._strategy, self._source._without_tensor_names())  # noqa: SLF001 - TypeSpec's protocol

    @property
    def _component_specs(self) -> Any:
        return self._source

    def _to_components(self, value: Any) -> Any:
        return value._source  # noqa: SLF001 - this module's own classes

    def _from_components(self, components: Any) -> Any:
        return self.value_type(self._strategy, components)

    @property
    def source(self) -> Any:
        """The type of the tf.data iterator or dataset inside."""
        return self._source

    def _same_but_source(self, other: Any) -> bool:
        return type(self) is type(other) and self._serialize()[:-1] == other._serialize()[:-1]  # noqa: SLF001 - own class

    def is_subtype_of(self, other: Any) -> bool:
        return self._same_but_source(other) and self._source.is_subtype_of(other.source)

    def most_specific_common_supertype(self, others: Any) -> Any:
        if not all(self._same_but_source(other) for other in others):
            return None
        common = self._source.most_specific_common_supertype([other.source for other in others])
        return None if common is None else type(self)(self._strategy, common)


class RestartableIterator(VirtualDistributedIterator):
    """What the deprecated `make_dataset_iterator` and `make_input_fn_iterator` give: `initialize` starts it again."""

    def __init__(self, strategy: Any, dataset: tf.data.Dataset):
        self._dataset = dataset
        in_eager_code = tf.compat.v1.executing_eagerly_outside_functions()
        make: Callable[..., Any] = iter if in_eager_code else tf.compat.v1.data.make_initializable_iterator
        super().__init__(strategy, make(dataset))

    def initialize(self) -> list[tf.Operation]:
        """Starts again; in a TensorFlow 1 graph, returns the operations that do."""
        if not tf.compat.v1.executing_eagerly_outside_functions():
            return [self._source.initializer]
        # The same resource: a tf.function may hold it.
        (resource,) = tf.nest.flatten(self._source, expand_composites=True)
        tf.raw_ops.MakeIterator(dataset=tf.data.experimental.to_variant(self._dataset), iterator=resource)
        return []

    @property
    def initializer(self) -> list[tf.Operation]:
        return self.initialize()


class CallableIterator:
    """An iterator that calls a function for every replica's batch."""

    def __init__(self, strategy: Any, function: Callable[[], Any]):
        self._strategy = strategy
        self._function = function

    def get_next(self, name: Any = None) -> Any:
        del name
        values = [self._function() for _ in range(self._strategy.extended.replicas_here)]
        return values[0] if len(values) == 1 else _values.regroup(values, always_wrap=True)

    def initialize(self) -> list[tf.Operation]:
        return []

    initializer = property(initialize)


class VirtualDistributedIteratorSpec(_DistributedInputSpec):
    """Type of a distributed iterator."""

    __slots__: Sequence[str] = []
    value_type = property(lambda self: VirtualDistributedIterator)


def _check_batched(strategy: Any, element_spec: Any) -> None:
    """Refuses a dataset whose elements are no batches, if they are to be cut."""
    num_parts, num_replicas = strategy.extended.num_parts, strategy.num_replicas_in_sync
    parts = [(path, spec) for path, spec in _tf.flatten_with_paths(element_spec) if isinstance(spec, _PLAIN_SPECS)]
    numbers = [(path, spec) for path, spec in parts if spec.shape.rank == 0]
    # Between replicas everything is split; one replica's batch may have a number beside its rows.
    if numbers and num_parts > 1 and (num_replicas > 1 or len(numbers) == len(parts)):
        path, spec = numbers[0]
        raise _errors.not_batched(_path_name(path), spec, num_parts, num_replicas)


class VirtualDistributedDataset(_tf.DistributedDataset):
    """A tf.distribute.DistributedDataset whose elements are global batches, held as per-replica values.

    Replica r of N gets rows r·c … (r+1)·c of a batch of B rows, c = ceil(B / N), as tf.distribute splits it; the last
    replicas of a short batch get fewer rows, or none.
    """

    def __init__(self, strategy: Any, source: Any):
        self._strategy = strategy
        self._source = source
        if isinstance(source, tf.data.Dataset):
            _check_batched(strategy, source.element_spec)

    @property
    def _type_spec(self) -> VirtualDistributedDatasetSpec:
        return VirtualDistributedDatasetSpec(self._strategy, tf.type_spec_from_value(self._source))

    @property
    def element_spec(self) -> Any:
        """Specs of the elements."""
        return _wrap_spec(self._strategy, self._source.element_spec)

    @property
    def cardinality(self) -> Any:
        """Number of global batches, as tf.data tells it."""
        cardinality = self._source.cardinality
        return cardinality() if callable(cardinality) else cardinality

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> VirtualDistributedIterator:
        return VirtualDistributedIterator(self._strategy, iter(self._source))

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Folds over the global batches; what AutoGraph makes of `for x in dataset` inside a tf.function."""
        iterator = iter(self)

        def body(optional: Any, state: Any) -> Any:
            state = reduce_func(state, optional.get_value())
            return iterator.get_next_as_optional(), state

        first = iterator.get_next_as_optional()
        _, state = _tf.while_loop_same_structure(lambda optional, _: optional.has_value(), body, [first, initial_state])
        return state


class VirtualDistributedDatasetSpec(_DistributedInputSpec):
    """Type of a distributed dataset."""

    __slots__: Sequence[str] = []
    value_type = property(lambda self: VirtualDistributedDataset)


def restartable_iterator(strategy: Any, dataset: tf.data.Dataset) -> RestartableIterator:
    """An iterator over global batches, each split over the replicas."""
    _check_batched(strategy, dataset.element_spec)
    return RestartableIterator(strategy, dataset)


def iterator_from_function(strategy: Any, input_fn: Callable[[tf.distribute.InputContext], Any]) -> Any:
    """An iterator over what `input_fn` gives: a dataset of per-replica batches, or a function that makes one."""
    (result,) = _call_for_pipelines(strategy, input_fn, 1)
    if isinstance(result, tf.data.Dataset):
        return RestartableIterator(strategy, _in_groups(strategy, result))
    if not callable(result):
        raise _errors.not_a_dataset("make_input_fn_iterator", result)
    return CallableIterator(strategy, result)


def distribute_dataset(strategy: Any, dataset: tf.data.Dataset, options: Any) -> VirtualDistributedDataset:
    """A dataset of global batches, each split over the replicas."""
    if _replication_mode(options) is tf.distribute.InputReplicationMode.PER_REPLICA:
        raise _errors.cannot_place_per_replica()
    real = strategy.extended.real
    if real.workers == 1:
        return VirtualDistributedDataset(strategy, dataset)
    # tf.distribute shards the dataset, gives every process its rows of a batch, and agrees on where the data end.
    _check_batched(strategy, dataset.element_spec)
    on_host = tf.distribute.InputOptions(experimental_fetch_to_device=False)
    return VirtualDistributedDataset(strategy, real.base.experimental_distribute_dataset(dataset, on_host))


def distribute_from_function(
    strategy: Any, dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset], options: Any
) -> VirtualDistributedDataset:
    """A dataset made of per-replica batches: N consecutive elements of one pipeline make a step, as in tf.distribute.

    With InputReplicationMode.PER_REPLICA, every replica has a pipeline of its own. Replicas that get no element at the end
    get an empty batch.
    """
    num_replicas = strategy.extended.replicas_here
    per_replica = _replication_mode(options) is tf.distribute.InputReplicationMode.PER_REPLICA
    datasets = _call_for_pipelines(strategy, dataset_fn, num_replicas if per_replica else 1)
    for dataset in datasets:
        if not isinstance(dataset, tf.data.Dataset):
            raise _errors.not_a_dataset("distribute_datasets_from_function", dataset)
    if num_replicas == 1 or not per_replica:
        return VirtualDistributedDataset(strategy, _in_groups(strategy, datasets[0]))
    zipped = tf.data.Dataset.zip(tuple(datasets))
    return VirtualDistributedDataset(
        strategy,
        zipped.map(
            lambda *elements: tf.nest.map_structure(lambda *parts: _values.Separate(parts), *elements),
            name="replicas",
        ),
    )


def _call_for_pipelines(
    strategy: Any, function: Callable[[tf.distribute.InputContext], Any], pipelines: int
) -> list[Any]:
    number, real = strategy.num_replicas_in_sync, strategy.extended.real
    first = real.worker * pipelines
    return [
        function(tf.distribute.InputContext(pipelines * real.workers, first + pipeline, num_replicas_in_sync=number))
        for pipeline in range(pipelines)
    ]


def _in_groups(strategy: Any, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """N consecutive elements of a dataset as one, of per-replica values."""
    num_replicas = strategy.extended.replicas_here
    if num_replicas == 1:
        return dataset
    specs = tf.nest.flatten(dataset.element_spec)
    # As tf.distribute: where all shapes are known, what is left at the end must be enough for all replicas.
    static = all(_is_static(spec) for spec in specs)
    if all(_has_known_rest(spec) for spec in specs):
        groups = dataset.batch(num_replicas, drop_remainder=True) if static else dataset.ragged_batch(num_replicas)
        return groups.map(lambda *group: _flat_as_replicas(num_replicas, _tf.as_element(group)))
    groups = dataset.window(num_replicas, drop_remainder=static)
    return groups.map(lambda *group: _window_as_replicas(num_replicas, _tf.as_element(group), static))


def _has_known_rest(spec: Any) -> bool:
    """Whether only the number of rows may be unknown, so that batches can be joined along them."""
    return isinstance(spec, tf.TensorSpec) and bool(spec.shape.rank) and spec.shape[1:].is_fully_defined()


def _is_static(spec: Any) -> bool:
    """Whether all of a shape is known; of ragged and sparse batches, the number of rows."""
    if isinstance(spec, tf.RaggedTensorSpec | tf.SparseTensorSpec):
        return not spec.shape.rank or spec.shape[0] is not None
    return not isinstance(spec, tf.TensorSpec) or spec.shape.is_fully_defined()


def _flat_as_replicas(num_replicas: int, group: Any) -> Any:
    """A group of per-replica batches, stacked by tf.data, as per-replica values."""

    def convert(value: Any) -> Any:
        if isinstance(value, tf.RaggedTensor):
            return _values.Concatenated(num_replicas, value.values, _pad(value.row_lengths(), num_replicas))
        lengths = tf.repeat(tf.shape(value, tf.int64)[1], tf.shape(value)[0])
        flat = tf.reshape(value, tf.concat([[-1], tf.shape(value)[2:]], 0))
        flat.set_shape([None, *value.shape[2:]])
        return _values.Concatenated(num_replicas, flat, _pad(lengths, num_replicas))

    return tf.nest.map_structure(convert, group)


def _window_as_replicas(num_replicas: int, group: Any, full: bool) -> Any:
    """A group of any elements, as tf.data's datasets of at most N, as per-replica values."""

    def convert(window: tf.data.Dataset) -> Any:
        spec: Any = window.element_spec
        if not isinstance(spec, _PLAIN_SPECS):
            return None  # tf.data's own spec of None
        if not full:
            first = window.take(1).get_single_element()
            missing = _rows.cut_rows(first, 0, 0) if spec.shape.rank else tf.zeros_like(first)
            window = window.concatenate(tf.data.Dataset.from_tensors(missing).repeat(num_replicas))
        parts = [window.skip(replica).take(1).get_single_element() for replica in range(num_replicas)]
        if isinstance(spec, tf.TensorSpec) and (spec.shape.rank == 0 or spec.shape.is_fully_defined()):
            return _values.Stacked(num_replicas, tf.stack(parts))
        if _has_known_rest(spec):
            lengths = tf.stack([tf.shape(part, tf.int64)[0] for part in parts])
            return _values.Concatenated(num_replicas, tf.concat(parts, 0), lengths)
        return _values.SeparateRows(parts)

    return tf.nest.map_structure(convert, group)


def _pad(lengths: tf.Tensor, num_replicas: int) -> tf.Tensor:
    missing = tf.zeros([num_replicas - tf.shape(lengths)[0]], tf.int64)
    return tf.ensure_shape(tf.concat([lengths, missing], 0), [num_replicas])


def _replication_mode(options: Any) -> Any:
    return options.experimental_replication_mode if options is not None else None
