"""The boundary to TensorFlow: the only module that touches its private names.

Public TensorFlow offers no way to subclass a strategy's internals, to cut a traced graph into functions, or to rewire
an operation. Each name below says what it is, why there is no public way, and the versions it was checked on. A new
private name goes here, with the same three facts, and nowhere else (ruff's banned-api and a test enforce this).

Checked on TensorFlow 2.16 and 2.21 unless a line says otherwise.
"""

# TensorFlow ships no types for these, and typeshed's stubs know only the public modules.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportMissingModuleSource=false

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2 as _attr_value_pb2  # protos are not exported under tf.*
from tensorflow.python.autograph.core import ag_ctx as _ag_ctx
from tensorflow.python.autograph.core import config as _ag_config
from tensorflow.python.autograph.impl import api as _autograph
from tensorflow.python.client import pywrap_tf_session as _session
from tensorflow.python.data.ops import optional_ops as _optional_ops
from tensorflow.python.distribute import device_util as _device_util
from tensorflow.python.distribute import distribute_lib as _distribute_lib
from tensorflow.python.distribute import input_lib as _input_lib
from tensorflow.python.distribute import values as _values
from tensorflow.python.distribute import values_util as _values_util
from tensorflow.python.eager import backprop as _backprop
from tensorflow.python.eager import context as _context
from tensorflow.python.eager import forwardprop as _forwardprop
from tensorflow.python.eager import record as _record
from tensorflow.python.eager.polymorphic_function import atomic_function as _atomic_function
from tensorflow.python.eager.polymorphic_function import polymorphic_function as _polymorphic_function
from tensorflow.python.framework import auto_control_deps as _auto_control_deps
from tensorflow.python.framework import auto_control_deps_utils as _auto_control_deps_utils
from tensorflow.python.framework import func_graph as _func_graph
from tensorflow.python.framework import op_callbacks as _op_callbacks
from tensorflow.python.framework import op_def_registry as _op_def_registry
from tensorflow.python.framework import ops as _ops
from tensorflow.python.framework import tensor_conversion_registry as _conversion
from tensorflow.python.ops import control_flow_util_v2 as _control_flow_util_v2
from tensorflow.python.ops import gen_stateful_random_ops as _stateful_random_ops
from tensorflow.python.ops import gen_summary_ops as _gen_summary_ops
from tensorflow.python.ops import random_ops_util as _random_ops_util
from tensorflow.python.ops import resource_variable_ops as _resource_variable_ops
from tensorflow.python.ops import summary_ops_v2 as _summary_ops
from tensorflow.python.ops import tensor_array_ops as _tensor_array_ops
from tensorflow.python.ops import variable_scope as _variable_scope
from tensorflow.python.ops import while_loop as _while_loop
from tensorflow.python.ops import while_v2 as _while_v2
from tensorflow.python.trackable import base as _trackable
from tensorflow.python.types import distribute as _distribute_types
from tensorflow.python.util import nest as _nest

from microstrat import _patches

# --- Base classes -----------------------------------------------------------------------------------------------------
# The public tf.distribute.StrategyExtended lacks the v1 hooks (read_var, call_for_each_replica, broadcast_to) that
# Keras, optimizers and checkpoints still call on every strategy.
StrategyExtended: Any = _distribute_lib.StrategyExtendedV1
# Keras and tf.distribute recognise distributed variables and per-replica values by isinstance on these.
PerReplica: Any = _values.PerReplica
PerReplicaSpec: Any = _values.PerReplicaSpec
MirroredVariable: Any = _values.MirroredVariable
SyncOnReadVariable: Any = _values.SyncOnReadVariable
DistributedVariable: Any = _values.DistributedVariable
ResourceVariable: Any = _resource_variable_ops.BaseResourceVariable
# AutoGraph and Keras dispatch `for` loops and fit on these.
# Keras recognises a distributed dataset by the name and module of one of its base classes.
DistributedDataset: Any = _input_lib.DistributedDataset
DistributedIteratorInterface: Any = _distribute_types.DistributedIteratorInterface
FuncGraph: Any = _func_graph.FuncGraph
# What may be an argument of a tf.function; tf.experimental.ExtensionType can't hold an iterator.
CompositeTensor: Any = tf.__internal__.CompositeTensor
VARIABLE_VALUE_KEY = _trackable.VARIABLE_VALUE_KEY

