"""tf.while_loop in a replica function, all replicas together: where one holds a collective, they meet in every turn.

Such a loop cannot run once per replica. It runs once, and each of its turns is lowered like a replica function of its own,
with loops over the replicas between its collectives. A loop variable that differs between replicas holds all their values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from microstrat import _errors, _lower, _tf, _tracing, _values


def run(
    tracing: _tracing.Tracing,
    stock: Callable[..., Any],
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop_vars: Any,
    shape_invariants: Any = None,
    parallel_iterations: int = 10,
    maximum_iterations: Any = None,
    name: str | None = None,
    return_same_structure: bool = True,
    back_prop: bool = True,
    *,
    device: str,
) -> Any:
    """Runs a loop of the replica function. The arguments after `stock`, TensorFlow's own, are those of tf.while_loop."""
    del parallel_iterations
    if _tf.tape_is_recording() and back_prop:
        raise _errors.gradient_through_loop(tracing.function_name)
    if tracing.varies(maximum_iterations):
        raise _errors.collective_under_varying_condition(tracing.function_name, "")
    loop = _Loop(tracing, cond, body, loop_vars, shape_invariants, device)
    loop.find_varying()
    # Its random draws and prints are seen to by the loops inside.
    with tracing.in_cross_replica_context():
        results = stock(
            loop.condition,
            loop.turn,
            loop.start(),
            shape_invariants=loop.invariants(),
            parallel_iterations=1,
            maximum_iterations=maximum_iterations,
            name=name,
            return_same_structure=True,
        )
    results = loop.own_values(results)
    return results if return_same_structure or len(results) > 1 else results[0]


