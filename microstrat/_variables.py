"""Variables made under the strategy: which have one value, which have one per replica, and who may write what.

One value for all replicas is one ordinary variable (`primary`). A value per replica is one variable of shape [N, ...]
(`rows`), read and written by replica id, so that the looped engine stays one loop and the graph does not grow with N.
On several devices each has its own of either; a trace sees the first device's, which stand for all.

Semantics: tf.distribute.MirroredStrategy's variables (tensorflow/python/distribute/values.py).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from microstrat import _context, _errors, _keras, _real, _tf, _tracing, _values

_creating = threading.local()


def creating_plain_variable() -> bool:
    """True while this module makes a component variable, which must not become a distributed one itself."""
    return getattr(_creating, "depth", 0) > 0


class _PlainVariables:
    def __enter__(self) -> None:
        _creating.depth = getattr(_creating, "depth", 0) + 1

    def __exit__(self, *_: Any) -> None:
        _creating.depth -= 1


def spread(value: tf.Tensor, num_replicas: int) -> tf.Tensor:
    """[N, ...] of one value."""
    return tf.broadcast_to(value, tf.concat([[num_replicas], tf.shape(value)], 0))


def tile_initial_value(initial_value: Any, dtype: Any, num_replicas: int) -> Callable[[], tf.Tensor]:
    """An initial value for rows: every replica starts from the same value."""

    def initial() -> tf.Tensor:
        value: Any = initial_value() if callable(initial_value) else initial_value
        return spread(tf.convert_to_tensor(value, dtype=dtype), num_replicas)

    return initial


def _in_update_context() -> bool:
    return _tf.get_update_replica_id() is not None


class Rows:
    """A value for each replica: on each device one variable, whose first axis is its replicas'."""

    def __init__(self, parts: Sequence[Any]):
        self.parts = tuple(parts)

    @property
    def _parts(self) -> tuple[Any, ...]:
        return self.parts if _tracing.current_tracing() is None else self.parts[:1]

    @property
    def handle(self) -> tf.Tensor:
        """The first device's; in a trace, whichever device's."""
        return self.parts[0].handle

    name = property(lambda self: self.parts[0].name)
    dtype = property(lambda self: self.parts[0].dtype)
    device = property(lambda self: self.parts[0].device)
    initial_value = property(lambda self: self.parts[0].initial_value)

    @property
    def row_shape(self) -> tf.TensorShape:
        return self.parts[0].shape[1:]

    @property
    def here(self) -> int:
        """Number of rows on all devices; in a trace, on whichever device."""
        return self.parts[0].shape[0] * len(self._parts)

    def beside(self, row: int) -> Rows:
        """The rows on the device of one."""
        return Rows([self.parts[row // self.parts[0].shape[0]]])

    def read_value(self) -> tf.Tensor:
        """[N, ...], all rows."""
        values = [part.read_value() for part in self._parts]
        return values[0] if len(values) == 1 else tf.concat(values, 0)

    def update(self, method: str, values: tf.Tensor) -> Any:
        """Assigns, adds or subtracts [N, ...], all rows; an operation in a graph, else None."""
        if len(self._parts) == 1:
            return getattr(self.parts[0], method)(values, read_value=False)
        split = tf.split(values, len(self._parts))
        written = [getattr(part, method)(own, read_value=False) for part, own in zip(self._parts, split, strict=True)]
        return tf.group(*[op for op in written if op is not None])

    def gather(self, row: Any) -> tf.Tensor:
        """One row."""
        return self._at(
            row, lambda part, own: tf.raw_ops.ResourceGather(resource=part.handle, indices=own, dtype=self.dtype)
        )

    def scatter(self, op: Callable[..., Any], row: Any, value: tf.Tensor) -> Any:
        """Writes one row by a raw operation; the operation in a graph, else None."""
        return self._at(row, lambda part, own: op(resource=part.handle, indices=own, updates=value))

    def _at(self, row: Any, act: Callable[[Any, Any], Any]) -> Any:
        if len(self._parts) == 1:
            return act(self.parts[0], row)
        each = self.parts[0].shape[0]
        known = tf.get_static_value(row) if isinstance(row, tf.Tensor) else row
        if known is not None:
            return act(self.parts[int(known) // each], int(known) % each)
        return tf.switch_case(row // each, [functools.partial(act, part, row % each) for part in self.parts])


class ReplicaView:
    """The component variable of one replica: a row of `rows`; by default of the replica whose turn it is."""

    def __init__(self, container: Any, replica_id: Any = None):
        self._container = container
        self._replica_id = replica_id

    def _row(self) -> Any:
        return _context.live_row() if self._replica_id is None else self._replica_id

    name = property(lambda self: self._container.name)
    dtype = property(lambda self: self._container.dtype)
    shape = property(lambda self: self._container.shape)
    device = property(lambda self: self._container.primary.device)

    def read_value(self) -> tf.Tensor:
        return self._container.read_row(self._row())

    value = read_value

    def numpy(self) -> Any:
        return self.read_value().numpy()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.asarray(self.numpy(), *args, **kwargs)

    def __int__(self) -> int:
        return int(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.read_value(), dtype=dtype, name=name)

    def __repr__(self) -> str:
        return f"<component of {self._container.name!r}>"

    def _convert(self, value: Any) -> tf.Tensor:
        tensor = tf.convert_to_tensor(value, dtype=self.dtype)
        self.shape.assert_is_compatible_with(tensor.shape)
        return tensor

    def _scatter(self, op: Callable[..., Any], value: Any, read_value: bool) -> Any:
        written = self._container.rows.scatter(op, self._row(), self._convert(value))
        # Like a variable, the view is read when it is used, not here.
        return self if read_value else written

    def assign(self, value: Any, use_locking: Any = False, name: Any = None, read_value: bool = True) -> Any:
        del use_locking, name
        return self._scatter(tf.raw_ops.ResourceScatterUpdate, value, read_value)

    def assign_add(self, value: Any, use_locking: Any = False, name: Any = None, read_value: bool = True) -> Any:
        del use_locking, name
        return self._scatter(tf.raw_ops.ResourceScatterAdd, value, read_value)

    def assign_sub(self, value: Any, use_locking: Any = False, name: Any = None, read_value: bool = True) -> Any:
        del use_locking, name
        return self._scatter(tf.raw_ops.ResourceScatterSub, value, read_value)

    def __getitem__(self, index: Any) -> tf.Tensor:
        return _assignable_slice(self, index)

    def _strided_slice_assign(self, begin: Any, end: Any, strides: Any, value: Any, name: Any, **masks: Any) -> Any:
        del name
        return self.assign(_with_slice(self, begin, end, strides, value, masks))

    def __getattr__(self, method: str) -> Any:
        if method.startswith("scatter_"):
            return lambda *args, **kwargs: self._scatter_rows(method, *args, **kwargs)
        raise AttributeError(method)

    def _scatter_rows(self, method: str, sparse_delta: tf.IndexedSlices, *args: Any, **kwargs: Any) -> Any:
        """Scatters into this replica's value, as scatter_* of a variable of that value would."""
        del args, kwargs
        if method not in _SCATTERS and method not in _SCALES:
            raise _errors.scatter_on_local(self.name, method)
        row = self.read_value()
        indices, values = sparse_delta.indices, tf.convert_to_tensor(sparse_delta.values, self.dtype)
        if method in _SCATTERS:
            return self.assign(getattr(tf, _SCATTERS[method])(row, tf.reshape(indices, [-1, 1]), values))
        indices, position = tf.unique(tf.reshape(indices, [-1]))  # an index that stands there twice scales twice
        factors = tf.math.unsorted_segment_prod(values, position, tf.size(indices))
        scaled = _SCALES[method](tf.gather(row, indices), factors)
        return self.assign(tf.tensor_scatter_nd_update(row, indices[:, tf.newaxis], scaled))


def read_view(value: Any) -> Any:
    """The value of a view; anything else as it is."""
    return value.read_value() if isinstance(value, ReplicaView) else value


def _delegate_operators(cls: type) -> None:
    """Makes arithmetic on a view work on its value."""
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge"):
        for method in (f"__{name}__", f"__r{name}__"):
            if hasattr(tf.Tensor, method):
                setattr(cls, method, _operator(method))
    for method in ("__neg__", "__abs__"):
        setattr(cls, method, _operator(method))


def _operator(method: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.read_value(), method)(*args)


_delegate_operators(ReplicaView)

_SCATTERS = {
    "scatter_add": "tensor_scatter_nd_add",
    "scatter_sub": "tensor_scatter_nd_sub",
    "scatter_update": "tensor_scatter_nd_update",
    "scatter_min": "tensor_scatter_nd_min",
    "scatter_max": "tensor_scatter_nd_max",
}
_SCALES: dict[str, Callable[..., tf.Tensor]] = {
    "scatter_mul": tf.multiply,
    "scatter_div": lambda x, y: tf.truncatediv(x, y) if x.dtype.is_integer else x / y,
}


def _assignable_slice(variable: Any, index: Any) -> tf.Tensor:
    """`variable[index]`, with an `assign` of its own."""
    return tf.Variable.__getitem__(variable, index)


def _with_slice(variable: Any, begin: Any, end: Any, strides: Any, value: Any, masks: dict[str, Any]) -> tf.Tensor:
    """The value of a variable after one of its slices has been assigned."""
    return tf.raw_ops.TensorStridedSliceUpdate(
        input=variable.value(),
        begin=begin,
        end=end,
        strides=strides,
        value=tf.convert_to_tensor(value, variable.dtype),
        **masks,
    )


class AllReplicasView:
    """All replicas' values at once: what a cross-replica assignment to a variable with a value per replica means.

    `rows`: the values, if they are not all of `container`'s.
    """

    def __init__(self, container: Any, rows: Rows | None = None):
        self._container = container
        self._rows = container.rows if rows is None else rows

    def _spread(self, value: Any) -> tf.Tensor:
        tensor = tf.convert_to_tensor(value, dtype=self._rows.dtype)
        self._container.shape.assert_is_compatible_with(tensor.shape)
        return spread(tensor, self._rows.here)

    def assign(self, value: Any, use_locking: Any = False, name: Any = None, read_value: bool = True) -> Any:
        del use_locking, name, read_value
        return self._rows.update("assign", self._spread(value))

    def assign_add(self, value: Any, use_locking: Any = False, name: Any = None, read_value: bool = True) -> Any:
        del use_locking, name, read_value
        return self._rows.update("assign_add", self._spread(value))

    def assign_sub(self, value: Any, use_locking: Any = False, name: Any = None, read_value: bool = True) -> Any:
        del use_locking, name, read_value
        return self._rows.update("assign_sub", self._spread(value))

    def __getattr__(self, method: str) -> Any:
        if not method.startswith("scatter_"):
            raise AttributeError(method)

        def scatter(*args: Any, **kwargs: Any) -> None:
            for replica in range(self._container.num_replicas):
                getattr(ReplicaView(self._container, replica), method)(*args, **kwargs)

        return scatter


class EveryReplicaView(ReplicaView):
    """Read as one replica's value; written for all replicas of its device."""

    def _everywhere(self, method: str, value: Any) -> Any:
        getattr(AllReplicasView(self._container, self._container.rows.beside(self._replica_id)), method)(value)
        self._container.follow_replica_0()
        return self

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return self._everywhere("assign", value)

    def assign_add(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return self._everywhere("assign_add", value)

    def assign_sub(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return self._everywhere("assign_sub", value)


class _PerReplicaRows:
    """What both kinds of variables need to read and write rows."""

    rows: Rows | None
    shape: Any
    dtype: Any
    has_primary: bool
    _ones: tuple[Any, ...] = ()
    _primary: Any
    _values: tuple[Any, ...]
    _common_name: str
    _distribute_strategy: Any
    _get: Callable[[], Any]
    _get_cross_replica: Callable[[], tf.Tensor]

    @property
    def num_replicas(self) -> int:
        return self._distribute_strategy.num_replicas_in_sync

    @property
    def real(self) -> _real.Real:
        return self._distribute_strategy.extended.real

    @property
    def replicas_here(self) -> int:
        return self._distribute_strategy.extended.replicas_here

    @property
    def replicas_of_device(self) -> int:
        return self._distribute_strategy.extended.replicas_of_device

    def component_of(self, replica: int) -> Any:
        """The variable of a replica of this process, where all replicas of a device share one."""
        return self._values[replica // self.replicas_of_device]

    @property
    def primary(self) -> Any:
        """The resource variable it was made of: the one value (replica 0's, once there are rows), or the rows themselves."""
        return self._primary

    def handle_is_rows(self, handle: tf.Tensor) -> bool:
        return self.rows is not None and any(handle is part.handle for part in self.rows.parts)

    def handle_on(self, handle: tf.Tensor, device: int) -> tf.Tensor:
        """What a handle of the first device's is on another."""
        for group in (self._values, self.rows.parts if self.rows is not None else (), self._ones):
            if group and handle is group[0].handle:
                return group[device].handle
        return handle

    def is_handle(self, handle: tf.Tensor) -> bool:
        """Whether a resource handle is this variable's."""
        return any(handle is own for own in self.own_handles) or self.handle_is_rows(handle)

    @property
    def own_handles(self) -> list[tf.Tensor]:
        """Of the variables, one for each device, that all its replicas share."""
        return [component.handle for component in self._values]

    def _get_replica(self, replica_id: int) -> Any:
        tracing = _tracing.current_tracing()
        if self.rows is None:
            return self._primary if tracing is not None else self.component_of(replica_id)
        return ReplicaView(self, replica_id if tracing is None else tracing.row)

    def __int__(self) -> int:
        return int(self.numpy())  # type: ignore[attr-defined]

    def __float__(self) -> float:
        return float(self.numpy())  # type: ignore[attr-defined]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        # NumPy would ask the eager tensor, which gives no array where there is one number.
        array = np.asarray(self.numpy(), dtype=dtype)  # type: ignore[attr-defined]
        return array.copy() if copy else array  # NumPy 1 has no copy=None

    def __getitem__(self, index: Any) -> tf.Tensor:
        own = self.in_own_replica_context() and not _tf.is_saving_non_distributed()
        if own and self.rows is not None:
            return ReplicaView(self)[index]
        one_for_all = self.rows is None and isinstance(self._get(), tf.Tensor)
        if one_for_all or (own and _tracing.current_tracing() is None):
            return _assignable_slice(self, index)
        return super().__getitem__(index)  # type: ignore[misc]

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {_tf.VARIABLE_VALUE_KEY: self._get_cross_replica()}

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        raise NotImplementedError("replaced by _serialize_to_tensors")

    def _one_replica(self) -> Any:
        """One variable of one replica's shape, that holds nothing of its own."""
        if not self._ones:
            made = []
            with tf.init_scope(), _tf.with_variable_creators([]), _PlainVariables():
                for component in self._values:
                    with tf.device(component.device):
                        made.append(
                            tf.Variable(tf.zeros(self.shape, self.dtype), trainable=False, name=self._common_name)
                        )
            self._ones = tuple(made)
        return self._ones[0]

    def _lent_handle(self) -> tf.Tensor:
        """The handle of a variable that holds this replica's value, for who must read by handle: restored SavedModels."""
        one = self._one_replica()
        loaded = one.assign(self.read_row(_context.live_row()), read_value=False)
        tracing = _tracing.current_tracing()
        if tracing is not None:
            tracing.lent[id(one.handle)] = self
            tracing.lending.add(loaded)
        return one.handle

    def take_back(self, after: tf.Tensor) -> None:
        """Makes what `after` has left in the lent variable this replica's value."""
        with tf.control_dependencies([after]):
            ReplicaView(self).assign(self._one_replica().read_value())

    def read_row(self, row: Any) -> tf.Tensor:
        assert self.rows is not None
        return self.rows.gather(row)

    def _of_replica_0(self) -> tf.Tensor:
        """Replica 0's value, for all replicas."""
        tracing = _tracing.current_tracing()
        if self.real.alone:
            return self.read_row(0)
        if tracing is not None:
            return tracing.first(self.read_row(tracing.row))
        return self.real.first([self.read_row(0)] * len(self.real.devices))[0]

    def _sum_of_replicas(self) -> tf.Tensor:
        tracing = _tracing.current_tracing()
        if tracing is not None and not self.real.alone:
            return tracing.reduce(tf.distribute.ReduceOp.SUM, self.read_row(tracing.row))
        assert self.rows is not None
        return self.real.sum_of_workers(tf.reduce_sum(self.rows.read_value(), axis=0))

    def in_own_replica_context(self) -> bool:
        return isinstance(_tf.get_replica_context_of(self._distribute_strategy), _context.ReplicaContext)

    def assign_all_rows(self, method: str, value: Any, read_value: bool) -> Any:
        written = getattr(AllReplicasView(self), method)(value)
        if not read_value:
            return written
        with tf.control_dependencies([written] if isinstance(written, tf.Operation) else []):
            return self.read_value()  # type: ignore[attr-defined]


def combined(variable: Any, method: str, value: Any) -> Any:
    """What an assignment in a replica function assigns: of a whole batch, what its micro-batches' come to."""
    if not variable.in_own_replica_context():
        return value
    tracing = _tracing.current_tracing()
    if tracing is not None:
        value = tracing.combine_write(variable, method, value)
    strategy = variable.distribute_strategy
    if strategy.extended.averages_batch_norm and _keras.batch_normalization_updating(variable) is not None:
        with _tf.stop_recording():
            value = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, value)
    return value


class VirtualMirroredVariable(_PerReplicaRows, _tf.MirroredVariable):
    """A variable with synchronization ON_WRITE (the default): one value for all replicas.

    With aggregation NONE, a non-trainable variable to which replicas assign different values gets a value per replica at
    the first such assignment (BatchNormalization's moving statistics): each replica reads its own. `primary` follows
    replica 0's, for everybody else: cross-replica reads, checkpoints, and functions traced before.
    """

    has_primary = True

    def __init__(self, strategy: Any, values: Any, aggregation: Any, var_policy: Any = None):
        super().__init__(strategy, values, aggregation, var_policy)  # pyright: ignore[reportCallIssue]
        self.rows = None
        # tf.function -> [(the trace or None, whether it writes)] of those that took the variable for a shared one.
        self.assumed_shared_by: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    @property
    def values(self) -> tuple[Any, ...]:
        """The N component variables: the one variable N times, or each replica's own."""
        if self.rows is None:
            if self.may_become_local:
                self._assume_shared(writing=False)  # if what gets them writes, the graph tells
            return tuple(self.component_of(replica) for replica in range(self.replicas_here))
        return tuple(ReplicaView(self, replica) for replica in range(self.replicas_here))

    def _get_replica(self, replica_id: int) -> Any:
        if self.may_become_local:
            self._assume_shared(writing=False)
        return super()._get_replica(replica_id)

    @property
    def handle(self) -> tf.Tensor:
        context = _tf.get_replica_context_of(self._distribute_strategy)
        if self._aggregation == tf.VariableAggregation.NONE and not self._always_shared and tf.executing_eagerly():
            if isinstance(context, _context.ReplicaContext):
                context.will_use_handle(self)
        elif self.rows is not None and isinstance(context, _context.ReplicaContext):
            return self._lent_handle()
        elif self.may_become_local and isinstance(context, _context.ReplicaContext):
            self._assume_shared(writing=False)
        return self._component_here().handle

    def _component_here(self) -> Any:
        """The component on the device that `update` runs on; else the primary."""
        updated = _tf.get_update_replica_id()
        return (
            self._primary if updated is None or _tracing.current_tracing() is not None else self.component_of(updated)
        )

    @property
    def may_become_local(self) -> bool:
        return (
            self.rows is None
            and self._aggregation == tf.VariableAggregation.NONE
            and not self._always_shared
            and self.num_replicas > 1
        )

    @property
    def _always_shared(self) -> bool:
        # Values of different shapes do not go into the rows of one variable.
        return self.trainable or not self.shape.is_fully_defined()

    def _get(self) -> Any:
        if _tf.is_saving_non_distributed():
            return self._primary
        if self.in_own_replica_context():
            return self._get_on_device_or_primary()
        if _in_update_context():
            # The variable itself, if there is one: TensorFlow 1's optimizers find its slots by it.
            component = self._get_replica(_tf.get_update_replica_id())
            return component if self.rows is None else tf.convert_to_tensor(component)
        return self._get_cross_replica()

    def _get_cross_replica(self) -> tf.Tensor:
        if self.rows is not None and (_tracing.current_tracing() is not None or tf.executing_eagerly()):
            return self._of_replica_0()  # the primary follows at the end of the trace, or of the run
        return tf.identity(self._primary)

    def _get_on_device_or_primary(self) -> Any:
        if _tf.is_saving_non_distributed():
            return self._primary
        if not self.in_own_replica_context():
            return self._component_here()
        if self.rows is not None:
            return self.read_row(_context.live_row())
        if self.may_become_local:
            return self._read_before_local()
        return self._primary

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return super().assign(combined(self, "assign", value), *args, **kwargs)

    def assign_add(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return super().assign_add(combined(self, "assign_add", value), *args, **kwargs)

    def assign_sub(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return super().assign_sub(combined(self, "assign_sub", value), *args, **kwargs)

    def scatter_nd_add(self, *args: Any, **kwargs: Any) -> Any:
        return self._of_one_replica("scatter_nd_add")(*args, **kwargs)

    def scatter_nd_sub(self, *args: Any, **kwargs: Any) -> Any:
        return self._of_one_replica("scatter_nd_sub")(*args, **kwargs)

    def scatter_nd_update(self, *args: Any, **kwargs: Any) -> Any:
        return self._of_one_replica("scatter_nd_update")(*args, **kwargs)

    def _strided_slice_assign(self, begin: Any, end: Any, strides: Any, value: Any, name: Any, **masks: Any) -> Any:
        del name
        updated = _with_slice(self, begin, end, strides, value, masks)
        if self._aggregation == tf.VariableAggregation.NONE or not self.in_own_replica_context():
            return self.assign(updated)
        # tf.distribute writes slices past the aggregation.
        write = functools.partial(self._write_if_equal, update_fn=lambda component, value: component.assign(value))
        return tf.distribute.get_replica_context().merge_call(write, (), {"value": updated})

    def _of_one_replica(self, method: str) -> Callable[..., Any]:
        """A method that tf.distribute's variables lack: of one replica there is one variable, which has it."""
        return getattr(self._primary if self.num_replicas == 1 else super(), method)

    def _assume_shared(self, *, writing: bool) -> None:
        """Notes the functions being traced: they are out of date once the variable gets a value per replica."""
        tracing = _tracing.current_tracing()
        for function in _tf.functions_being_traced():
            assumptions = self.assumed_shared_by.setdefault(function, [])
            assumptions.append((tracing and weakref.ref(tracing.root), writing))
            if tracing is not None and any(function is around for around in tracing.functions):
                tracing.assumptions.append(assumptions)

    def assign_rows(self, values: tf.Tensor) -> None:
        """Sets every replica's value; `values` is [N, ...]."""
        self.ensure_rows()
        assert self.rows is not None
        self.rows.update("assign", values)

    def follow_replica_0(self) -> None:
        """Makes the primary replica 0's value; other devices' components, that of the first replica there."""
        if _tracing.current_tracing() is not None:
            self._primary.assign(self.read_row(0), read_value=False)
            return
        for replica in range(0, self.replicas_here, self.replicas_of_device):
            self.component_of(replica).assign(self.read_row(replica), read_value=False)

    def _read_before_local(self) -> Any:
        """A read in a nested graph of a variable that may yet get a value per replica.

        A tf.function's trace outlives this one, so it must not capture the primary: it asks for the value at every call.
        """
        if tf.executing_eagerly():
            return self._primary
        self._assume_shared(writing=False)
        graph = tf.compat.v1.get_default_graph()
        context = _tf.get_replica_context_of(self._distribute_strategy)
        assert context is not None
        own = context._graph()  # noqa: SLF001 - this package's own class
        if graph is own:
            return self._primary
        function = _context.enclosing_function(graph, own)
        if function is None:
            return self._primary
        spec = tf.TensorSpec(self.shape, self.dtype)
        with function.as_default():
            return _tf.capture_call_time_value(
                function, lambda: tf.convert_to_tensor(self), spec, _tf.CallTimeKey(("value", id(self._primary.handle)))
            )

    def value(self) -> tf.Tensor:
        current = self._get_on_device_or_primary()
        return current if isinstance(current, tf.Tensor) else current.value()

    def _as_graph_element(self) -> Any:
        return _tf.as_graph_element(self.value())

    def _update_replica(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        if isinstance(value, _tf.DistributedVariable):
            value = tf.convert_to_tensor(value)  # this replica's value; a merge function would see replica 0's
        if self._aggregation == tf.VariableAggregation.NONE:
            tracing = _tracing.current_tracing()
            if self.num_replicas == 1 or (self._always_shared and tracing is not None):
                # One value; the planner refuses the program if replicas would write different ones.
                return update_fn(self._primary, value, **kwargs)
            if self._always_shared:
                # In eager mode replicas meet at the write, so that it happens once and to what all of them read.
                return tf.distribute.get_replica_context().merge_call(
                    functools.partial(self._write_if_equal, update_fn=update_fn), (), {"value": value, **kwargs}
                )
            if self.rows is None and tracing is not None and not tracing.varies_between_replicas(value):
                # The same in all replicas, so one value still does. (Under a condition that varies it would not: that is
                # found out when the trace is planned.)
                self._assume_shared(writing=True)
                return update_fn(self._primary, value, **kwargs)
            self.ensure_rows()
            return update_fn(ReplicaView(self), value, **kwargs)

        def merge(strategy: Any, value: Any, **kwargs: Any) -> Any:
            reduced = aggregate(strategy, value, self._aggregation, self)
            return self._update_cross_replica(update_fn, reduced, **kwargs)

        return tf.distribute.get_replica_context().merge_call(merge, args=(value,), kwargs=kwargs)

    def _write_if_equal(self, strategy: Any, *, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        """Writes what all replicas want to write; refuses if they differ."""
        del strategy
        if isinstance(value, _values.PerReplica):
            first, *others = (tf.nest.flatten(part, expand_composites=True) for part in value.values)
            for other in others:
                if not all(np.array_equal(a, b, equal_nan=_may_be_nan(a)) for a, b in zip(first, other, strict=True)):
                    raise _errors.varying_write(self.name, None, "assign", "")
            value = value.select(0)
        return self._update_components(update_fn, value, **kwargs)

    def _update_components(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        """Writes the one value, on every device."""
        components = self._values if _tracing.current_tracing() is None else self._values[:1]
        written = [update_fn(component, value, **kwargs) for component in components]
        return written[0]

    def _update_cross_replica(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        if self.rows is not None and _tracing.current_tracing() is None and not isinstance(value, _values.PerReplica):
            update_fn(AllReplicasView(self), value, **kwargs)
            written = self._update_components(update_fn, value, **kwargs)
            return self if kwargs.get("read_value", True) else written  # what is assigned next is for all, too
        if self.may_become_local:
            self._assume_shared(writing=True)
        return super()._update_cross_replica(update_fn, value, **kwargs)

    def ensure_rows(self, finished: Any = None) -> None:
        """Gives the variable a value per replica, each its value so far.

        Args:
          finished: the trace, if one that has ended showed that the variable needs them.
        """
        if self.rows is not None:
            return
        tracing = _tracing.current_tracing()
        self.rows = self._make_rows()
        self._distribute_strategy.extended.became_local(self, finished or tracing)
        if tracing is not None:
            tracing.adopt_local_state(self._primary, lambda: self.read_row(tracing.row))

    def _make_rows(self) -> Rows:
        return Rows([self._make_rows_on(component, self.replicas_of_device) for component in self._values])

    def _make_rows_on(self, component: Any, number: int) -> Any:
        name = f"{self._common_name}/replicas"
        with tf.init_scope():
            ready = tf.executing_eagerly() and bool(component.is_initialized())
            if ready:
                # Without creators: a tf.function that saw a variable being made would trace everything again.
                with _tf.with_variable_creators([]), tf.device(component.device), _tf.stop_recording():
                    initial = tf.broadcast_to(component.read_value(), [number, *self.shape])
                    return tf.Variable(initial, trainable=False, name=name)
        # The variable itself is being made by the surrounding tf.function's first trace; so are its rows.
        with _tracing.outside_trace(), _PlainVariables(), _tf.stop_recording():
            return tf.Variable(
                lambda: spread(component.read_value(), number),
                trainable=False,
                name=name,
                shape=[number, *self.shape],
                dtype=self.dtype,
            )

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        value = restored_tensors[_tf.VARIABLE_VALUE_KEY]
        written = [component.assign(value, read_value=False) for component in self._values]
        if self.rows is not None:
            written.append(AllReplicasView(self).assign(value))
        return tf.group(*[op for op in written if op is not None])


class VirtualSyncOnReadVariable(_PerReplicaRows, _tf.SyncOnReadVariable):
    """A variable with synchronization ON_READ: a value per replica, aggregated when read in cross-replica context."""

    has_primary = False

    def __init__(self, strategy: Any, values: Any, aggregation: Any, var_policy: Any = None):
        self.rows: Rows = Rows(values)
        super().__init__(strategy, values, aggregation, var_policy)  # pyright: ignore[reportCallIssue]

    # A SavedModel has the one variable instead: functions traced for it read and write that.
    def _export_to_saved_model_graph(self, object_map: Any, tensor_map: Any, options: Any, **kwargs: Any) -> list[Any]:
        saved = self._one_replica()
        resources = saved._export_to_saved_model_graph(object_map, tensor_map, options, **kwargs)  # noqa: SLF001 - protocol
        object_map[self], tensor_map[self] = object_map[saved], tensor_map[saved.handle]
        return [*resources, self]

    @property
    def shape(self) -> tf.TensorShape:
        return self.rows.row_shape

    def get_shape(self) -> tf.TensorShape:
        return self.shape

    @property
    def handle(self) -> tf.Tensor:
        if _tf.is_saving_non_distributed():
            return self._one_replica().handle
        return self._lent_handle() if self.in_own_replica_context() else self.rows.handle

    device = property(lambda self: self.rows.device)

    @property
    def values(self) -> tuple[Any, ...]:
        """The N component variables."""
        return tuple(ReplicaView(self, replica) for replica in range(self.replicas_here))

    @property
    def initial_value(self) -> Any:
        return self.rows.initial_value[0]

    def _get(self) -> Any:
        if _tf.is_saving_non_distributed():
            return self._one_replica().read_value()
        if self.in_own_replica_context():
            return self.read_row(_context.live_row())
        return self._get_cross_replica()

    def _get_on_device_or_primary(self) -> Any:
        return ReplicaView(self)

    def _get_cross_replica(self) -> tf.Tensor:
        _tf.mark_as_unsaveable()
        if self._aggregation == tf.VariableAggregation.SUM:
            return tf.cast(self._sum_of_replicas(), self.dtype)
        if self._aggregation == tf.VariableAggregation.MEAN:
            return self._sum_of_replicas() / self.num_replicas
        if self._aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            return self._of_replica_0()
        raise _errors.no_cross_replica_value(self.name)

    def value(self) -> tf.Tensor:
        if _tf.in_sync_on_read_context():
            raise NotImplementedError("call `variable.value()` inside variable_sync_on_read_context is not supported")
        return tf.convert_to_tensor(self._get())

    def _dense_var_to_tensor(self, dtype: Any = None, name: Any = None, as_ref: bool = False) -> tf.Tensor:
        del as_ref
        value = self._get()
        if self.in_own_replica_context() and _tf.in_sync_on_read_context():
            if self._aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
                value = self._of_replica_0()
            else:
                reduce_op = _reduce_op_of(self._aggregation)
                value = tf.distribute.get_replica_context().all_reduce(reduce_op, value)
        return tf.convert_to_tensor(value, dtype=dtype, name=name)

    def _update_replica(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        return update_fn(ReplicaView(self), value, **kwargs)

    def _assign_anywhere(self, method: str, value: Any, use_locking: Any, name: Any, read_value: bool) -> Any:
        if _tf.is_saving_non_distributed():
            return getattr(self._one_replica(), method)(value, use_locking, name, read_value)
        with _tf.enter_or_assert_strategy(self._distribute_strategy):
            if self.in_own_replica_context():
                return getattr(ReplicaView(self), method)(combined(self, method, value), use_locking, name, read_value)
            if _in_update_context():
                view = self._get_replica(_tf.get_update_replica_id())
                return getattr(view, method)(value, use_locking, name, read_value)
            if self._aggregation == tf.VariableAggregation.SUM:
                if method != "assign":
                    raise _errors.sum_changed_outside(self.name, method)
                # The sum must come back when it is read: each replica gets an equal part, as tf.distribute does it.
                value = tf.cast(tf.convert_to_tensor(value) / self.num_replicas, self.dtype)
            return self.assign_all_rows(method, value, read_value)

    def assign(self, value: Any, use_locking: Any = False, name: Any = None, read_value: bool = True) -> Any:
        return self._assign_anywhere("assign", value, use_locking, name, read_value)

    def assign_add(self, value: Any, use_locking: Any = False, name: Any = None, read_value: bool = True) -> Any:
        return self._assign_anywhere("assign_add", value, use_locking, name, read_value)

    def assign_sub(self, value: Any, use_locking: Any = False, name: Any = None, read_value: bool = True) -> Any:
        return self._assign_anywhere("assign_sub", value, use_locking, name, read_value)

    def _as_graph_element(self) -> Any:
        return _tf.as_graph_element(tf.convert_to_tensor(self._get()))

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        value = restored_tensors[_tf.VARIABLE_VALUE_KEY]
        if self._aggregation == tf.VariableAggregation.SUM:
            value = tf.cast(value / self.num_replicas, self.dtype)
        return AllReplicasView(self).assign(value)


def _may_be_nan(value: Any) -> bool:
    return tf.as_dtype(value.dtype).is_floating


def _reduce_op_of(aggregation: tf.VariableAggregation) -> tf.distribute.ReduceOp:
    is_sum = aggregation == tf.VariableAggregation.SUM
    return tf.distribute.ReduceOp.SUM if is_sum else tf.distribute.ReduceOp.MEAN


def aggregate(strategy: Any, value: Any, aggregation: tf.VariableAggregation, variable: Any) -> Any:
    """The one value that a variable with `aggregation` gets from the replicas' values."""
    if aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
        if isinstance(value, _values.Symbolic):
            tracing = _tracing.current_tracing()
            assert tracing is not None
            return tracing.first(value.value)
        if isinstance(value, _values.PerReplica):
            return value.select(0)
        return value
    is_mean = aggregation == tf.VariableAggregation.MEAN
    if is_mean and not variable.dtype.is_floating and isinstance(value, _values.PerReplica):
        raise _errors.integer_mean(variable.name, variable.dtype.name)
    return strategy.extended.reduce_to(_reduce_op_of(aggregation), value, variable)
