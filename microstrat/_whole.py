"""Whole-batch semantics: one replica, whose batch is cut into micro-batches only to fit the memory.

The replica function is code for one device. What it computes from the whole batch is put together from what it computes
from the micro-batches, at the places where single values come out of many rows:

    a gradient by a variable    the sum over micro-batches, each with its share of the rows (`fraction`) as cotangent
    an assignment               one, of what the micro-batches' assignments come to (`combine_write`)
    a summary of one number     one, of the sum or the mean
    an explicit collective      the sum, the mean weighted by rows, all rows
    what the function returns   one value per micro-batch, weighted by rows when it is averaged (`_lower`)

After each of these a value is the same for all micro-batches, so everything that follows (clipping, loss-scale checks,
the optimizer, `result()` of a metric) runs once, on the whole batch's value, as it does on one device.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from microstrat import _context, _degrees, _errors, _keras, _kinds, _lift, _tf, _tracing, _values

LOSS_REDUCTIONS = ("mean", "sum")
_EXTREMES = {"Maximum": "max", "Minimum": "min"}
_GENERATORS = frozenset({"RngReadAndSkip", "RngSkip", "StatefulUniform"})


class WholeBatch(_tracing.Tracing):
    """One run of a replica function on behalf of all micro-batches of its batch.

    Attributes:
      loss_reduction: "mean" if the losses are means over rows, "sum" if they are sums.
      weight: float64 scalar, what the user says the micro-batch weighs; None if that is its rows.
    """

    # A draw, a print, a Python function without anything of a micro-batch in it happens once, as on one device.
    draws_per_turn = False
    rows_per_turn = False
    listed = "some"

    def __init__(self, *args: Any, loss_reduction: str, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.loss_reduction = loss_reduction
        self._fraction: tf.Tensor | None = None
        self.weight: tf.Tensor | None = None
        self._taking_gradient = False
        self._means: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}
        self._starts: dict[int, tf.Tensor] = {}

    def _replica_id(self) -> tf.Tensor:
        return tf.constant(0) if self.around is None else tf.identity(self.around.replica_id)

    def _row(self) -> tf.Tensor:
        return self.replica_id if self.around is None else tf.identity(self.around.row)

    def context(self) -> _context.SymbolicReplicaContext:
        return WholeBatchContext(self)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_tf.hooked_operations(lambda draw: self.current().own_draws(draw)))
            if self.turns.most > 1:
                stack.enter_context(_tf.hooked_loops(self._loop))
                stack.enter_context(
                    _tf.hooked_gradients(lambda *args, **options: self.current().gradient(*args, **options))
                )
                stack.enter_context(_tf.hooked_summaries(lambda value: self.current().combine_summary(value)))
                stack.enter_context(_keras.whole_batch_losses(_Current(self), self.loss_reduction))
            yield

    def continuation(self, function_name: str, outer: tf.Graph, **options: Any) -> _tracing.Tracing:
        return ContinuedWholeBatch(
            self.strategy,
            function_name,
            outer,
            turns=self.turns,
            run_loop=self.run_loop,
            loss_reduction=self.loss_reduction,
            around=self.around,
            continues=self,
            **options,
        )

    def varies(self, value: Any) -> bool:
        return self.turns.most > 1 and super().varies(value)

    def uniform_sum(self, value: tf.Tensor) -> tf.Tensor:
        return value

    def writes_in_order(self, op: tf.Operation, owner: Any) -> bool:
        """Random generators go on from micro-batch to micro-batch, and so do tables; a variable is written once."""
        types = self.kinds.stateful_types(op)
        return types <= _GENERATORS if owner is not None else not any(_kinds.writes_variables(kind) for kind in types)

    # --- What a micro-batch weighs ------------------------------------------------------------------------------------
    def fraction(self) -> tf.Tensor:
        """Float64 scalar: this micro-batch's share of the rows, or of the weights that the user gave."""
        fraction = self._fraction
        if fraction is None:
            with self.graph.as_default(), tf.control_dependencies(None):
                if self.turns.rows is None:
                    fraction = tf.constant(1.0, tf.float64)
                elif self.weight is not None:
                    fraction = self.weight / self.total(self.weight)
                else:
                    rows = self.turns.rows_of_turn(self.turn)
                    fraction = tf.cast(rows, tf.float64) / tf.cast(self.turns.rows, tf.float64)
            self._fraction = fraction
        return fraction

    def set_weight(self, weight: Any) -> None:
        """See `microstrat.set_weight`."""
        weight = tf.convert_to_tensor(weight)
        if weight.shape.rank != 0:
            raise _errors.weight_not_scalar(weight.shape)
        if self._fraction is not None:
            raise _errors.weight_too_late(self.function_name)
        if self.varies(weight):
            self.refuse_nested_function()
            self.weight = self._out_of_branches("sum", tf.cast(weight, tf.float64))

    def result_weights(self) -> tf.Tensor | None:
        """Float64 [n], what the results of each micro-batch weigh in a mean; None if their rows are what they weigh."""
        if self.weight is None:
            return None
        weights = self.collect(_tracing.Collective("concat"), self.weight[tf.newaxis])
        with self.graph.as_default():
            missing = tf.zeros([self.turns.most - tf.shape(weights)[0]], weights.dtype)
            return tf.ensure_shape(tf.concat([weights, missing], 0), [self.turns.most])

    def weights_of_turns(self) -> tf.Tensor | None:
        if self.turns.most == 1:
            return None
        rows = tf.cast(self.turns.rows_of_turn(tf.range(self.turns.most)), tf.float64)
        return tf.maximum(rows, tf.one_hot(0, self.turns.most, dtype=tf.float64))  # a batch without rows is one part

    def concatenated(self, flat: tf.Tensor, lengths: tf.Tensor) -> _values.PerReplica:
        return _values.ConcatenatedRows(self.turns.most, flat, lengths)

    def returned(self, value: Any) -> Any:
        if self.loss_reduction == "mean" or not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
            return value
        uniform, varying = self._terms(value)
        if not uniform or not varying:
            return value
        # What all micro-batches have in common is counted once when they are added.
        return _add([*varying, self._weigh(_add(uniform))])

    def present(self, result: Any) -> Any:
        if isinstance(result, _values.Uniform):
            return result.value
        if self.around is None or not isinstance(result, _values.PerReplica):
            return result
        # A replica among others returns one value, its batch's.
        return result.reduce_mean() if self.loss_reduction == "mean" else result.reduce_sum()

    # --- Sums and means -----------------------------------------------------------------------------------------------
    def total(self, value: Any) -> Any:
        """The sum over the micro-batches; of what is theirs together, the one value."""
        if not self.varies_anywhere(value):
            return value
        if isinstance(value, tf.IndexedSlices):
            return self._total_slices(value)
        value = tf.convert_to_tensor(value)
        if value.op.type == "Pack" and value.graph is self.graph and not all(self.varies(t) for t in value.op.inputs):
            return tf.stack([self.total(part) for part in value.op.inputs], value.op.get_attr("axis"))
        uniform, varying = self._terms(value)
        total = self.collect(_tracing.Collective("sum"), _add(varying))
        return _add([*uniform, total])

    def _total_slices(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        values = self.collect(_tracing.Collective("concat"), slices.values)
        indices = self.collect(_tracing.Collective("concat"), slices.indices)
        if _see_through(slices.indices).op.type == "Unique":
            # Each index stood there once, so it does for the whole batch: optimizers square slice by slice.
            unique, position = tf.unique(indices)
            values, indices = tf.math.unsorted_segment_sum(values, position, tf.size(unique)), unique
        return tf.IndexedSlices(values, indices, slices.dense_shape)

    def _terms(self, value: tf.Tensor) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The terms of a sum: those that all micro-batches have in common (a regularizer's), and the others."""
        if not self.varies(value):
            return [value], []
        op = _see_through(value).op
        if op.graph is not self.graph:
            return [], [value]
        summands = _summands(op)
        if summands:
            parts = [self._terms(tensor) for tensor in summands]
            uniform = [term for one, _ in parts for term in one]
            varying = [term for _, one in parts for term in one]
        elif op.type in ("Mul", "RealDiv", "Cast"):
            uniform, varying = self._scaled_terms(op)
        else:
            return [], [value]
        return (uniform, varying) if uniform else ([], [value])

    def _scaled_terms(self, op: tf.Operation) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The terms of a sum times, or divided by, what all micro-batches have in common; or of another dtype."""
        first, *rest = op.inputs
        if op.type == "Mul" and not self.varies(first):
            first, rest = rest[0], [first]
        if any(self.varies(factor) for factor in rest):
            return [], []

        def scale(term: tf.Tensor) -> tf.Tensor:
            if op.type == "Cast":
                return tf.cast(term, op.outputs[0].dtype)
            return term * rest[0] if op.type == "Mul" else term / rest[0]

        uniform, varying = self._terms(first)
        return ([scale(term) for term in uniform], [scale(term) for term in varying]) if uniform else ([], [])

    def mean(self, value: Any) -> Any:
        """The mean over the micro-batches, weighted by `fraction`; float64 for integers."""
        if not self.varies_anywhere(value) or isinstance(value, tf.IndexedSlices):
            return self.total(self._weigh(value)) if self.varies_anywhere(value) else value
        # What all have in common stays outside: it may be known only after a first loop, which the rest need not wait for.
        uniform, varying = self._terms(tf.convert_to_tensor(value))
        total = self.total(self._weigh(_add(varying)))
        return _add([*(tf.cast(term, total.dtype) for term in uniform), total])

    def varies_anywhere(self, value: Any) -> bool:
        parts = tf.nest.flatten(value, expand_composites=True)
        return any(self.varies(part) for part in parts)

    def _weigh(self, value: Any) -> Any:
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(self._weigh(value.values), value.indices, value.dense_shape)
        value = tf.convert_to_tensor(value)
        if not (value.dtype.is_floating or value.dtype.is_complex):
            value = tf.cast(value, tf.float64)
        return value * tf.cast(self.fraction(), value.dtype)

    def reduce(self, reduce_op: tf.distribute.ReduceOp, value: Any) -> Any:
        if _keras.optimizer_is_applying():
            # Gradients that no tape of ours has summed: tf.gradients, or worked out by hand.
            own = self.mean(value) if self.loss_reduction == "mean" else self.total(value)
        else:
            own = self.total(value) if reduce_op == tf.distribute.ReduceOp.SUM else self.mean(value)
        return own if self.around is None else super().reduce(reduce_op, own)

    def gradient_of_sum(self, collective: _tracing.Collective, gradient: tf.Tensor) -> tf.Tensor:
        total = self.total(gradient)
        return self.collect(collective, total) if collective.between_replicas else total

    def gather(self, value: tf.Tensor, axis: int) -> tf.Tensor:
        if self.varies(value):
            if axis != 0:
                raise _errors.gather_not_rows(self.function_name, axis)
            value = self.collect(_tracing.Collective("concat"), value)
        return value if self.around is None else super().gather(value, axis)

    # --- Replicas around ----------------------------------------------------------------------------------------------
    def collect_replicas(self, kind: str, tensor: tf.Tensor, axis: int = 0) -> tf.Tensor:
        if self.around is None:
            return tensor
        return self.collect(_tracing.Collective(kind, axis, between_replicas=True), tensor)

    @property
    def running_replicas(self) -> Any:
        return 1 if self.around is None else self.around.running_replicas

    def all_values(self, value: Any) -> tuple[Any, ...]:
        return (value,) if self.around is None else super().all_values(value)

    def varies_between_replicas(self, value: Any) -> bool:
        if self.around is None or not isinstance(value, tf.Tensor):
            return False
        stack, seen = [value.op], set()
        while stack:
            op = stack.pop()
            if op in seen:
                continue
            seen.add(op)
            collective = self.collectives.get(op)
            if collective is not None and collective.between_replicas:
                continue
            if op.graph is self.graph and op.type == "Placeholder":
                outer = next((outer for outer, inner in self.graph.captures if inner.op is op), None)
                if outer is not None and self.around.varies(outer):
                    return True
            elif self.kinds.has_own_state(op) and op not in self.graph.cross_replica_ops:
                return True
            else:
                stack.extend(self._sources_of(op) if op.type == "Placeholder" else [tensor.op for tensor in op.inputs])
        return False

    # --- Gradients ----------------------------------------------------------------------------------------------------
    def gradient(
        self, compute: Callable[..., Any], target: Any, sources: Any, output_gradients: Any, **options: Any
    ) -> Any:
        """In place of GradientTape.gradient: gradients come out as the whole batch's.

        A mean loss of one micro-batch stands in the whole batch's loss with its share of the rows, which is therefore its
        cotangent. A tensor with a value for each row is part of the whole batch's as it is. Gradients by the strategy's
        variables are then summed; those by other tensors are about this micro-batch's rows.
        """
        targets = tf.nest.flatten(target)
        flat = tf.nest.flatten(sources)
        owned = [isinstance(_keras.plain(source), _tf.DistributedVariable) for source in flat]
        # In a gradient function (tf.recompute_grad) the tape outside sums.
        nothing = not any(owned) and not self.varies_anywhere(targets)
        if self._taking_gradient or nothing or _tracing.current_tracing() is not self:
            return compute(target, sources, output_gradients=output_gradients, **options)
        if self.loss_reduction == "mean":
            given = [None] * len(targets) if output_gradients is None else tf.nest.flatten(output_gradients)
            output_gradients = [self._cotangent(*pair) for pair in zip(targets, given, strict=True)]
            if not any(owned) and not all(_degrees.has_row_axis(one) for one in targets):
                self.strategy.extended.announce("inner gradient", _errors.gradient_of_inner_mean(self.function_name))
        elif any(owned):
            for one in targets:
                if not _degrees.has_row_axis(one):
                    self._check_declared(one)
        self._taking_gradient = True
        try:
            gradients = compute(targets, flat, output_gradients=output_gradients, **options)
        finally:
            self._taking_gradient = False
        summed = [
            self._differentiable_total(gradient) if own and gradient is not None else gradient
            for gradient, own in zip(gradients, owned, strict=True)
        ]
        return tf.nest.pack_sequence_as(sources, summed)

    def _cotangent(self, target: Any, given: Any) -> Any:
        if not self.varies_anywhere(target):
            return tf.ones_like(target) if given is None else given  # the whole batch's already
        if not _degrees.has_row_axis(target):
            self._check_declared(target)
            return self._weigh(tf.ones_like(target) if given is None else given)
        if given is None:
            return tf.ones_like(target)
        # A cotangent worked out by hand for a mean is divided by the micro-batch's rows, not by the batch's.
        by_hand = isinstance(given, tf.Tensor) and _degrees.is_divided_by_rows(given, self.varies)
        return self._weigh(given) if by_hand else given

    def _check_declared(self, target: tf.Tensor) -> None:
        """Announces a loss that certainly is not what losses are declared to be."""
        kind = _degrees.kind_of(target, self.varies) if self.varies(target) else _degrees.Kind.UNKNOWN
        is_other = kind is (_degrees.Kind.SUM if self.loss_reduction == "mean" else _degrees.Kind.MEAN)
        if is_other:
            message = _errors.loss_not_as_declared(self.function_name, kind.value, self.loss_reduction)
            self.strategy.extended.announce("loss reduction", message)
        elif kind is _degrees.Kind.RATIO and self.loss_reduction == "mean" and self.weight is None:
            self.strategy.extended.announce("loss weight", _errors.loss_divided_by_a_sum(self.function_name))

    def _differentiable_total(self, value: Any) -> Any:
        if isinstance(value, tf.IndexedSlices) or not _tf.tape_is_recording():
            return self.total(value)

        @tf.custom_gradient
        def total(part: tf.Tensor) -> Any:
            return self.total(part), self._differentiable_total

        return total(value)

    # --- State --------------------------------------------------------------------------------------------------------
    def combine_write(self, variable: Any, method: str, value: Any) -> Any:
        """What `variable.method(value)` of the whole batch assigns, from what each micro-batch would.

        Sums (aggregation SUM, as Keras' metrics declare; integers, which count) add up, and running maxima and minima go
        on. Anything else is taken for a statistic of the batch, of which the mean is taken.
        """
        value = tf.convert_to_tensor(value, dtype=variable.dtype)
        if not self.varies(value):
            return value
        if _degrees.has_row_axis(value):
            raise _errors.rows_assigned(variable.name, value.shape, self.function_name)
        if not (value.dtype.is_floating or value.dtype.is_complex or value.dtype.is_integer):
            raise _errors.cannot_combine(variable.name, value.dtype.name, self.function_name)
        kind = self._kind_of_change(variable, value)
        if kind is _degrees.Kind.MEAN and value.dtype.is_floating:
            layer = _keras.batch_normalization_updating(variable)
            return self.mean(value) if layer is None else self._combine_batch_norm(layer, variable, method, value)
        if self.loss_reduction == "mean" and _keras.scalar_mean_updating(variable, self.varies):
            return self.mean(value)
        declared = variable.aggregation == tf.VariableAggregation.SUM or value.dtype.is_integer
        if declared or kind is _degrees.Kind.SUM:
            return self._combine_sum(variable, method, value)
        layer = _keras.batch_normalization_updating(variable)
        if layer is not None:
            return self._combine_batch_norm(layer, variable, method, value)
        if variable.aggregation != tf.VariableAggregation.MEAN:
            self._announce(variable, _errors.mean_assigned(variable.name, self.function_name))
        return self.mean(value)

    def _announce(self, variable: Any, message: str) -> None:
        self.strategy.extended.announce(f"variable {id(variable)}", message)

    def _kind_of_change(self, variable: Any, value: tf.Tensor) -> _degrees.Kind:
        """What a value that is assigned, or added, is over rows, apart from what all micro-batches have in common."""
        if variable.aggregation == tf.VariableAggregation.MEAN:
            return _degrees.Kind.UNKNOWN  # what is declared goes
        return self._kind(value)

    def _kind(self, value: tf.Tensor) -> _degrees.Kind:
        _, varying = self._terms(value)
        return _degrees.kind_of(_add(varying), self.varies)

    def _combine_sum(self, variable: Any, method: str, value: tf.Tensor) -> tf.Tensor:
        uniform, varying = self._terms(value)
        if method != "assign" or not self._reads(variable, _add(varying)):
            certain = self._kind_of_change(variable, value) is _degrees.Kind.SUM
            if (
                method == "assign"
                and not uniform
                and not certain
                and variable.aggregation != tf.VariableAggregation.SUM
            ):
                self._announce(variable, _errors.sum_assigned(variable.name, self.function_name))
            return self.total(value)
        op = _see_through(value).op
        if op.type in _EXTREMES and any(self._is_read(_see_through(tensor).op, variable) for tensor in op.inputs):
            return self.collect(_tracing.Collective(_EXTREMES[op.type]), value)
        raise _errors.cannot_combine(variable.name, value.dtype.name, self.function_name)

    def _is_read(self, op: tf.Operation, variable: Any) -> bool:
        if op.type not in ("ReadVariableOp", "ResourceGather"):
            return False
        handle: Any = op.inputs[0]
        while (outer := _tf.captured(handle)) is not None:
            handle = outer
        return handle is variable.primary.handle or variable.handle_is_rows(handle)

    def _reads(self, variable: Any, value: tf.Tensor) -> bool:
        """Whether `value` depends on the variable's value before."""
        stack, seen = [value.op], set()
        while stack:
            op = stack.pop()
            if op in seen:
                continue
            seen.add(op)
            if self._is_read(op, variable):
                return True
            stack.extend(self._sources_of(op) if op.type == "Placeholder" else [tensor.op for tensor in op.inputs])
        return False

    def _combine_batch_norm(self, layer: Any, variable: Any, method: str, value: tf.Tensor) -> tf.Tensor:
        """Moving statistics as the whole batch's mean and variance would change them.

        The variance of all rows is the mean of the micro-batches' variances plus the variance of their means. What a
        layer assigns has (1 - momentum) times the statistic in it, next to terms that all micro-batches have in common.
        """
        mean = self.mean(value)
        if variable is _keras.plain(layer.moving_mean):
            _, varying = self._terms(value)
            # Relative to the old value, or squares cancel. Read once: a layer may be called several times.
            start = self._starts.setdefault(id(layer), (1 - layer.momentum) * tf.convert_to_tensor(variable))
            own = _add(varying) - start
            self._means[id(layer)] = (self.mean(own), self.mean(tf.square(own)))
            return mean
        if id(layer) not in self._means or layer.momentum == 1:
            return mean
        mean_own, mean_square = self._means[id(layer)]
        between = tf.maximum(mean_square - tf.square(mean_own), 0) / (1 - layer.momentum)
        between = tf.cast(between, value.dtype)
        return mean - between if method == "assign_sub" else mean + between

    def combine_summary(self, value: tf.Tensor) -> tf.Tensor:
        """What a summary of the whole batch says: of one number the batch's; of rows, each micro-batch writes its own.

        So it does in loops, which a collective would take apart.
        """
        is_number = value.shape.rank == 0 and (value.dtype.is_floating or value.dtype.is_integer)
        graph: Any = tf.compat.v1.get_default_graph()
        if not is_number or not self.varies(value) or _tf.in_loop(graph, self.graph):
            return value
        self.refuse_nested_function()
        # Outside of its condition, which micro-batches then need not agree on.
        with contextlib.suppress(_lift.CannotLift):
            value = _lift.lift(value, self.graph, with_work=False)
        with value.graph.as_default():
            whole = self.total(value) if self._kind(value) is _degrees.Kind.SUM else self.mean(value)
            return tf.cast(whole, value.dtype)

    # --- Random draws -------------------------------------------------------------------------------------------------
    def own_draws(self, draw: _tf.StatelessDraw) -> tf.Tensor | None:
        """Gives draws whose shape has the micro-batch's rows in it a key of their own in every micro-batch.

        Their seed is one for the whole batch, so all would draw the same. A draw of another shape (noise for the weights)
        is the whole batch's, and stays one.
        """
        if _tracing.current_tracing() is not self or self.varies(draw.key):
            return None
        own_micro_batch = any(self.varies(tensor) for tensor in draw.other_inputs)
        own_replica = self.around is not None and self.strategy.extended.draws_independently
        if own_replica:
            turn = _context.live_turn() if own_micro_batch else 0
            most = self.turns.most
            return draw.key_for(_context.live_replica_id() * most + turn, self.num_replicas * most)
        return draw.key_for(_context.live_turn(), self.turns.most) if own_micro_batch else None


def _add(terms: Sequence[tf.Tensor]) -> tf.Tensor:
    # Terms may broadcast, which tf.add_n does not.
    return functools.reduce(operator.add, terms)


def _summands(op: tf.Operation) -> Sequence[tf.Tensor]:
    """What an operation adds up; nothing if it does not."""
    if op.type in ("AddN", "AddV2"):
        return op.inputs
    if op.type == "Sum" and op.inputs[0].op.type == "Pack" and op.inputs[0].shape.rank == 1:
        return op.inputs[0].op.inputs  # Keras adds losses up this way
    return ()


def _see_through(tensor: tf.Tensor) -> tf.Tensor:
    """What a tensor is, past operations that change nothing."""
    while True:
        op = tensor.op
        source = op.inputs[0] if op.inputs else tensor
        nothing = op.type == "Identity" or (op.type == "Sum" and source.shape.rank == 0)
        if not nothing and not (op.type == "Reshape" and source.shape.rank == tensor.shape.rank == 1):
            return tensor
        tensor = source


class _Current:
    """Adds and weighs for Keras, in a trace or in that of a loop in it."""

    def __init__(self, tracing: WholeBatch):
        self._tracing = tracing

    def varies(self, value: Any) -> bool:
        return self._tracing.current().varies(value)

    def total(self, value: Any) -> Any:
        return self._tracing.current().total(value)

    def fraction(self) -> tf.Tensor:
        return self._tracing.current().fraction()


class ContinuedWholeBatch(_tracing.Continuation, WholeBatch):
    """One turn of a loop in the replica function, of all micro-batches."""

    def __init__(self, *args: Any, continues: Any, **options: Any):
        super().__init__(*args, continues=continues, **options)
        self.weight = continues.weight


class WholeBatchContext(_context.SymbolicReplicaContext):
    """The one replica's context."""

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """On one replica an all-reduce changes nothing. Here the replica's value is that of the whole batch: of sums the sum
        over the micro-batches, of means the mean weighted by rows."""
        whole: Any = self.tracing
        for part in tf.nest.flatten(value) if whole.turns.most > 1 else ():
            if isinstance(part, tf.Tensor) and not part.shape.is_fully_defined() and whole.varies(part):
                raise _errors.reduce_of_rows(whole.function_name, part.shape)
        return super().all_reduce(reduce_op, value, options)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """The rows of all micro-batches, i.e. of the whole batch; differentiable."""
        del options
        return tf.nest.map_structure(lambda part: self._gather(part, axis), value)

    def _gather(self, value: Any, axis: int) -> Any:
        whole: Any = self.tracing
        if isinstance(value, tf.IndexedSlices):
            raise _errors.gather_slices()
        value = tf.convert_to_tensor(value)
        if not whole.varies(value):
            return value

        @tf.custom_gradient
        def gather(part: tf.Tensor) -> Any:
            own = tf.shape(part)[:1]
            gathered = whole.gather(part, axis)

            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                lengths = whole.collect(_tracing.Collective("concat"), own)
                lengths.set_shape([None])
                start = tf.reduce_sum(lengths[: whole.turn])
                if whole.around is not None:
                    of_replicas = whole.gather(tf.reduce_sum(lengths)[tf.newaxis], 0)
                    of_replicas.set_shape([None])
                    start += tf.reduce_sum(of_replicas[: whole.replica_id])
                meeting = _tracing.Collective("sum", between_replicas=whole.around is not None)
                return whole.gradient_of_sum(meeting, upstream)[start : start + own[0]]

            return gathered, gradient

        return gather(value)


def set_weight(weight: Any) -> None:
    """Says what this micro-batch weighs, for a loss that is not a mean over rows.

    Under `microstrat.scope(micro_batches=n)`, the whole batch's gradient is the mean of its micro-batches' gradients,
    weighted by their rows. That is right for a loss that is a mean over rows. A loss that is divided by something else, a
    number of tokens say, must say so:

        def train_step(x, y):
            mask = tf.cast(y != 0, tf.float32)
            microstrat.set_weight(tf.reduce_sum(mask))
            with tf.GradientTape() as tape:
                loss = tf.math.divide_no_nan(tf.reduce_sum(mask * token_losses(y, model(x))), tf.reduce_sum(mask))
            ...

    (`divide_no_nan`, since a micro-batch may have no token at all: 0/0 would make the whole gradient NaN.)

    It also weighs what the function returns, when `strategy.reduce("MEAN", ...)` averages it. Keras' own masked losses
    and `reduction="mean_with_sample_weight"` need no weight: they are taken care of.

    On one device without a strategy, and outside tf.function, the batch is whole and this does nothing.

    Args:
      weight: the denominator of this micro-batch's loss; a scalar, of any numeric dtype. Call it before the gradient.

    Raises:
      ValueError: if `weight` is not a scalar.
      RuntimeError: if something has been weighted by rows already, or in a replica function of several replicas without
        micro-batches (`replicas=N` alone), where the code scales its loss itself.
    """
    tracing = _tracing.current_tracing()
    if isinstance(tracing, WholeBatch):
        tracing.set_weight(weight)
        return
    context = tf.distribute.get_replica_context()
    if isinstance(context, _context.ReplicaContext) and context.num_replicas_in_sync > 1:
        if context.strategy.extended.micro_batches == 1:
            raise _errors.weight_for_replicas()
