"""The eager engine: one thread per virtual replica, one of them running at a time.

For `strategy.run` outside any tf.function: debugging with `.numpy()`, prints and pdb. It is also the reference that the
looped engine is tested against. A replica runs until it meets a collective; when all have, the collective is computed,
and they go on, replica 0 first. Sums take in each replica's contribution as it arrives.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from microstrat import _arguments, _context, _errors, _tf, _trace, _tracing, _values


class _Abandoned(BaseException):
    """Ends a replica's thread after another replica failed; never seen by the user."""


class EagerReplicaContext(_context.ReplicaContext):
    """The context of one replica that runs for itself."""

    def __init__(self, strategy: tf.distribute.Strategy, replica_id: int, replica: _Replica | None):
        self._id = strategy.extended._get_replica_id_in_sync_group(replica_id)  # noqa: SLF001 - this package's own class
        super().__init__(strategy, replica_id_in_sync_group=self._id)
        self._number = replica_id
        self._replica = replica

    def _graph(self) -> Any:
        return None

    def _own_id(self) -> tf.Tensor:
        return tf.constant(self._id)

    def _own_row(self) -> tf.Tensor:
        return tf.constant(self._number)

    def will_use_handle(self, variable: Any) -> None:
        """Notes that the replica may write `variable` through its handle."""
        if self._replica is not None:
            self._replica.registers.touch(variable, self.strategy.extended.replicas_here, self._number)

    def _meet(self, request: _Request) -> Any:
        if not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            name = self._replica.function_name if self._replica is not None else "?"
            raise _errors.collective_in_function(request.kind, name, graph.name)
        if self._replica is None:
            return request.alone(self.strategy)
        return self._replica.pause(request)

    def _reduce_flat(self, reduce_op: tf.distribute.ReduceOp, flat: list[Any]) -> list[Any]:
        return self._meet(_Reduce(reduce_op, flat))

    def _merge_call(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return self._meet(_Merge(merge_fn, tuple(args), dict(kwargs)))


class _Registers:
    """Variables that replicas write through their handle: each replica finds there what it left.

    A tf.random.Generator advances its state variable by handle. One variable serves all replicas, so its value is swapped
    when another replica's turn comes, as a processor swaps registers between threads.
    """

    def __init__(self) -> None:
        self._variables: list[Any] = []
        self._initial: list[list[tf.Tensor]] = []
        self._left: list[dict[int, tf.Tensor]] = []

    def touch(self, variable: Any, num_replicas: int, replica: int) -> None:
        """Called before a replica's first use of a variable's handle."""
        if any(known is variable for known in self._variables):
            return
        if variable.rows is None:
            initial = [variable.primary.read_value()] * num_replicas
        else:
            initial = list(tf.unstack(variable.rows.read_value(), num=num_replicas))
        self._variables.append(variable)
        self._initial.append(initial)
        self._left.append({})
        variable.primary.assign(initial[replica])

    def load(self, replica: int) -> None:
        for variable, initial, left in zip(self._variables, self._initial, self._left, strict=True):
            variable.primary.assign(left.get(replica, initial[replica]))

    def save(self, replica: int) -> None:
        for variable, left in zip(self._variables, self._left, strict=True):
            left[replica] = variable.primary.read_value()

    def finish(self) -> None:
        """Leaves replica 0's value in the variable, and every replica's in its rows if they differ."""
        for variable, initial, left in zip(self._variables, self._initial, self._left, strict=True):
            values = [left.get(replica, start) for replica, start in enumerate(initial)]
            variable.primary.assign(values[0])
            if variable.rows is None and all(bool(tf.reduce_all(value == values[0])) for value in values):
                continue
            variable.assign_rows(tf.stack(values))


class _Request:
    """What a replica waits for."""

    kind: str

    def alone(self, strategy: tf.distribute.Strategy) -> Any:
        """The answer when there is a single replica."""
        raise NotImplementedError


class _Reduce(_Request):
    kind = "all_reduce"

    def __init__(self, reduce_op: tf.distribute.ReduceOp, flat: list[Any]):
        self.reduce_op = reduce_op
        self.flat = flat

    def alone(self, strategy: tf.distribute.Strategy) -> Any:
        return self.flat


class _Merge(_Request):
    kind = "merge_call"

    def __init__(self, merge_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.merge_fn = merge_fn
        self.args = args
        self.kwargs = kwargs

    def alone(self, strategy: tf.distribute.Strategy) -> Any:
        with _tf.cross_replica_context(strategy), _tf.stop_recording():
            return self.merge_fn(strategy, *self.args, **self.kwargs)


class _Replica(threading.Thread):
    """One virtual replica: runs when `proceed` is called, until it pauses at a collective or ends."""

    def __init__(
        self, strategy: Any, number: int, fn: Any, args: Any, kwargs: Any, device: str, made: list[Any], registers: Any
    ):
        super().__init__(name=f"microstrat-replica-{number}", daemon=True)
        self.function_name = _trace.name_of(fn)
        self.request: _Request | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = False
        self._strategy, self._number, self._device = strategy, number, device
        self._call = lambda: fn(*args, **kwargs)
        self._made = made
        self.registers = registers
        self._go = threading.Semaphore(0)
        self._paused = threading.Semaphore(0)
        self._answer: Any = None
        self._abandon = False
        self._inherit()

    def _inherit(self) -> None:
        """Notes what TensorFlow keeps per thread."""
        self._summary = dict(vars(_tf.summary_state()))
        self._callbacks = _tf.eager_op_callbacks().op_callbacks
        self._creators = _tf.variable_creators()

    @contextlib.contextmanager
    def _inherited(self) -> Any:
        vars(_tf.summary_state()).update(self._summary)
        _tf.eager_op_callbacks().op_callbacks = self._callbacks
        with contextlib.ExitStack() as stack:
            stack.enter_context(_tf.with_variable_creators(self._creators))
            stack.enter_context(_tracing.keras_of_replicas(self._strategy, self.function_name))
            if self._strategy.extended.draws_independently:
                number, replicas = self._number, self._strategy.num_replicas_in_sync
                stack.enter_context(_tf.hooked_keys(lambda key: _tf.key_for(key, number, replicas)))
            yield

    def run(self) -> None:
        self._go.acquire()
        try:
            if self._abandon:
                return
            context = EagerReplicaContext(self._strategy, self._number, self)
            with (
                self._inherited(),
                context,
                tf.device(self._device),
                _tf.variable_creator_scope(_share_variables(self._made, self._number)),
            ):
                self.result = self._call()
        except _Abandoned:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.done = True
            self._paused.release()

    def proceed(self, answer: Any = None) -> None:
        """Lets the replica run until it pauses or ends."""
        self._answer = answer
        self.request = None
        self.registers.load(self._number)
        self._go.release()
        self._paused.acquire()
        self.registers.save(self._number)

    def abandon(self) -> None:
        if not self.done:
            self._abandon = True
            self.proceed()

    def pause(self, request: _Request) -> Any:
        """Called by the replica itself: waits for the answer to `request`."""
        self.request = request
        self._paused.release()
        self._go.acquire()
        if self._abandon:
            raise _Abandoned
        return self._answer


def _share_variables(made: list[Any], number: int) -> Callable[..., Any]:
    """A variable that replicas create in their function is one variable: replica 0 makes it, the others get it."""
    position = 0

    def creator(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        nonlocal position
        if number == 0:
            made.append(next_creator(**kwargs))
        elif position >= len(made):
            raise _errors.different_number_of_variables(number, kwargs.get("name"))
        position += 1
        return made[position - 1]

    return creator


def run(strategy: Any, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs `fn` for every replica of this process and returns the regrouped results."""
    extended = strategy.extended
    if strategy.num_replicas_in_sync == 1:
        with EagerReplicaContext(strategy, 0, None), tf.device(extended.device_of(0)):
            return fn(*_values.select_replica(tuple(args), 0), **_values.select_replica(kwargs, 0))
    turns = _arguments.turns((tuple(args), kwargs), extended.replicas_here)
    number = int(turns.running)
    made: list[Any] = []
    registers = _Registers()
    replicas = [
        _Replica(
            strategy,
            replica,
            fn,
            _values.select_replica(tuple(args), replica),
            _values.select_replica(kwargs, replica),
            extended.device_of(replica),
            made,
            registers,
        )
        for replica in range(number)
    ]
    for replica in replicas:
        replica.start()
    try:
        _drive(strategy, replicas)
    finally:
        for replica in replicas:
            replica.abandon()
            replica.join()
    registers.finish()
    for variable in extended.local_variables():
        variable.follow_replica_0()
    rows = [] if turns.rows is None else [int(turns.rows_of_turn(tf.constant(replica))) for replica in range(number)]
    return _values.regroup([replica.result for replica in replicas], number=extended.replicas_here, rows=rows)


def _drive(strategy: Any, replicas: list[_Replica]) -> None:
    answers: list[Any] = [None] * len(replicas)
    while True:
        total: _Sum | None = None
        for index, replica in enumerate(replicas):
            replica.proceed(answers[index])
            answers[index] = None
            if replica.error is not None:
                raise replica.error
            if isinstance(replica.request, _Reduce):
                total = total or _Sum(replica.request)
                total.add(replica.request)
        if all(replica.done for replica in replicas):
            return
        if any(replica.done for replica in replicas):
            finished = [index for index, replica in enumerate(replicas) if replica.done]
            waiting = [index for index, replica in enumerate(replicas) if not replica.done]
            raise _errors.different_number_of_collectives(finished, waiting)
        requests = [replica.request for replica in replicas]
        if len({request.kind for request in requests if request is not None}) > 1:
            raise _errors.different_collectives([request.kind for request in requests if request is not None])
        if total is not None:
            result = total.result(strategy, len(replicas))
            answers = [_own_copy(result) for _ in replicas]
        else:
            answers = _merge(strategy, requests)


class _Sum:
    """An all-reduce that takes in one replica after the other."""

    def __init__(self, first: _Reduce):
        self._reduce_op = first.reduce_op
        self._total: list[Any] | None = None
        # What all replicas have given so far, if it is the very same tensor.
        self._shared: list[Any] = list(first.flat)

    def add(self, request: _Reduce) -> None:
        flat = request.flat
        request.flat = []
        if self._total is None:
            self._total = [[part] if isinstance(part, tf.IndexedSlices) else part for part in flat]
            return
        self._shared = [known if known is part else None for known, part in zip(self._shared, flat, strict=True)]
        for index, part in enumerate(flat):
            if isinstance(part, tf.IndexedSlices):
                self._total[index].append(part)
            else:
                self._total[index] = self._total[index] + part

    def result(self, strategy: Any, num_replicas: int) -> list[Any]:
        assert self._total is not None
        return [
            _context.reduce_shared(strategy, self._reduce_op, shared)
            if isinstance(shared, tf.Tensor) and num_replicas > 1
            else self._divided(_values.add_values(part) if isinstance(part, list) else part, num_replicas)
            for part, shared in zip(self._total, self._shared, strict=True)
        ]

    def _divided(self, total: Any, num_replicas: int) -> Any:
        return (
            _values.divide_by_replicas(total, num_replicas) if self._reduce_op == tf.distribute.ReduceOp.MEAN else total
        )


def _merge(strategy: Any, requests: Sequence[Any]) -> list[Any]:
    args = _values.regroup([request.args for request in requests])
    kwargs = _values.regroup([request.kwargs for request in requests])
    result = requests[0].merge_fn(strategy, *args, **kwargs)
    return [_own_copy(_values.select_replica(result, replica)) for replica in range(len(requests))]


def _own_copy(structure: Any) -> Any:
    """The same values as tensors of one replica: what all replicas share by identity is not a per-replica value."""

    def copy(value: Any) -> Any:
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(tf.identity(value.values), value.indices, value.dense_shape)
        return tf.identity(value) if isinstance(value, tf.Tensor) else value

    return tf.nest.map_structure(copy, structure)