# --- Contexts ---------------------------------------------------------------------------------------------------------
# The update context (inside StrategyExtended.update) has no public accessor.
UpdateContext: Any = _distribute_lib.UpdateContext
get_update_replica_id: Callable[[], Any] = _distribute_lib.get_update_replica_id
enter_or_assert_strategy = _distribute_lib.enter_or_assert_strategy
# Stops gradient tapes: stock merge functions run on another thread, where no tape of the replica records.
stop_recording = _record.stop_recording
tape_is_recording = _record.could_possibly_record
# True while a SavedModel without distributed variables is written; variables then act as their one saved copy.
is_saving_non_distributed = _values_util.is_saving_non_distributed
# Notes that the function being traced reads distributed variables as a SavedModel could not; it must be traced again there.
mark_as_unsaveable = _values_util.mark_as_unsaveable
in_sync_on_read_context = _distribute_lib.in_variable_sync_on_read_context
canonicalize_device = _device_util.canonicalize
host_for_device = _device_util.get_host_for_device


def _eager_context() -> Any:
    return _context.context()


def when_started(act: Callable[[], None]) -> None:
    """Calls `act` once, on this thread, as soon as TensorFlow has started or somebody asks for the current strategy.

    Before, programs set up devices and threads; after, they make tensors and variables. Nothing public tells of it.
    """
    waiting = contextlib.ExitStack()

    def acting(stock: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = stock(*args, **kwargs)
            if tf.inside_function():
                return result
            waiting.close()
            act()
            return _distribute_lib._get_per_thread_mode() if stock.__name__ == "_get_default_replica_mode" else result

        return call

    waiting.enter_context(_patches.replaced(_context.Context, "ensure_initialized", acting))
    waiting.enter_context(_patches.replaced(_distribute_lib, "_get_default_replica_mode", acting))


def is_tf_function(fn: Any) -> bool:
    """Whether `fn` is a `tf.function`; tf.types.experimental.PolymorphicFunction alone does not promise `_clone`."""
    return isinstance(fn, _polymorphic_function.Function)


def clone_tf_function(fn: Any, python_function: Callable[..., Any]) -> Any:
    """A `tf.function` with `fn`'s options and another body; the public constructor can't read the options back."""
    return fn._clone(python_function=python_function)


def functions_being_traced() -> list[Any]:
    """The tf.functions whose Python bodies are running on this thread, innermost first.

    A FuncGraph does not know the tf.function it is traced for, so this looks at the stack.
    """
    found: list[Any] = []
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _polymorphic_function.__file__:
            function = frame.f_locals.get("self")
            if is_tf_function(function) and not any(known is function for known in found):
                found.append(function)
        frame = frame.f_back
    return found


def forget_traces(function: Any) -> None:
    """Makes a tf.function trace again at its next call; there is no public way to drop what it has."""
    function._function_cache._primary.clear()
    function._function_cache._dispatch_dict.clear()


def convert_by_autograph(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Applies AutoGraph if the caller is under it; tf.autograph.to_graph ignores the caller's status."""
    return _autograph.tf_convert(fn, _ag_ctx.control_status_ctx())


@contextlib.contextmanager
def inline_functions() -> Iterator[None]:
    """Runs tf.functions called on this thread as plain Python, with AutoGraph.

    tf.config.run_functions_eagerly is for the whole process and drops AutoGraph.
    """

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        del stock

        def call_inline(self: Any, *args: Any, **kwargs: Any) -> Any:
            status = _ag_ctx.Status.ENABLED if self._autograph else _ag_ctx.Status.DISABLED
            return _autograph.tf_convert(self.python_function, _ag_ctx.ControlStatusCtx(status))(*args, **kwargs)

        return call_inline

    with _patches.replaced(_polymorphic_function.Function, "__call__", make):
        yield


@contextlib.contextmanager
def hooked_gradients(hook: Callable[..., Any]) -> Iterator[None]:
    """Calls `hook(compute, target, sources, output_gradients, **options)` for GradientTape.gradient on this thread.

    A tape has no hook of its own.
    """

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        def gradient(
            self: Any, target: Any, sources: Any, output_gradients: Any = None, unconnected_gradients: Any = "none"
        ) -> Any:
            compute = functools.partial(stock, self)
            # Forward-mode differentiation takes gradients of its own, in functions that it keeps for all; jacobian, one
            # by one.
            caller = sys._getframe(1 + _patches.CALLS_BETWEEN).f_code.co_filename
            inside = caller in (_forwardprop.__file__, _backprop.__file__)
            run = compute if inside else functools.partial(hook, compute)
            return run(target, sources, output_gradients, unconnected_gradients=unconnected_gradients)

        return gradient

    with _patches.replaced(_backprop.GradientTape, "gradient", make):
        yield


@dataclasses.dataclass(frozen=True)
class StatelessDraw:
    """A random draw without state: its key (or seed), and the inputs that say what is drawn (shape, range, values)."""

    key: tf.Tensor
    other_inputs: tuple[tf.Tensor, ...]

    def key_for(self, turn: Any, turns: int) -> tf.Tensor:
        return key_for(self.key, turn, turns)


def key_for(key: tf.Tensor, turn: Any, turns: int) -> tf.Tensor:
    """Another key (or seed) for every turn but the first, which keeps this one."""
    keys = tf.constant([index * 0x9E3779B9 % key.dtype.max for index in range(turns)], key.dtype)
    return tf.bitwise.bitwise_xor(key, keys[turn])


def _attribute(value: Any) -> Any:
    """An attribute as tf.raw_ops takes it; while a graph is built, callbacks get it as a proto."""
    if not isinstance(value, _attr_value_pb2.AttrValue):
        return value
    kind = value.WhichOneof("value")
    return tf.as_dtype(value.type) if kind == "type" else getattr(value, kind)


_DRAWS_THAT_ONLY_MAKE_KEYS = (
    "StatelessRandomGetKeyCounter",
    "StatelessRandomGetKeyCounterAlg",
    "StatelessRandomGetAlg",
)


@contextlib.contextmanager
def hooked_operations(hook: Callable[[StatelessDraw], tf.Tensor | None]) -> Iterator[None]:
    """Lets `hook` give another key to every stateless random draw that this thread puts in a graph.

    Op callbacks are TensorFlow's debugging interface; no public function sees the draws that layers make.
    """

    def callback(op_type: str, inputs: Any, attrs: Any, outputs: Any, op_name: Any = None, graph: Any = None) -> Any:
        del op_name, graph
        if tf.executing_eagerly() or not op_type.startswith("Stateless") or op_type in _DRAWS_THAT_ONLY_MAKE_KEYS:
            return outputs
        op_def: Any = _op_def_registry.get(op_type)
        names = [argument.name for argument in op_def.input_arg]
        at = next((names.index(name) for name in ("key", "seed") if name in names), None)
        if at is None:
            return outputs
        others = tuple(
            tensor for name, tensor in zip(names, inputs, strict=True) if name not in ("key", "seed", "counter", "alg")
        )
        key = hook(StatelessDraw(inputs[at], others))
        if key is None:
            return outputs
        arguments = dict(zip(names, inputs, strict=True)) | {names[at]: key}
        draw = getattr(tf.raw_ops, op_type)
        accepted = inspect.signature(draw).parameters
        for name, value in zip(attrs[::2], attrs[1::2], strict=True):
            if name in accepted and name not in arguments:
                arguments[name] = _attribute(value)
        drawn = draw(**arguments)
        return list(drawn) if isinstance(drawn, tuple) else [drawn]

    _op_callbacks.add_op_callback(callback)
    try:
        yield
    finally:
        _op_callbacks.remove_op_callback(callback)


@contextlib.contextmanager
def hooked_keys(hook: Callable[[tf.Tensor], tf.Tensor]) -> Iterator[None]:
    """Lets `hook` change the key of every stateless random draw made on this thread outside graphs.

    There, TensorFlow does not let a callback replace what an operation gave.
    """

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        def get_key_counter(seed: Any, alg: Any) -> Any:
            key, counter = stock(seed, alg)
            return hook(key), counter

        return get_key_counter

    with _patches.replaced(_random_ops_util, "_get_key_counter", make):
        yield


def is_compiled_by_xla(function: Any) -> bool:
    """Whether a tf.function has jit_compile=True; its options can't be read back publicly."""
    return bool(function._jit_compile)


def compiling_by_xla() -> bool:
    """Whether what is being traced on this thread is for XLA."""
    return any(is_compiled_by_xla(function) for function in functions_being_traced())


def do_not_compile_by_xla(function: Any) -> None:
    """Takes jit_compile from a tf.function that has not been traced yet; `_clone` keeps it."""
    function._jit_compile = None


@contextlib.contextmanager
def cross_replica_context(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Enters cross-replica context from a replica context; `scope()` refuses to nest there."""
    _distribute_lib._push_per_thread_mode(_distribute_lib._CrossReplicaThreadMode(strategy))
    try:
        yield
    finally:
        _distribute_lib._pop_per_thread_mode()


def get_replica_context_of(strategy: tf.distribute.Strategy) -> tf.distribute.ReplicaContext | None:
    """The current replica context if it is one of `strategy`, else None."""
    context = tf.distribute.get_replica_context()
    return context if context is not None and context.strategy is strategy else None


def summary_state() -> Any:
    """The thread's summary state: writer, step, recording flag; replica threads must inherit it."""
    return _summary_ops._summary_state


def eager_op_callbacks() -> Any:
    """The thread's eager op callbacks (tf.debugging); replica threads must inherit them."""
    return _eager_context()._thread_local_data


# AutoGraph converts whatever converted user code calls, this package too; a rule is the only way to exempt a package.
_ag_config.CONVERSION_RULES = (_ag_config.DoNotConvert("microstrat"), *_ag_config.CONVERSION_RULES)


# --- Graphs -----------------------------------------------------------------------------------------------------------
def replica_graph(name: str) -> Any:
    """A FuncGraph that notes which of its operations were made in cross-replica context."""
    return _ReplicaGraph(name)


class _ReplicaGraph(_func_graph.FuncGraph):
    def __init__(self, name: str):
        super().__init__(name)
        self.cross_replica_depth = 0
        self.cross_replica_ops: set[tf.Operation] = set()
        self.substitute: Callable[[tf.Tensor], tf.Tensor | None] = lambda _: None
        """Gives what a tensor of a graph around is to be read as in here, if not as itself."""

    def _create_op_internal(self, *args: Any, **kwargs: Any) -> Any:
        op: Any = super()._create_op_internal(*args, **kwargs)
        if self.cross_replica_depth:
            self.cross_replica_ops.add(op)
        return op

    def capture(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        other = getattr(tensor, "graph", self) is not self if not isinstance(tensor, _ops.EagerTensor) else False
        own = self.substitute(tensor) if other else None
        return super().capture(tensor, *args, **kwargs) if own is None else own

    def capture_call_time_value(self, closure: Callable[[], Any], spec: Any, key: Any = None, **kwargs: Any) -> Any:
        """Values that a nested function asks its caller for (replica id, local state) are had right here."""
        if isinstance(key, CallTimeKey):
            return closure()
        return super().capture_call_time_value(closure, spec, key=key, **kwargs)


class CallTimeKey(tuple):
    """Key of a call-time capture of ours."""


AutomaticControlDependencies = _auto_control_deps.AutomaticControlDependencies


def is_stateful(op: tf.Operation) -> bool:
    return bool(op._is_stateful)  # the OpDef's flag has no public accessor


def is_random(op: tf.Operation) -> bool:
    return op.type in _auto_control_deps.LEGACY_RANDOM_OPS  # TensorFlow's own list of stateful random draws


def is_control_flow_graph(graph: tf.Graph) -> bool:
    """Whether `graph` is the body of a tf.cond or tf.while_loop, as opposed to that of a tf.function."""
    return bool(getattr(graph, "is_control_flow_graph", False))


def is_inside(graph: Any, other: Any) -> bool:
    """Whether `graph` is `other`, or in it."""
    while isinstance(graph, FuncGraph) and graph is not other:
        graph = outer_graph(graph)
    return graph is other


def graphs_around(graph: Any) -> list[Any]:
    """A function's graph and those that it is part of, innermost first."""
    found = []
    while isinstance(graph, FuncGraph):
        found.append(graph)
        graph = outer_graph(graph)
    return found


def in_loop(graph: Any, stop: Any = None) -> bool:
    """Whether `graph` is part of a tf.while_loop's body, inside of `stop`."""
    while isinstance(graph, FuncGraph) and graph is not stop:
        if isinstance(graph, _control_flow_util_v2.WhileBodyFuncGraph):  # no public way to ask
            return True
        graph = outer_graph(graph)
    return False


def in_control_flow() -> bool:
    """Whether the current graph is in a branch or loop, at any depth, of what is being traced."""
    graph: Any = tf.compat.v1.get_default_graph()
    while isinstance(graph, FuncGraph):
        if is_control_flow_graph(graph):
            return True
        graph = outer_graph(graph)
    return False


def outer_graph(graph: Any) -> tf.Graph | None:
    return getattr(graph, "outer_graph", None)


def captures(graph: Any) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """(outer tensor, placeholder) of every value `graph` captured, call-time captures evaluated now."""
    pairs = list(graph.captures)
    deferred = tf.nest.flatten(graph.deferred_internal_captures, expand_composites=True)
    if deferred:
        outer = tf.nest.flatten([closure() for closure in graph.deferred_external_captures], expand_composites=True)
        pairs += zip(outer, deferred, strict=True)
    return pairs


def captured(tensor: tf.Tensor) -> Any:
    """What a function's graph takes from around itself as this tensor; None if it has the tensor from elsewhere."""
    graph: Any = getattr(tensor, "graph", None)
    pairs = graph.captures if isinstance(graph, FuncGraph) else ()
    return next((outer for outer, inner in pairs if inner is tensor), None)


def captured_here(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The same values as tensors of the current graph, which takes them from around itself."""
    graph: Any = _ops.get_default_graph()
    return [graph.capture(tensor) if isinstance(graph, FuncGraph) else tensor for tensor in tensors]


def capture_as(graph: Any, tensor: tf.Tensor, value: tf.Tensor) -> None:
    """Makes `graph` take `value` from around itself wherever it is asked to take `tensor`."""
    inner = graph.capture(value)
    outer = next((outer for outer, known in graph.captures if known is inner), None)
    if outer is not None:
        graph._function_captures.add_or_replace(key=id(tensor), external=outer, internal=inner)


def capture_call_time_value(graph: Any, closure: Callable[[], Any], spec: tf.TypeSpec, key: Any) -> Any:
    """A value that a tf.function looks up at every call; a plain capture would freeze it at the first trace.

    Where it is called, it asks the graph around the call, which asks in turn: but tf.cond does not answer its branches.
    There the value is looked up right away.
    """
    captures = graph._function_captures  # no public way to say what a call-time capture asks
    known = key in captures.by_ref_external
    value = graph.capture_call_time_value(closure, spec, key=key)
    if not known and key in captures.by_ref_external:
        ask_around = captures.by_ref_external[key]

        def look_up() -> Any:
            if isinstance(tf.compat.v1.get_default_graph(), _control_flow_util_v2.CondBranchFuncGraph):
                return closure()
            return ask_around()

        look_up.output_spec = ask_around.output_spec  # type: ignore[attr-defined]
        captures.by_ref_external[key] = look_up
    return value


def watch_variables(graph: Any, variables: Sequence[tf.Variable]) -> None:
    """Tells the surrounding tf.function which variables it uses, as if it had read them itself."""
    if hasattr(graph, "watch_variable"):
        for variable in variables:
            graph.watch_variable(variable)


def watched_variables(graph: Any) -> list[tf.Variable]:
    return list(graph._watched_variables)  # FuncGraph.variables is filled in only by func_graph_from_py_func


def update_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    op._update_input(index, tensor)  # graphs are append-only in public TensorFlow


def set_control_inputs(op: tf.Operation, control_inputs: Sequence[tf.Operation]) -> None:
    op._remove_all_control_inputs()
    if control_inputs:
        op._add_control_inputs(control_inputs)


def replace_tensor(old: tf.Tensor, new: tf.Tensor, *, skip: Sequence[tf.Operation] = ()) -> None:
    """Makes every consumer of `old` in its graph read `new` instead."""
    for consumer in old.consumers():
        if consumer in skip:
            continue
        for index, tensor in enumerate(consumer.inputs):
            if tensor is old or (tensor.op is old.op and tensor.value_index == old.value_index):
                consumer._update_input(index, new)


def written_resources(op: tf.Operation) -> list[tf.Tensor]:
    """The resource inputs that `op` may write, by the rule tf.function's automatic control dependencies use."""
    _, writes = _auto_control_deps_utils.get_read_write_resource_inputs(op)
    return list(writes)


def may_write(graph: Any, resource: tf.Tensor) -> bool:
    """Whether an operation of a graph, or of one that it is part of, may write what the graphs take from outside."""
    inner: tf.Tensor | None = resource
    for around in reversed(graphs_around(graph)):
        inner = next((own for outer, own in around.captures if outer is inner), None)
        if inner is None:
            return False
        if any(inner is written for op in inner.consumers() for written in written_resources(op)):
            return True
    return False


def functions(graph: Any) -> dict[str, Any]:
    return graph._functions


def function_definition(graph: Any, name: str) -> Any:
    """The FunctionDef of function `name` of `graph`'s library."""
    return graph._functions[name].cached_definition


def function_nodes(graph: Any, name: str) -> Any:
    """The NodeDefs of function `name`; none if the graph does not hold it."""
    return function_definition(graph, name).node_def if name in graph._functions else ()


def copy_operation(op: tf.Operation, inputs: Sequence[tf.Tensor], graph: Any) -> tf.Operation:
    """The same operation over other inputs in another graph; tf.* functions can't be had back from an operation."""
    for function in op.graph._functions.values():
        graph._add_function_recursive(function)
    attrs = {name: value for name, value in op.node_def.attr.items() if not name.startswith("_")}
    with graph.as_default(), _ops.control_dependencies(None):
        return graph._create_op_internal(
            op.type, list(inputs), [output.dtype for output in op.outputs], attrs=attrs, op_def=op.op_def
        )


def function_names(op: tf.Operation, attr: str) -> list[str]:
    """The functions that attribute `attr` of `op` names, if it has it."""
    try:
        value = op.get_attr(attr)
    except ValueError:
        return []
    return [func.name for func in (value if isinstance(value, list) else [value]) if hasattr(func, "name")]


def branch_graphs(op: tf.Operation) -> list[Any]:
    """The FuncGraphs of an If's or Case's branches, as they were traced; none of one that `graph_to_function` made."""
    return _graphs_of(op, "then_branch", "else_branch", "branches")


def called_graphs(op: tf.Operation) -> list[tuple[Any, Sequence[tf.Tensor]]]:
    """The FuncGraphs of the functions that an operation calls, or runs as branches or in turns, and what each gets.

    Those that `graph_to_function` made are missing.
    """
    branches = [(graph, op.inputs[1:]) for graph in branch_graphs(op)]  # the first input says which
    return [*branches, *((graph, op.inputs) for graph in _graphs_of(op, "f", "body", "cond"))]


def _graphs_of(op: tf.Operation, *attrs: str) -> list[Any]:
    found = [op.graph._functions[name] for attr in attrs for name in function_names(op, attr)]
    return [function.graph for function in found if function.function_type is not None]


def graph_to_function(
    name: str,
    graph: Any,
    operations: Sequence[tf.Operation],
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tf.Tensor],
    control_outputs: Sequence[tf.Operation],
    *,
    apart: bool = False,
) -> Any:
    """Makes a function of a subset of `graph`'s operations in one C++ call.

    Public tf.function can only trace Python again, and importing a GraphDef copies operation by operation. `inputs` may
    be any tensors of the graph; `operations` are the body. If it is to stay `apart`, it is never inlined.
    """
    with graph._c_graph.get() as c_graph:
        function = _session.TF_GraphToFunction_wrapper(
            c_graph,
            name,
            False,
            [op._c_op for op in operations],
            [tensor._as_tf_output() for tensor in inputs],
            [tensor._as_tf_output() for tensor in outputs],
            [],
            [op._c_op for op in control_outputs],
            [],
            None,
            "",
        )
    if apart:
        yes = _attr_value_pb2.AttrValue(b=True).SerializeToString()
        _session.TF_FunctionSetAttrValueProto(function, "_noinline", yes)
    context = _eager_context()
    context.add_c_function(function)
    _session.TF_DeleteFunction(function)
    make: Any = _atomic_function.AtomicFunction
    return make(
        name.encode(),
        context,
        function_type=None,  # only needed to call the function from Python, which nothing does
        children=list(graph._functions.values()),
    )


def is_cpu(device: str) -> bool:
    return tf.DeviceSpec.from_string(device).device_type == "CPU"


def config_of_calls() -> bytes:
    """How functions called from here are optimized: a call left in a graph takes that from an attribute."""
    return _eager_context().function_call_options.config_proto_serialized


def temporary_variable(dtype: tf.DType, shape: tf.TensorShape) -> tf.Tensor:
    """The handle of a variable that each run of the graph makes anew, under no name, and has to destroy."""
    return tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=_context.anonymous_name())


def add_function(graph: Any, function: Any) -> None:
    graph._add_function_recursive(function)


def dismantle(graph: Any) -> None:
    """Breaks a used-up graph's reference cycles, so that its memory comes back at once and not at the next collection."""
    _func_graph.dismantle_func_graph(graph)


def set_lowering(op: tf.Operation) -> None:
    """Lets the runtime lower a While to dataflow, as tf.while_loop does (not under XLA)."""
    _control_flow_util_v2.maybe_set_lowering_attr(op)


def set_read_only_resources(op: tf.Operation, indices: Sequence[int]) -> None:
    """Tells automatic control dependencies which resource inputs `op` only reads."""
    op._set_attr(
        _auto_control_deps_utils.READ_ONLY_RESOURCE_INPUTS_ATTR,
        _attr_value_pb2.AttrValue(list=_attr_value_pb2.AttrValue.ListValue(i=indices)),
    )


@contextlib.contextmanager
def other_seeds(ops: Sequence[tf.Operation], number: int) -> Iterator[None]:
    """Gives stateful random draws that have a seed the `number`-th of seeds of their own."""
    before = [op.get_attr("seed2") for op in ops]

    def seed(values: Sequence[int]) -> None:
        for op, value in zip(ops, values, strict=True):
            op._set_attr("seed2", _attr_value_pb2.AttrValue(i=value))

    seed([value + (number << 32) for value in before])
    try:
        yield
    finally:
        seed(before)


def is_seeded(op: tf.Operation) -> bool:
    """Whether `op` is a stateful random draw that draws the same numbers whenever its program runs."""
    return is_random(op) and bool(op.get_attr("seed") or op.get_attr("seed2"))


def set_loop_attributes(op: tf.Operation, num_outputs: int) -> None:
    """The attribute that tf.while_loop leaves for its gradient and for SavedModel."""
    op._set_attr("_num_original_outputs", _attr_value_pb2.AttrValue(i=num_outputs))


# --- Gradients --------------------------------------------------------------------------------------------------------
def set_gradient(result: tf.Tensor, source: tf.Tensor, gradient: Callable[[Any], Any]) -> None:
    """Says what the gradient of an operation made while no tape recorded is, for tapes and for tf.gradients.

    tf.custom_gradient keeps every gradient function it has seen in a graph, and with it the graph, for good.
    """
    result.op._gradient_function = lambda _, upstream: [gradient(upstream)]
    _record.record_operation("collective", [result], [source], lambda upstream: [gradient(upstream)])


def with_gradient(
    results: Sequence[tf.Tensor],
    variables: Sequence[Any],
    tensors: Sequence[tf.Tensor],
    gradient: Callable[..., list[Any]],
    why_not: str,
    host: str,
) -> list[tf.Tensor]:
    """`results`, whose gradients by variables and tensors `gradient(*upstream)` computes: for tapes, and for functions' own.

    tf.custom_gradient would read the variables, which keeps their values where an optimizer wants to write. In a graph only
    what stands between results and sources has gradients; for tensors an empty slice does, so that none travels to a device.

    Args:
      results: tensors.
      variables: what they may have a gradient by,
      tensors: likewise.
      gradient: takes a gradient, or None, for every result, and returns one for every variable and tensor.
      why_not: an error message, if there is no gradient. Functions called under a tape make a gradient, wanted or not, so
        theirs raises when it is computed.
      host: device for what the slices are made of.
    """
    handles = [variable.handle for variable in variables]
    with stop_recording():
        with tf.device(host):
            slices = [tensor if tensor.shape.rank in (0, None) else tensor[:0] for tensor in tensors]
        # Grappler forwards an input of an IdentityN to its reader, but not that the reader came after its other inputs. It
        # drops an Identity too, and a constant: only what it takes for work keeps what each result comes after.
        with tf.control_dependencies([*results, *slices]), tf.control_dependencies([tf.no_op()]):
            results = [tf.ensure_shape(result, result.shape) for result in results]
        outputs = tf.raw_ops.IdentityN(input=[*results, *handles, *slices])
    (op,) = {output.op for output in outputs}
    set_read_only_resources(op, range(len(results), len(results) + len(handles)))
    outputs = outputs[: len(results)]
    latest: list[Any] = []

    def of_operation(_: Any, *upstream: Any) -> list[Any]:
        latest[:] = failing() if why_not else gradient(*upstream[: len(results)])
        by_tensors = latest[len(handles) :]
        short = [None if whole is None else whole[:0] if whole.shape.rank else whole for whole in by_tensors]
        return [None] * len(results) + latest[: len(handles)] + short

    def failing() -> list[Any]:
        with tf.control_dependencies([tf.debugging.Assert(False, [why_not], summarize=1)]):
            return [tf.zeros(tf.shape(source), source.dtype) for source in (*variables, *tensors)]

    def of_slice(index: int) -> Callable[..., list[Any]]:
        return lambda op, _: [latest[index]] + [None] * (len(op.inputs) - 1)

    def of_tape(*upstream: Any) -> list[Any]:
        if why_not:
            raise RuntimeError(why_not)
        return gradient(*upstream)

    op._gradient_function = of_operation
    for index, (short, tensor) in enumerate(zip(slices, tensors, strict=True)):
        if short is not tensor:
            short.op._gradient_function = of_slice(len(handles) + index)
    _record.record_operation("strategy.run", outputs, [*handles, *tensors], of_tape)
    return outputs


# --- Strategies of real replicas ----------------------------------------------------------------------------------------
def gather(strategy: Any, values: Sequence[tf.Tensor], axis: int) -> Any:
    """The concatenation of all replicas' values, on every device; `strategy.gather` gives it to one device only."""
    value = PerReplica(tuple(values))
    with cross_replica_context(strategy):
        return strategy.extended._gather_to(value, value, axis)


def worker_index(strategy: Any) -> int:
    """Which of the strategy's processes this one is; a cluster resolver does not count the chief among the workers."""
    return getattr(strategy.extended, "_id_in_cluster", 0)


def components(strategy: Any, next_creator: Callable[..., Any], **kwargs: Any) -> tuple[Any, ...]:
    """The components of a new variable of a strategy, one a device, equal on all of them; its scope would wrap them."""
    return strategy.extended._create_variable(next_creator, **kwargs)._values


# --- Variables --------------------------------------------------------------------------------------------------------
def variable_creator_scope(creator: Callable[..., Any]) -> Any:
    return _variable_scope.variable_creator_scope(creator)  # the tf.* export rejects some distributed kwargs


def register_conversion(cls: type, function: Callable[..., Any]) -> None:
    """Registers how `cls` becomes a Tensor; `__tf_tensor__` alone is not asked for CompositeTensors."""
    _conversion.register_tensor_conversion_function(cls, function)


def unknown_shape() -> tf.TensorShape:
    return tf.TensorShape(None)  # pyright: ignore[reportArgumentType] - typeshed's stubs lack the unknown rank


def as_graph_element(value: Any) -> Any:
    return _ops._as_graph_element(value)


def op_type_is_stateful(op_type: str) -> bool:
    """The OpDef flag of an op type inside a function, where no Operation exists."""
    op_def = _op_def_registry.get(op_type)
    return op_def is not None and op_def.is_stateful


def op_type_takes_resource(op_type: str) -> bool:
    op_def = _op_def_registry.get(op_type)
    return op_def is not None and any(arg.type == tf.resource.as_datatype_enum for arg in op_def.input_arg)


def variable_creators() -> list[Any]:
    """The variable creators in force on this thread; the eager default graph keeps them per thread."""
    return list(_ops.get_default_graph()._variable_creator_stack)


@contextlib.contextmanager
def with_variable_creators(creators: Sequence[Any]) -> Iterator[None]:
    graph = _ops.get_default_graph()
    before = graph._variable_creator_stack
    graph._variable_creator_stack = list(creators)
    try:
        yield
    finally:
        graph._variable_creator_stack = before


# --- Inputs -----------------------------------------------------------------------------------------------------------
def flatten_with_paths(structure: Any) -> list[tuple[tuple[Any, ...], Any]]:
    return _nest.flatten_with_tuple_paths(structure)  # tf.nest has no paths


def as_element(arguments: tuple[Any, ...]) -> Any:
    """What a function mapped over a dataset got: tf.data spreads tuples over the arguments."""
    (*first, last) = arguments
    return arguments if first else last


def optional_with_spec(optional: Any, element_spec: Any) -> Any:
    """The same Optional, its value seen as `element_spec`; the public class has no constructor for that."""
    return _optional_ops._OptionalImpl(optional._variant_tensor, element_spec)


def scratch_graph(name: str) -> Any:
    """A FuncGraph in the current graph, to build in and throw away."""
    return _func_graph.FuncGraph(name)


def tensor_array_with_flow(array: tf.TensorArray, flow: tf.Tensor) -> tf.TensorArray:
    """The same tf.TensorArray with what has been written to it since; the public class has no such constructor."""
    return _tensor_array_ops.build_ta_with_new_flow(array, flow)


def record_same(inner: tf.Tensor, outer: tf.Tensor) -> None:
    """Tells the tapes that are recording that `inner` is `outer`, as a FuncGraph does of what it captures."""
    _record.record_operation("captured_value", [inner], [outer], lambda gradient: [gradient])


@contextlib.contextmanager
def hooked_summaries(hook: Callable[[tf.Tensor], tf.Tensor]) -> Iterator[None]:
    """Lets `hook` say what is written in place of a tensor of every summary of this thread.

    tf.summary.write calls the op last of all: where it records, and with what its caller worked out. No public function
    stands in between. Checked on 2.16 and 2.21.
    """

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        return lambda writer, step, tensor, *args, **options: stock(writer, step, hook(tensor), *args, **options)

    with _patches.replaced(_gen_summary_ops, "write_summary", make):
        yield


@contextlib.contextmanager
def hooked_loops(hook: Callable[..., Any]) -> Iterator[None]:
    """Calls `hook(stock, cond, body, loop_vars, **options)` for every loop that this thread puts in a graph.

    tf.while_loop, tf.map_fn and the like, AutoGraph's loops and Keras' all come by here.
    """
    with _patches.replaced(_while_v2, "while_loop", lambda stock: functools.partial(hook, stock)):
        yield


@contextlib.contextmanager
def hooked_generators(after: Callable[[tf.Tensor, tf.Tensor], None]) -> Iterator[None]:
    """Calls `after(handle, result)` when a tf.random.Generator has advanced its state on this thread, by handle."""

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        def rng_read_and_skip(resource: Any, *args: Any, **kwargs: Any) -> Any:
            result = stock(resource, *args, **kwargs)
            after(resource, result)
            return result

        return rng_read_and_skip

    with _patches.replaced(_stateful_random_ops, "rng_read_and_skip", make):
        yield


def while_loop_same_structure(cond: Any, body: Any, loop_vars: Any) -> Any:
    """tf.while_loop that keeps the structure of its variables (the public one unwraps a single one)."""
    return _while_loop.while_loop(cond, body, loop_vars, parallel_iterations=1, return_same_structure=True)
