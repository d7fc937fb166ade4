"""The state of a trace while a replica function runs in it: its graph, its collectives, what varies between replicas."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import tensorflow as tf

from microstrat import _context, _errors, _keras, _kinds, _lift, _real, _rows, _tf, _values

_thread = threading.local()
ALONE = _real.Real(("",))
"""Wherever it is traced for."""


def current_tracing() -> Tracing | None:
    """The trace that is being made on this thread, if any."""
    stack = getattr(_thread, "tracings", None)
    return stack[-1] if stack else None


@dataclass(frozen=True, slots=True)
class Collective:
    """What a marker operation stands for.

    Attributes:
      kind: "sum", "max", "min", "concat" (along `axis`, replica 0 first) or "first" (replica 0's value).
      axis: for "concat".
      between_replicas: whether it is over the replicas around a loop over the micro-batches of one.
    """

    kind: str
    axis: int = 0
    between_replicas: bool = False


class Tracing:
    """One run of a replica function on behalf of all replicas.

    Attributes:
      graph: the FuncGraph it runs in.
      outer: the graph that the result goes to.
      turns: how often the loop goes round, on all devices together.
      turn: int32 scalar placeholder, which time it is, on its device.
      before: int32 scalar placeholder, how many turns the devices before have; None if there is one device.
      part: int32 scalar, which turn it is of all.
      replica_id: int32 scalar, the id of the replica whose turn it is.
      row: int32 scalar, its row of a variable with a value per replica, among those on its device.
      real: the devices.
      collectives: marker operation -> what it stands for. A marker passes its input through, so that the trace stays an
        ordinary graph; the lowering replaces it.
      cuts: operations that cut a replica's share out of an argument; cheap, so repeated rather than kept.
      around: the trace of all replicas that this one of one replica's micro-batches is part of, if any.
      outermost: the graph outside all traces.
      inline: whether nested tf.functions run inline (they hold a collective).
      lent: id of a handle that holds a replica's value of a variable -> that variable.
      lending: operations that put it there, and that change it and give it back.
      lifted: markers of collectives that stood in a branch, and were lifted out of it.
      continues: the trace whose loop this one is a turn of, if it is one.
      run_loop: runs a tf.while_loop that holds a collective: see `_loops.run`.
      unfolded: which loops of the replica function, in the order it makes them, are known to.
      loops: the others' operations -> their numbers.
      functions: the tf.functions whose traces this one becomes part of.
      assumptions: lists of what those assume of variables (see `VirtualMirroredVariable`), this trace among others.
      restart: why the trace must start again, if it must.
      draws_per_turn: whether random draws, prints and the like happen every turn, whatever they depend on.
      rows_per_turn: whether each turn has its own row of a variable with a value per replica.
      listed: which results count as values of their own, see `_values.PerReplica`.
    """

    draws_per_turn = True
    rows_per_turn = True
    listed = "all"
    continues: Tracing | None = None

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        function_name: str,
        outer: tf.Graph,
        *,
        turns: _rows.Turns,
        inline: bool,
        run_loop: Callable[..., Any],
        unfolded: frozenset[int] = frozenset(),
        around: Tracing | None = None,
        real: _real.Real = ALONE,
    ):
        self.strategy = strategy
        self.real = real
        self.run_loop = run_loop
        self.unfolded = unfolded
        self._loops = 0
        self._loops_inside: list[int] = []
        self.loops: dict[tf.Operation, int] = {}
        self.turns = turns
        self.function_name = function_name
        self.outer = outer
        self.around = around
        self.outermost: tf.Graph = outer if around is None else around.outermost
        self.inline = inline
        # Names of operations and functions allow fewer characters than Python's, and none for a lambda.
        self.graph_name = re.sub(r"\W", "", function_name).lstrip("_") or "replica_function"
        self.graph = _tf.replica_graph(self.graph_name)
        self.collectives: dict[tf.Operation, Collective] = {}
        self.cuts: set[tf.Operation] = set()
        self.lent: dict[int, Any] = {}
        self.lending: set[tf.Operation] = set()
        self.lifted: set[tf.Operation] = set()
        self.kinds = _kinds.Kinds(self.graph)
        self.functions = _tf.functions_being_traced()
        self.assumptions: list[list[Any]] = []
        self._varies: dict[tf.Operation, bool] = {}
        self._running: tf.Tensor | None = None
        self._each: set[Any] = set()
        self._common: set[Any] = set()
        self.restart: str | None = None
        self.redirected: list[tuple[tf.Tensor, tf.Tensor]] = []
        with self.graph.as_default():
            self.turn = tf.compat.v1.placeholder(tf.int32, [], name="turn")
            self.before = tf.compat.v1.placeholder(tf.int32, [], name="before") if len(real.devices) > 1 else None
            self.part = self.turn if self.before is None else self.turn + self.before
            self.replica_id = self._replica_id()
            self.row = self._row()

    def __enter__(self) -> Tracing:
        if not hasattr(_thread, "tracings"):
            _thread.tracings = []
        _thread.tracings.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _thread.tracings.pop()

    @property
    def num_replicas(self) -> int:
        return self.strategy.num_replicas_in_sync

    @property
    def root(self) -> Tracing:
        """The trace that this one is, or is part of."""
        tracing: Tracing = self
        while (outer := tracing.around or tracing.continues) is not None:
            tracing = outer
        return tracing

    @property
    def laps(self) -> int:
        """How often the loop goes round on one device, at most."""
        return self.turns.most // len(self.real.devices)

    @property
    def single(self) -> bool:
        """Whether there is one turn in all."""
        return self.turns.most == 1 and self.real.workers == 1

    def _replica_id(self) -> tf.Tensor:
        return self.part + self.real.worker * self.turns.most if self.real.worker else self.part

    def _row(self) -> tf.Tensor:
        return self.turn

    @contextlib.contextmanager
    def in_cross_replica_context(self) -> Iterator[None]:
        """Notes the operations that are made as cross-replica context's: what they draw or print is once for all."""
        here: Any = tf.compat.v1.get_default_graph()
        before = len(here.get_operations())
        self.graph.cross_replica_depth += 1
        try:
            yield
        finally:
            self.graph.cross_replica_depth -= 1
        if here is not self.graph:  # a branch or loop in it
            self.graph.cross_replica_ops.update(itertools.islice(here.get_operations(), before, None))

    def continuation(self, function_name: str, outer: tf.Graph, **options: Any) -> Tracing:
        """The trace of one turn of a loop in the replica function."""
        return Continuation(
            self.strategy,
            function_name,
            outer,
            turns=self.turns,
            run_loop=self.run_loop,
            around=self.around,
            continues=self,
            **options,
        )

    def current(self) -> Any:
        """The trace that is being made of a loop in this one; this one itself if none is."""
        for tracing in reversed(getattr(_thread, "tracings", [])):
            ancestor = tracing
            while ancestor is not None and ancestor is not self:
                ancestor = ancestor.continues
            if ancestor is self:
                return tracing
        return self

    def context(self) -> _context.SymbolicReplicaContext:
        """The replica context that the replica function runs in."""
        return _context.SymbolicReplicaContext(self)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """What else must be in force while the replica function runs."""
        with contextlib.ExitStack() as stack:
            if not self.single:
                stack.enter_context(keras_of_replicas(self.strategy, self.function_name))
                stack.enter_context(_tf.hooked_loops(self._loop))
                stack.enter_context(_tf.hooked_generators(_take_back))
            if self.strategy.extended.draws_independently:
                stack.enter_context(_tf.hooked_operations(lambda draw: self.current().own_draws(draw)))
            yield

    def _loop(self, stock: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """In place of a loop: the loop as it is, if it holds no collective."""
        tracing = self.current()
        if tracing is not current_tracing() or _context.enclosing_function(
            tf.compat.v1.get_default_graph(), tracing.graph
        ):
            return stock(*args, **options)
        return tracing._next_loop(stock, args, options)  # noqa: SLF001 - another trace of this class

    def _next_loop(self, stock: Callable[..., Any], args: Any, options: Any) -> Any:
        number = self._loops
        self._loops += 1
        if number in self.unfolded:
            return self.run_loop(self, stock, *args, **options)
        self._loops_inside.append(number)
        graph: Any = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        try:
            results = stock(*args, **options)
        finally:
            self._loops_inside.pop()
        self.loops |= {op: number for op in graph.get_operations()[before:] if op.type in _kinds.LOOPS}
        return results

    def own_draws(self, draw: _tf.StatelessDraw) -> tf.Tensor | None:
        """Gives each replica a key of its own for a random draw that all would do alike."""
        return None if self.varies(draw.key) else draw.key_for(_context.live_replica_id(), self.num_replicas)

    def result_weights(self) -> tf.Tensor | None:
        """Float64 [most], what the results of each turn weigh in a mean, if the replica function has said so."""

    def weights_of_turns(self) -> tf.Tensor | None:
        """Float64 [most], what the results of each turn weigh in a mean otherwise; None if all the same."""
        return self.turns.happen()

    def concatenated(self, flat: tf.Tensor, lengths: tf.Tensor) -> _values.PerReplica:
        """Returned values of different lengths, joined."""
        return _values.Concatenated(self.turns.most, flat, lengths)

    def returned(self, value: Any) -> Any:
        """A value that the replica function returns, as the trace is to return it."""
        return value

    def present(self, result: Any) -> Any:
        """A returned value as whoever called `run` sees it."""
        return result.value if isinstance(result, _values.Uniform) and self.single else result

    def writes_in_order(self, op: tf.Operation, owner: Any) -> bool:
        """Whether turns write a resource one after another, each seeing what those before it left there.

        Args:
          op: the operation that writes.
          owner: the strategy's variable that it writes, or None if the resource is somebody else's.
        """
        del op
        return owner is None

    def uniform_result(self, collective: Collective, value: tf.Tensor) -> tf.Tensor:
        """The result of a collective over a value that is the same in all turns."""
        if self.single or collective.kind in ("first", "max", "min"):
            return value
        if collective.kind == "sum":
            return self.uniform_sum(value)
        running = self.running_replicas
        if isinstance(running, int):
            return tf.concat([value] * running, collective.axis)
        rank = value.shape.rank
        copies = [running if dim == collective.axis % rank else 1 for dim in range(rank)]
        return tf.tile(value, copies)

    def uniform_sum(self, value: tf.Tensor) -> tf.Tensor:
        """The sum over all turns of a value that is the same in all."""
        return value * tf.cast(self.running_replicas, value.dtype)

    def collect(self, collective: Collective, tensor: tf.Tensor) -> tf.Tensor:
        """Leaves a marker that stands for a collective over `tensor`, and returns its result."""
        tensor = self._source(collective, tensor)
        shape = tensor.shape
        if collective.kind == "concat" and shape.rank is not None:
            dims = shape.as_list()
            dims[collective.axis] = None
            shape = tf.TensorShape(dims)
        elif collective.kind == "concat":
            shape = _tf.unknown_shape()
        with tensor.graph.as_default(), tf.control_dependencies(None), _tf.stop_recording():
            # Unlike an Identity, this op may have a wider static shape than its input.
            marker = tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape, name="collective")
        self.collectives[marker.op] = collective
        if tensor.graph is not tf.compat.v1.get_default_graph():
            self.lifted.add(marker.op)
        if collective.kind == "sum":
            _tf.set_gradient(marker, tensor, lambda gradient: self.current().gradient_of_sum(collective, gradient))
        return marker

    def collect_replicas(self, kind: str, tensor: tf.Tensor, axis: int = 0) -> tf.Tensor:
        """The result of a collective over the replicas."""
        return self.collect(Collective(kind, axis), tensor)

    @property
    def running_replicas(self) -> Any:
        """How many replicas have any rows, and run."""
        running = self.turns.running
        return running * self.real.workers if isinstance(running, int) else self._running_of_workers(running)

    def _running_of_workers(self, running: tf.Tensor) -> tf.Tensor:
        if self.real.workers == 1:
            return running
        total = self._running
        if total is None:
            with self.outer.as_default(), tf.control_dependencies(None), _tf.stop_recording():
                total = self._running = self.real.sum_of_workers(tf.convert_to_tensor(running))
        return total

    def reduce(self, reduce_op: tf.distribute.ReduceOp, value: Any) -> Any:
        """Sum or mean over the replicas of a tensor or IndexedSlices of this trace; slices stay slices."""
        if isinstance(value, tf.IndexedSlices):
            total: Any = tf.IndexedSlices(
                self.collect_replicas("concat", value.values),
                self.collect_replicas("concat", value.indices),
                value.dense_shape,
            )
        else:
            total = self.collect_replicas("sum", tf.convert_to_tensor(value))
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            return _values.divide_by_replicas(total, self.running_replicas)
        return total

    def gradient_of_sum(self, collective: Collective, gradient: tf.Tensor) -> tf.Tensor:
        """The gradient of a sum over replicas: the sum of their gradients."""
        return self.collect(collective, gradient)

    def first(self, value: Any) -> Any:
        """Replica 0's value."""
        return tf.nest.map_structure(
            lambda tensor: self.collect_replicas("first", tf.convert_to_tensor(tensor)),
            value,
            expand_composites=True,
        )

    def gather(self, value: tf.Tensor, axis: int) -> tf.Tensor:
        """All replicas' values, concatenated along `axis`, replica 0 first."""
        return self.collect_replicas("concat", value, axis)

    def note_each(self, result: Any) -> Any:
        """Notes tensors of which tf.distribute gives each replica its own, equal ones: a reduced value, say."""
        self._each |= {tensor.ref() for tensor in tf.nest.flatten(result) if isinstance(tensor, tf.Tensor)}
        return result

    def note_common(self, result: Any) -> None:
        """Notes tensors that a merge function hands to all replicas: one value, and not one for each of them."""
        found = {tensor.ref() for tensor in tf.nest.flatten(result) if isinstance(tensor, tf.Tensor)}
        self._common |= found - self._each

    def is_common(self, value: Any) -> bool:
        """Whether a value is one tensor that a merge function has handed to all replicas."""
        return isinstance(value, tf.Tensor) and value.ref() in self._common

    def combine_write(self, variable: Any, method: str, value: Any) -> Any:
        """What `variable.method(value)` in the replica function is to assign."""
        del variable, method
        return value

    def all_values(self, value: Any) -> tuple[Any, ...]:
        """The values that one value of the trace has in this process' replicas."""
        here = slice(self.real.worker * self.turns.most, (self.real.worker + 1) * self.turns.most)
        parts = [self._all_tensors(tensor)[here] for tensor in tf.nest.flatten(value, expand_composites=True)]
        return tuple(
            tf.nest.pack_sequence_as(value, list(replica), expand_composites=True)
            for replica in zip(*parts, strict=True)
        )

    def _all_tensors(self, tensor: tf.Tensor) -> tuple[tf.Tensor, ...]:
        if tensor.shape.is_fully_defined():
            # The marker's static shape is its input's; a leading axis makes room for N.
            stacked = self.collect_replicas("concat", tensor[tf.newaxis])
            stacked.set_shape([self.num_replicas, *tensor.shape])
            return tuple(tf.unstack(stacked, num=self.num_replicas))
        if tensor.shape.rank:
            flat = self.collect_replicas("concat", tensor)
            lengths = self.collect_replicas("concat", tf.shape(tensor)[:1])
            lengths.set_shape([self.num_replicas])
            return tuple(tf.split(flat, lengths, num=self.num_replicas))
        raise _errors.local_results_of_unknown_rank(tensor.name)

    def discard(self) -> None:
        """Takes back what the trace has assumed: another takes its place."""
        for assumptions in self.assumptions:
            assumptions[:] = [(trace, wrote) for trace, wrote in assumptions if trace is None or trace() is not self]

    def refuse_nested_function(self) -> None:
        """A nested tf.function that holds a collective is traced again, inline."""
        graph = tf.compat.v1.get_default_graph()
        if _context.enclosing_function(graph, self.graph) is not None:
            self._restart("inline")

    def _out_of_branches(self, kind: str, tensor: tf.Tensor) -> tf.Tensor:
        """A tensor that a collective needs, computed outside the branches and loops it stands in."""
        try:
            return _lift.lift(tensor, self.graph)
        except _lift.CannotLift as reason:
            raise _errors.collective_in_loop(kind, self.function_name, str(reason)) from None

    def _source(self, collective: Collective, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor that a collective is over, in the trace if it can be, else in the branch that it stands in.

        In a branch stays what is not worth doing in vain. Out of a loop a collective must come.
        """
        self.refuse_nested_function()
        graph: Any = tf.compat.v1.get_default_graph()
        if tensor.graph is not graph:
            tensor = tf.identity(tensor)
        looping = _tf.in_loop(graph, self.graph)
        if collective.between_replicas and (looping or self.continues is not None):
            reason = "replicas that cut their batches in micro-batches cannot meet there"
            raise _errors.collective_in_loop(collective.kind, self.function_name, reason)
        if graph is self.graph or (self.single and not collective.between_replicas):
            return tensor
        try:
            return _lift.lift(tensor, self.graph, with_work=looping)
        except _lift.CannotLift as reason:
            if not looping:
                return tensor
            if not self._loops_inside or not self.real.alone:
                raise _errors.collective_in_loop(collective.kind, self.function_name, str(reason)) from None
            self.unfolded |= {self._loops_inside[0]}
            self._restart("loop")

    def _restart(self, reason: str) -> NoReturn:
        """Gives up this trace. The tracer sees `restart`: AutoGraph would not let a type of our own through."""
        self.restart = reason
        raise RuntimeError(f"internal: the trace of {self.function_name!r} starts again ({reason})")

    def symbolic(self, value: Any) -> Any:
        """What a merge function sees of an argument."""
        if isinstance(value, tf.Tensor | tf.IndexedSlices | tf.SparseTensor | tf.RaggedTensor) and not self.shares(
            value
        ):
            return _values.Symbolic(self.turns.most, value, self.all_values)
        return value

    def values_of_turns(self, tensor: tf.Tensor) -> _values.PerReplica:
        """The values of `tensor` in all turns, where they are the same for all."""
        most = self.turns.most

        def all_of(part: tf.Tensor) -> tf.Tensor:
            found = self.collect(Collective("concat"), part[tf.newaxis])
            if self.turns.happen() is not None:  # turns that never run have zeros
                found = tf.concat([found, tf.zeros([most - tf.shape(found)[0], *part.shape], part.dtype)], 0)
            return tf.ensure_shape(found, [most, *part.shape])

        if tensor.shape.is_fully_defined():
            return _values.Stacked(most, all_of(tensor))
        if not tensor.shape.rank or tensor.dtype in (tf.variant, tf.resource):
            raise _errors.loop_variable(self.function_name, tensor.dtype.name, tensor.shape)
        lengths = all_of(tf.shape(tensor, tf.int64)[0])
        return _values.Concatenated(most, self.collect(Collective("concat"), tensor), lengths)

    def shares(self, value: Any) -> bool:
        """Whether `value` is a tensor made outside the replica function: not a value of each of N replicas, but one."""
        if self.num_replicas == 1 or not isinstance(value, tf.Tensor):
            return False
        if self.is_common(value):
            return True
        first = self
        while first.continues is not None:
            first = first.continues
        replica_function = first.graph if first.around is None else first.around.graph
        while _tf.is_inside(getattr(value, "graph", None), replica_function):
            if value.op.type not in ("Placeholder", "Const"):  # a capture may be either
                return False
            value = _tf.captured(value)
            if value is None:
                return False
        return True

    def varies(self, value: Any) -> bool:
        """Whether a value may differ between replicas, as far as the trace tells by now.

        Inside a nested tf.function nothing is known of its arguments, so everything there may.
        """
        if not isinstance(value, tf.Tensor):
            parts = tf.nest.flatten(value, expand_composites=True)
            return any(part is not value and self.varies(part) for part in parts)
        if not hasattr(value, "graph"):
            return False
        value = unwrapped(value)
        if _tf.is_inside(value.graph, self.graph) and _context.enclosing_function(value.graph, self.graph) is not None:
            return True
        return self.operation_varies(value.op)

    def operation_varies(self, operation: tf.Operation) -> bool:
        stack = [operation]
        while stack:
            op = stack[-1]
            if op in self._varies:
                stack.pop()
                continue
            sources = self._sources_of(op)
            unknown = [source for source in sources if source not in self._varies]
            if unknown and not self._varies_itself(op):
                stack.extend(unknown)
                continue
            self._varies[op] = self._varies_itself(op) or any(self._varies[source] for source in sources)
            stack.pop()
        return self._varies[operation]

    def _varies_itself(self, op: tf.Operation) -> bool:
        if self.is_mark(op):
            return True
        if not _tf.is_inside(op.graph, self.graph):
            return self._varies_outside(op)
        return self.draws_per_turn and self.kinds.has_own_state(op) and op not in self.graph.cross_replica_ops

    def is_mark(self, op: tf.Operation) -> bool:
        """Whether an operation tells a turn from others."""
        return op is self.turn.op or (self.before is not None and op is self.before.op)

    def _varies_outside(self, op: tf.Operation) -> bool:
        """Whether an operation of a graph further out gives what differs between replicas."""
        del op
        return False

    def _sources_of(self, op: tf.Operation) -> list[tf.Operation]:
        if op in self.collectives or not _tf.is_inside(op.graph, self.graph):
            return []
        if op.type in _kinds.BRANCHES:
            results = [tensor for graph in _tf.branch_graphs(op) for tensor in graph.outputs]
            return [op.inputs[0].op, *(unwrapped(tensor).op for tensor in results)]
        if op.graph is self.graph or op.type != "Placeholder":
            return [unwrapped(tensor).op for tensor in op.inputs if hasattr(tensor, "op")]
        # An argument of a branch or loop: captured from further out, or a loop variable, which may be anything.
        outer = next((outer for outer, inner in op.graph.captures if inner.op is op), self.turn)
        return [outer.op] if isinstance(getattr(outer, "graph", None), _tf.FuncGraph) else []

    def varies_between_replicas(self, value: Any) -> bool:
        """Whether a value may differ between replicas."""
        return self.varies(value)

    def adopt_local_state(self, primary: Any, read: Callable[[], tf.Tensor]) -> None:
        """Makes the reads so far of a variable that has just got a value per replica read that value."""
        graph: Any = tf.compat.v1.get_default_graph()
        while graph is not self.graph:  # a branch or loop that is being traced may have read it too
            if any(outer is primary.handle for outer, _ in graph.captures):
                self._restart("local state")
            graph = _tf.outer_graph(graph)
        placeholder = next((inner for outer, inner in graph.captures if outer is primary.handle), None)
        if placeholder is None:
            return
        if tf.compat.v1.get_default_graph() is not graph:
            self._restart("local state")
        replacement: tf.Tensor | None = None
        for op in placeholder.consumers():
            if op.type != "ReadVariableOp":
                self._restart("local state")
            if replacement is None:
                with graph.as_default(), tf.control_dependencies(None):
                    replacement = read()
            _tf.replace_tensor(op.outputs[0], replacement)
            self.redirected.append((op.outputs[0], replacement))


class Continuation(Tracing):
    """The trace of one turn of a tf.while_loop in the replica function of another trace.

    What differs between replicas outside is read as all their values, of which each picks its own.
    """

    continues: Tracing

    def __init__(self, *args: Any, continues: Tracing, place: Any, **options: Any):
        super().__init__(*args, **options)
        self.continues = continues
        self._place = place
        self._read_as: dict[tuple[tf.Operation, int], tf.Tensor] = {}
        self.graph.substitute = self._substitute

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        yield  # what the other trace has in force goes on

    def returned(self, value: Any) -> Any:
        # As it is, a value from outside would stand for one that all replicas have.
        return self.graph.capture(value) if isinstance(value, tf.Tensor) and hasattr(value, "graph") else value

    def present(self, result: Any) -> Any:
        return result

    def result_weights(self) -> tf.Tensor | None:
        return None

    def weights_of_turns(self) -> tf.Tensor | None:
        return None

    # Each turn's values are kept apart, whatever a subclass makes of them at the end.
    concatenated = Tracing.concatenated

    def _in_loop(self, graph: Any) -> bool:
        """Whether a graph is the loop's, where all replicas have the same values."""
        return graph is not self._place and _tf.is_inside(graph, self._place)

    def _varies_outside(self, op: tf.Operation) -> bool:
        return not self._in_loop(op.graph) and self.continues.operation_varies(op)

    def _substitute(self, tensor: tf.Tensor) -> tf.Tensor | None:
        outer = self.continues
        if tensor.dtype == tf.resource or self._in_loop(tensor.graph):
            return None
        if not _tf.is_inside(tensor.graph, outer.graph):
            with outer.graph.as_default():
                further = outer.graph.substitute(tensor)
            if further is None:
                return None
            tensor = further
        if not outer.varies(tensor):
            return None
        if tensor.op is outer.turn.op:
            return self.turn
        key = (tensor.op, tensor.value_index)
        if key not in self._read_as:
            with _tf.stop_recording():
                with self._place.as_default(), tf.control_dependencies(None):
                    values = outer.values_of_turns(tensor)
                with self.graph.as_default(), tf.control_dependencies(None):
                    self._read_as[key] = own = values.select(self.turn)
                    own.set_shape(tensor.shape)
        _tf.record_same(self._read_as[key], tensor)
        return self._read_as[key]

    def adopt_local_state(self, primary: Any, read: Callable[[], tf.Tensor]) -> None:
        super().adopt_local_state(primary, read)
        self.continues.adopt_local_state(primary, read)


def _take_back(handle: tf.Tensor, result: tf.Tensor) -> None:
    """After an operation on a handle that holds a replica's value of a variable: the replica keeps what it has become."""
    tracing = current_tracing()
    variable = None if tracing is None else tracing.lent.get(id(handle))
    if tracing is not None and variable is not None:
        tracing.lending.add(result.op)
        variable.take_back(result)


def unwrapped(tensor: tf.Tensor) -> tf.Tensor:
    """What tf.custom_gradient has put into one IdentityN with all its other results and arguments."""
    while tensor.op.type == "IdentityN":
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


@contextlib.contextmanager
def keras_of_replicas(strategy: Any, function_name: str) -> Iterator[None]:
    """What must be in force of Keras while a function of several replicas runs on this thread.

    Losses that are not scaled for several replicas are warned of.
    """

    def warn(loss: str) -> None:
        message = _errors.unscaled_loss(loss, function_name, strategy.num_replicas_in_sync)
        strategy.extended.announce(f"loss {loss}", message)

    with _keras.watched_losses(warn), _keras.accumulating_together():
        yield


def value_outside_trace(value: Any) -> Any:
    """An initial value of a variable, computed outside the trace it comes from."""
    tracing = current_tracing()
    if tracing is None or not isinstance(value, tf.Tensor) or getattr(value, "graph", None) is not tracing.graph:
        return value
    try:
        return _lift.lift(value, tracing.outermost, with_random=True)
    except _lift.CannotLift as reason:
        raise _errors.initial_value_in_trace(tracing.function_name, str(reason)) from None


@contextlib.contextmanager
def outside_trace() -> Iterator[None]:
    """Leaves the trace for the graph around it, where variables made by the first trace are initialised."""
    tracing = current_tracing()
    if tracing is None or tf.executing_eagerly() or tf.compat.v1.get_default_graph() is not tracing.graph:
        yield
        return
    with tracing.outermost.as_default():
        yield
