"""From a replica function to a trace: the function runs once, in a graph of its own, on behalf of all replicas."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from microstrat import _branches, _context, _errors, _kinds, _plan, _tf, _values, _variables

_MAX_TRACES = 32


@dataclass(frozen=True, slots=True)
class Trace:
    """A traced replica function.

    Attributes:
      tracing: its graph, replica id and collective markers.
      structure: what the function returned, tensors and all.
      leaves: `structure` flattened, composite tensors expanded.
      must_run: operations whose effects must happen.
      weights: what the results of each turn weigh in a mean, if the function has said so.
    """

    tracing: _context.Tracing
    structure: Any
    leaves: tuple[Any, ...]
    must_run: frozenset[tf.Operation]
    weights: tf.Tensor | None = None


def trace(
    make_tracing: Callable[..., _context.Tracing],
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: str,
) -> Trace:
    """Runs `fn` once for all replicas and returns its trace. `make_tracing(function_name, outer, inline=)` begins one.

    It runs again from the start where TensorFlow's graphs leave no other way: a nested tf.function turned out to hold a
    collective (it then runs inline), or a variable got a value per replica after a branch had read it. Both happen at
    most once per function or variable.
    """
    inline = False
    for _ in range(_MAX_TRACES):
        tracing = make_tracing(name_of(fn), tf.compat.v1.get_default_graph(), inline=inline)
        try:
            return _trace_once(tracing, fn, args, kwargs, device)
        except Exception:
            if tracing.restart is None:
                raise
            inline = inline or tracing.restart == "inline"
    raise AssertionError("a trace restarts once per variable at most")


def name_of(fn: Callable[..., Any]) -> str:
    """A replica function's name, for messages."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def _trace_once(
    tracing: _context.Tracing, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], device: str
) -> Trace:
    graph = tracing.graph
    fn = _tf.convert_by_autograph(fn)
    control = _tf.AutomaticControlDependencies()
    with (
        tracing,
        graph.as_default(),
        control,
        tf.device(device),
        tracing.context(),
        tracing.active(),
        _tf.inline_functions() if tracing.inline else contextlib.nullcontext(),
    ):
        args, kwargs = _cut_arguments(tracing, (tuple(args), kwargs), device)
        structure = fn(*args, **kwargs)
        structure = tf.nest.map_structure(lambda value: tracing.returned(_as_output(value)), structure)
        redirect = {id(old): new for old, new in tracing.redirected}
        leaves = tuple(redirect.get(id(leaf), leaf) for leaf in tf.nest.flatten(structure, expand_composites=True))
        weights = tracing.result_weights()
        for old, new in tracing.redirected:
            _tf.replace_tensor(old, new)
        if tracing.around is None:
            _follow_replica_0(tracing)
    _tf.watch_variables(tracing.outer, _tf.watched_variables(graph))
    leaves = tuple(_unwrapped(leaf) for leaf in leaves)
    _see_through_wrappers(graph)
    if tracing.lifted:
        for op in graph.get_operations():
            if op.type in _kinds.BRANCHES and any(tensor.op in tracing.lifted for tensor in op.inputs):
                _branches.drop_dead_inputs(op, graph)
    return Trace(tracing, structure, leaves, frozenset(control.ops_which_must_run), weights)


def _follow_replica_0(tracing: _context.Tracing) -> None:
    """Makes variables with a value per replica show replica 0's to everybody outside."""
    graph = tracing.graph
    for handle, inner in list(graph.captures):
        owner = tracing.strategy.extended.owner_of(handle)
        if owner is not None and owner.has_primary and owner.handle_is_rows(handle):
            if any(_kinds.writes(op) for op in inner.consumers()):
                graph.cross_replica_depth += 1
                owner.follow_replica_0()
                graph.cross_replica_depth -= 1


def _cut_arguments(tracing: _context.Tracing, structure: Any, device: str) -> Any:
    """Replaces per-replica arguments by the value of the replica whose turn it is.

    The cut runs on the host, where the global batch stays: only the micro-batch travels to the device.
    """
    before = len(tracing.graph.get_operations())
    with tf.device(_tf.host_for_device(device)):
        chosen = _values.select_replica(structure, tracing.turn)
    tracing.cuts.update(itertools.islice(tracing.graph.get_operations(), before, None))
    return chosen


