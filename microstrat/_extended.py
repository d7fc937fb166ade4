"""tf.distribute's hooks (StrategyExtended): thin delegation to the engines, variables and values."""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from microstrat import (
    _arguments,
    _context,
    _eager,
    _errors,
    _inputs,
    _keras,
    _loops,
    _real,
    _replay,
    _tf,
    _trace,
    _tracing,
    _values,
    _variables,
    _whole,
)

CHOICES = {"batch_norm_statistics": ("per_replica", "averaged"), "dropout_masks": ("mirrored", "independent")}
"""What may be chosen for what replicas keep apart; tf.distribute's own way first."""


def _has_one_replica(strategy: tf.distribute.Strategy) -> bool:
    """Whether a strategy of ours runs one replica's batch in micro-batches."""
    return isinstance(strategy.extended, MicroBatchExtended) and strategy.extended.reduces_axes_itself


def _written_everywhere(value: Any, replica: int) -> Any:
    """An argument of `update` on a replica's device: a variable with a value per replica is to be written for all there."""
    is_local = isinstance(value, _variables.VirtualMirroredVariable) and value.rows is not None
    return _variables.EveryReplicaView(value, replica) if is_local and _tracing.current_tracing() is None else value


class MicroBatchExtended(_tf.StrategyExtended):
    """Implementation of MicroBatchStrategy; see tf.distribute.StrategyExtended for what each hook means."""

    def __init__(
        self,
        container_strategy: Any,
        virtual_replicas: int,
        real: _real.Real,
        *,
        micro_batches: int,
        loss_reduction: str,
        batch_norm_statistics: str,
        dropout_masks: str,
    ):
        super().__init__(container_strategy)
        self.real = real
        self.replicas_here = virtual_replicas * len(real.devices)
        self.replicas_of_device = virtual_replicas
        self._number = virtual_replicas * real.number
        self.micro_batches = micro_batches
        self.loss_reduction = loss_reduction
        self.averages_batch_norm = batch_norm_statistics == "averaged"
        self.draws_independently = dropout_masks == "independent"
        self._announced: set[str] = set()
        self._device = real.devices[0]
        self._host = _tf.host_for_device(self._device)
        # Nested tf.functions are shared by all replicas of a device: they look their replica up when they run.
        self._retrace_functions_for_each_device = len(real.devices) > 1
        self._functions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._owners: dict[int, Any] = {}
        self._local: list[Any] = []

    # --- Running ------------------------------------------------------------------------------------------------------
    def _call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], compiled: bool = False
    ) -> Any:
        """`compiled`: whether XLA is to compile what each of several devices does."""
        strategy = self._container_strategy()
        tracing = _tracing.current_tracing()
        if tracing is not None and tracing.strategy is strategy:
            return self._call_in_merge_function(tracing, fn, args, kwargs)
        _keras.weigh_results(_values.is_weighted)
        if _tf.is_tf_function(fn):
            return self._around(fn)(*args, **kwargs)
        if tf.executing_eagerly():
            if self.micro_batches > 1:
                self.announce("eager", _errors.eager_batch_whole(_trace.name_of(fn)))
                args, kwargs = _arguments.whole_values((tuple(args), kwargs), self._number)
            return _eager.run(strategy, fn, args, kwargs)
        if self._number == 1:
            return self._run_micro_batches(fn, args, kwargs)
        if self.micro_batches > 1:
            fn = self._in_micro_batches(fn, (tuple(args), kwargs))
        for function in _tf.functions_being_traced() if len(self.real.devices) > 1 else ():
            if _tf.is_compiled_by_xla(function):
                raise _errors.compiled_around_devices(_trace.name_of(fn), function.name, len(self.real.devices))
        for value in tf.nest.flatten((tuple(args), kwargs)):
            if isinstance(value, _values.PerReplica) and value.num_replicas != self.replicas_here:
                raise _errors.values_of_other_strategy(_trace.name_of(fn), value.num_replicas, self.replicas_here)
        number = _arguments.turns((tuple(args), kwargs), self.replicas_here)
        make_tracing = functools.partial(
            _tracing.Tracing,
            strategy,
            turns=number,
            run_loop=self._run_loop,
            real=dataclasses.replace(self.real, compiled=compiled),
        )
        return _replay.run(strategy, make_tracing, fn, args, kwargs, self.real.scope)

    def _in_micro_batches(self, fn: Callable[..., Any], structure: Any) -> Callable[..., Any]:
        """`fn`, to be run by each replica on its part of `structure`, in micro-batches."""
        cut = [_arguments.is_batch(value) for value in tf.nest.flatten(structure)]

        @functools.wraps(fn, updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            flat = tf.nest.flatten((args, kwargs))
            if len(flat) == len(cut):
                flat = [
                    _values.MicroBatches(self.micro_batches, value) if is_batch else value
                    for value, is_batch in zip(flat, cut, strict=True)
                ]
                args, kwargs = tf.nest.pack_sequence_as((args, kwargs), flat)
            return self._run_micro_batches(fn, args, kwargs)

        return run

    def _run_micro_batches(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs `fn` on what one replica has, in micro-batches."""
        strategy = self._container_strategy()
        around = _tracing.current_tracing()
        even = around is not None and around.real.compiled
        even = even or _tf.compiling_by_xla()
        args, kwargs = _arguments.in_micro_batches((tuple(args), kwargs), self.micro_batches, even=even)
        number = _arguments.turns((args, kwargs), self.micro_batches, without_batch=1)
        make_tracing = functools.partial(
            _whole.WholeBatch,
            strategy,
            turns=number,
            run_loop=self._run_loop,
            loss_reduction=self.loss_reduction,
            around=around,
        )
        return _replay.run(strategy, make_tracing, fn, args, kwargs, self.real.scope)

    def _run_loop(self, *args: Any, **options: Any) -> Any:
        return _loops.run(*args, **options, device=self.real.scope)

    def device_of(self, replica: int) -> str:
        """The device of a replica of this process."""
        return self.real.devices[replica // self.replicas_of_device]

    def announce(self, subject: str, message: str) -> None:
        """Warns, once for each subject."""
        if subject not in self._announced:
            self._announced.add(subject)
            warnings.warn(message, UserWarning, stacklevel=2)

    def has_announced(self, subject: str) -> bool:
        return subject in self._announced

    @property
    def num_parts(self) -> int:
        """How many parts a batch of a distributed dataset is cut into first: one a replica, else one a micro-batch."""
        return self.replicas_here if self._number > 1 else self.micro_batches

    @property
    def kind_of_cut(self) -> str:
        """Name of the per-replica value that such a batch is."""
        return "rows" if self._number > 1 else "micro_batches"

    def cut(self, batch: Any) -> Any:
        """A batch as such a per-replica value."""
        return (_values.BatchRows if self._number > 1 else _values.MicroBatches)(self.num_parts, batch)

    def _around(self, fn: Any) -> Any:
        """`fn` with the loop over the replicas inside it, rather than around: a tf.function runs one replica only."""
        if fn not in self._functions:
            # A weak reference: the value of a WeakKeyDictionary must not keep its key alive.
            python_function = fn.python_function
            one_by_one = len(self.real.devices) > 1 and _tf.is_compiled_by_xla(fn)
            clone = _tf.clone_tf_function(
                fn, lambda *args, **kwargs: self._call_for_each_replica(python_function, args, kwargs, one_by_one)
            )
            if one_by_one:
                _tf.do_not_compile_by_xla(clone)
            self._functions[fn] = clone
        return self._functions[fn]

    def _call_in_merge_function(
        self, tracing: _tracing.Tracing, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """call_for_each_replica inside a merge function goes on with the same trace."""
        depth, tracing.graph.cross_replica_depth = tracing.graph.cross_replica_depth, 0
        try:
            args, kwargs = _values.select_replica((tuple(args), kwargs), tracing.replica_id)
            with tracing.context():
                result = fn(*args, **kwargs)
        finally:
            tracing.graph.cross_replica_depth = depth
        return tf.nest.map_structure(tracing.symbolic, result)

    # --- Variables ----------------------------------------------------------------------------------------------------
    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if _variables.creating_plain_variable():
            kwargs.pop("distribute_strategy", None)
            return next_creator(**kwargs)
        colocate_with = kwargs.pop("colocate_with", None)
        device = getattr(colocate_with, "device", None) if not isinstance(colocate_with, tf.Variable) else None
        synchronization = kwargs.get("synchronization", tf.VariableSynchronization.AUTO)
        if synchronization == tf.VariableSynchronization.NONE:
            raise _errors.synchronization_none(kwargs.get("name"))
        if synchronization not in (
            tf.VariableSynchronization.AUTO,
            tf.VariableSynchronization.ON_READ,
            tf.VariableSynchronization.ON_WRITE,
        ):
            raise _errors.invalid_variable_mode("synchronization", synchronization, kwargs.get("name"))
        aggregation = kwargs.get("aggregation", tf.VariableAggregation.NONE)
        if aggregation not in tuple(tf.VariableAggregation):
            raise _errors.invalid_variable_mode("aggregation", aggregation, kwargs.get("name"))
        on_read = synchronization == tf.VariableSynchronization.ON_READ
        kwargs["synchronization"] = synchronization if on_read else tf.VariableSynchronization.ON_WRITE
        kwargs.pop("caching_device", None)
        kwargs.pop("experimental_batch_initialization", None)
        kwargs["initial_value"] = _tracing.value_outside_trace(kwargs["initial_value"])
        cls: Any = _variables.VirtualMirroredVariable
        if on_read:
            cls = _variables.VirtualSyncOnReadVariable
            kwargs["initial_value"] = _variables.tile_initial_value(
                kwargs["initial_value"], kwargs.get("dtype"), self.replicas_of_device
            )
            if kwargs.get("shape") is not None:
                kwargs["shape"] = tf.TensorShape([self.replicas_of_device]).concatenate(kwargs["shape"])
        with _tracing.outside_trace(), _tf.stop_recording():
            if self.real.base is not None:
                components = _tf.components(self.real.base, next_creator, **kwargs)
            else:
                with tf.device(device or self._device):
                    components = (next_creator(**kwargs),)
        variable = cls(self._container_strategy(), components, aggregation)
        self.own(variable, components)
        return variable

    def own(self, variable: Any, components: Sequence[Any]) -> None:
        """Notes whose the handles of some variables are."""
        for component in components:
            self._owners[id(component.handle)] = weakref.ref(variable)

    def became_local(self, variable: Any, tracing: _tracing.Tracing | None) -> None:
        """Notes that a variable has got a value per replica because of a trace.

        Functions traced before took it for a shared one; they are traced again the next time they are called.
        """
        self.own(variable, variable.rows.parts)
        self._local.append(weakref.ref(variable))
        active = [] if tracing is None else tracing.functions
        unfinished = []
        for function, assumptions in list(variable.assumed_shared_by.items()):
            _tf.forget_traces(function)
            # What this trace itself assumed, it mends. What the same function did before, in its graph, stays there.
            this = tracing and tracing.root
            earlier = [wrote for trace, wrote in assumptions if trace is None or trace() is not this]
            if tracing is not None and earlier and any(function is known for known in active):
                unfinished.append(function)
                wrote = any(earlier) or any(_tf.may_write(tracing.outer, handle) for handle in variable.own_handles)
                if wrote or _tf.in_loop(tracing.outer):
                    variable.assumed_shared_by.clear()
                    raise _errors.became_local_too_late(variable.name, tracing.function_name)
        variable.assumed_shared_by.clear()
        if tracing is not None and unfinished:
            # All replicas' values are still equal when the function runs for the first time, so what it read before is
            # right this once; from its second call on it must not be used.
            _context.at_every_call(tracing.outer, lambda: [_tf.forget_traces(function) for function in unfinished])

    def local_variables(self) -> list[Any]:
        """Variables that were shared and have got a value per replica."""
        return [variable for reference in self._local if (variable := reference()) is not None]

    def owner_of(self, handle: tf.Tensor) -> Any:
        """This strategy's variable behind a resource handle, or None."""
        reference = self._owners.get(id(handle))
        variable = reference() if reference is not None else None
        return variable if variable is not None and variable.is_handle(handle) else None

    def _check_owned(self, variable: Any, what: str) -> None:
        owner = getattr(variable, "distribute_strategy", None)
        if owner is not self._container_strategy():
            raise _errors.variable_of_other_strategy(
                getattr(variable, "name", repr(variable)), owner, self._container_strategy(), what
            )

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        self._check_owned(colocate_with_variable, "colocate_vars_with")

    def _update(self, var: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
        self._check_owned(var, "extended.update")
        if _tracing.current_tracing() is not None:  # which stands for all replicas, and refuses what differs
            return self._update_once(lambda *a, **k: fn(self._component(var, 0), *a, **k), args, kwargs, group)
        if var.rows is None and any(_values.may_differ(value) for value in tf.nest.flatten((tuple(args), kwargs))):
            if not var.may_become_local:
                raise _errors.varying_write(var.name, None, "extended.update", "")
            var.ensure_rows()
        if var.rows is None:
            results = [
                self._update_once(functools.partial(fn, self._component(var, replica)), args, kwargs, group, replica)
                for replica in range(0, self.replicas_here, self.replicas_of_device)
            ]
            return results[0]
        results = []
        for replica in range(self.replicas_here):
            own_args, own_kwargs = _values.select_replica((tuple(args), kwargs), replica)
            with tf.device(self.device_of(replica)), _tf.UpdateContext(replica):
                result = fn(self._component(var, replica), *own_args, **own_kwargs)
            results.append(tf.nest.map_structure(_variables.read_view, result))
        if var.has_primary:
            var.follow_replica_0()
        return var if group else tf.nest.map_structure(lambda *parts: parts, *results)

    def _component(self, var: Any, replica: int) -> Any:
        return var._get_replica(replica)  # noqa: SLF001 - this package's own class

    def _update_non_slot(self, colocate_with: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
        del colocate_with
        return self._update_once(fn, args, kwargs, group)

    def _update_once(self, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool, replica: int = 0) -> Any:
        """All replicas of a device share the variable, so an update runs once there; varying arguments stay varying and are
        refused later."""
        args, kwargs = tf.nest.map_structure(lambda value: _written_everywhere(value, replica), (tuple(args), kwargs))
        args, kwargs = _values.select_replica((args, kwargs), 0)  # which are the same for all
        device = self.real.scope if _tracing.current_tracing() is not None else self.device_of(replica)
        with tf.device(device), _tf.UpdateContext(replica):
            result = fn(*args, **kwargs)
        if group and isinstance(result, _tf.ResourceVariable) and _tracing.current_tracing() is not None:
            result = result.read_value()  # the value after this write, not after later ones
        if (tracing := _tracing.current_tracing()) is not None:
            tracing.note_each(result)
        return result if group else tf.nest.map_structure(self._copies, result)

    def _copies(self, value: Any) -> tuple[Any, ...]:
        """What every replica's component gave, where the one component of a variable has given `value`."""
        alone = isinstance(value, _tf.ResourceVariable) and not isinstance(value, _tf.DistributedVariable)
        return (value,) * self.replicas_here if alone else self._local_results(value)

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        return tf.distribute.get_replica_context().all_reduce(reduce_op, value, options)

    def read_var(self, replica_local_var: Any) -> tf.Tensor:
        return replica_local_var._get_cross_replica()  # noqa: SLF001 - this package's own class

    def value_container(self, value: Any) -> Any:
        if isinstance(value, _tf.DistributedVariable) or not isinstance(value, _tf.ResourceVariable):
            return value
        return self.owner_of(value.handle) or value

    # --- Values -------------------------------------------------------------------------------------------------------
    def _local_results(self, val: Any) -> tuple[Any, ...]:
        if isinstance(val, tf.distribute.DistributedValues):
            return val.values if isinstance(val, _tf.DistributedVariable) else val._values  # noqa: SLF001
        if isinstance(val, _tf.ResourceVariable):
            return (val,)
        if tf.nest.is_nested(val):
            return tuple(_values.select_replica(val, replica) for replica in range(self.replicas_here))
        return (val,) * self.replicas_here

    def _reduce(self, reduce_op: tf.distribute.ReduceOp, value: Any) -> Any:
        return self._reduce_to(reduce_op, value, self._device, None)

    def _reduce_to(self, reduce_op: tf.distribute.ReduceOp, value: Any, destinations: Any, options: Any) -> Any:
        del destinations, options
        return tf.nest.map_structure(lambda part: self._reduce_one(reduce_op, part), value)

    def _reduce_one(self, reduce_op: tf.distribute.ReduceOp, value: Any) -> Any:
        is_sum = reduce_op == tf.distribute.ReduceOp.SUM
        if isinstance(value, _values.Symbolic):
            tracing = _tracing.current_tracing()
            assert tracing is not None
            return tracing.note_each(tracing.reduce(reduce_op, value.value))
        if isinstance(value, _tf.DistributedVariable):
            if isinstance(value, _variables.VirtualMirroredVariable):
                if is_sum and self._number > 1:
                    raise _errors.reduce_mirrored_sum(value.name)
                return value._get_cross_replica()  # noqa: SLF001 - this package's own class
            total = self.real.sum_of_workers(tf.reduce_sum(value.rows.read_value(), axis=0))
            return total if is_sum else total / self._number
        if isinstance(value, tf.distribute.DistributedValues):
            per_replica = value if isinstance(value, _values.PerReplica) else _values.Separate(value._values)  # noqa: SLF001
            with tf.device(self._host if isinstance(value, _values.BatchRows) else None):
                return self._reduce_here(per_replica, is_sum)
        if value is None or not is_sum or self._number == 1:
            return value
        if isinstance(value, tf.Tensor | tf.IndexedSlices):
            raise _errors.reduce_plain_value(value)
        return _values.scale_by_replicas(value, self._number)

    def _reduce_here(self, value: _values.PerReplica, is_sum: bool) -> Any:
        """Sum or mean of per-replica values, over all processes."""
        if self.real.workers == 1:
            return value.reduce_sum() if is_sum else value.reduce_mean()
        if is_sum:
            return self.real.sum_of_workers(value.reduce_sum())
        weight = tf.constant(value.num_replicas, tf.float64) if value.weights is None else tf.reduce_sum(value.weights)
        share = weight / self.real.sum_of_workers(weight)
        return tf.nest.map_structure(
            lambda mean: self.real.sum_of_workers(mean * tf.cast(share, mean.dtype)), value.reduce_mean()
        )

    @property
    def reduces_axes_itself(self) -> bool:
        """tf.distribute reduces an axis in a replica function, which has no rows of micro-batches to add."""
        return self._number == 1 and self.micro_batches > 1

    def reduce_axis(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """`strategy.reduce` over an axis of what micro-batches returned, and over the micro-batches."""
        is_sum = tf.distribute.ReduceOp(getattr(reduce_op, "value", reduce_op).upper()) == tf.distribute.ReduceOp.SUM

        def reduce(part: Any) -> Any:
            if isinstance(part, _values.PerReplica) and not isinstance(part, _tf.DistributedVariable):
                return part.reduce_axis(is_sum, axis)
            return _values.reduce_axis(tf.convert_to_tensor(part), is_sum, axis)

        return tf.nest.map_structure(reduce, value)

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        return [
            # As tf.distribute, which takes one tensor here for the only value to add.
            value if isinstance(value, tf.Tensor) else self._reduce_to(reduce_op, value, to, options)
            for value, to in value_destination_pairs
        ]

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        del destinations, options
        if isinstance(value, _values.Symbolic):
            if isinstance(value.value, tf.IndexedSlices):
                raise _errors.gather_slices()
            tracing = _tracing.current_tracing()
            assert tracing is not None
            return tracing.note_each(tracing.gather(tf.convert_to_tensor(value.value), axis))
        if isinstance(value, tf.distribute.DistributedValues):
            per_replica = (
                value if isinstance(value, _values.PerReplica) else _values.Separate(self._local_results(value))
            )
            return self.real.gather_of_workers(per_replica.gather(axis), axis)
        return value

    def _broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        del destinations
        tracing = _tracing.current_tracing()
        if isinstance(tensor, _tf.DistributedVariable):
            tensor = tf.convert_to_tensor(tensor)
        if tracing is None or not isinstance(tensor, tf.Tensor):
            return tensor
        return tracing.note_each(tf.identity(tensor))

    # --- Inputs -------------------------------------------------------------------------------------------------------
    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        _keras.build_while_tracing(_has_one_replica)
        return _inputs.distribute_dataset(self._container_strategy(), dataset, options)

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        return _inputs.distribute_from_function(self._container_strategy(), dataset_fn, options)

    def _make_dataset_iterator(self, dataset: Any) -> Any:
        return _inputs.restartable_iterator(self._container_strategy(), dataset)

    def _make_input_fn_iterator(self, input_fn: Any, replication_mode: Any = None) -> Any:
        del replication_mode  # tf.distribute lets PER_WORKER through only
        return _inputs.iterator_from_function(self._container_strategy(), input_fn)

    def _experimental_distribute_values_from_function(self, value_fn: Any) -> Any:
        first = self.real.worker * self.replicas_here
        values = [
            value_fn(tf.distribute.experimental.ValueContext(first + replica, self._number))
            for replica in range(self.replicas_here)
        ]
        return values[0] if self._number == 1 else _values.regroup(values, always_wrap=True)

    def _experimental_make_numpy_dataset(self, numpy_input: Any, session: Any) -> tf.data.Dataset:
        del session
        return tf.data.Dataset.from_tensor_slices(numpy_input)

    # --- Facts --------------------------------------------------------------------------------------------------------
    @property
    def _num_replicas_in_sync(self) -> int:
        return self._number

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Each device as often as it has replicas: TensorFlow's helpers take the length for the number of replicas."""
        return tuple(self.device_of(replica) for replica in range(self.replicas_here))

    @property
    def worker_devices_by_replica(self) -> list[list[str]]:
        return [[device] for device in self.worker_devices]

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        return self.real.devices

    def non_slot_devices(self, var_list: Any) -> tuple[str, ...]:
        del var_list
        return self.real.devices

    def _get_local_replica_id(self, replica_id_in_sync_group: Any) -> Any:
        return replica_id_in_sync_group - self.real.worker * self.replicas_here

    def _get_replica_id_in_sync_group(self, replica_id: Any) -> Any:
        return replica_id + self.real.worker * self.replicas_here

    def _in_multi_worker_mode(self) -> bool:
        return self.real.workers > 1

    def _use_merge_call(self) -> bool:
        """Whether optimizers step in merge functions; outside `run`, one replica's do it as on one device."""
        outside = self._number == 1 and tf.distribute.in_cross_replica_context() and _tracing.current_tracing() is None
        if outside and self.micro_batches > 1 and _keras.optimizer_is_applying():
            self.announce("outside run", _errors.optimizer_outside_run())
        return not outside

    def _configure(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def _of_base(self, name: str, alone: bool) -> bool:
        return alone if self.real.base is None else getattr(self.real.base.extended, name)

    def _update_config_proto(self, config_proto: Any) -> Any:
        updated = copy.deepcopy(config_proto)
        updated.isolate_session_state = True
        return updated

    experimental_between_graph = property(lambda self: self._of_base("experimental_between_graph", False))
    experimental_should_init = property(lambda self: self._of_base("experimental_should_init", True))
    should_checkpoint = property(lambda self: self._of_base("should_checkpoint", True))
    should_save_summary = property(lambda self: self._of_base("should_save_summary", True))
    _global_batch_size = property(lambda self: True)
    _support_per_replica_values = property(lambda self: True)
    _num_gpus_per_worker = property(lambda self: sum("GPU" in device for device in self.real.devices))
