"""Runs a drawn program under a strategy: each instruction means the same whatever strategy that is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.samplers.program import Block, Input, Instruction, Program, Run, Type, Variable, walk

plain = tf.autograph.experimental.do_not_convert
"""AutoGraph is to see the branches and loops of a program, not the machine."""


def run(program: Program, strategy: tf.distribute.Strategy, *, eager: bool, inline: bool, wide: bool = False) -> Any:
    """Everything that can be seen of a program: what its replicas return, what becomes of that, and all variables.

    Args:
      program: what to run.
      strategy: whatever it runs under.
      eager: whether the step is called as it is, or as a tf.function.
      inline: whether nested tf.functions that hold collectives run inline: they cannot run by themselves where each replica
        does, outside tf.functions and under stock strategies.
      wide: whether float32 is float64.
    """
    return Machine(program, strategy, eager=eager, inline=inline, wide=wide).run()


class Machine:
    def __init__(self, program: Program, strategy: tf.distribute.Strategy, *, eager: bool, inline: bool, wide: bool):
        self.program, self.strategy = program, strategy
        self.eager, self.inline, self.wide = eager, inline, wide
        self.variables: dict[str, tf.Variable] = {}
        self.functions: dict[int, Any] = {}
        self.number = strategy.num_replicas_in_sync

    def dtype(self, kind: Type) -> tf.DType:
        return tf.float64 if self.wide and kind.is_float else tf.as_dtype(kind.dtype)

    def shape(self, kind: Type, rows: int = 0) -> list[int]:
        width = self.program.width
        return [rows, width] if kind.is_rows else {"scalar": [], "vector": [width], "table": [4, width]}[kind.shape]

    # --- The whole ----------------------------------------------------------------------------------------------------
    def run(self) -> Any:
        results: dict[str, Any] = {}
        with self.strategy.scope():
            for variable in self.program.variables:
                try:
                    self.variables[variable.name] = self.make(variable)
                except ValueError:
                    results[f"{variable.name} cannot be made"] = True
            self.anchor = tf.Variable(0.0, trainable=False)  # where what is reduced goes to
            self.generator = tf.random.Generator.from_seed(self.program.index)
            self.optimizers = [self.make_optimizer(name) for name in self.program.optimizers]
        step = self.step if self.eager else tf.function(self.step, autograph=False)
        for number, inputs in enumerate(self.inputs()):
            for attempt in range(3):
                try:
                    returned = step(inputs)
                    break
                except RuntimeError as error:
                    # Says itself that nothing has run, and what to do.
                    if "call the tf.function again" not in str(error) or attempt == 2:
                        raise
            results[f"step {number}"] = self.seen(returned)
            for block in self.program.outside:
                with self.strategy.scope():
                    results[f"after step {number}"] = self.seen([self.execute(block, {}), [], []])
        results["variables"] = {name: self.state(name) for name in self.variables}
        slots = [variable for optimizer in self.optimizers for variable in optimizer.variables]
        results["optimizers"] = [np.asarray(tf.convert_to_tensor(slot.value)) for slot in slots]
        return results

    def make(self, variable: Variable) -> tf.Variable:
        kind = variable.type
        shape = self.shape(kind)
        start = (np.arange(int(np.prod(shape))) % 9 + 1).reshape(shape) / 4
        return tf.Variable(
            tf.constant(start * (1 if kind.is_float else 4), self.dtype(kind)),
            trainable=variable.trainable,
            synchronization=getattr(tf.VariableSynchronization, variable.synchronization),
            aggregation=getattr(tf.VariableAggregation, variable.aggregation),
            name=variable.name,
        )

    def trained(self) -> list[tf.Variable]:
        """What optimizers train."""
        return [
            self.variables[v.name]
            for v in self.program.variables
            if v.trainable and v.aggregation == "NONE" and v.type.dtype == "float32" and v.can_be_made
        ]

    def make_optimizer(self, name: str) -> keras.optimizers.Optimizer:
        # Adam and RMSprop with the usual epsilon turn a gradient that is rounding alone into a whole step.
        optimizer = {
            "SGD": lambda: keras.optimizers.SGD(0.1),
            "Momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
            "Adam": lambda: keras.optimizers.Adam(0.05, epsilon=0.1),
            "RMSprop": lambda: keras.optimizers.RMSprop(0.05, epsilon=0.1),
        }[name]()
        optimizer.build(self.trained())
        return optimizer

    def state(self, name: str) -> Any:
        """A variable as seen from outside, and by each replica."""
        variable = self.variables[name]
        own = self.strategy.run(plain(lambda: tf.identity(tf.convert_to_tensor(variable))))
        facts = {"own": self.local(own), "results": self.local(variable)}
        if self.program.variable(name).has_cross_replica_value:
            facts["outside"] = variable.numpy()
        return facts

    def local(self, value: Any) -> list[Any]:
        """Each replica's value, as arrays."""
        parts = self.strategy.experimental_local_results(value)
        if len(parts) == 1:
            # Where all replicas return the same Python object, stock strategies keep one of them.
            parts = parts * self.number
        return [self.array(part) for part in parts]

    def array(self, value: Any) -> Any:
        if isinstance(value, tf.RaggedTensor):
            return [value.flat_values.numpy(), value.row_splits.numpy()]
        if isinstance(value, tf.SparseTensor):
            return [value.indices.numpy(), value.values.numpy(), value.dense_shape.numpy()]
        return "None" if value is None else np.asarray(value, np.int32 if isinstance(value, int) else None)

    def seen(self, returned: Any) -> Any:
        cross, results, reduced = returned
        seen: dict[str, Any] = {f"reduced {number}": self.array(value) for number, value in enumerate(reduced)}
        seen |= {name: self.array(value) for name, value in cross.items()}
        for number, result in enumerate(results):
            leaves = tf.nest.flatten(result)
            seen[f"run {number}"] = [self.local(leaf) for leaf in leaves]
            numbers = [leaf for leaf in leaves if isinstance(leaf, tf.distribute.DistributedValues)]
            for leaf in numbers:
                first = self.strategy.experimental_local_results(leaf)[0]
                if isinstance(first, tf.Tensor) and first.dtype.is_floating and first.shape == [self.program.width]:
                    # What a step returned is reduced outside it, too.
                    total = self.strategy.reduce("SUM", leaf, axis=None), self.strategy.reduce("MEAN", leaf, axis=0)
                    seen.setdefault(f"run {number} reduced", []).append([self.array(part) for part in total])
        return seen

    # --- Inputs -------------------------------------------------------------------------------------------------------
    def inputs(self) -> list[dict[str, Any]]:
        """The arguments of each step."""
        program = self.program
        steps: list[dict[str, Any]] = [{} for _ in range(program.steps)]
        for one in program.inputs:
            rng = np.random.default_rng([program.seed, program.index, int(one.name[1:])])
            for step, value in zip(steps, self.values_of(one, rng), strict=True):
                step[one.name] = value
        return steps

    def values_of(self, one: Input, rng: np.random.Generator) -> list[Any]:
        dtype, steps = self.dtype(one.type), self.program.steps
        if one.source == "python":
            return [round(float(rng.normal()), 2)] * steps
        if one.source == "plain":
            return [tf.constant(rng.standard_normal(self.shape(one.type)), dtype) for _ in range(steps)]
        if one.source == "dataset":
            batches = [tf.constant(rng.standard_normal((rows, self.program.width)), dtype) for rows in one.rows[:steps]]
            data = tf.data.Dataset.from_tensor_slices(tf.concat(batches, 0)).batch(one.rows[0])
            return list(self.strategy.experimental_distribute_dataset(data))
        made = [[self.own_value(one, rng, r) for r in range(self.number)] for _ in range(steps)]
        distribute = self.strategy.experimental_distribute_values_from_function
        return [distribute(lambda context, values=values: values[context.replica_id_in_sync_group]) for values in made]

    def own_value(self, one: Input, rng: np.random.Generator, replica: int) -> Any:
        dtype = self.dtype(one.type)
        if one.source == "ragged":
            lengths = rng.integers(0, 4, 3)
            return tf.RaggedTensor.from_row_lengths(tf.constant(rng.standard_normal(lengths.sum()), dtype), lengths)
        if one.source == "sparse":
            return tf.sparse.from_dense(tf.constant(rng.standard_normal((3, 2)) * (rng.random((3, 2)) > 0.4), dtype))
        shape = self.shape(one.type, one.rows[replica] if one.rows else 0)
        return tf.constant(rng.standard_normal(shape), dtype)

    # --- Steps --------------------------------------------------------------------------------------------------------
    def step(self, inputs: dict[str, Any]) -> Any:
        given, results, reduced = dict(inputs), [], []
        cross: dict[str, Any] = {}
        for part in self.program.parts:
            if isinstance(part, Run):
                returned = self.run_replicas(part, given)
                results.append(returned)
                by_name = dict(zip(part.block.results, self.unpacked(part, returned), strict=True))
                given |= by_name
                for name, reduction in part.after:
                    cross[f"{name}/{reduction}"] = self.reduction(by_name[name], reduction)
                    reduced.append(cross[f"{name}/{reduction}"])
            else:
                with self.strategy.scope():
                    env = self.execute(part, cross)
                reduced += [value for name, value in env.items() if name not in cross]
        return {}, results, reduced

    def reduction(self, value: Any, reduction: str) -> tf.Tensor:
        if reduction == "gather":
            return self.strategy.gather(value, axis=0)
        kind, *axis = reduction.split()
        return self.strategy.reduce(kind, value, axis=0 if axis else None)

    def run_replicas(self, part: Run, given: Mapping[str, Any]) -> Any:
        names = list(given)

        @plain
        def replica_function(*args: Any, **kwargs: Any) -> Any:
            if part.packing == "nested":
                flat = [*args[0]["first"], *kwargs["others"]["rest"]]
            else:
                flat = [*args, *kwargs.values()]
            env = dict(zip(names, flat, strict=True))
            for one in self.program.inputs:
                if one.source == "python" and one.name in env:
                    env[one.name] = tf.constant(env[one.name], self.dtype(one.type))
            env = self.execute(part.block, env)
            values = self.own([self.get(env, name) for name in part.block.results])
            if part.packing == "flat":
                return tuple(values)
            if part.packing == "dict":
                return dict(zip(part.block.results, values, strict=True))
            return {"some": (values[:1], None), "others": {"rest": tuple(values[1:]), "number": 3}}

        values = [given[name] for name in names]
        if part.packing == "nested":
            args: Any = ({"first": tuple(values[:1]), "nothing": None},)
            return self.strategy.run(replica_function, args, {"others": {"rest": values[1:], "number": 2}})
        if part.packing == "dict":
            return self.strategy.run(replica_function, kwargs=dict(given))
        return self.strategy.run(replica_function, args=tuple(values))

    def unpacked(self, part: Run, returned: Any) -> Sequence[Any]:
        if part.packing == "flat":
            return returned
        if part.packing == "dict":
            return [returned[name] for name in part.block.results]
        return [*returned["some"][0], *returned["others"]["rest"]]

    def execute(self, block: Block, env: Mapping[str, Any]) -> dict[str, Any]:
        """Runs a block; returns all values by name."""
        env = dict(env)
        for instruction in block.instructions:
            args = [self.get(env, name) for name in instruction.args]
            if self.program.is_collective(instruction):
                args = self.own(args)
            made = getattr(self, f"do_{instruction.op}")(instruction, env, *args)
            results = made if isinstance(made, list | tuple) else [made]
            env.update(zip(instruction.out, results, strict=False))
        return env

    def own(self, values: Sequence[Any]) -> list[Any]:
        """The values as tensors of this replica: the very same in all is, to stock strategies, reduced already."""
        return [tf.identity(value) if isinstance(value, tf.Tensor) else value for value in values]

    def get(self, env: Mapping[str, Any], name: str) -> Any:
        """A value; a constant if the instruction that made it is no longer there."""
        return env[name] if name in env else self.constant(self.program.types[name], 0.375)

    def constant(self, kind: Type, value: float) -> Any:
        dtype = self.dtype(kind)
        if kind.shape == "ragged":
            return tf.RaggedTensor.from_row_lengths(tf.constant([value], dtype), [0, 1])
        if kind.shape == "sparse":
            return tf.SparseTensor([[0, 1]], tf.constant([value], dtype), [3, 2])
        shape = self.shape(kind, 3)
        ramp = 1 + (np.arange(int(np.prod(shape))) % 9).reshape(shape) / 8
        return tf.constant(value * ramp if kind.is_float else np.round(4 * value * ramp), dtype)

    def of(self, instruction: Instruction, number: int = 0) -> Type:
        return self.program.types[instruction.out[number]]

    @property
    def context(self) -> tf.distribute.ReplicaContext:
        context = tf.distribute.get_replica_context()
        assert context is not None
        return context

    # --- Values -------------------------------------------------------------------------------------------------------
    def do_constant(self, instruction: Instruction, env: Any) -> Any:
        return self.constant(self.of(instruction), instruction.options["value"])

    def do_num_replicas(self, instruction: Instruction, env: Any) -> Any:
        kind = self.of(instruction)
        return tf.fill(self.shape(kind), tf.cast(self.context.num_replicas_in_sync, self.dtype(kind)))

    def do_replica_id(self, instruction: Instruction, env: Any) -> Any:
        return tf.cast(self.context.replica_id_in_sync_group, self.dtype(self.of(instruction)))

    def do_unary(self, instruction: Instruction, env: Any, x: Any) -> Any:
        functions: dict[str, Callable[[Any], Any]] = {
            "tanh": tf.tanh,
            "sin": tf.sin,
            "square": lambda x: tf.square(tf.tanh(x)),
            "abs": tf.abs,
            "neg": lambda x: -x,
            "sigmoid": tf.sigmoid,
            "double": lambda x: 2 * x,
            "identity": tf.identity,
            "stop_gradient": tf.stop_gradient,
            "clip": lambda x: tf.clip_by_value(x, -0.7, 0.9),
            "softplus": tf.nn.softplus,
        }
        return functions[instruction.options["how"]](x)

    def do_binary(self, instruction: Instruction, env: Any, x: Any, y: Any) -> Any:
        functions: dict[str, Callable[[Any, Any], Any]] = {
            "add": lambda x, y: x + y,
            "sub": lambda x, y: x - y,
            "mul": lambda x, y: tf.tanh(x) * y,
            "maximum": tf.maximum,
            "divide": lambda x, y: x / (1 + tf.abs(y)),
            "where": lambda x, y: tf.where(x > 0.3, x, y),
        }
        return functions[instruction.options["how"]](x, y)

    def do_of_rows(self, instruction: Instruction, env: Any, x: Any) -> Any:
        functions: dict[str, Callable[[Any], Any]] = {
            "sum": lambda x: tf.reduce_sum(x, axis=0),
            "mean": lambda x: tf.reduce_mean(x, axis=0),
            "max": lambda x: tf.reduce_max(x, axis=0),
            "sum all": tf.reduce_sum,
            "first": lambda x: x[0],
        }
        return functions[instruction.options["how"]](x)

    def do_rows_times(self, instruction: Instruction, env: Any, x: Any) -> Any:
        width = self.program.width
        return x @ tf.constant(np.eye(width) * instruction.options["value"] + np.eye(width, k=1) / 2, x.dtype)

    def do_count_rows(self, instruction: Instruction, env: Any, x: Any) -> Any:
        return tf.shape(x)[0]

    def do_index(self, instruction: Instruction, env: Any, x: Any) -> Any:
        return x[instruction.options["at"]]

    def do_pack(self, instruction: Instruction, env: Any, x: Any) -> Any:
        vector = x * tf.cast(1 + tf.range(self.program.width) % 5, x.dtype)
        return vector if self.of(instruction).shape == "vector" else tf.stack([vector, -vector, vector + 1, vector])

    def do_cast(self, instruction: Instruction, env: Any, x: Any) -> Any:
        dtype = self.dtype(self.of(instruction))
        if x.dtype.is_floating and dtype.is_integer:
            x = tf.round(tf.clip_by_value(4 * x, -99, 99))
        return tf.cast(x, dtype)

    def do_integer(self, instruction: Instruction, env: Any, x: Any) -> Any:
        return (x * instruction.options["value"] + 1) % 97

    def do_repeat(self, instruction: Instruction, env: Any, x: Any) -> Any:
        return tf.tile(x[tf.newaxis], [1 + self.context.replica_id_in_sync_group, 1])

    def do_lookup(self, instruction: Instruction, env: Any, x: Any) -> Any:
        return tf.reduce_sum(tf.gather(x, tf.stack([1, self.context.replica_id_in_sync_group % 4])), axis=0)

    def do_composite(self, instruction: Instruction, env: Any, x: Any) -> Any:
        if isinstance(x, tf.RaggedTensor):
            return tf.ragged.map_flat_values(lambda flat: 2 * flat + 1, x)
        return tf.sparse.map_values(lambda flat: 2 * flat + 1, x)

    def do_of_composite(self, instruction: Instruction, env: Any, x: Any) -> Any:
        if isinstance(x, tf.RaggedTensor):
            both = tf.stack([tf.reduce_sum(x), tf.cast(tf.reduce_max(x.row_lengths()), x.dtype)])
        else:
            both = tf.stack([tf.sparse.reduce_sum(x), tf.reduce_sum(tf.sparse.to_dense(x)[:, 0])])
        return tf.tile(both, [self.program.width // 2])

    def do_random(self, instruction: Instruction, env: Any) -> Any:
        kind, how, seed = self.of(instruction), instruction.options["how"], instruction.options["seed"]
        # The same numbers whichever way they are stored.
        shape, dtype = self.shape(kind), tf.as_dtype(kind.dtype)
        replica = self.context.replica_id_in_sync_group
        drawn: dict[str, Callable[[], Any]] = {
            "stateless": lambda: tf.random.stateless_normal(shape, [seed, 1], dtype=dtype),
            "stateless_of_replica": lambda: tf.random.stateless_uniform(shape, tf.stack([seed, replica]), dtype=dtype),
            "generator": lambda: self.generator.normal(shape, dtype=dtype),
            # What they draw depends on the graph.
            "stateful": lambda: 0 * tf.random.normal(shape, dtype=dtype) + tf.cast(replica, dtype),
            "stateful_shape": lambda: tf.zeros(shape, dtype) + tf.cast(tf.size(tf.random.uniform(shape)), dtype),
        }
        return tf.cast(drawn[how](), self.dtype(kind))

    # --- Variables ----------------------------------------------------------------------------------------------------
    def do_read(self, instruction: Instruction, env: Any) -> Any:
        variable = self.variables[instruction.variable]
        functions: dict[str, Callable[[Any], Any]] = {
            "identity": tf.identity,
            "read_value": lambda v: v.read_value(),
            "value": lambda v: v.value() + 0,
            "operator": lambda v: v + 1 if v.dtype.is_floating else 2 * v,
            "convert": tf.convert_to_tensor,
        }
        return functions[instruction.options["how"]](variable)

    def do_assign(self, instruction: Instruction, env: Any, value: Any) -> Any:
        written = getattr(self.variables[instruction.variable], instruction.options["method"])(value)
        return tf.identity(written) if instruction.out else None

    def do_scatter(self, instruction: Instruction, env: Any, value: Any) -> Any:
        variable, options = self.variables[instruction.variable], instruction.options
        shape = self.shape(self.program.variable(instruction.variable).type)
        indices: Any = tf.constant(options["at"], tf.int32)
        if options["shift"]:
            indices = (indices + self.context.replica_id_in_sync_group) % shape[0]
        values = value[:2] if len(shape) == 1 else tf.stack([value, 2 * value])
        getattr(variable, options["method"])(tf.IndexedSlices(values, indices, tf.constant(shape)))

    def do_cross_read(self, instruction: Instruction, env: Any) -> Any:
        return self.do_read(instruction, env)

    def do_cross_assign(self, instruction: Instruction, env: Any, *value: Any) -> None:
        kind = self.program.variable(instruction.variable).type
        given = value[0] if value else self.constant(kind, instruction.options["value"])
        # Nothing is read back: of some variables nothing can be.
        getattr(self.variables[instruction.variable], instruction.options["method"])(given, read_value=False)

    def do_cross_update(self, instruction: Instruction, env: Any, *value: Any) -> None:
        kind = self.program.variable(instruction.variable).type
        given = value[0] if value else self.constant(kind, instruction.options["value"])
        self.update(self.strategy, instruction, given)

    def update(self, cross: Any, instruction: Instruction, value: Any) -> None:
        method = instruction.options["method"]
        variable = self.variables[instruction.variable]
        cross.extended.update(variable, plain(lambda v, given: getattr(v, method)(given)), args=(value,))

    # --- Collectives --------------------------------------------------------------------------------------------------
    def do_all_reduce(self, instruction: Instruction, env: Any, *values: Any) -> Any:
        how = instruction.options["how"]
        if len(values) == 1:
            return self.context.all_reduce(how, values[0])
        reduced = self.context.all_reduce(how, {"first": values[0], "rest": list(values[1:])})
        return [reduced["first"], *reduced["rest"]]

    def do_all_reduce_slices(self, instruction: Instruction, env: Any, value: Any) -> Any:
        indices = tf.stack([0, self.context.replica_id_in_sync_group % 4])
        slices = tf.IndexedSlices(tf.stack([value, -value]), indices, tf.constant([4, self.program.width]))
        return tf.convert_to_tensor(self.context.all_reduce(instruction.options["how"], slices))

    def do_all_gather(self, instruction: Instruction, env: Any, value: Any) -> Any:
        axis = instruction.options["axis"]
        value = value if value.shape.rank else value[tf.newaxis]
        if len(instruction.out) == 1:
            gathered = self.context.all_gather(value, axis)
            return gathered if self.of(instruction).is_rows else self.folded(gathered)
        several = self.context.all_gather({"one": value, "two": [2 * value]}, axis)
        return [self.folded(several["one"]), self.folded(several["two"][0])]

    def folded(self, value: Any) -> Any:
        """A scalar that depends on the order of the numbers."""
        flat = tf.reshape(value, [-1])
        size = tf.cast(tf.size(flat), flat.dtype)
        return tf.reduce_sum(flat * (1 + tf.range(size))) / size

    def do_merge_call(self, instruction: Instruction, env: Any, *values: Any) -> Any:
        options = instruction.options
        reduction = options.get("reduction")

        def merge(cross: Any, *given: Any) -> Any:
            if options["how"] == "reduce":
                return cross.extended.reduce_to(reduction, given[0], self.anchor)
            if options["how"] == "batch_reduce":
                return cross.extended.batch_reduce_to(reduction, [(value, self.anchor) for value in given])
            if options["how"] == "strategy_reduce":
                return cross.reduce(reduction, given[0], axis=None)
            if options["how"] == "local":
                parts = cross.experimental_local_results(given[0])
                return functools.reduce(lambda total, part: part + 0.5 * total, parts)
            if options["how"] == "gather":
                return self.folded(cross.gather(given[0], axis=0))
            if options["how"] == "broadcast":
                total = cross.extended.reduce_to("SUM", given[0], "/CPU:0")
                return cross.extended.broadcast_to(total, self.anchor)
            if options["how"] == "pass":
                return given[0]
            if options["how"] == "update_own":
                return self.update(cross, instruction, given[0])
            variable = self.variables[instruction.variable]
            if options["how"] == "read":
                return tf.identity(variable)
            total = cross.extended.reduce_to(reduction, given[0], variable)
            if options["how"] == "assign":
                getattr(variable, options["method"])(total, read_value=False)
                return None
            self.update(cross, instruction, total)
            return None

        if options["how"] == "gather" and not values[0].shape.rank:
            values = (values[0][tf.newaxis],)
        return self.context.merge_call(plain(merge), args=tuple(values))

    # --- Blocks -------------------------------------------------------------------------------------------------------
    def do_branch(self, instruction: Instruction, env: Any, x: Any) -> Any:
        condition = x > instruction.options["above"]
        then, otherwise = (plain(functools.partial(self.results, block, env)) for block in instruction.blocks)
        if instruction.options["style"] == "tf.cond":
            return tf.cond(condition, then, otherwise)
        return (_if if tf.executing_eagerly() else _converted_if())(condition, then, otherwise)

    def results(self, block: Block, env: Any) -> tuple[Any, ...]:
        env = self.execute(block, env)
        # In graphs, what comes out of a branch or loop is a tensor of its own, which matters to a tape that watches it.
        return tuple(tf.identity(self.get(env, name)) for name in block.results)

    def do_loop(self, instruction: Instruction, env: Any, *given: Any) -> Any:
        (block,) = instruction.blocks
        values, count = given[: len(instruction.out)], given[len(instruction.out) :]
        times: Any = count[0] % 3 + 1 if count else tf.constant(instruction.options["times"])

        @plain
        def body(number: Any, values: Any) -> Any:
            return self.results(block, {**env, **dict(zip(block.parameters, (number, *values), strict=True))})

        if instruction.options["style"] == "for":
            return (_for if tf.executing_eagerly() else _converted_for())(times, body, tuple(values))
        _, *results = tf.while_loop(
            plain(lambda number, *_: number < times),
            plain(lambda n, *v: (n + 1, *body(n, v))),
            (tf.constant(0), *values),
        )
        return results

    def do_gradient(self, instruction: Instruction, env: Any, *sources: Any) -> Any:
        (block,), reduce = instruction.blocks, instruction.options["reduce"]
        variables = [self.variables[name] for name in instruction.options["variables"]]
        with tf.GradientTape() as tape:
            for source in sources:
                tape.watch(source)
            (target,) = self.results(block, env)
        gradients = tape.gradient(target, [*sources, *variables], unconnected_gradients="zero")
        if reduce is not None:
            gradients = self.context.all_reduce(reduce, gradients)
        return [*(tf.convert_to_tensor(gradient) for gradient in gradients), target]

    def do_train(self, instruction: Instruction, env: Any) -> Any:
        variables = self.trained()
        with tf.GradientTape() as tape:
            (target,) = self.results(instruction.blocks[0], env)
        gradients = tape.gradient(target, variables, unconnected_gradients="zero")
        self.optimizers[instruction.options["optimizer"]].apply(gradients, variables)
        return target

    def do_function(self, instruction: Instruction, env: Any, *given: Any) -> Any:
        (block,) = instruction.blocks

        @plain
        def body(*values: Any) -> Any:
            return self.results(block, dict(zip(block.parameters, values, strict=True)))

        if self.inline and self.is_where_replicas_meet(block):
            return body(*given)
        # One function for all replicas and all steps, as a user's is.
        function = self.functions.setdefault(id(instruction), tf.function(body, autograph=False))
        return function(*given)

    def is_where_replicas_meet(self, block: Block) -> bool:
        """Whether replicas meet in a block: at a collective, or to write what they share."""
        return any(
            self.program.is_collective(instruction)
            or (instruction.op in ("assign", "scatter") and not self.program.variable(instruction.variable).is_local)
            for instruction in walk(block)
        )


# --- Branches and loops as AutoGraph makes them -----------------------------------------------------------------------
def _if(condition: Any, then: Any, otherwise: Any) -> Any:
    if condition:
        results = then()
    else:
        results = otherwise()
    return results


def _for(times: Any, body: Any, values: Any) -> Any:
    for number in tf.range(times):
        values = body(number, values)
    return values


@functools.cache
def _converted_if() -> Any:
    return tf.autograph.to_graph(_if)


@functools.cache
def _converted_for() -> Any:
    return tf.autograph.to_graph(_for)
