"""From a replica function to a trace: the function runs once, in a graph of its own, on behalf of all replicas."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from microstrat import _errors, _kinds, _plan, _tf, _tracing, _values, _variables

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

    tracing: _tracing.Tracing
    structure: Any
    leaves: tuple[Any, ...]
    must_run: frozenset[tf.Operation]
    weights: tf.Tensor | None = None


def trace(
    make_tracing: Callable[..., _tracing.Tracing],
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: str,
    *,
    inline: bool = False,
    unfolded: frozenset[int] = frozenset(),
) -> Trace:
    """Runs `fn` once for all replicas and returns its trace; nested tf.functions inline if that is known to be needed.

    So do `unfolded` loops run for all replicas together (`_loops`).

    `make_tracing(function_name, outer, inline=, unfolded=)` begins one.

    It runs again from the start where TensorFlow's graphs leave no other way: a nested tf.function turned out to hold a
    collective (it then runs inline), or a loop did (see `_loops`), or a variable got a value per replica after a branch had
    read it. Each happens at most once per function, loop or variable.
    """
    for _ in range(_MAX_TRACES):
        tracing = make_tracing(name_of(fn), tf.compat.v1.get_default_graph(), inline=inline, unfolded=unfolded)
        try:
            return _trace_once(tracing, fn, args, kwargs, device)
        except Exception:
            if tracing.restart is None:
                raise
            tracing.discard()
            inline = inline or tracing.restart == "inline"
            unfolded |= tracing.unfolded
    raise AssertionError("a trace restarts once per variable, or loop, at most")


def name_of(fn: Callable[..., Any]) -> str:
    """A replica function's name, for messages."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def _trace_once(
    tracing: _tracing.Tracing, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], device: str
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
        args, kwargs = cut_arguments(tracing, (tuple(args), kwargs), device)
        structure = fn(*args, **kwargs)
        structure = tf.nest.map_structure(lambda value: tracing.returned(as_output(value)), structure)
        redirect = {id(old): new for old, new in tracing.redirected}
        leaves = tuple(redirect.get(id(leaf), leaf) for leaf in tf.nest.flatten(structure, expand_composites=True))
        weights = tracing.result_weights()
        for old, new in tracing.redirected:
            _tf.replace_tensor(old, new)
        if tracing.around is None and tracing.continues is None:
            _follow_replica_0(tracing)
    _tf.watch_variables(tracing.outer, _tf.watched_variables(graph))
    leaves = tuple(
        _tracing.unwrapped(leaf) if isinstance(leaf, tf.Tensor) and hasattr(leaf, "graph") else leaf for leaf in leaves
    )
    see_through_wrappers(graph)
    return Trace(tracing, structure, leaves, frozenset(control.ops_which_must_run), weights)


def _follow_replica_0(tracing: _tracing.Tracing) -> None:
    """Makes variables with a value per replica show replica 0's to everybody outside."""
    graph = tracing.graph
    for handle, inner in list(graph.captures):
        owner = tracing.strategy.extended.owner_of(handle)
        if owner is not None and owner.has_primary and owner.handle_is_rows(handle):
            if any(_kinds.writes(op) for op in inner.consumers()):
                graph.cross_replica_depth += 1
                owner.follow_replica_0()
                graph.cross_replica_depth -= 1


def cut_arguments(tracing: _tracing.Tracing, structure: Any, device: str) -> Any:
    """Replaces per-replica arguments by the value of the replica whose turn it is.

    The cut runs on the host, where the global batch stays: only the micro-batch travels to the device.
    """
    before = len(tracing.graph.get_operations())
    with tf.device(_tf.host_for_device(device)):
        chosen = _values.select_replica(structure, tracing.part)
    tracing.cuts.update(itertools.islice(tracing.graph.get_operations(), before, None))
    return chosen


def as_output(value: Any) -> Any:
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


def see_through_wrappers(graph: Any) -> None:
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


