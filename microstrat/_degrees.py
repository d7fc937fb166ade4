"""How a number grows with the rows it comes from: a sum over rows, a mean over rows, or something that nobody can tell.

The whole batch's value is the sum of the micro-batches' sums, and the weighted mean of their means. Which one a number is
must otherwise be declared; where the graph says it, it need not be, and what contradicts a declaration can be announced.
Only what is certain counts: a reduction over rows, a number of rows, and products, quotients and sums of those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

import tensorflow as tf

from microstrat import _tf

_SAME = frozenset({"Identity", "Cast", "Neg", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "CheckNumerics"})
_QUOTIENTS = frozenset({"RealDiv", "Div", "DivNoNan"})
_MOST = 200  # operations to look at


class Kind(Enum):
    """What a number is, over the rows of a micro-batch."""

    MEAN = "mean"
    SUM = "sum"
    RATIO = "ratio"  # of two sums, the lower one not the number of rows
    UNKNOWN = "unknown"


class _Unknown(Exception):
    pass


def kind_of(value: tf.Tensor, varies: Callable[[tf.Tensor], bool]) -> Kind:
    """What `value`, which has no axis of rows, is. `varies(tensor)`: whether micro-batches have different values."""
    walk = _Walk(varies)
    try:
        degree = walk.degree(value)
    except _Unknown:
        return Kind.UNKNOWN
    if degree == 0:
        return Kind.RATIO if walk.divided_by_a_sum else Kind.MEAN
    return Kind.SUM if degree == 1 and not walk.divided_by_a_sum else Kind.UNKNOWN


def is_divided_by_rows(value: tf.Tensor, varies: Callable[[tf.Tensor], bool]) -> bool:
    """Whether each row of `value` is divided by the number of rows of its micro-batch."""
    walk = _Walk(varies)
    try:
        return walk.degree_of_rows(value) == -1 and not walk.divided_by_a_sum
    except _Unknown:
        return False


def has_row_axis(value: tf.Tensor | tf.IndexedSlices) -> bool:
    """Rows of a micro-batch are the only size that is unknown while tracing."""
    return bool(value.shape.rank) and value.shape[0] is None


class _Walk:
    """Degrees: 1 for what grows with the number of rows, 0 for what does not, -1 for what shrinks."""

    def __init__(self, varies: Callable[[tf.Tensor], bool]):
        self._varies = varies
        self._left = _MOST
        self.divided_by_a_sum = False

    def degree(self, value: tf.Tensor) -> int:
        """Of a tensor without an axis of rows."""
        if not self._varies(value):
            return 0
        self._left -= 1
        op = value.op
        if self._left < 0 or has_row_axis(value):
            raise _Unknown
        if (outer := _tf.captured(value)) is not None:
            return self.degree(outer)
        if op.type in _SAME:
            return self.degree(op.inputs[0])
        if op.type in ("Sum", "Mean"):
            if not has_row_axis(op.inputs[0]):
                return self.degree(op.inputs[0])
            if not _reduces_first_axis(op):
                raise _Unknown
            return self.degree_of_rows(op.inputs[0]) + (op.type == "Sum")
        if op.type == "AddN" or op.type in ("AddV2", "Add", "Sub"):
            return self._common([self.degree(tensor) for tensor in op.inputs if self._varies(tensor)])
        if op.type == "Mul":
            return sum(self.degree(tensor) for tensor in op.inputs)
        if op.type in _QUOTIENTS:
            above, below = op.inputs
            return self.degree(above) - self._denominator(below)
        if _is_number_of_rows(value):
            return 1
        raise _Unknown

    def degree_of_rows(self, value: tf.Tensor) -> int:
        """Of the entries of a tensor with an axis of rows: 0, unless they are multiplied or divided by such a number."""
        if not has_row_axis(value):
            return self.degree(value)
        self._left -= 1
        op = value.op
        if self._left < 0:
            raise _Unknown
        if (outer := _tf.captured(value)) is not None:
            return self.degree_of_rows(outer)
        if op.type in _SAME:
            return self.degree_of_rows(op.inputs[0])
        if op.type == "Mul":
            return sum(self.degree_of_rows(tensor) for tensor in op.inputs if self._varies(tensor))
        if op.type in _QUOTIENTS:
            above, below = op.inputs
            own = self.degree_of_rows(above) if self._varies(above) else 0
            return own - (0 if has_row_axis(below) else self._denominator(below))
        return 0

    def _denominator(self, value: tf.Tensor) -> int:
        degree = self.degree(value)
        if degree and not _is_number_of_rows(value):
            self.divided_by_a_sum = True
        return degree

    def _common(self, degrees: Sequence[int]) -> int:
        if len(set(degrees)) > 1:
            raise _Unknown
        return degrees[0]


def _reduces_first_axis(op: tf.Operation) -> bool:
    axes = tf.get_static_value(op.inputs[1])
    rank = op.inputs[0].shape.rank
    if axes is None:
        return op.outputs[0].shape.rank == 0  # all of them: the range of a rank
    return rank is not None and 0 in (axes.reshape(-1) % max(rank, 1))


def _is_number_of_rows(value: tf.Tensor) -> bool:
    """Whether a number is the size of a tensor of rows, or of its first axis, times what is the same everywhere."""
    op = value.op
    while op.type in (*_SAME, "Prod", "Pack", "Mul", "StridedSlice", "GatherV2"):
        following = [tensor.op for tensor in op.inputs if tensor.op.type != "Const"]
        if not following:
            return False
        op = following[0]
    return op.type in ("Shape", "Size", "ShapeN")