def _as_output(value: Any) -> Any:
    """A returned value as tensors where it can be; variables and Python values stay as they are."""
    if isinstance(value, tf.Operation):
        with tf.control_dependencies([value]):
            return tf.constant(True)
    if isinstance(value, _tf.DistributedVariable):
        return value
    if isinstance(value, _variables.ReplicaView):
        return value.read_value()
    if isinstance(value, tf.Variable):
        # An assignment returns a variable that has not been read yet; reading it here keeps the order.
        container = tf.distribute.get_strategy().extended.value_container(value)
        return container if container is not value and isinstance(value, _tf.ResourceVariable) else value.read_value()
    if hasattr(value, "__tf_tensor__") and not isinstance(value, tf.Tensor) and not _is_composite(value):
        return tf.convert_to_tensor(value)
    return value


def _is_composite(value: Any) -> bool:
    return isinstance(value, _tf.CompositeTensor)


def _unwrapped(value: Any) -> Any:
    while isinstance(value, tf.Tensor) and hasattr(value, "graph") and value.op.type == "IdentityN":
        value = value.op.inputs[value.value_index]
    return value


def _see_through_wrappers(graph: Any) -> None:
    """Makes readers of an IdentityN, and of the handles that leave a loop, read what went in.

    tf.custom_gradient wraps a function's results together with its arguments in one IdentityN. As one operation it would
    be varying as soon as one argument is, and every all-reduced gradient with it.
    """
    for op in graph.get_operations():
        if op.type == "IdentityN":
            for source, output in zip(op.inputs, op.outputs, strict=True):
                _tf.replace_tensor(output, source)
        elif op.type in _kinds.LOOPS:
            # A loop hands the resources it uses through; a handle is no value to keep for every replica.
            for source, output in zip(op.inputs, op.outputs, strict=True):
                if output.dtype == tf.resource:
                    _tf.replace_tensor(output, source)


@dataclass(slots=True)
class Graph:
    """A trace as the planner sees it.

    Attributes:
      operations: node id -> operation.
      ids: operation -> node id.
      nodes: node id -> planner node.
    """

    operations: list[tf.Operation] = field(default_factory=list)
    ids: dict[tf.Operation, int] = field(default_factory=dict)
    nodes: list[_plan.Node] = field(default_factory=list)


def to_graph(trace: Trace, owner_of: Callable[[tf.Tensor], Any]) -> Graph:
    """Describes a trace to the planner. `owner_of` maps a captured handle to the strategy's variable it belongs to."""
    tracing = trace.tracing
    result = Graph()
    for op in tracing.graph.get_operations():
        result.ids[op] = len(result.operations)
        result.operations.append(op)
    outer_of = {id(inner): outer for outer, inner in tracing.graph.captures}
    returned = trace.leaves if trace.weights is None else (*trace.leaves, trace.weights)
    required = {leaf.op for leaf in returned if isinstance(leaf, tf.Tensor) and leaf.graph is tracing.graph}
    # A variable of somebody else that replicas write: each sees the writes of those before it, so all of it varies.
    foreign: set[Hashable] = set()
    while True:
        result.nodes = [_describe(op, trace, result.ids, outer_of, required, foreign) for op in result.operations]
        found = _foreign_writes(result, outer_of, owner_of, tracing)
        if found <= foreign:
            return result
        foreign |= found


def resource_of(handle: tf.Tensor, outer_of: dict[int, tf.Tensor]) -> Hashable:
    """An identity for the resource behind a handle inside the trace."""
    while handle.op.type == "Identity":
        handle = handle.op.inputs[0]
    return id(outer_of.get(id(handle), handle))


