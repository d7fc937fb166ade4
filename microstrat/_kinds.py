"""What kind of operation is this? The facts the tracer and the planner's input are built from."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from microstrat import _tf

FUNCTION_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
LOOPS = frozenset({"While", "StatelessWhile"})
BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
CALLS = FUNCTION_CALLS | LOOPS | BRANCHES
# Ops that TensorFlow marks stateful, but that have nothing to run once a replica for: they follow their inputs.
_FOLLOWS_INPUTS = frozenset({"Assert", "VarIsInitializedOp", "VariableShape", "LookupTableFindV2", "LookupTableSizeV2"})
_FUNCTION_ATTRS = ("f", "body", "cond", "then_branch", "else_branch", "branches")


_VIEWS = frozenset({"ExpandDims", "Identity", "Reshape", "Squeeze"})
_FEW = 1024  # elements; carrying a value through a loop costs six operations an iteration


def is_cheap(op: tf.Operation) -> bool:
    """Whether an operation without state is better computed again than carried: a view, or work on a few numbers."""
    if op.type in CALLS:
        return False
    return op.type in _VIEWS or all((t.shape.num_elements() or _FEW + 1) <= _FEW for t in (*op.inputs, *op.outputs))


_WORK = ("AvgPool", "BatchMatMul", "Conv", "Depthwise", "Einsum", "FusedBatchNorm", "MatMul", "MaxPool", "SparseMatMul")


def is_work(op: tf.Operation) -> bool:
    """Whether an operation is one of those that training spends its time in."""
    return op.type in CALLS or op.type.startswith(_WORK)


def size_of(op: tf.Operation) -> int:
    """Roughly how many numbers an operation's outputs have; an unknown dimension counts as a few."""
    return sum(
        math.prod(16 if size is None else size for size in t.shape) for t in op.outputs if t.shape.rank is not None
    )


class Kinds:
    """Classifies the operations of one graph."""

    def __init__(self, graph: Any):
        self._graph = graph
        self._inside: dict[str, frozenset[str]] = {}

    def stateful_types(self, op: tf.Operation) -> frozenset[str]:
        """The op types with state that running `op` runs: its own, or those of the functions it calls, at any depth."""
        if not _tf.is_stateful(op):
            return frozenset()
        if op.type not in CALLS:
            return frozenset({op.type})
        names = [name for key in _FUNCTION_ATTRS for name in _tf.function_names(op, key)]
        return frozenset().union(*(self._of_function(name) for name in names))

    def _of_function(self, name: str) -> frozenset[str]:
        if name not in self._inside:
            self._inside[name] = frozenset()  # functions may be recursive
            found: set[str] = set()
            for node in _tf.function_nodes(self._graph, name):
                if _tf.op_type_is_stateful(node.op) and node.op not in CALLS:
                    found.add(node.op)
                for attr in node.attr.values():
                    for func in (attr.func, *attr.list.func):
                        if func.name:
                            found |= self._of_function(func.name)
            self._inside[name] = frozenset(found)
        return self._inside[name]

    def has_own_state(self, op: tf.Operation) -> bool:
        """Whether it draws random numbers, prints, calls Python, or the like: state that is not a resource."""
        return any(
            kind not in _FOLLOWS_INPUTS and not _tf.op_type_takes_resource(kind) for kind in self.stateful_types(op)
        )

    def writes_summaries_only(self, op: tf.Operation) -> bool:
        return "WriteSummary" in (types := self.stateful_types(op)) and types <= {"WriteSummary", "ReadVariableOp"}

    def asserts(self, op: tf.Operation) -> bool:
        return "Assert" in self.stateful_types(op)


_VARIABLE_WRITES = ("ResourceScatter", "ResourceApply", "ResourceSparseApply", "ResourceStridedSliceAssign")


def writes_variables(kind: str) -> bool:
    """Whether operations of a type write a variable, as opposed to a table, a queue or another resource."""
    return kind.startswith(_VARIABLE_WRITES) or (kind.startswith("Assign") and kind.endswith("VariableOp"))


def writes(op: tf.Operation) -> list[tf.Tensor]:
    """The resource handles that `op` may write to."""
    return [] if op.type in _FOLLOWS_INPUTS or not _tf.is_stateful(op) else _tf.written_resources(op)
