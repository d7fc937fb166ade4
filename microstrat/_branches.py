"""Collectives inside tf.cond: their source is computed before the branch, so that all replicas meet there.

LossScaleOptimizer and gradient accumulation take the optimizer step, and with it the all-reduce, under a condition. A
collective cannot end a loop from inside a branch. But if its source is a pure function of what the branch captured, the
collective can be lifted out: it then runs whatever the condition says, which costs a sum and changes no result.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from microstrat import _tf


class CannotLift(Exception):
    """Why a tensor cannot be computed outside its branch. Internal: `Tracing` turns it into an error for the user."""


def lift(tensor: tf.Tensor, target: Any, *, with_random: bool = False) -> tf.Tensor:
    """Computes a tensor of a graph inside `target` again in `target`; random draws only if asked for."""
    return _Lifter(target, with_random).lift(tensor)


class _Lifter:
    def __init__(self, target: Any, with_random: bool):
        self._target = target
        self._with_random = with_random
        self._known: dict[tuple[int, int], tf.Tensor] = {}
        self._captures: dict[int, dict[int, tf.Tensor]] = {}

    def lift(self, tensor: tf.Tensor) -> tf.Tensor:
        stack = [tensor]
        while stack:
            current = stack[-1]
            if self._find(current) is not None:
                stack.pop()
                continue
            missing = [source for source in self._sources(current) if self._find(source) is None]
            if missing:
                stack.extend(missing)
                continue
            self._compute(current)
            stack.pop()
        found = self._find(tensor)
        assert found is not None
        return found

    def _find(self, tensor: tf.Tensor) -> tf.Tensor | None:
        if getattr(tensor, "graph", None) is self._target or not hasattr(tensor, "graph"):
            return tensor
        if not isinstance(tensor.graph, _tf.FuncGraph):
            return tensor
        if not _tf.is_within(tensor.graph, self._target):
            return self._target.capture(tensor)  # of a graph further out, captured by the branch itself
        return self._known.get((id(tensor.op), tensor.value_index))

    def _outer(self, tensor: tf.Tensor) -> tf.Tensor | None:
        graph = tensor.graph
        if id(graph) not in self._captures or id(tensor) not in self._captures[id(graph)]:
            self._captures[id(graph)] = {id(inner): outer for outer, inner in graph.captures}
        return self._captures[id(graph)].get(id(tensor))

    def _sources(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        op = tensor.op
        if op.type == "Placeholder":
            outer = self._outer(tensor)
            if outer is None:
                raise CannotLift("its source depends on a value that the loop itself computes")
            return [outer]
        if op.type in ("ReadVariableOp", "ResourceGather"):
            for other in op.inputs[0].consumers():
                if other is not op and _tf.written_resources(other):
                    raise CannotLift("its source reads a variable that the branch assigns")
        elif _tf.is_stateful(op) and not (self._with_random and _tf.is_random(op)):
            raise CannotLift(f"its source depends on {op.type}, which has state")
        return list(op.inputs)

    def _compute(self, tensor: tf.Tensor) -> None:
        op = tensor.op
        sources: Any = [self._find(source) for source in self._sources(tensor)]
        if op.type == "Placeholder":
            outputs = sources
        else:
            outputs = _tf.copy_operation(op, sources, self._target).outputs
        for index, output in enumerate(outputs):
            self._known[id(op), index] = output


def drop_dead_inputs(op: tf.Operation, graph: Any) -> None:
    """Feeds zeros to the arguments of an If or Case that no branch uses any more.

    After lifting, a branch still captures what the lifted source was made of: per-replica gradients, which would make the
    whole branch look different for every replica.
    """
    names = [name for key in ("then_branch", "else_branch", "branches") for name in _tf.function_names(op, key)]
    live = set[int]().union(*(_live_arguments(_tf.function_definition(graph, name)) for name in names))
    first = len(op.inputs) - len(_tf.function_definition(graph, names[0]).signature.input_arg)
    for index in range(first, len(op.inputs)):
        source = op.inputs[index]
        if index - first in live or source.dtype in (tf.resource, tf.variant):
            continue
        shape = [1 if size is None else size for size in source.shape] if source.shape.rank else []
        with graph.as_default(), tf.control_dependencies(None):
            _tf.update_input(op, index, tf.zeros(shape, source.dtype))


def _live_arguments(definition: Any) -> set[int]:
    arguments = {argument.name: index for index, argument in enumerate(definition.signature.input_arg)}
    nodes = {node.name: node for node in definition.node_def}
    stack = [_source_name(value) for value in (*definition.ret.values(), *definition.control_ret.values())]
    seen: set[str] = set()
    live: set[int] = set()
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in arguments:
            live.add(arguments[name])
        else:
            stack.extend(_source_name(value) for value in nodes[name].input)
    return live


def _source_name(value: str) -> str:
    return value.lstrip("^").split(":")[0]