class _Loop:
    """A loop whose variables are held as per-replica values where they differ between replicas.

    Attributes:
      kinds: how each (flattened) loop variable is held: "uniform" (as it is), "stacked" or "concatenated".
    """

    def __init__(
        self,
        tracing: _tracing.Tracing,
        cond: Callable[..., Any],
        body: Callable[..., Any],
        loop_vars: Any,
        shape_invariants: Any,
        device: str,
    ):
        self.tracing = tracing
        self.place: Any = tf.compat.v1.get_default_graph()
        self.cond, self.body, self.device = cond, body, device
        self.most = tracing.turns.most
        self.structure = loop_vars
        self.flat = _flatten(loop_vars)
        self.shapes = [tensor.shape for tensor in self.flat]
        if shape_invariants is not None:
            given = tf.nest.flatten(shape_invariants, expand_composites=True)
            self.shapes = [getattr(shape, "shape", shape) for shape in given]
        self.kinds = [
            self._kind(index) if tracing.varies(tensor) else "uniform" for index, tensor in enumerate(self.flat)
        ]

    def _kind(self, index: int) -> str:
        """How values that differ between replicas are held."""
        shape, dtype = tf.TensorShape(self.shapes[index]), self.flat[index].dtype
        if dtype not in (tf.variant, tf.resource):
            if shape.is_fully_defined():
                return "stacked"
            if shape.rank and shape[1:].is_fully_defined():
                return "concatenated"
        raise _errors.loop_variable(self.tracing.function_name, dtype.name, shape)

    # --- What differs between replicas --------------------------------------------------------------------------------
    def find_varying(self) -> None:
        """Finds the variables that come to differ between replicas once the loop has turned."""
        while True:
            graph = _tf.scratch_graph("loop")
            with graph.as_default():
                packed = [self._placeholders(index) for index in range(len(self.flat))]
                results = self._run(self.body, packed)
            found = [
                self._kind(index) if kind == "uniform" and _differs(result) else kind
                for index, (kind, result) in enumerate(zip(self.kinds, results, strict=True))
            ]
            if found == self.kinds:
                return
            self.kinds = found

    def _placeholders(self, index: int) -> Any:
        tensors = [
            tf.compat.v1.placeholder(dtype, shape)
            for shape, dtype in zip(self._shapes(index), self._dtypes(index), strict=True)
        ]
        return self._value(index, tensors)

    def _shapes(self, index: int) -> list[tf.TensorShape]:
        shape = tf.TensorShape(self.shapes[index])
        if self.kinds[index] == "uniform":
            return [shape]
        if self.kinds[index] == "stacked":
            return [tf.TensorShape([self.most]).concatenate(shape)]
        return [tf.TensorShape([None]).concatenate(shape[1:]), tf.TensorShape([self.most])]

    def _dtypes(self, index: int) -> list[tf.DType]:
        return [self.flat[index].dtype] + [tf.int64] * (self.kinds[index] == "concatenated")

    def _value(self, index: int, tensors: Sequence[tf.Tensor]) -> Any:
        """A loop variable made of the tensors that hold it."""
        if self.kinds[index] == "uniform":
            return tensors[0]
        kind = _values.Stacked if self.kinds[index] == "stacked" else _values.Concatenated
        return kind(self.most, *tensors)

    # --- The loop -----------------------------------------------------------------------------------------------------
    def start(self) -> list[list[tf.Tensor]]:
        with tf.control_dependencies(None):
            return [self._tensors(index, self._first(index)) for index in range(len(self.flat))]

    def _first(self, index: int) -> Any:
        tensor = self.flat[index]
        return self.tracing.values_of_turns(tensor) if self.tracing.varies(tensor) else tensor

    def _tensors(self, index: int, value: Any) -> list[tf.Tensor]:
        """The tensors that hold a value as its loop variable is held."""
        if self.kinds[index] == "uniform":
            return [value.value if isinstance(value, _values.Uniform) else tf.convert_to_tensor(value)]
        if not isinstance(value, _values.PerReplica):
            value = _values.Uniform(self.most, tf.convert_to_tensor(value))
        if self.kinds[index] == "stacked":
            if not isinstance(value, _values.Uniform | _values.Stacked):
                raise _errors.loop_variable(self.tracing.function_name, self.flat[index].dtype.name, self.shapes[index])
            return [value.stacked()]
        if isinstance(value, _values.Concatenated):
            return [value.flat, value.lengths]
        stack = value.stacked()
        length = tf.shape(stack, tf.int64)[1]
        return [tf.reshape(stack, tf.concat([[-1], tf.shape(stack)[2:]], 0)), tf.fill([self.most], length)]

    def invariants(self) -> list[list[tf.TensorShape]]:
        return [self._shapes(index) for index in range(len(self.flat))]

    def condition(self, *packed: Sequence[tf.Tensor]) -> tf.Tensor:
        (goes_on,) = self._run(self.cond, [self._value(index, tensors) for index, tensors in enumerate(packed)])
        if _differs(goes_on):
            raise _errors.collective_under_varying_condition(self.tracing.function_name, "")
        return goes_on.value if isinstance(goes_on, _values.Uniform) else goes_on

    def turn(self, *packed: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        results = self._run(self.body, [self._value(index, tensors) for index, tensors in enumerate(packed)])
        return [self._tensors(index, result) for index, result in enumerate(results)]

    def _run(self, fn: Callable[..., Any], flat: Sequence[Any]) -> list[Any]:
        """Runs `fn` for all replicas in the graph that is being built; returns what they return, flattened."""

        def one_turn(*own: Any) -> list[Any]:
            return _flatten(fn(*_pack(self.structure, own)))

        results, _ = _lower.run(self.tracing.strategy, self._continuation, one_turn, flat, {}, self.device)
        return list(results)

    def _continuation(self, function_name: str, outer: tf.Graph, **options: Any) -> _tracing.Tracing:
        del function_name
        return self.tracing.continuation(self.tracing.function_name, outer, place=self.place, **options)

    def own_values(self, results: Sequence[Sequence[tf.Tensor]]) -> Any:
        """What each replica has after the loop."""
        own = _values.select_replica(
            [self._value(index, tensors) for index, tensors in enumerate(results)], self.tracing.turn
        )
        for tensor, shape in zip(own, self.shapes, strict=True):
            tensor.set_shape(shape)
        return _pack(self.structure, own)


def _differs(value: Any) -> bool:
    return isinstance(value, _values.PerReplica) and not isinstance(value, _values.Uniform)


def _flatten(structure: Any) -> list[tf.Tensor]:
    flat = tf.nest.flatten(structure, expand_composites=True)
    return [tf.convert_to_tensor(value.flow if isinstance(value, tf.TensorArray) else value) for value in flat]


def _pack(structure: Any, flat: Sequence[tf.Tensor]) -> Any:
    old = tf.nest.flatten(structure, expand_composites=True)
    new = [
        _tf.tensor_array_with_flow(value, tensor) if isinstance(value, tf.TensorArray) else tensor
        for value, tensor in zip(old, flat, strict=True)
    ]
    return tf.nest.pack_sequence_as(structure, new, expand_composites=True)
