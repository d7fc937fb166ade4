"""Replica contexts: what a replica function sees of tf.distribute while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from microstrat import _errors, _tf, _values

_REPLICA_ID = _tf.CallTimeKey(("replica id",))
_TURN = _tf.CallTimeKey(("turn",))
_ROW = _tf.CallTimeKey(("row",))


def enclosing_function(graph: Any, stop: Any = None) -> Any:
    """The innermost tf.function body that `graph` is in or is, up to but not including `stop`."""
    while isinstance(graph, _tf.FuncGraph) and graph is not stop:
        if not _tf.is_control_flow_graph(graph):
            return graph
        graph = _tf.outer_graph(graph)
    return None


class ReplicaContext(tf.distribute.ReplicaContext):
    """What the two engines' replica contexts share."""

    def _graph(self) -> Any:
        """The graph that the replica function itself runs in; None in eager mode."""
        raise NotImplementedError

    def _own_id(self) -> Any:
        """The replica's id in `_graph()`."""
        raise NotImplementedError

    def _own_turn(self) -> Any:
        """Which turn of the loop it is, in `_graph()`."""
        return self._own_id()

    def _own_row(self) -> Any:
        """Which row of a variable with a value per replica is the replica's, in `_graph()`."""
        return self._own_id()

    def _reduce_flat(self, reduce_op: tf.distribute.ReduceOp, flat: list[Any]) -> list[Any]:
        raise NotImplementedError

    def will_use_handle(self, variable: Any) -> None:
        """Hook: the replica may write `variable` through its handle, past the variable's own methods."""

    @property
    def replica_id_in_sync_group(self) -> tf.Tensor:
        """Id of this replica, an int32 scalar in 0 … N-1.

        Inside a nested tf.function it is looked up at every call: replicas share one device, so TensorFlow shares one
        trace of that function between them, and a constant in it would be replica 0's for all.
        """
        return live_replica_id()

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Sum or mean of `value` (a tensor, IndexedSlices, or a structure of them) over the replicas.

        Differentiable, as in tf.distribute: the gradient of an all-reduce is the all-reduce of the gradient.
        """
        del options
        if isinstance(reduce_op, str):
            reduce_op = tf.distribute.ReduceOp(reduce_op.upper())
        flat = [
            part if isinstance(part, tf.IndexedSlices) else tf.convert_to_tensor(part)
            for part in tf.nest.flatten(value)
        ]
        slices = any(isinstance(part, tf.IndexedSlices) for part in flat)
        if slices or not tf.executing_eagerly() or not _tf.tape_is_recording():
            # In a graph, what stands for a sum over replicas has its gradient (`_tracing`).
            return tf.nest.pack_sequence_as(value, self._reduce_flat(reduce_op, flat))

        @tf.custom_gradient
        def reduce(*parts: Any) -> Any:
            reduced = self._reduce_flat(reduce_op, list(parts))
            return reduced, lambda *gradients: self.all_reduce(reduce_op, list(gradients))

        return tf.nest.pack_sequence_as(value, reduce(*flat))


def live_replica_id() -> Any:
    """The current replica's id as a tensor of the current graph (an eager tensor outside graphs)."""
    return _live(lambda context: context._own_id(), live_replica_id, _REPLICA_ID)  # noqa: SLF001 - this module's own class


def live_turn() -> Any:
    """Which turn of the loop it is, as a tensor of the current graph (an eager tensor outside graphs)."""
    return _live(lambda context: context._own_turn(), live_turn, _TURN)  # noqa: SLF001 - this module's own class


def live_row() -> Any:
    """Which row of a variable with a value per replica is the current replica's, as a tensor of the current graph."""
    return _live(lambda context: context._own_row(), live_row, _ROW)  # noqa: SLF001 - this module's own class


def _live(get: Callable[[ReplicaContext], Any], again: Callable[[], Any], key: _tf.CallTimeKey) -> Any:
    context = tf.distribute.get_replica_context()
    if not isinstance(context, ReplicaContext):
        return tf.constant(0)
    if tf.executing_eagerly():
        return get(context)
    graph = tf.compat.v1.get_default_graph()
    function = enclosing_function(graph, context._graph())  # noqa: SLF001
    if function is None:
        return get(context)
    with function.as_default():
        return _tf.capture_call_time_value(function, again, tf.TensorSpec([], tf.int32), key)


class SymbolicReplicaContext(ReplicaContext):
    """Stands for all replicas at once while their function is traced."""

    def __init__(self, tracing: Any):
        self.tracing = tracing
        super().__init__(tracing.strategy, replica_id_in_sync_group=tracing.replica_id)

    def _graph(self) -> Any:
        return self.tracing.graph

    def _own_id(self) -> Any:
        return self.tracing.replica_id

    def _own_turn(self) -> Any:
        return self.tracing.turn

    def _own_row(self) -> Any:
        return self.tracing.row

    @property
    def devices(self) -> tuple[str, ...]:
        return self.strategy.extended.worker_devices[:1]

    def _reduce_flat(self, reduce_op: tf.distribute.ReduceOp, flat: list[Any]) -> list[Any]:
        return [
            self._reduce_shared(reduce_op, part) if self.tracing.shares(part) else self.tracing.reduce(reduce_op, part)
            for part in flat
        ]

    def _reduce_shared(self, reduce_op: tf.distribute.ReduceOp, tensor: tf.Tensor) -> tf.Tensor:
        """A tensor that all replicas share counts once; its gradients are as many as there are replicas."""
        with _tf.stop_recording():
            result = reduce_shared(self.strategy, reduce_op, tensor)
        _tf.set_gradient(result, tensor, lambda gradient: self.all_reduce(reduce_op, gradient))
        return result

    def _merge_call(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs `merge_fn` inline, once: its arguments are symbols that stand for all replicas' values."""
        tracing = self.tracing
        tracing.refuse_nested_function()
        args, kwargs = tf.nest.map_structure(tracing.symbolic, (tuple(args), dict(kwargs)))
        # Stock merge functions run on a thread where none of the replica's tapes records.
        with tracing.in_cross_replica_context(), _tf.cross_replica_context(self.strategy), _tf.stop_recording():
            result = merge_fn(self.strategy, *args, **kwargs)
        tracing.note_common(result)
        return _values.select_replica(result, tracing.replica_id)


def reduce_shared(strategy: Any, reduce_op: tf.distribute.ReduceOp, value: tf.Tensor) -> tf.Tensor:
    """All-reduce of one tensor that all replicas share by identity: as in tf.distribute, it counts once."""
    if reduce_op == tf.distribute.ReduceOp.SUM:
        strategy.extended.announce(
            "shared tensor", _errors.shared_tensor_counts_once(value, strategy.num_replicas_in_sync)
        )
    return tf.identity(value)


def at_every_call(graph: Any, action: Callable[[], Any]) -> None:
    """Does something in Python whenever the tf.function that `graph` belongs to is called."""
    function = enclosing_function(graph)

    def value() -> tf.Tensor:
        action()
        return tf.constant(0)

    with function.as_default():
        _tf.capture_call_time_value(function, value, tf.TensorSpec([], tf.int32), object())
