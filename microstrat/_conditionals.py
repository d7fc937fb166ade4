"""tf.cond in pieces: what the replicas do together under a condition, and what each of them does.

A branch may hold work of both kinds: gradient accumulation adds every replica's gradient to a sum of its own, and now and
then steps the one optimizer. As one operation it would run either once or N times. If all replicas take the same branch, its
operations are planned like a replica function's, and each stage becomes a tf.cond of its own, which the planner can place.
Collectives stand between these pieces. What a later piece needs of an earlier one goes from one to the other as an ordinary
tensor: zeros, which nobody reads, if the other branch was taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from microstrat import _errors, _kinds, _plan, _tf, _trace, _tracing

_counter = itertools.count()
Key = tuple[tf.Operation, int]


def cut_in_pieces(graph: _trace.Graph) -> None:
    """Puts pieces in the place of all conditionals that hold collectives, or both kinds of work."""
    seen: set[tf.Operation] = set()
    while any(op.type in _kinds.BRANCHES for op in graph.operations):
        varying = graph.colours()
        found: list[_Conditional] = []
        waiting: set[tf.Operation] = set()  # what depends on a conditional that is not yet in pieces
        for op in graph.operations:
            if op in graph.replaced or any(source.op in waiting for source in op.inputs):
                waiting.add(op)
            elif op.type in _kinds.BRANCHES and op not in seen:
                seen.add(op)
                conditional = _Conditional(graph, op, varying)
                if conditional.mixed():
                    found.append(conditional)
                    waiting.add(op)
        if not found:
            return
        for conditional in found:
            conditional.replace()
            seen.update(conditional.pieces.values())
        graph.describe()


def holds_collectives(graph: Any, tracing: Any) -> bool:
    """Whether a graph, or a branch in it, holds a collective."""
    return any(
        op in tracing.collectives
        or (op.type in _kinds.BRANCHES and any(holds_collectives(inner, tracing) for inner in _tf.branch_graphs(op)))
        for op in graph.get_operations()
    )


def _key(tensor: tf.Tensor) -> Key:
    return tensor.op, tensor.value_index


class _Conditional:
    """One conditional, and its branches as the planner sees them."""

    def __init__(self, graph: _trace.Graph, op: tf.Operation, varying: Sequence[bool]):
        self.graph = graph
        self.op = op
        self.varying = varying
        self.tracing = graph.tracing
        self.condition, *self.arguments = op.inputs

    def _varies(self, tensor: tf.Tensor) -> bool:
        return self.varying[self.graph.ids[tensor.op]]

    def mixed(self) -> bool:
        """Whether it must be cut."""
        inner = _tf.branch_graphs(self.op)
        collective = any(holds_collectives(graph, self.tracing) for graph in inner)
        if self._varies(self.condition):
            lifted = any(argument.op in self.graph.lifted for argument in self.arguments)
            if (collective or lifted) and self.condition.op not in self.tracing.collectives:
                raise _errors.collective_under_varying_condition(self.tracing.function_name, _trace.where(self.op))
            return False
        if not collective and not any(self._varies(argument) for argument in self.arguments):
            if not self.varying[self.graph.ids[self.op]]:
                return False
        self.branches = [self._branch(graph) for graph in inner]
        for branch in self.branches:
            cut_in_pieces(branch)
        self.colours = [branch.settled_colours() for branch in self.branches]
        return collective or self._has_uniform_parts()

    def _branch(self, inner: Any) -> _trace.Graph:
        _trace.see_through_wrappers(inner)
        pairs = list(zip(inner.inputs, self.arguments, strict=True))
        return _trace.Graph(
            self.tracing,
            inner,
            returned=[_tracing.unwrapped(output) for output in inner.outputs],
            must_run=set(inner.control_outputs),
            outer_of={id(own): self.graph.outside(given) for own, given in pairs if own.dtype == tf.resource},
            arguments={own.op: self._varies(given) for own, given in pairs},
            foreign=self.graph.foreign,
            lifted={own.op for own, given in pairs if given.op in self.graph.lifted},
            once=self.graph.once or self.op in self.tracing.graph.cross_replica_ops,
        )

    def _has_uniform_parts(self) -> bool:
        for branch, colours in zip(self.branches, self.colours, strict=True):
            for node, varying in zip(branch.nodes, colours, strict=True):
                if node.effect and node.required and not varying:
                    return True
        used = [output for output in self.op.outputs if output.consumers() or self.graph.returns(output)]
        return any(not self._output_varies(output.value_index) for output in used)

    def _output_varies(self, index: int) -> bool:
        pairs = zip(self.branches, self.colours, strict=True)
        return any(colours[branch.ids[branch.returned[index].op]] for branch, colours in pairs)

    # --- The pieces ---------------------------------------------------------------------------------------------------
    def replace(self) -> None:
        """Puts pieces in its place."""
        self.parts = [_Parts(branch, colours) for branch, colours in zip(self.branches, self.colours, strict=True)]
        # What later pieces, and the graph around, can have of a branch.
        self.known: list[dict[Key, tf.Tensor]] = [
            {_key(own): given for own, given in zip(branch.graph.inputs, self.arguments, strict=True)}
            for branch in self.branches
        ]
        self.pieces: dict[int, tf.Operation] = {}
        outputs: dict[int, list[int]] = {}
        for index in range(len(self.op.outputs)):
            ready = max(
                part.stage_of(branch.returned[index]) for part, branch in zip(self.parts, self.branches, strict=True)
            )
            varies = self._output_varies(index)
            outputs.setdefault(ready if ready % 2 == varies else ready + 1, []).append(index)
        for stage, indices in outputs.items():
            for part in self.parts:
                part.want([part.branch.returned[index] for index in indices], stage)
        self.name = f"microstrat_{self.tracing.graph_name}_piece_{next(_counter)}"
        self._cross_collectives(-1)
        for stage in range(max([*outputs, *(part.last for part in self.parts)], default=-1) + 1):
            self._emit(stage, outputs.get(stage, []))
            self._cross_collectives(stage)
        self._order_followers()
        self.graph.replaced.add(self.op)
        self.graph.must_run.discard(self.op)

    def _cross_collectives(self, stage: int) -> None:
        """Leaves collectives whose source a piece has computed to the graph around."""
        for part, known in zip(self.parts, self.known, strict=True):
            for marker in part.collectives_after(stage):
                (source,) = marker.inputs
                (result,) = marker.outputs
                here = _tf.copy_operation(marker, [known[_key(source)]], self.graph.graph)
                here.outputs[0].set_shape(result.shape)
                self.tracing.collectives[here] = self.tracing.collectives[marker]
                known[_key(result)] = here.outputs[0]

    def _emit(self, stage: int, indices: Sequence[int]) -> None:
        slots = self._slots(stage)
        crossing = [(which, tensor) for which, part in enumerate(self.parts) for tensor in part.wanted(stage)]
        if not indices and not crossing and not any(part.has_effects(stage) for part in self.parts):
            return
        given = [outer for outer, _ in slots]
        names = [f"{self.name}_{stage}_{which}" for which in range(len(self.parts))]
        for which, part in enumerate(self.parts):
            outputs = [(part.branch.returned[index], True) for index in indices]
            outputs += [(tensor, whose == which) for whose, tensor in crossing]
            inputs = [(outer, inner.get(which)) for outer, inner in slots]
            part.add_function(names[which], self.graph.graph, stage, inputs, outputs)
        like = [self.op.outputs[index] for index in indices] + [tensor for _, tensor in crossing]
        stateful = any(part.has_state(stage) for part in self.parts)
        piece = self._operation(names, given, [tensor.dtype for tensor in like], stateful)
        self.pieces[stage] = piece
        resources = {id(self.graph.outside(tensor)) for tensor in given if tensor.dtype == tf.resource}
        written = {resource for part in self.parts for resource in part.written(stage)}
        read_only = [
            index + 1
            for index, tensor in enumerate(given)
            if tensor.dtype == tf.resource and id(self.graph.outside(tensor)) not in written
        ]
        if stateful:
            _tf.set_read_only_resources(piece, read_only)
            self.graph.must_run.add(piece)
        before = [other for other in self.op.control_inputs if self._ordered(other, resources)]
        earlier = {at for part in self.parts for at in part.follows(stage)}
        _tf.set_control_inputs(piece, before + [self.pieces[at] for at in sorted(earlier) if at in self.pieces])
        if stage % 2 == 0 or self.op in self.tracing.graph.cross_replica_ops:
            self.tracing.graph.cross_replica_ops.add(piece)
        for result, tensor in zip(piece.outputs, like, strict=True):
            result.set_shape(tensor.shape)
        for index, result in zip(indices, piece.outputs, strict=False):
            self.graph.move(self.op.outputs[index], result)
        for (which, tensor), result in zip(crossing, piece.outputs[len(indices) :], strict=True):
            self.known[which][_key(tensor)] = result

    def _slots(self, stage: int) -> list[tuple[tf.Tensor, dict[int, tf.Tensor]]]:
        """What a piece is given: a tensor of the graph around, and what it is in the branches that read it."""
        slots: list[tuple[tf.Tensor, dict[int, tf.Tensor]]] = []
        for which, part in enumerate(self.parts):
            for tensor in part.external(stage):
                outer = self.known[which][_key(tensor)]
                free = (inner for other, inner in slots if _key(other) == _key(outer) and which not in inner)
                inner = next(free, None)
                if inner is None:
                    inner = {}
                    slots.append((outer, inner))
                inner[which] = tensor
        return slots

    def _operation(
        self, names: Sequence[str], given: Sequence[tf.Tensor], dtypes: Sequence[tf.DType], stateful: bool
    ) -> tf.Operation:
        options: dict[str, Any] = {"input": given, "Tout": dtypes, "output_shapes": [_tf.unknown_shape()] * len(dtypes)}
        with self.graph.graph.as_default(), tf.device(self.op.device or None), tf.control_dependencies(None):
            if "If" in self.op.type:
                make = tf.raw_ops.If if stateful else tf.raw_ops.StatelessIf
                made = make(cond=self.condition, then_branch=names[0], else_branch=names[1], **options)
            else:
                make = tf.raw_ops.Case if stateful else tf.raw_ops.StatelessCase
                made = make(branch_index=self.condition, branches=list(names), **options)
        piece = made if isinstance(made, tf.Operation) else made[0].op
        _tf.set_lowering(piece)
        return piece

    def _ordered(self, other: tf.Operation, resources: set[int]) -> bool:
        """Whether a piece that uses `resources` must keep its place before or after an operation of the graph around."""
        theirs = {id(self.graph.outside(tensor)) for tensor in other.inputs if tensor.dtype == tf.resource}
        return not theirs or bool(theirs & resources) or self.graph.kinds.has_own_state(other)

    def _order_followers(self) -> None:
        """What came after the conditional comes after its pieces."""
        for other in self.graph.graph.get_operations():
            if self.op not in other.control_inputs:
                continue
            after = [before for before in other.control_inputs if before is not self.op]
            for piece in self.pieces.values():
                used = {id(self.graph.outside(tensor)) for tensor in piece.inputs if tensor.dtype == tf.resource}
                if other.type == "NoOp" or self._ordered(other, used) or self.graph.kinds.has_own_state(piece):
                    after.append(piece)
            _tf.set_control_inputs(other, after)


class _Parts:
    """One branch, planned: what of it goes into which piece."""

    def __init__(self, branch: _trace.Graph, varying: Sequence[bool]):
        self.branch = branch
        self.plan = _plan.plan(branch.nodes, varying)
        self.members = [set(stage.nodes) | set(stage.copies) for stage in self.plan.stages]
        self.copies = frozenset(itertools.chain.from_iterable(stage.copies for stage in self.plan.stages))
        self._returned: dict[int, list[tf.Tensor]] = {}

    @property
    def last(self) -> int:
        return max((stage for stage, members in enumerate(self.members) if members), default=-1)

    def _id(self, tensor: tf.Tensor) -> int:
        return self.branch.ids[tensor.op]

    def _in(self, stage: int) -> set[int]:
        return self.members[stage] if 0 <= stage < len(self.members) else set()

    def stage_of(self, tensor: tf.Tensor) -> int:
        """The piece that computes it, or the first one that is given it."""
        if self.branch.nodes[self._id(tensor)].argument:
            return 0
        return self.plan.stage[self._id(tensor)]

    def want(self, returned: Sequence[tf.Tensor], stage: int) -> None:
        """Notes what piece `stage` returns for the conditional as a whole."""
        self._returned[stage] = list(returned)

    def external(self, stage: int) -> list[tf.Tensor]:
        """What piece `stage` reads and does not compute."""
        members = self._in(stage)
        read = [tensor for node in sorted(members) for tensor in self.branch.operations[node].inputs]
        read += self._returned.get(stage, [])
        return list({_key(tensor): tensor for tensor in read if self._id(tensor) not in members}.values())

    def wanted(self, stage: int) -> list[tf.Tensor]:
        """What piece `stage` computes for later pieces, and for collectives."""
        home = set(self.plan.stages[stage].nodes) if 0 <= stage < len(self.plan.stages) else set()
        later = [self.external(at) for at in range(stage + 1, max([*self._returned, self.last], default=-1) + 1)]
        later.append([marker.inputs[0] for marker in self._collectives()])
        read = itertools.chain.from_iterable(later)
        return list({_key(tensor): tensor for tensor in read if self._id(tensor) in home}.values())

    def _collectives(self) -> list[tf.Operation]:
        nodes = [index for index, node in enumerate(self.branch.nodes) if node.collective and index in self.plan.stage]
        return [self.branch.operations[index] for index in nodes]

    def collectives_after(self, stage: int) -> list[tf.Operation]:
        """Collectives whose source is there once piece `stage` has run; those of arguments for -1."""
        return [marker for marker in self._collectives() if self._source_stage(marker.inputs[0]) == stage]

    def _source_stage(self, source: tf.Tensor) -> int:
        return -1 if self.branch.nodes[self._id(source)].argument else self.plan.stage[self._id(source)]

    def has_state(self, stage: int) -> bool:
        return any(not self.branch.nodes[node].pure for node in self._in(stage))

    def has_effects(self, stage: int) -> bool:
        return any(self.branch.nodes[node].effect for node in self._in(stage))

    def written(self, stage: int) -> set[Any]:
        return set().union(*(self.branch.nodes[node].writes for node in self._in(stage)))

    def follows(self, stage: int) -> set[int]:
        """Earlier pieces whose effects, or reads, come before those of piece `stage`."""
        found: set[int] = set()
        for index in self._in(stage) - self.copies:
            node = self.branch.nodes[index]
            if node.hub:
                continue
            for before in self._after(index):
                other = self.branch.nodes[before]
                if before in self.plan.stage and (other.effect or (node.effect and not other.pure)):
                    found.add(self.plan.stage[before])
        return {at for at in found if at < stage}

    def _after(self, index: int) -> Iterable[int]:
        """What a node is ordered after, directly or through bundles of ordering edges."""
        stack = list(self.branch.nodes[index].after)
        while stack:
            before = stack.pop()
            if self.branch.nodes[before].hub:
                stack.extend(self.branch.nodes[before].after)
            else:
                yield before

    def add_function(
        self,
        name: str,
        graph: Any,
        stage: int,
        slots: Sequence[tuple[tf.Tensor, tf.Tensor | None]],
        outputs: Sequence[tuple[tf.Tensor, bool]],
    ) -> None:
        """Makes a function of piece `stage` and adds it to a graph.

        Args:
          name: the function's.
          graph: that is to call it.
          stage: the piece.
          slots: for every argument, the tensor given, and what it is in this branch (None: only other branches read it).
          outputs: for every output, a tensor, and whether it is this branch's.
        """
        inner = self.branch.graph
        before = len(inner.get_operations())
        with inner.as_default(), tf.control_dependencies(None):
            inputs = [tf.compat.v1.placeholder(given.dtype) if own is None else own for given, own in slots]
            results = [tensor if own else _nothing(tensor) for tensor, own in outputs]
        added = itertools.islice(inner.get_operations(), before, None)
        members = self._in(stage)
        operations = [self.branch.operations[node] for node in sorted(members)]
        for node, op in zip(sorted(members), operations, strict=True):
            kept = [
                other for other in op.control_inputs if self.branch.ids[other] in members and node not in self.copies
            ]
            if len(kept) != len(op.control_inputs):
                _tf.set_control_inputs(op, kept)
        must_run = [self.branch.operations[node] for node in members if self.branch.nodes[node].must_finish]
        operations += [op for op in added if op.type != "Placeholder"]
        for function in _tf.functions(inner).values():
            _tf.add_function(graph, function)
        _tf.add_function(graph, _tf.graph_to_function(name, inner, operations, inputs, results, must_run))


def _nothing(tensor: tf.Tensor) -> tf.Tensor:
    """Stands for a value of a branch that was not taken."""
    if tensor.dtype == tf.variant:
        return tf.raw_ops.EmptyTensorList(element_shape=-1, max_num_elements=-1, element_dtype=tf.float32)
    # One row where their number is not known: it can be added to any number of rows.
    shape = [1 if size is None else size for size in tensor.shape] if tensor.shape.rank else []
    return tf.zeros(shape, tensor.dtype)
