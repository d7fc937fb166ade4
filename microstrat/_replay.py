"""Gradients through `strategy.run`: for tapes around it, or around a tf.function that holds it.

TensorFlow cannot differentiate the loops of the lowering: their bodies are functions that nothing has traced. Nor need
it. The gradient of a run is another run, of the same replica function with a tape inside it, and the sum over the
replicas of what that tape gives. This takes a function that can run again: one without effects.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from microstrat import _lower, _tf, _trace, _tracing, _values


def run(
    strategy: Any,
    make_tracing: Callable[..., Any],
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: str,
) -> Any:
    """`_lower.run`, whose results have a gradient by the variables and tensors that `fn` uses."""
    result, used = _lower.run(strategy, make_tracing, fn, args, kwargs, device)
    if _tracing.current_tracing() is not None:
        return result
    leaves = tf.nest.flatten(result)
    parts = [_parts(leaf) for leaf in leaves]
    results = [part for own in parts for part in own if _has_gradient(part)]
    if not results or not (used.variables or used.tensors):
        return result

    def gradient(*upstream: Any) -> list[Any]:
        given = iter(upstream)
        seeds = [[_seed(part, next(given)) if _has_gradient(part) else part for part in own] for own in parts]
        packed = [_packed(leaf, own) for leaf, own in zip(leaves, seeds, strict=True)]
        backward = _Backward(fn, (tuple(args), kwargs), device, packed, used)
        with strategy.scope(), tf.device(None):
            summed = iter(run(strategy, make_tracing, backward, (), {}, device))
        count = len(used.variables)
        found = [_one(next(summed)) if has else None for has in backward.connected]
        by_tensors = [None if value is None else tf.convert_to_tensor(value) for value in found[count:]]
        return found[:count] + by_tensors

    host = _tf.host_for_device(device)
    graph_results = iter(_tf.with_gradient(results, used.variables, used.tensors, gradient, used.why_not, host))
    parts = [[next(graph_results) if _has_gradient(part) else part for part in own] for own in parts]
    return tf.nest.pack_sequence_as(result, [_packed(leaf, own) for leaf, own in zip(leaves, parts, strict=True)])


class _Backward:
    """The replica function of the backward pass: this replica's part of the gradients, summed over the replicas."""

    def __init__(self, fn: Any, structure: Any, device: str, seeds: Sequence[Any], used: _lower.Used):
        self._fn = fn
        self._structure = structure
        self._device = device
        self._seeds = seeds
        self._used = used
        # A gradient of this gradient may use tensors of the graph that it stands in, and no others.
        self._here = _tf.captured_here(used.captured)
        self.connected: list[bool] = []
        functools.update_wrapper(self, fn, assigned=["__name__"], updated=[])

    def __call__(self) -> list[Any]:
        tracing = _tracing.current_tracing()
        assert tracing is not None
        for tensor, value in zip(self._used.captured, self._here, strict=True):
            _tf.capture_as(tracing.graph, tensor, value)
        tensors = [tracing.graph.capture(tensor) for tensor in self._used.tensors]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*self._used.variables, *tensors])
            args, kwargs = _trace.cut_arguments(tracing, self._structure, self._device)
            results = tf.nest.flatten(tf.nest.map_structure(_trace.as_output, self._fn(*args, **kwargs)))
        targets, seeds = [], []
        for result, seed in zip(results, self._seeds, strict=True):
            own = _trace.cut_arguments(tracing, seed, self._device)
            for target, upstream in zip(_tensors(result), _tensors(own), strict=True):
                if _has_gradient(target):
                    targets.append(target)
                    # What all replicas share is one value: replica 0's.
                    one = isinstance(seed, _values.Uniform)
                    seeds.append(tf.where(tracing.part == 0, upstream, tf.zeros_like(upstream)) if one else upstream)
        gradients = tape.gradient(targets, [*self._used.variables, *tensors], output_gradients=seeds)
        self.connected = [gradient is not None for gradient in gradients]
        found = [gradient for gradient in gradients if gradient is not None]
        if _tf.tape_is_recording():  # all_reduce has a gradient for tensors only
            found = [tf.convert_to_tensor(gradient) for gradient in found]
        return tf.distribute.get_replica_context().all_reduce("SUM", found)


def _parts(leaf: Any) -> list[Any]:
    """The tensors of a result."""
    if not isinstance(leaf, _values.PerReplica):
        return [leaf]
    flat = tf.nest.flatten(leaf, expand_composites=True)
    return flat[:-1] if leaf.weights is not None else flat


def _packed(leaf: Any, parts: list[Any]) -> Any:
    """A result of other tensors."""
    if not isinstance(leaf, _values.PerReplica):
        return parts[0]
    weights = [] if leaf.weights is None else [leaf.weights]
    return tf.nest.pack_sequence_as(leaf, [*parts, *weights], expand_composites=True)


def _tensors(value: Any) -> list[Any]:
    return [] if isinstance(value, tf.Variable) else tf.nest.flatten(value, expand_composites=True)


def _has_gradient(part: Any) -> bool:
    return isinstance(part, tf.Tensor) and (part.dtype.is_floating or part.dtype.is_complex)


def _seed(part: tf.Tensor, upstream: Any) -> tf.Tensor:
    return tf.zeros_like(part) if upstream is None else tf.convert_to_tensor(upstream)


def _one(value: Any) -> Any:
    return value.value if isinstance(value, _values.Uniform) else value