def _describe(
    op: tf.Operation,
    trace: Trace,
    ids: dict[tf.Operation, int],
    outer_of: dict[int, tf.Tensor],
    required: set[tf.Operation],
    foreign: set[Hashable],
) -> _plan.Node:
    tracing = trace.tracing
    inputs = tuple(ids[tensor.op] for tensor in op.inputs)
    after = tuple(ids[before] for before in op.control_inputs)
    must = op in required
    if op.type == "Placeholder":
        return _plan.Node(varying=op is tracing.turn.op, argument=True, required=must)
    if op in tracing.collectives:
        border = tracing.collectives[op].between_replicas
        return _plan.Node(inputs, after, collective=True, border=border, required=must)
    if op.type == "NoOp":
        return _plan.Node(inputs, after, hub=True)
    if not _tf.is_stateful(op):
        cheap = op in tracing.cuts or _kinds.is_cheap(op)
        return _plan.Node(inputs, after, cheap=cheap, size=_kinds.size_of(op), required=must)
    resources = {resource_of(t, outer_of) for t in op.inputs if t.dtype == tf.resource}
    writes = frozenset(resource_of(t, outer_of) for t in _kinds.writes(op))
    own_state = tracing.kinds.has_own_state(op)
    # Random draws, prints and Python functions run once per replica whatever their inputs; those of a merge function once.
    per_replica = own_state and tracing.draws_per_turn and op not in tracing.graph.cross_replica_ops
    effect = bool(writes) or own_state or tracing.kinds.asserts(op)
    reads = None
    if op.type == "ReadVariableOp":
        (reads,) = resources
    return _plan.Node(
        inputs,
        after,
        varying=per_replica or bool(resources & foreign),
        pure=False,
        effect=effect,
        required=must or (effect and op in trace.must_run),
        reads=reads,
        writes=writes,
    )


def _foreign_writes(
    graph: Graph, outer_of: dict[int, tf.Tensor], owner_of: Callable[[tf.Tensor], Any], tracing: _context.Tracing
) -> set[Hashable]:
    found: set[Hashable] = set()
    for op, node in zip(graph.operations, graph.nodes, strict=True):
        if not node.writes:
            continue
        for tensor in op.inputs:
            if tensor.dtype != tf.resource or resource_of(tensor, outer_of) not in node.writes:
                continue
            while tensor.op.type == "Identity":
                tensor = tensor.op.inputs[0]
            outer = outer_of.get(id(tensor))
            owner = None if outer is None else owner_of(outer)
            own = tracing.draws_per_turn or any(tracing.varies(source) for source in op.inputs)
            if own and tracing.writes_in_order(op, owner) and op not in tracing.graph.cross_replica_ops:
                found.add(resource_of(tensor, outer_of))
    return found


def varying_writes(
    graph: Graph, varying: Sequence[bool], trace: Trace, owner_of: Callable[[tf.Tensor], Any]
) -> list[tuple[Any, tf.Operation]]:
    """(variable, operation) where replicas would write different values to a variable that has one."""
    outer_of = {id(inner): outer for outer, inner in trace.tracing.graph.captures}
    found = []
    for index, (op, node) in enumerate(zip(graph.operations, graph.nodes, strict=True)):
        if not node.writes or not varying[index]:
            continue
        for tensor in op.inputs:
            if tensor.dtype != tf.resource or resource_of(tensor, outer_of) not in node.writes:
                continue
            handle = outer_of.get(id(tensor), tensor)
            owner = owner_of(handle)
            if trace.tracing.writes_in_order(op, owner):
                continue
            if owner is None:
                raise _errors.varying_write_outside(trace.tracing.function_name, op.type, where(op))
            if not (trace.tracing.rows_per_turn and owner.handle_is_rows(handle)):
                found.append((owner, op))
    return found


def refuse_varying_conditions(graph: Graph, varying: Sequence[bool], trace: Trace) -> None:
    """Raises if a collective that was lifted out of a branch stood under a condition that differs between replicas."""
    tracing = trace.tracing
    for op in graph.operations if tracing.lifted else ():
        if op.type in _kinds.BRANCHES and any(tensor.op in tracing.lifted for tensor in op.inputs[1:]):
            condition = op.inputs[0].op
            if varying[graph.ids[condition]] and condition not in tracing.collectives:
                raise _errors.collective_under_varying_condition(tracing.function_name, where(op))


def refuse_varying_writes(found: Sequence[tuple[Any, tf.Operation]], trace: Trace) -> None:
    """Raises if replicas would write different values to a variable that must have one."""
    for owner, op in found:
        if trace.tracing.num_replicas == 1:
            raise _errors.varying_write_of_micro_batches(owner.name, trace.tracing.function_name, op.type, where(op))
        if op.type in _kinds.BRANCHES:
            raise _errors.varying_branch(owner.name, trace.tracing.function_name, where(op))
        raise _errors.varying_write(owner.name, trace.tracing.function_name, op.type, where(op))


def where(op: tf.Operation) -> str:
    """Where in the user's code an operation was made, as ' at file:line'."""
    frames = [frame for frame in op.traceback or () if not _is_library(frame.filename)]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _is_library(filename: str) -> bool:
    return any(f"/{name}/" in filename.replace("\\", "/") for name in ("tensorflow", "keras", "tf_keras", "microstrat"))
