"""From a trace to what runs: every stage becomes one function, cut out of the trace in one piece.

A uniform stage is called once. A loop stage is the body of one While over the replicas; what its collectives need is
added to the trace first, as ordinary operations around the user's own:

    sum     an accumulator that the loop carries, or a variable while the loop runs; so for max and min
    first   an accumulator that the first replica sets
    concat  a tensor list, joined after the loop; also for values that are returned, or that a later loop reads
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import tensorflow as tf

from microstrat import _conditionals, _errors, _plan, _rows, _tf, _trace, _values

_counter = itertools.count()
_last = threading.local()

_MANY_OPERATIONS = 150
_UNKNOWN_SHAPE = _tf.unknown_shape()
Key = tuple[int, int]  # (node id, output index): one tensor of the trace


def last_plan() -> _plan.Plan | None:
    """The plan of the last replica function lowered on this thread, for structure tests."""
    return getattr(_last, "plan", None)


@contextlib.contextmanager
def observed(observer: Callable[[_trace.Trace, _trace.Graph, _plan.Plan], None]) -> Iterator[None]:
    """Calls `observer` with everything that is lowered on this thread, while it is still there to look at."""
    before = getattr(_last, "observer", None)
    _last.observer = observer
    try:
        yield
    finally:
        _last.observer = before


@dataclasses.dataclass(frozen=True)
class Used:
    """What the results of a run may have gradients by.

    Attributes:
      variables: trainable variables that the replica function read.
      tensors: floating-point tensors from outside it, its arguments included.
      captured: all tensors of graphs outside it.
      why_not: why there is no gradient, if there is none.
    """

    variables: Sequence[Any]
    tensors: Sequence[tf.Tensor]
    captured: Sequence[tf.Tensor]
    why_not: str


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection meanwhile: a graph is objects by the hundred thousand, all in use, looked through in vain."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_collector_paused()
def run(
    strategy: Any,
    make_tracing: Callable[..., Any],
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: str,
) -> tuple[Any, Used]:
    """Runs `fn` for every replica, or micro-batch, as part of the current graph.

    Returns the values that they return, and what those may have gradients by.

    A variable that may have a value per replica, but was taken for a shared one while tracing, turns out here: it gets its
    values, and the function is traced again. So it is with nested tf.functions inline, if one writes a shared variable.

    Args:
      strategy: whose variables `fn` uses.
      make_tracing: see `_trace.trace`.
      fn: the replica function.
      args: its arguments, per-replica values and others.
      kwargs: likewise.
      device: where it runs.
    """
    owner_of = strategy.extended.owner_of
    inline, unfolded = False, frozenset[int]()
    while True:
        trace = _trace.trace(make_tracing, fn, args, kwargs, device, inline=inline, unfolded=unfolded)
        graph = _trace.to_graph(trace, owner_of)
        _conditionals.cut_in_pieces(graph)
        found = _trace.varying_writes(graph, owner_of)
        local = [owner for owner, _ in found if owner.may_become_local]
        # What a loop writes for all replicas, beside what it does for each, is written once if they loop together.
        mixed = {trace.tracing.loops[op] for _, op in found if op in trace.tracing.loops and not local}
        unfolded |= mixed
        if not local and not mixed and not (inline := _trace.needs_inline(found, trace.tracing)):
            _trace.refuse_varying_writes(found, trace)
            break
        for owner in local:
            owner.ensure_rows(trace.tracing)
        trace.tracing.discard()
        _tf.dismantle(trace.tracing.graph)
    varying = graph.settled_colours()
    used = _used(trace, graph)
    emitter = _Emitter(trace, graph, device)
    plan = _plan.plan(graph.nodes, varying)
    if getattr(_last, "observer", None) is not None:
        _last.observer(trace, graph, plan)
    with _tf.stop_recording():
        result = emitter.emit(plan, varying)
    _last.plan = plan
    _tf.dismantle(trace.tracing.graph)
    return result, used


def _used(trace: _trace.Trace, graph: _trace.Graph) -> Used:
    tracing = trace.tracing
    variables = [variable for variable in _tf.watched_variables(tracing.graph) if variable.trainable]
    outside = list({id(outer): outer for outer, _ in tracing.graph.captures}.values())
    tensors = [outer for outer in outside if outer.dtype.is_floating or outer.dtype.is_complex]
    captured = [outer for outer in outside if hasattr(outer, "graph")]
    why_not = ""
    if tracing.strategy.extended.micro_batches > 1:
        why_not = _errors.gradient_of_micro_batches(tracing.function_name)
    for op, node in zip(graph.operations, graph.nodes, strict=True):
        if node.required and (node.writes or tracing.kinds.has_own_state(op)):
            why_not = why_not or _errors.gradient_of_effects(tracing.function_name, op.type, _trace.where(op))
    return Used(variables, tensors, captured, why_not)


@dataclasses.dataclass(slots=True)
class _LoopVariable:
    """One value that a loop carries.

    Attributes:
      inner: where it enters the body.
      start: makes what it is before the first replica, on the current device.
      after: where it leaves the body.
      shape: what is known of its shape in all iterations.
      finish: takes the value after the last replica of a device, with the device's index.
      element: of a tensor list, what goes into it each time.
    """

    inner: tf.Tensor
    start: Callable[[], tf.Tensor]
    after: tf.Tensor
    shape: tf.TensorShape
    finish: Callable[[tf.Tensor, int], None]
    element: tf.Tensor | None = None


@dataclasses.dataclass(slots=True)
class _Total:
    """A sum over the turns of a loop in a variable that exists while the loop runs.

    Attributes:
      inner: its handle in the body.
      add: what adds to it.
      key: the sum.
      dtype, shape: of the sum.
    """

    inner: tf.Tensor
    add: tf.Operation
    key: Key
    dtype: tf.DType
    shape: tf.TensorShape

    def start(self) -> tuple[tf.Tensor, tf.Operation]:
        """The handle, and what must run before anybody uses it."""
        handle = _tf.temporary_variable(self.dtype, self.shape)
        return handle, tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros(self.shape, self.dtype))

    def finish(self, handle: tf.Tensor) -> tf.Tensor:
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=self.dtype)
        with tf.control_dependencies([value]):
            destroyed = tf.raw_ops.DestroyResourceOp(resource=handle)
        with tf.control_dependencies([destroyed]):
            return tf.identity(value)


class _Emitter:
    def __init__(self, trace: _trace.Trace, graph: _trace.Graph, device: str):
        self.trace = trace
        self.tracing = trace.tracing
        self.inner = trace.tracing.graph
        self.outer = tf.compat.v1.get_default_graph()
        self.graph = graph
        self.turns = trace.tracing.turns
        self.device = device
        self.turn = trace.tracing.turn
        self.name = f"{trace.tracing.graph_name}_{next(_counter)}"
        self.real = trace.tracing.real
        self.devices = range(len(self.real.devices))
        # For every device, tensors of the trace that exist in the outer graph by now, and tensor lists of those that vary.
        self.env: list[dict[Key, tf.Tensor]] = [{} for _ in self.devices]
        self.lists: list[dict[Key, tf.Tensor]] = [{} for _ in self.devices]
        self.previous: list[tf.Operation] = []
        self._around: list[bool] | None = None

    def key(self, tensor: tf.Tensor) -> Key:
        return self.graph.ids[tensor.op], tensor.value_index

    def tensor(self, key: Key) -> tf.Tensor:
        return self.graph.operations[key[0]].outputs[key[1]]

    # --- Emission -----------------------------------------------------------------------------------------------------
    def emit(self, plan: _plan.Plan, varying: Sequence[bool]) -> Any:
        self.plan = plan
        self.varying = varying
        self.sets = [frozenset(stage.nodes) | frozenset(stage.copies) for stage in plan.stages]
        self._keep_ordering_within_stages()
        for function in _tf.functions(self.inner).values():
            _tf.add_function(self.outer, function)
        self.captured_pairs = _tf.captures(self.inner)
        self.captured = {self.key(inner): outer for outer, inner in self.captured_pairs}
        leaves = [self.graph.now(leaf) if self._is_inner(leaf) else leaf for leaf in self.trace.leaves]
        wanted = self._wanted_keys([*leaves, self.trace.weights])
        # The replica id alone needs a loop to be returned, though no operation does.
        stacked = {self.key(leaf) for leaf in leaves if self._is_inner(leaf) and self._varies(leaf)}
        if stacked and len(self.sets) < 2:
            self.sets.append(frozenset())
            wanted.append([])
        with tf.device(None):
            for index in range(len(self.sets)):
                self._cross_borders(index)
                if index % 2:
                    self._emit_loop(index, wanted[index], stacked)
                elif self.sets[index]:
                    self._emit_uniform(index, wanted[index])
            return self._result(leaves)

    def _is_inner(self, value: Any) -> TypeGuard[tf.Tensor]:
        return isinstance(value, tf.Tensor) and getattr(value, "graph", None) is self.inner

    def _varies(self, tensor: tf.Tensor) -> bool:
        return self.varying[self.graph.ids[tensor.op]]

    def _keep_ordering_within_stages(self) -> None:
        """Drops control edges that leave a stage (stages are in order), and those of copies, which stand in several."""
        self._keep_ordering_within(self.sets)

    def _keep_ordering_within(self, sets: Sequence[frozenset[int]]) -> None:
        copied = frozenset(itertools.chain.from_iterable(stage.copies for stage in self.plan.stages))
        for members in sets:
            for node in members:
                op = self.graph.operations[node]
                before = op.control_inputs
                kept = [] if node in copied else [other for other in before if self.graph.ids[other] in members]
                if len(kept) != len(before):
                    _tf.set_control_inputs(op, kept)

    def _borders(self) -> list[tf.Operation]:
        """Collectives between the replicas around, in use."""
        found = [marker for marker, collective in self.tracing.collectives.items() if collective.between_replicas]
        return [marker for marker in found if self.graph.ids[marker] in self.plan.stage]

    def _external_keys(self, members: frozenset[int]) -> list[Key]:
        """Tensors that operations read and do not compute, arguments included; in a fixed order."""
        found: dict[Key, None] = {}
        for node in sorted(members):
            for tensor in self.graph.operations[node].inputs:
                key = self.key(tensor)
                if key[0] not in members:
                    found[key] = None
        return list(found)

    def _wanted_keys(self, leaves: Iterable[Any]) -> list[list[Key]]:
        """For every stage, its tensors that later stages or the caller read."""
        wanted: list[dict[Key, None]] = [{} for _ in self.sets]

        def want(key: Key) -> None:
            if not self.graph.nodes[key[0]].argument and not self.graph.nodes[key[0]].collective:
                wanted[self.plan.stage[key[0]]][key] = None

        for stage in range(len(self.sets)):
            for key in self._external_keys(self.sets[stage]):
                want(key)
        for marker in self._borders():
            want(self.key(marker.inputs[0]))
        for leaf in leaves:
            if self._is_inner(leaf) and not self._varies(leaf):
                want(self.key(leaf))
        return [list(keys) for keys in wanted]

    def _must_run(self, members: frozenset[int]) -> list[tf.Operation]:
        return [self.graph.operations[index] for index in members if self.graph.nodes[index].must_finish]

    def _outside(self, key: Key, device: int = 0) -> tf.Tensor:
        """A uniform tensor of the trace, in the outer graph, as a device has it."""
        if key[0] == self.graph.ids[self.turn.op]:
            return tf.constant(0)  # only with a single turn
        if self.tracing.before is not None and key[0] == self.graph.ids[self.tracing.before.op]:
            return tf.constant(device * self.tracing.laps)
        if key in self.env[device]:
            return self.env[device][key]
        outer = self.captured[key]
        if device and outer.dtype == tf.resource:
            owner = self.tracing.strategy.extended.owner_of(outer) or self.tracing.lent.get(id(outer))
            return outer if owner is None else owner.handle_on(outer, device)
        return outer

    def _on(self, device: int) -> Any:
        return tf.device(self.real.devices[device] if len(self.devices) > 1 else None)

    def _function(
        self, suffix: str, operations: Any, inputs: Any, outputs: Any, control: Any = (), *, apart: bool = False
    ) -> str:
        name = f"microstrat_{self.name}_{suffix}"
        function = _tf.graph_to_function(name, self.inner, operations, inputs, outputs, control, apart=apart)
        for graph in (self.outer, self.inner) if apart else (self.outer,):  # whoever calls it
            _tf.add_function(graph, function)
        return name

    def _functions(self, suffix: str, operations: Sequence[tf.Operation], *rest: Any) -> list[str]:
        """`_function` for each device: the same, but for the seeds of random draws, which would all be alike."""
        seeded = [op for op in operations if _tf.is_seeded(op)] if len(self.devices) > 1 else []
        if not seeded:
            return [self._function(suffix, operations, *rest)] * len(self.devices)
        names = []
        for device in self.devices:
            with _tf.other_seeds(seeded, device):
                names.append(self._function(f"{suffix}_{device}", operations, *rest))
        return names

    def _read_only(self, op: tf.Operation, inputs: Sequence[tf.Tensor], members: frozenset[int]) -> None:
        """Marks the resources that a stage only reads, so that it need not wait for other readers."""
        written = {resource for node in members for resource in self.graph.nodes[node].writes}
        indices = [
            index
            for index, tensor in enumerate(inputs)
            if tensor.dtype == tf.resource and self.graph.resource_of(tensor) not in written
        ]
        _tf.set_read_only_resources(op, indices)

    def _emit_uniform(self, stage: int, wanted: list[Key]) -> None:
        if self.tracing.around is not None:
            groups = self._groups(self.sets[stage], self._varies_around)
        elif len(self.devices) > 1:
            groups = self._groups(self.sets[stage], self._happens_once)
        else:
            groups = [self.sets[stage]]
        if len(groups) > 1:
            self._keep_ordering_within(groups)
        for position, members in enumerate(groups):
            later = [key for group in groups[position + 1 :] for key in self._external_keys(group)]
            outputs = [key for key in dict.fromkeys([*wanted, *later]) if key[0] in members]
            suffix = f"stage_{stage}" if len(groups) == 1 else f"stage_{stage}_{position}"
            once = len(self.devices) > 1 and any(self._happens_once(node) for node in members)
            self._emit_call(suffix, members, outputs, once=once)

    def _groups(self, members: frozenset[int], belongs: Callable[[int], bool]) -> list[frozenset[int]]:
        """A stage in pieces: a node belongs to an odd one, or to an even one. One call must not be both."""
        place: dict[int, int] = {}
        for node in _plan.topological_order(
            self.graph.nodes, [index in members for index in range(len(self.graph.nodes))]
        ):
            before = [
                place[other]
                for other in (*self.graph.nodes[node].inputs, *self.graph.nodes[node].after)
                if other in place
            ]
            earliest = max(before, default=0)
            place[node] = earliest + (earliest % 2 != belongs(node))
        groups: dict[int, set[int]] = {}
        for node, at in place.items():
            groups.setdefault(at, set()).add(node)
        return [frozenset(groups[at]) for at in sorted(groups)]

    def _happens_once(self, node: int) -> bool:
        """Whether an operation of a uniform stage is for one device to do: it draws, prints, or writes what all share."""
        if not self.graph.nodes[node].effect:
            return False
        written = self.graph.written(self.graph.operations[node])
        owner_of = self.tracing.strategy.extended.owner_of
        return not any(owner_of(handle) is not None for handle in written)

    def _varies_around(self, node: int) -> bool:
        around = self.tracing.around
        assert around is not None
        if self._around is None:
            outer_of = {id(inner): outer for outer, inner in self.captured_pairs}
            nodes = []
            for op, known in zip(self.graph.operations, self.graph.nodes, strict=True):
                outer = outer_of.get(id(op.outputs[0])) if op.type == "Placeholder" else None
                varying = outer is not None and around.varies(outer)
                varying = varying or (self.tracing.kinds.has_own_state(op) and op not in self.inner.cross_replica_ops)
                nodes.append(dataclasses.replace(known, varying=varying, collective=known.border))
            self._around = _plan.find_varying(nodes)
        return self._around[node]

    def _emit_call(self, suffix: str, members: frozenset[int], wanted: list[Key], *, once: bool) -> None:
        operations = [self.graph.operations[node] for node in sorted(members)]
        keys = self._external_keys(members)
        inputs = [self.tensor(key) for key in keys]
        outputs = [self.tensor(key) for key in wanted]
        name = self._function(suffix, operations, inputs, outputs, self._must_run(members))

        def call(*args: tf.Tensor) -> Any:
            return tf.raw_ops.StatefulPartitionedCall(args=args, Tout=[tensor.dtype for tensor in outputs], f=name)

        done = []
        for device in self.devices[:1] if once else self.devices:
            with self._on(device), tf.control_dependencies(self.previous):
                arguments = [self._outside(key, device) for key in keys]
                if self.real.compiled and not once:
                    op, results = self._compiled(call, arguments, [None] * len(keys), [None] * len(outputs))
                else:
                    results = call(*arguments)
                    op = results[0].op if outputs else results
            self._read_only(op, inputs, members)
            done.append(op)
            for key, inner, result in zip(wanted, outputs, results if outputs else (), strict=True):
                result.set_shape(inner.shape)
                self.env[device][key] = result
        self.previous = done
        if once:
            for device in self.devices[1:]:
                self.env[device] |= {key: self.env[0][key] for key in wanted}

    def _cross_borders(self, stage: int) -> None:
        """Leaves a collective between the replicas around to their trace."""
        for marker in self._borders():
            if self.plan.stage[self.graph.ids[marker]] == stage:
                collective = self.tracing.collectives[marker]
                over = dataclasses.replace(collective, between_replicas=False)
                around = self.tracing.around
                assert around is not None
                result = around.collect(over, self._outside(self.key(marker.inputs[0])))
                result.set_shape(marker.outputs[0].shape)
                self.env[0][self.key(marker.outputs[0])] = result

    def _emit_loop(self, stage: int, wanted: list[Key], stacked: set[Key]) -> None:
        markers = [self.graph.operations[node] for node in self.plan.collectives.get(stage, ())]
        here = [key for key in stacked if self._home_loop(key) == stage]
        kept = list(dict.fromkeys([key for key in wanted if self.varying[key[0]]] + here))
        if not self.sets[stage] and not markers and not kept:
            return
        variables: list[_LoopVariable] = []
        totals: list[_Total] = []
        apart = self._runs_apart(stage)
        before = len(self.inner.get_operations())
        running = [self.turns.on_device(device, self.tracing.laps) for device in self.devices]
        with self.inner.as_default(), tf.device(self.device), tf.control_dependencies(None):
            following = self.turn + tf.constant(1)
            variables.append(
                _LoopVariable(self.turn, lambda: tf.constant(0), following, tf.TensorShape([]), lambda *_: None)
            )
            fixed = isinstance(running[0], int) and len(set(running)) == 1
            limit = None if fixed else tf.compat.v1.placeholder(tf.int32, [])
            condition = self.turn < (running[0] if limit is None else limit)
            for marker in markers:
                if apart and self._fits_variable(marker):
                    totals.append(self._total(marker))
                else:
                    variables.append(self._collective_variable(marker))
            for key in kept:
                variables.append(self._list_variable(key))
            invariants = self._invariants(stage)
            if limit is not None:
                invariants.insert(0, (limit, lambda device: tf.convert_to_tensor(running[device], tf.int32), None))
        glue = list(itertools.islice(self.inner.get_operations(), before, None))
        glue = [op for op in glue if op.type != "Placeholder"]
        fixed_inputs = [inner for inner, _, _ in invariants]
        handles = [total.inner for total in totals]
        inputs = [variable.inner for variable in variables] + fixed_inputs + handles
        outputs = [variable.after for variable in variables] + fixed_inputs + handles
        test = {condition.op, *(tensor.op for tensor in condition.op.inputs if tensor.op.type != "Placeholder")}
        body = [self.graph.operations[node] for node in sorted(self.sets[stage])] + [
            op for op in glue if op not in test
        ]
        must_run = self._must_run(self.sets[stage]) + [total.add for total in totals]
        if apart:
            ends = [variable.after.op for variable in variables if variable.after.op in glue]
            body, must_run = self._apart(stage, body, ends, must_run)
        body_names = self._functions(f"stage_{stage}_body", body, inputs, outputs, must_run)
        test_name = self._function(f"stage_{stage}_test", list(test), inputs, [condition])

        def loop(device: int, starts: Sequence[tf.Tensor], *invariant: tf.Tensor) -> Any:
            results = tf.raw_ops.While(
                input=[*starts, *invariant],
                cond=test_name,
                body=body_names[device],
                output_shapes=[variable.shape for variable in variables] + [outer.shape for outer in invariant],
                parallel_iterations=1,
                name=f"{self.tracing.graph_name}_replicas",
            )
            op = results[0].op
            if not apart:
                _tf.set_lowering(op)
            _tf.set_loop_attributes(op, len(results))
            self._read_only(op, inputs[: len(inputs) - len(handles)], self.sets[stage])
            return results[: len(variables)]

        def start_and_loop(device: int, *invariant: tf.Tensor) -> Any:
            return loop(device, [variable.start() for variable in variables], *invariant)

        done = []
        for device in self.devices:
            with self._on(device):
                invariant = [outside(device) for _, outside, _ in invariants]
                if self.real.compiled:
                    with tf.control_dependencies(self.previous):
                        op, results = self._compiled(
                            functools.partial(start_and_loop, device),
                            invariant,
                            [element for _, _, element in invariants],
                            [variable.element for variable in variables],
                        )
                    self._read_only(op, fixed_inputs, self.sets[stage])
                else:
                    starts = [variable.start() for variable in variables]
                    owned = [total.start() for total in totals]
                    with tf.control_dependencies([*self.previous, *(ready for _, ready in owned)]):
                        results = loop(device, starts, *invariant, *(handle for handle, _ in owned))
                    op = results[0].op
                    with tf.control_dependencies([op]):
                        for total, (handle, _) in zip(totals, owned, strict=True):
                            self.env[device][total.key] = total.finish(handle)
                done.append(op)
                for variable, result in zip(variables, results, strict=True):
                    variable.finish(result, device)
        self.previous = done
        if not self.real.alone:
            self._meet(markers)

    def _runs_apart(self, stage: int) -> bool:
        """Whether a loop's body is a call of a function that is not inlined.

        TensorFlow runs the operations of a loop one by one in a frame, at some microseconds each, and every value that goes
        through the loop costs six. In a function they cost what they cost outside of loops, but the call some 20 µs: it
        pays from about a hundred operations on. On a GPU the call would take the whole batch to the device. What
        XLA compiles has no such costs.
        """
        large = len(self.sets[stage]) >= _MANY_OPERATIONS
        here = len(self.devices) == 1 and _tf.is_cpu(self.device)
        return large and here and self.tracing.root is self.tracing and not _tf.compiling_by_xla()

    def _apart(
        self,
        stage: int,
        operations: Sequence[tf.Operation],
        ends: Sequence[tf.Operation],
        must_run: Sequence[tf.Operation],
    ) -> tuple[list[tf.Operation], list[tf.Operation]]:
        """A body whose operations, but those at its ends, are one call: its operations, and which of them must run.

        The ends add to what the loop carries, and put it into lists, in place: a call would hold on to what it is given.
        """
        inside = [op for op in operations if op not in ends]
        members = set(inside)
        inputs = {(t.op, t.value_index): t for op in inside for t in op.inputs if t.op not in members}
        wanted = {(t.op, t.value_index): t for op in ends for t in op.inputs if t.op in members}
        arguments, outputs = list(inputs.values()), list(wanted.values())
        name = self._function(f"stage_{stage}_turn", inside, arguments, outputs, must_run, apart=True)
        with self.inner.as_default(), tf.device(None), tf.control_dependencies(None):
            results = tf.raw_ops.StatefulPartitionedCall(
                args=arguments, Tout=[tensor.dtype for tensor in outputs], f=name, config_proto=_tf.config_of_calls()
            )
        call = results[0].op if outputs else results
        position = {key: index for index, key in enumerate(wanted)}
        for op in ends:
            for index, tensor in enumerate(op.inputs):
                if (tensor.op, tensor.value_index) in wanted:
                    _tf.update_input(op, index, results[position[tensor.op, tensor.value_index]])
        return [call, *ends], [call]

    def _fits_variable(self, marker: tf.Operation) -> bool:
        (source,) = marker.inputs
        kind = self.tracing.collectives[marker].kind
        return kind == "sum" and source.dtype.is_floating and source.shape.is_fully_defined()

    def _total(self, marker: tf.Operation) -> _Total:
        (source,) = marker.inputs
        handle = tf.compat.v1.placeholder(tf.resource, [])
        add = tf.raw_ops.AssignAddVariableOp(resource=handle, value=source)
        return _Total(handle, add, self.key(marker.outputs[0]), source.dtype, source.shape)

    def _compiled(
        self,
        run: Callable[..., Any],
        inputs: Sequence[tf.Tensor],
        incoming: Sequence[tf.Tensor | None],
        outgoing: Sequence[tf.Tensor | None],
    ) -> tuple[tf.Operation, list[tf.Tensor]]:
        """The operation that does what `run(*inputs)` does, compiled by XLA, and the results.

        No tensor list goes in or out of what XLA compiles: they go as tensors. `incoming` and `outgoing` are their elements.
        """

        def dense(values: Sequence[tf.Tensor], elements: Sequence[tf.Tensor | None]) -> list[tf.Tensor]:
            return [
                value if element is None else self._stack(value, element.dtype, element.shape)
                for value, element in zip(values, elements, strict=True)
            ]

        def lists(values: Sequence[tf.Tensor], elements: Sequence[tf.Tensor | None]) -> list[tf.Tensor]:
            return [
                value
                if element is None
                else tf.raw_ops.TensorListFromTensor(tensor=value, element_shape=_shape_tensor(element.shape))
                for value, element in zip(values, elements, strict=True)
            ]

        def compiled(*given: tf.Tensor) -> list[tf.Tensor]:
            results = run(*lists(given, incoming))
            return [tf.constant(0), *(dense(results, outgoing) if outgoing else ())]

        first, *results = tf.function(compiled, jit_compile=True, autograph=False)(*dense(inputs, incoming))
        return first.op, lists(results, outgoing)

    def _meet(self, markers: Sequence[tf.Operation]) -> None:
        """Makes what the loops of all devices have come to the results of collectives."""
        collected: dict[str, list[tf.Operation]] = {}
        for marker in markers:
            collected.setdefault(self.tracing.collectives[marker].kind, []).append(marker)
        for kind, same in collected.items():
            keys = [self.key(marker.outputs[0]) for marker in same]
            parts = [[self.env[device][key] for device in self.devices] for key in keys]
            if kind == "sum":
                met = self.real.sums(parts)
            elif kind == "first":
                met = [self.real.first(values) for values in parts]
            elif kind == "concat":
                axes = [self.tracing.collectives[marker].axis for marker in same]
                met = [self.real.concat(values, axis) for values, axis in zip(parts, axes, strict=True)]
            else:
                met = [self.real.extreme(kind, values) for values in parts]
            for key, marker, values in zip(keys, same, met, strict=True):
                for device, value in enumerate(values):
                    value.set_shape(marker.outputs[0].shape)
                    self.env[device][key] = value

    def _home_loop(self, key: Key) -> int:
        """The loop that computes a varying tensor; the replica id and other arguments exist in every loop."""
        if self.graph.nodes[key[0]].argument:
            return 1
        return self.plan.stage[key[0]]

    def _collective_variable(self, marker: tf.Operation) -> _LoopVariable:
        collective = self.tracing.collectives[marker]
        (source,) = marker.inputs
        key = self.key(marker.outputs[0])
        if collective.kind == "concat":
            return self._concat_variable(source, collective.axis, marker.outputs[0].shape, key)
        shape = source.shape
        accumulator = tf.compat.v1.placeholder(source.dtype, shape if shape.is_fully_defined() else None)
        if collective.kind == "sum":
            after = accumulator + source
        elif collective.kind in ("max", "min"):
            after = (tf.maximum if collective.kind == "max" else tf.minimum)(accumulator, source)
        else:
            after = tf.raw_ops.SelectV2(condition=tf.equal(self.turn, 0), t=source, e=accumulator)

        def start() -> tf.Tensor:
            # A scalar start suits any shape: the first sum or choice broadcasts it.
            value = tf.zeros(shape if shape.is_fully_defined() else [], source.dtype)
            if collective.kind in ("max", "min"):
                value += source.dtype.min if collective.kind == "max" else source.dtype.max
            return value

        def finish(result: tf.Tensor, device: int) -> None:
            result.set_shape(marker.outputs[0].shape)
            self.env[device][key] = result

        known = shape if shape.is_fully_defined() else _UNKNOWN_SHAPE
        return _LoopVariable(accumulator, start, after, known, finish)

    def _concat_variable(self, source: tf.Tensor, axis: int, shape: tf.TensorShape, key: Key) -> _LoopVariable:
        rank = source.shape.rank
        if axis < 0:
            axis += rank
        order = [axis, *(dim for dim in range(rank or 0) if dim != axis)]
        moved = tf.transpose(source, order) if axis else source

        def finish(result: tf.Tensor, device: int) -> None:
            joined = self._join(result, moved.dtype, moved.shape, device)
            if axis:
                joined = tf.transpose(joined, [order.index(dim) for dim in range(len(order))])
            joined.set_shape(shape if len(self.devices) == 1 else _any_size(shape, axis))
            self.env[device][key] = joined

        return self._new_list(moved, finish)

    def _list_variable(self, key: Key) -> _LoopVariable:
        def finish(result: tf.Tensor, device: int) -> None:
            self.lists[device][key] = result

        return self._new_list(self.tensor(key), finish)

    def _new_list(self, element: tf.Tensor, finish: Callable[[tf.Tensor, int], None]) -> _LoopVariable:
        handle = tf.compat.v1.placeholder(tf.variant, [])
        after = tf.raw_ops.TensorListSetItem(input_handle=handle, index=self.turn, item=element)

        def start() -> tf.Tensor:
            return tf.raw_ops.TensorListReserve(
                element_shape=_shape_tensor(element.shape),
                num_elements=self.tracing.laps,
                element_dtype=element.dtype,
            )

        return _LoopVariable(handle, start, after, tf.TensorShape([]), finish, element)

    def _join(self, handle: tf.Tensor, dtype: tf.DType, shape: tf.TensorShape, device: int) -> tf.Tensor:
        """The elements of a device's tensor list, concatenated along their first axis."""
        if shape.is_fully_defined():
            stacked = self._stack(handle, dtype, shape)
            if self.turns.happen() is not None:
                stacked = stacked[: self.turns.on_device(device, self.tracing.laps)]
            return tf.reshape(stacked, [-1, *shape[1:]])
        return self._concat(handle, dtype, shape).tensor

    def _concat(self, handle: tf.Tensor, dtype: tf.DType, shape: tf.TensorShape) -> Any:
        """Elements that were never set have no rows."""
        return tf.raw_ops.TensorListConcatV2(
            input_handle=handle,
            element_shape=_shape_tensor(tf.TensorShape([None, *shape[1:]]) if shape.rank else shape),
            leading_dims=tf.zeros([self.tracing.laps], tf.int64),
            element_dtype=dtype,
        )

    def _stack(self, handle: tf.Tensor, dtype: tf.DType, shape: tf.TensorShape) -> tf.Tensor:
        """The elements of a tensor list, zeros for those that were never set."""
        stacked = tf.raw_ops.TensorListStack(
            input_handle=handle,
            element_shape=_shape_tensor(shape),
            element_dtype=dtype,
            num_elements=self.tracing.laps,
        )
        stacked.set_shape([self.tracing.laps, *shape])
        return stacked

    def _invariants(self, stage: int) -> list[tuple[tf.Tensor, Callable[[int], tf.Tensor], tf.Tensor | None]]:
        """What a loop reads and does not change: in the trace, and on a device in the outer graph.

        Carried values come as tensor lists; then the third is an element.
        """
        found: list[tuple[tf.Tensor, Callable[[int], tf.Tensor], tf.Tensor | None]] = []
        for key in self._external_keys(self.sets[stage]):
            if key[0] == self.graph.ids[self.turn.op]:
                continue
            if key in self.lists[0]:
                handle = tf.compat.v1.placeholder(tf.variant, [])
                carried = self.tensor(key)
                item = tf.raw_ops.TensorListGetItem(
                    input_handle=handle,
                    index=self.turn,
                    element_shape=_shape_tensor(carried.shape),
                    element_dtype=carried.dtype,
                )
                item.set_shape(carried.shape)
                for node in self.sets[stage]:
                    op = self.graph.operations[node]
                    for index, tensor in enumerate(op.inputs):
                        if tensor.op in self.graph.ids and self.key(tensor) == key:
                            _tf.update_input(op, index, item)
                found.append((handle, lambda device, key=key: self.lists[device][key], carried))
            else:
                found.append((self.tensor(key), functools.partial(self._outside, key), None))
        return found

    # --- Results ------------------------------------------------------------------------------------------------------
    def _result(self, leaves: Sequence[Any]) -> Any:
        remaining = iter(leaves)
        own = self.trace.weights
        if own is None:
            weights = self.tracing.weights_of_turns()
        else:
            weights = self._outside(self.key(self.graph.now(own)))

        def build(value: Any) -> Any:
            parts = [next(remaining) for _ in tf.nest.flatten(value, expand_composites=True)]
            result = self._value(value, parts)
            if isinstance(result, _values.PerReplica):
                result = result.with_weights(weights, self.tracing.listed)
            return self.tracing.present(result)

        return tf.nest.map_structure(build, self.trace.structure)

    def _value(self, value: Any, parts: list[Any]) -> Any:
        """One returned value, in the outer graph."""
        most = self.turns.most
        if not any(self._is_inner(part) for part in parts):
            return value
        if all(not self._is_inner(part) or not self._varies(part) for part in parts):
            outer = [self._outside(self.key(part)) if self._is_inner(part) else part for part in parts]
            if isinstance(value, tf.Tensor):
                (one,) = outer
            else:
                one = tf.nest.pack_sequence_as(value, outer, expand_composites=True)
            if self.tracing.is_common(value):
                return one
            return _values.Uniform(most, one)
        if not isinstance(value, tf.Tensor):
            columns = [self._separate(part) for part in parts]
            rows = zip(*columns, strict=True)
            entries = [tf.nest.pack_sequence_as(value, list(row), expand_composites=True) for row in rows]
            return _values.Separate([self._if_it_ran(turn, entry) for turn, entry in enumerate(entries)])
        (part,) = parts
        key, shape = self.key(part), part.shape
        if shape.is_fully_defined():
            stacks = [self._stack(lists[key], part.dtype, shape) for lists in self.lists]
            return _values.Stacked(most, stacks[0] if len(stacks) == 1 else tf.concat(stacks, 0))
        if shape.rank and shape[1:].is_fully_defined():
            joined = [self._concat(lists[key], part.dtype, shape) for lists in self.lists]
            flat, lengths = joined[0].tensor, joined[0].lengths
            if len(joined) > 1:
                flat = tf.concat([own.tensor for own in joined], 0)
                lengths = tf.concat([own.lengths for own in joined], 0)
            flat.set_shape([None, *shape[1:]])
            return self.tracing.concatenated(flat, tf.ensure_shape(lengths, [most]))
        return _values.Separate([self._if_it_ran(turn, entry) for turn, entry in enumerate(self._separate(part))])

    def _if_it_ran(self, turn: int, entry: Any) -> Any:
        """The result of a turn, without rows if it never ran."""
        if isinstance(self.turns.running, int) or isinstance(entry, tf.IndexedSlices) or not entry.shape.rank:
            return entry
        rows = _rows.count_rows(entry)
        return _rows.cut_rows(entry, 0, tf.where(turn < self.turns.running, rows, 0))

    def _separate(self, part: Any) -> list[Any]:
        most = self.turns.most
        if not self._is_inner(part):
            return [part] * most
        if not self._varies(part):
            return [self._outside(self.key(part))] * most
        items = []
        for turn in range(most):
            # A turn that never ran has the last one's value, and no weight.
            ran = turn if isinstance(self.turns.running, int) else tf.minimum(turn, self.turns.running - 1)
            item = tf.raw_ops.TensorListGetItem(
                input_handle=self._list_of(self.key(part), ran),
                index=ran % self.tracing.laps,
                element_shape=_shape_tensor(part.shape),
                element_dtype=part.dtype,
            )
            item.set_shape(part.shape)
            items.append(item)
        return items

    def _list_of(self, key: Key, turn: Any) -> tf.Tensor:
        """The tensor list of the device whose turn it is."""
        lists = [own[key] for own in self.lists]
        if len(lists) == 1:
            return lists[0]
        device = turn // self.tracing.laps
        if isinstance(device, int):
            return lists[device]
        return tf.switch_case(device, [functools.partial(tf.identity, own) for own in lists])


def _any_size(shape: tf.TensorShape, axis: int) -> tf.TensorShape:
    """A shape with one size forgotten."""
    if shape.rank is None:
        return shape
    return tf.TensorShape([None if dim == axis else size for dim, size in enumerate(shape)])


def _shape_tensor(shape: tf.TensorShape) -> tf.Tensor:
    if shape.rank is None:
        return tf.constant(-1)
    return tf.constant([-1 if size is None else size for size in shape], tf.int32)