@dataclass
class Graph:
    """A graph as the planner sees it: that of a trace, or of one branch of a tf.cond in it.

    Attributes:
      tracing: the trace that it is, or is part of.
      graph: TensorFlow's.
      returned: tensors of it whose values are wanted.
      must_run: operations whose effects must happen.
      outer_of: id of a placeholder -> what it stands for outside the trace.
      arguments: placeholders of a branch -> whether what they stand for differs between replicas.
      foreign: variables of somebody else that replicas write: each sees the writes of those before it, so all of it varies.
      lifted: results of collectives that stood in a branch, and were lifted out of it.
      once: whether it runs in cross-replica context, so that random draws, prints and the like happen once.
      replaced: operations that others have taken the place of.
      moved: (operation, output) -> what has taken the place of that tensor.
      operations: node id -> operation.
      ids: operation -> node id.
      nodes: node id -> planner node.
    """

    tracing: _tracing.Tracing
    graph: Any
    returned: Sequence[tf.Tensor]
    must_run: set[tf.Operation]
    outer_of: dict[int, tf.Tensor]
    arguments: dict[tf.Operation, bool] = field(default_factory=dict)
    foreign: set[Hashable] = field(default_factory=set)
    lifted: set[tf.Operation] = field(default_factory=set)
    once: bool = False
    replaced: set[tf.Operation] = field(default_factory=set)
    moved: dict[tuple[tf.Operation, int], tf.Tensor] = field(default_factory=dict)
    operations: list[tf.Operation] = field(default_factory=list)
    ids: dict[tf.Operation, int] = field(default_factory=dict)
    nodes: list[_plan.Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        own = self.graph is self.tracing.graph
        self.kinds = self.tracing.kinds if own else _kinds.Kinds(self.graph)
        self.describe()

    def describe(self) -> None:
        """Describes the operations, once more if some have changed."""
        self.operations = list(self.graph.get_operations())
        self.ids = {op: index for index, op in enumerate(self.operations)}
        required = {tensor.op for tensor in self.returned}
        self.nodes = [self._describe(op, op in required) for op in self.operations]
        self._colours: list[bool] | None = None

    def outside(self, handle: tf.Tensor) -> tf.Tensor:
        """What a resource handle here is outside the trace."""
        while handle.op.type == "Identity":
            handle = handle.op.inputs[0]
        return self.outer_of.get(id(handle), handle)

    def resource_of(self, handle: tf.Tensor) -> Hashable:
        """An identity for the resource behind a handle."""
        return id(self.outside(handle))

    def written(self, op: tf.Operation) -> list[tf.Tensor]:
        """The resources outside that `op` may write."""
        return [] if op in self.replaced else [self.outside(handle) for handle in _kinds.writes(op)]

    def colours(self) -> list[bool]:
        """For every node, whether it varies."""
        if self._colours is None:
            once = self.tracing.single
            self._colours = [False] * len(self.nodes) if once else _plan.find_varying(self.nodes)
        return self._colours

    def now(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor that has taken the place of `tensor`, if one has."""
        return self.moved.get((tensor.op, tensor.value_index), tensor)

    def returns(self, tensor: tf.Tensor) -> bool:
        return any(tensor.op is other.op and tensor.value_index == other.value_index for other in self.returned)

    def move(self, old: tf.Tensor, new: tf.Tensor) -> None:
        """Puts `new` in the place of `old`, everywhere."""
        _tf.replace_tensor(old, new)
        self.moved[old.op, old.value_index] = new
        self.returned = [self.now(tensor) for tensor in self.returned]

    def settled_colours(self) -> list[bool]:
        """For every node, whether it varies, after collectives over uniform values are replaced: those need no loop."""
        varying = list(self.colours())
        for marker, collective in self.tracing.collectives.items():
            if marker.graph is not self.graph or collective.between_replicas:
                continue
            (source,) = marker.inputs
            if varying[self.ids[source.op]]:
                continue
            before = len(self.operations)
            with self.graph.as_default(), tf.device(source.device), tf.control_dependencies(None):
                result = self.tracing.uniform_result(collective, source)
            for op in itertools.islice(self.graph.get_operations(), before, None):
                self.ids[op] = len(self.operations)
                self.operations.append(op)
                inputs = tuple(self.ids[tensor.op] for tensor in op.inputs)
                self.nodes.append(_plan.Node(inputs, argument=op.type == "Placeholder"))
                varying.append(False)
            readers = marker.outputs[0].consumers()
            self.move(marker.outputs[0], result)
            for reader in readers:
                self._change(reader, inputs=tuple(self.ids[tensor.op] for tensor in reader.inputs))
            if self.nodes[self.ids[marker]].required:
                self._change(marker, required=False)
                self._change(result.op, required=True)
        return varying

    def _change(self, op: tf.Operation, **changes: Any) -> None:
        self.nodes[self.ids[op]] = dataclasses.replace(self.nodes[self.ids[op]], **changes)

    def _describe(self, op: tf.Operation, must: bool) -> _plan.Node:
        tracing, ids = self.tracing, self.ids
        inputs = tuple(ids[tensor.op] for tensor in op.inputs)
        after = tuple(ids[before] for before in op.control_inputs)
        if op.type == "Placeholder":
            return _plan.Node(varying=self.arguments.get(op, tracing.is_mark(op)), argument=True, required=must)
        if op in tracing.collectives:
            border = tracing.collectives[op].between_replicas
            return _plan.Node(inputs, after, collective=True, border=border, required=must)
        if op.type == "NoOp":
            return _plan.Node(inputs, after, hub=True)
        if op in self.replaced or not _tf.is_stateful(op):
            cheap = op in tracing.cuts or _kinds.is_cheap(op)
            return _plan.Node(inputs, after, cheap=cheap, size=_kinds.size_of(op), required=must)
        resources = {self.resource_of(t) for t in op.inputs if t.dtype == tf.resource}
        writes = frozenset(id(resource) for resource in self.written(op))
        own_state = self.kinds.has_own_state(op)
        # Random draws, prints and Python functions run once per replica whatever their inputs, as does what reads or
        # writes a foreign variable; in a merge function all of them run once.
        per_replica = not self.once and op not in tracing.graph.cross_replica_ops
        effect = bool(writes) or own_state or self.kinds.asserts(op)
        reads = None
        if op.type == "ReadVariableOp":
            (reads,) = resources
        return _plan.Node(
            inputs,
            after,
            varying=per_replica and (bool(resources & self.foreign) or (own_state and tracing.draws_per_turn)),
            pure=False,
            effect=effect,
            required=must or (effect and op in self.must_run),
            reads=reads,
            writes=writes,
        )


def to_graph(trace: Trace, owner_of: Callable[[tf.Tensor], Any]) -> Graph:
    """Describes a trace to the planner. `owner_of` maps a captured handle to the strategy's variable it belongs to."""
    tracing = trace.tracing
    leaves = trace.leaves if trace.weights is None else (*trace.leaves, trace.weights)
    returned = [
        leaf for leaf in leaves if isinstance(leaf, tf.Tensor) and getattr(leaf, "graph", None) is tracing.graph
    ]
    outer_of = {id(inner): outer for outer, inner in tracing.graph.captures}
    result = Graph(tracing, tracing.graph, returned, set(trace.must_run), outer_of, lifted=tracing.lifted)
    while True:
        found = _foreign_writes(result, owner_of)
        if found <= result.foreign:
            return result
        result.foreign |= found
        result.describe()


def _foreign_writes(graph: Graph, owner_of: Callable[[tf.Tensor], Any]) -> set[Hashable]:
    tracing = graph.tracing
    found: set[Hashable] = set()
    for op, node in zip(graph.operations, graph.nodes, strict=True):
        if not node.writes or op in tracing.graph.cross_replica_ops:
            continue
        if not tracing.draws_per_turn and graph.kinds.writes_summaries_only(op):
            continue  # there is no order among them: what is the same for all is written once
        if tracing.draws_per_turn or _writes_what_varies(op, tracing):
            written = graph.written(op)
            found |= {id(handle) for handle in written if tracing.writes_in_order(op, owner_of(handle))}
    return found


def _writes_what_varies(op: tf.Operation, tracing: _tracing.Tracing) -> bool:
    """Whether an operation that writes is given something that varies; under a condition, those in its branches."""
    if op.type not in _kinds.BRANCHES or tracing.varies(op.inputs[0]):
        return any(tracing.varies(source) for source in op.inputs)
    inner = itertools.chain.from_iterable(graph.get_operations() for graph in _tf.branch_graphs(op))
    return any(_kinds.writes(other) and _writes_what_varies(other, tracing) for other in inner)


def varying_writes(graph: Graph, owner_of: Callable[[tf.Tensor], Any]) -> list[tuple[Any, tf.Operation]]:
    """(variable, operation) where replicas would write different values to a variable that has one."""
    tracing = graph.tracing
    varying = graph.colours()
    found = []
    for index, op in enumerate(graph.operations):
        if not graph.nodes[index].writes:
            continue
        for handle in _kinds.writes(op):
            lent = tracing.lent.get(id(graph.outside(handle)))
            if lent is not None and _writes_itself(op, handle, tracing.lending):
                raise _errors.written_by_handle(lent.name, tracing.function_name, op.type, where(op))
        if not varying[index]:
            continue
        for handle in graph.written(op):
            owner = owner_of(handle)
            if tracing.writes_in_order(op, owner):
                continue
            if owner is None:
                raise _errors.varying_write_outside(tracing.function_name, op.type, where(op))
            if not (tracing.rows_per_turn and owner.handle_is_rows(handle)):
                found.append((owner, op))
    return found


def _writes_itself(op: tf.Operation, handle: tf.Tensor, allowed: set[tf.Operation]) -> bool:
    """Whether `op` writes a resource, or an operation of a function that it calls does, other than those `allowed`."""
    if op in allowed or not any(written is handle for written in _kinds.writes(op)):
        return False
    called = _tf.called_graphs(op)
    return not called or any(
        _writes_itself(consumer, own, allowed)
        for graph, inputs in called
        for own, given in zip(graph.inputs, inputs, strict=True)
        if given is handle
        for consumer in own.consumers()
    )


def needs_inline(found: Sequence[tuple[Any, tf.Operation]], tracing: _tracing.Tracing) -> bool:
    """Whether the writes found may be of nested tf.functions that vary in something else: a call is one operation."""
    return not tracing.inline and any(op.type in _kinds.FUNCTION_CALLS for _, op in found)


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
    modules = [sys.modules.get(name) for name in ("tensorflow", "keras", "tf_keras", "microstrat")]
    folders = [os.path.join(os.path.dirname(module.__file__ or ""), "") for module in modules if module is not None]
    return filename.startswith(tuple(folders))
