"""Collectives inside tf.cond and tf.while_loop: their source is computed outside, where all replicas meet anyway.

LossScaleOptimizer and gradient accumulation take the optimizer step, and with it the all-reduce, under a condition. If the
source is a pure function of what the branch captured, the collective can be lifted out: it then runs whatever the condition
says, which costs a sum and changes no result. (Otherwise `_conditionals` cuts the branch in pieces.)
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from microstrat import _kinds, _tf


class CannotLift(Exception):
    """Why a tensor cannot be computed outside its branch. Internal: `Tracing` turns it into an error for the user."""


def lift(tensor: tf.Tensor, target: Any, *, with_random: bool = False, with_work: bool = True) -> tf.Tensor:
    """Computes a tensor of a graph inside `target` again in `target`; random draws, and real work, only if asked for."""
    return _Lifter(target, with_random, with_work).lift(tensor)


class _Lifter:
    def __init__(self, target: Any, with_random: bool, with_work: bool):
        self._target = target
        self._with_random = with_random
        self._with_work = with_work
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
        if not hasattr(tensor, "graph") or not self._is_inside(tensor.graph):
            return tensor  # an eager tensor, or one of the target or of a graph further out
        return self._known.get((id(tensor.op), tensor.value_index))

    def _is_inside(self, graph: Any) -> bool:
        return graph is not self._target and _tf.is_inside(graph, self._target)

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
            if _tf.in_loop(op.graph, self._target):
                raise CannotLift("its source reads a variable, which a turn of the loop may change")
            for other in op.inputs[0].consumers():
                if other is not op and _tf.written_resources(other):
                    raise CannotLift("its source reads a variable that the branch assigns")
        elif _tf.is_stateful(op) and not (self._with_random and _tf.is_random(op)):
            raise CannotLift(f"its source depends on {op.type}, which has state")
        elif not self._with_work and _kinds.is_work(op):
            raise CannotLift(f"its source takes work ({op.type})")
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
