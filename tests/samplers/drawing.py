"""Draws small SPMD programs: valid ones, that MirroredStrategy and we should agree on. Imports no TensorFlow.

What a drawer knows of each value: its type; whether it is *uniform*, surely the same in all replicas; and whether it is
*free*, computed before the branches and loops around, or from such values alone.
A block is of one of two sorts. In a *uniform* one all goes alike: it may write what replicas share, and hands out uniform
values. Elsewhere replicas may differ: they write only what they have for themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.samplers.program import Block, Input, Instruction, Program, Run, Type, Variable, pruned

WIDE = 1100
REPLICAS = (2, 2, 2, 2, 3, 3, 4)
FLOATS = ("float32", "float32", "float32", "float64")
INTEGERS = ("int32", "int64")
AGGREGATIONS = ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
OPTIMIZERS = ("SGD", "Momentum", "Adam", "RMSprop")
UNARY = ("tanh", "sin", "square", "abs", "neg", "sigmoid", "double", "identity", "stop_gradient", "clip", "softplus")
BINARY = ("add", "sub", "mul", "maximum", "divide", "where")
READS = ("identity", "read_value", "value", "operator", "convert")
METHODS = ("assign", "assign_add", "assign_sub")
MERGES = ("reduce", "batch_reduce", "strategy_reduce", "local", "gather", "broadcast", "update", "update_own", "assign")
MERGES += ("read", "pass")
RANDOM = ("stateless", "stateless_of_replica", "generator", "stateful", "stateful_shape")
VALUES = ("constant", "num_replicas", "replica_id", "unary", "binary", "of_rows", "rows_times", "index", "pack", "cast")
VALUES += ("lookup", "repeat", "count_rows", "integer", "composite", "of_composite", "read")
EFFECTS = ("assign", "scatter", "random", "all_reduce", "all_reduce_slices", "all_gather", "merge_call", "train")
BLOCKS = ("branch", "loop", "gradient", "function")
CROSS = ("cross_read", "cross_assign", "cross_update")
SCALAR, VECTOR, TABLE = "scalar", "vector", "table"


@dataclasses.dataclass(frozen=True)
class Info:
    """What is known of a value."""

    type: Type
    uniform: bool
    free: bool


@dataclasses.dataclass
class Scope:
    """What may stand at a place in the program."""

    values: dict[str, Info]
    top: bool = True
    uniform: bool = False
    collectives: bool = True
    shared_writes: bool = True
    generator: bool = True
    uniform_sources: bool = False  # of collectives
    depth: int = 0

    def inner(self, **changes: Any) -> Scope:
        return dataclasses.replace(self, values=dict(self.values), depth=self.depth + 1, **changes)


def draw(seed: int, index: int) -> Program:
    """The program number `index`."""
    return _Drawer(seed, index).program()


class _Drawer:
    def __init__(self, seed: int, index: int):
        self.seed, self.index = seed, index
        self.rng = np.random.default_rng([seed, index])
        self.types: dict[str, Type] = {}
        self.variables: tuple[Variable, ...] = ()
        self.optimizers: tuple[str, ...] = ()
        self.number = 0
        # What is small is computed again rather than carried from loop to loop.
        self.width = self.one_of((2, WIDE))
        self.out: list[Instruction] = []

    # --- Chance -------------------------------------------------------------------------------------------------------
    def one_of(self, options: Sequence[Any]) -> Any:
        return options[self.rng.integers(len(options))]

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def some_of(self, options: Sequence[Any], most: int) -> list[Any]:
        number = min(len(options), int(self.rng.integers(1, most + 1)))
        return [options[at] for at in sorted(self.rng.permutation(len(options))[:number])]

    def real(self) -> float:
        return round(float(self.rng.uniform(-1.5, 1.5)), 3)

    # --- The whole ----------------------------------------------------------------------------------------------------
    def program(self) -> Program:
        replicas = self.one_of(REPLICAS)
        steps = int(self.rng.integers(1, 3))
        self.variables = tuple(self.new_variable(number) for number in range(self.rng.integers(1, 6)))
        usable = [v for v in self.variables if v.can_be_made]
        trained = any(v.trainable and v.aggregation == "NONE" and v.type.dtype == "float32" for v in usable)
        if trained:
            self.optimizers = tuple(self.one_of(OPTIMIZERS) for _ in range(self.one_of((1, 1, 2))))
        inputs = tuple(self.new_input(number, replicas, steps) for number in range(self.rng.integers(1, 5)))
        given = {one.name: Info(one.type, one.source in ("plain", "python"), True) for one in inputs}
        parts: list[Run | Block] = []
        cross: dict[str, Info] = {}
        for _ in range(self.one_of((1, 1, 1, 2))):
            run, returned, reduced = self.run(given)
            parts.append(run)
            given |= returned
            cross |= reduced
            if self.chance(0.4):
                parts.append(self.between(cross))
        outside = (self.between(cross),) if self.chance(0.4) else ()
        made = Program(
            seed=self.seed,
            index=self.index,
            replicas=replicas,
            steps=steps,
            width=self.width,
            variables=self.variables,
            optimizers=self.optimizers,
            inputs=inputs,
            parts=tuple(parts),
            outside=outside,
            types=self.types,
        )
        return pruned(made, frozenset(VALUES))

    def new_variable(self, number: int) -> Variable:
        rarely = "NONE" if self.chance(0.1) else "AUTO"
        synchronization = self.one_of(("AUTO", "AUTO", "ON_WRITE", "ON_READ", "ON_READ", rarely))
        trainable = self.chance(0.35) and (synchronization != "ON_READ" or self.chance(0.05))
        integer = not trainable and self.chance(0.2)
        # TensorFlow makes no variables that are means of integers.
        aggregations = [name for name in AGGREGATIONS if name != "MEAN" or not integer or self.chance(0.1)]
        return Variable(
            name=f"v{number}",
            type=Type(self.one_of((SCALAR, VECTOR, VECTOR, TABLE)), self.one_of(INTEGERS if integer else FLOATS)),
            synchronization=synchronization,
            aggregation="NONE" if trainable and self.chance(0.6) else self.one_of(aggregations),
            trainable=trainable,
        )

    def new_input(self, number: int, replicas: int, steps: int) -> Input:
        name = f"x{number}"
        source = self.one_of(("values", "values", "dataset", "dataset", "plain", "python", "ragged", "sparse"))
        dtype = self.one_of(FLOATS)
        shape = self.one_of((SCALAR, VECTOR))
        rows: tuple[Any, ...] = ()
        if source == "dataset":
            # A share is ceil(rows / replicas) rows; what is left for the last replica must be one at least.
            sizes = [n for n in range(replicas, 9) if n - (replicas - 1) * -(-n // replicas) >= 1]
            full = int(self.one_of(sizes))
            last = int(self.one_of([n for n in sizes if n <= full])) if self.chance(0.6) else full
            rows = (*[full] * (steps - 1), last)
            even = all(n % replicas == 0 for n in rows)
            shape = f"rows:{'even_' if even else ''}{name}"
        elif source == "values" and self.chance(0.5):
            rows = tuple(int(self.rng.integers(1, 4)) for _ in range(replicas))
            rows = (rows[0],) * replicas if self.chance(0.3) else rows
            shape = f"rows:{'even_' if len(set(rows)) == 1 else ''}{name}"
        elif source == "python":
            shape, dtype = SCALAR, "float32"
        elif source in ("ragged", "sparse"):
            shape, dtype = source, "float32"
        self.types[name] = Type(shape, dtype)
        return Input(name, self.types[name], source, rows)

    def run(self, given: dict[str, Info]) -> tuple[Run, dict[str, Info], dict[str, Info]]:
        scope = Scope(dict(given))
        block = self.block(scope, int(self.rng.integers(6, 15)))
        made = [name for name in scope.values if name not in given] or list(given)
        results = tuple(self.some_of(made[-12:], 8))
        returned = {name: dataclasses.replace(scope.values[name], uniform=False) for name in results}
        after, reduced = [], {}
        for name in results:
            kind = scope.values[name].type
            if not kind.is_float or kind.shape in ("ragged", "sparse") or not self.chance(0.5):
                continue
            reductions = ["SUM 0", "MEAN 0", "gather"] if kind.is_rows else ["SUM", "MEAN"]
            reductions += ["SUM 0", "MEAN 0", "gather"] if kind.shape == VECTOR else []
            reduction = self.one_of(reductions)
            after.append((name, reduction))
            shape = {"SUM": kind.shape, "MEAN": kind.shape}.get(reduction, VECTOR if kind.is_rows else SCALAR)
            if reduction != "gather":
                self.types[f"{name}/{reduction}"] = Type(shape, kind.dtype)
                reduced[f"{name}/{reduction}"] = Info(Type(shape, kind.dtype), True, True)
        block = dataclasses.replace(block, results=results)
        return Run(block, tuple(after), self.one_of(("flat", "dict", "nested"))), returned, reduced

    def between(self, values: dict[str, Info]) -> Block:
        """Instructions in cross-replica context."""
        self.out, kept = [], self.out
        for _ in range(self.rng.integers(1, 4)):
            op = self.one_of(("cross_read", "cross_assign", "cross_assign", "cross_update"))
            variables = [v for v in self.variables if v.can_be_made]
            if op != "cross_assign":  # an update hands its variable back
                variables = [v for v in variables if v.has_cross_replica_value]
            if not variables:
                continue
            variable = self.one_of(variables)
            if op == "cross_read":
                self.add("cross_read", variable.type, variable=variable.name, how=self.one_of(READS))
                continue
            method = self.one_of(METHODS)
            if op == "cross_assign" and variable.on_read and variable.aggregation == "SUM":
                method = "assign"
            fitting = [name for name, info in values.items() if info.type == variable.type]
            args = (self.one_of(fitting),) if fitting and self.chance(0.7) else ()
            self.add(op, None, args, variable=variable.name, method=method, value=self.real())
        block, self.out = Block(tuple(self.out)), kept
        return block

    # --- Blocks -------------------------------------------------------------------------------------------------------
    def block(self, scope: Scope, length: int) -> Block:
        self.out, kept = [], self.out
        menu: dict[Callable[[Scope], bool], float] = {
            self.simple: 8,
            self.read: 2.5,
            self.assign: 2.5,
            self.scatter: 0.6,
            self.all_reduce: 2,
            self.all_reduce_slices: 0.3,
            self.all_gather: 0.7,
            self.merge_call: 1.2,
            self.random: 0.6,
            self.story: 1.2 if scope.depth == 0 else 0,
        }
        if scope.depth < 2:
            menu |= {self.branch: 0.9, self.loop: 0.6, self.gradient: 0.9, self.function: 0.6, self.train: 0.5}
        weights = np.array(list(menu.values())) / sum(menu.values())
        while len(self.out) < length:
            list(menu)[self.rng.choice(len(menu), p=weights)](scope)
        block, self.out = Block(tuple(self.out)), kept
        return block

    def add(
        self,
        op: str,
        types: Type | Sequence[Type] | None = None,
        args: Sequence[str] = (),
        *,
        scope: Scope | None = None,
        uniform: bool = False,
        free: bool = True,
        variable: str = "",
        blocks: Sequence[Block] = (),
        **options: Any,
    ) -> tuple[str, ...]:
        """Appends an instruction; its results get names."""
        kinds = [types] if isinstance(types, Type) else list(types or ())
        names = tuple(self.name(kind) for kind in kinds)
        self.out.append(Instruction(op, names, tuple(args), variable, options, tuple(blocks)))
        if scope is not None:
            for name, kind in zip(names, kinds, strict=True):
                scope.values[name] = Info(kind, uniform, free or scope.top)
        return names

    def name(self, kind: Type) -> str:
        self.number += 1
        name = f"{kind.shape.split(':')[0][0]}{self.number}"
        self.types[name] = kind
        return name

    def pick(
        self, scope: Scope, accepts: Callable[[Type], bool], *, uniform: bool = False, free: bool = False
    ) -> str | None:
        """A value, preferably a late one."""
        fitting = [
            name
            for name, info in scope.values.items()
            if accepts(info.type) and (info.uniform or not uniform) and (info.free or not free)
        ]
        return fitting[-1 - min(int(self.rng.exponential(2.5)), len(fitting) - 1)] if fitting else None

    def value_for(self, scope: Scope, kind: Type, *, uniform: bool = False, free: bool = False) -> str:
        """A value of a type; a new one if there is none."""
        found = self.pick(scope, lambda other: other == kind, uniform=uniform, free=free)
        if found is not None and self.chance(0.9):
            return found
        if self.chance(0.7):
            made = self.from_another(scope, kind, uniform=uniform, free=free)
            if made is not None:
                return made
        if kind.is_float and not uniform and self.chance(0.6):
            (name,) = self.add("replica_id", Type(SCALAR, kind.dtype), scope=scope)
            if kind.shape != SCALAR:
                (name,) = self.add("pack", kind, (name,), scope=scope)
            return name
        (name,) = self.add("constant", kind, scope=scope, uniform=True, value=self.real())
        return name

    def from_another(self, scope: Scope, kind: Type, *, uniform: bool, free: bool) -> str | None:
        """A value of a type, made of one of another type."""

        def fits(other: Type) -> bool:
            if other.dtype != kind.dtype:
                return other.shape == kind.shape
            shapes = {SCALAR: (VECTOR,), VECTOR: (SCALAR, TABLE, "ragged", "sparse"), TABLE: (SCALAR,)}[kind.shape]
            return other.shape in shapes or (other.is_rows and kind.shape == VECTOR and kind.is_float)

        x = self.pick(scope, fits, uniform=uniform, free=free)
        if x is None:
            return None
        other, flags = scope.values[x].type, self.flags(scope, x)
        options: dict[str, Any] = {}
        if other.dtype != kind.dtype:
            op = "cast"
        elif other.is_rows or other.shape == TABLE:
            op, options = "of_rows", {"how": self.one_of(("sum", "mean", "max", "first"))}
            if not kind.is_float:
                options = {"how": "sum"}
        elif kind.shape == SCALAR:
            op, options = "index", {"at": int(self.rng.integers(self.width))}
        else:
            op = "of_composite" if other.shape in ("ragged", "sparse") else "pack"
        (name,) = self.add(op, kind, (x,), scope=scope, **options, **flags)
        return name

    def flags(self, scope: Scope, *args: str) -> dict[str, bool]:
        return {
            "uniform": all(scope.values[name].uniform for name in args),
            "free": all(scope.values[name].free for name in args),
        }

    # --- Values -------------------------------------------------------------------------------------------------------
    def simple(self, scope: Scope) -> bool:
        """Operations without effects."""
        choice = self.rng.integers(11)
        if choice == 0:
            self.add("replica_id", Type(SCALAR, self.one_of((*FLOATS, "int32"))), scope=scope)
        elif choice == 1:
            kind = Type(self.one_of((SCALAR, VECTOR)), self.one_of(FLOATS))
            name = "num_replicas" if self.chance(0.3) else "constant"
            self.add(name, kind, scope=scope, uniform=True, value=self.real())
        elif choice <= 3:
            x = self.pick(scope, lambda kind: kind.is_float and kind.shape not in ("ragged", "sparse"))
            if x is not None:
                self.add(
                    "unary", scope.values[x].type, (x,), scope=scope, how=self.one_of(UNARY), **self.flags(scope, x)
                )
        elif choice <= 6:
            x = self.pick(scope, lambda kind: kind.is_float and kind.shape not in ("ragged", "sparse"))
            y = x and self.pick(scope, lambda kind: kind == scope.values[x].type)
            if x is not None and y is not None:
                flags = self.flags(scope, x, y)
                self.add("binary", scope.values[x].type, (x, y), scope=scope, how=self.one_of(BINARY), **flags)
        elif choice == 7:
            x = self.pick(scope, lambda kind: kind.is_rows or kind.shape == TABLE)
            if x is None:
                return False
            kind, flags = scope.values[x].type, self.flags(scope, x)
            if self.chance(0.2):
                self.add("count_rows", Type(SCALAR, "int32"), (x,), scope=scope, **flags)
            elif self.chance(0.3) and kind.is_float:
                self.add("rows_times", kind, (x,), scope=scope, value=self.real(), **flags)
            elif kind.is_float:
                how = self.one_of(("sum", "mean", "max", "sum all", "first"))
                shape = SCALAR if how == "sum all" else VECTOR
                self.add("of_rows", Type(shape, kind.dtype), (x,), scope=scope, how=how, **flags)
        elif choice == 8:
            x = self.pick(scope, lambda kind: kind.shape == VECTOR)
            if x is not None and self.chance(0.2) and scope.values[x].type.is_float:
                kind = Type(f"rows:grown{self.number + 1}", scope.values[x].type.dtype)
                self.add("repeat", kind, (x,), scope=scope, free=self.flags(scope, x)["free"])
            elif x is not None:
                kind = Type(SCALAR, scope.values[x].type.dtype)
                self.add(
                    "index", kind, (x,), scope=scope, at=int(self.rng.integers(self.width)), **self.flags(scope, x)
                )
        elif choice == 9:
            x = self.pick(scope, lambda kind: kind.shape in (SCALAR, VECTOR))
            if x is None:
                return False
            kind = scope.values[x].type
            if kind.shape == SCALAR and self.chance(0.5):
                shape = self.one_of((VECTOR, VECTOR, TABLE))
                self.add("pack", Type(shape, kind.dtype), (x,), scope=scope, **self.flags(scope, x))
            elif kind.is_float or self.chance(0.5):
                dtype = self.one_of(("float32", "float64", "int32", "int64"))
                self.add("cast", Type(kind.shape, dtype), (x,), scope=scope, **self.flags(scope, x))
            else:
                self.add("integer", kind, (x,), scope=scope, value=int(self.rng.integers(2, 9)), **self.flags(scope, x))
        else:
            x = self.pick(scope, lambda kind: kind.shape in ("ragged", "sparse", TABLE))
            if x is None:
                return False
            kind, flags = scope.values[x].type, self.flags(scope, x)
            if kind.shape == TABLE:
                self.add("lookup", Type(VECTOR, kind.dtype), (x,), scope=scope, free=flags["free"])
            elif self.chance(0.5) and scope.top:
                self.add("composite", kind, (x,), scope=scope, **flags)
            else:
                self.add("of_composite", Type(VECTOR, kind.dtype), (x,), scope=scope, **flags)
        return True

    def random(self, scope: Scope) -> bool:
        if scope.uniform:
            return False
        kind = Type(self.one_of((SCALAR, VECTOR)), self.one_of(FLOATS))
        how = self.one_of(RANDOM)
        if how == "generator" and not scope.generator:
            return False
        self.add("random", kind, scope=scope, free=False, how=how, seed=int(self.rng.integers(100)))
        return True

    # --- Variables ----------------------------------------------------------------------------------------------------
    def usable(self, scope: Scope) -> list[Variable]:
        return [v for v in self.variables if v.can_be_made and not (scope.uniform and v.is_local)]

    def read(self, scope: Scope) -> bool:
        variables = self.usable(scope)
        if not variables:
            return False
        variable = self.one_of(variables)
        flags = {"uniform": not variable.is_local, "free": False}
        self.add("read", variable.type, scope=scope, variable=variable.name, how=self.one_of(READS), **flags)
        return True

    def writable(self, scope: Scope) -> list[Variable]:
        def allowed(variable: Variable) -> bool:
            if variable.aggregates:
                return scope.shared_writes and scope.collectives
            return variable.is_local or scope.shared_writes

        return [variable for variable in self.usable(scope) if allowed(variable)]

    def assign(self, scope: Scope) -> bool:
        variables = self.writable(scope)
        if not variables:
            return False
        variable = self.one_of(variables)
        value = self.value_for(
            scope,
            variable.type,
            **(
                self.source(scope)
                if variable.aggregates
                else {"uniform": scope.uniform or not variable.is_local, "free": False}
            ),
        )
        back = self.chance(0.25)
        self.add(
            "assign",
            variable.type if back else None,
            (value,),
            scope=scope,
            uniform=not variable.is_local,
            free=False,
            variable=variable.name,
            method=self.one_of(METHODS),
        )
        return True

    def story(self, scope: Scope) -> bool:
        """A variable that is read, written and read again, around a collective; what is read meets what differs."""
        variables = [v for v in self.writable(scope) if v.type.is_float]
        if not variables:
            return False
        variable = self.one_of(variables)
        kind, name = variable.type, variable.name
        flags = {"scope": scope, "uniform": not variable.is_local, "free": False}
        x = self.value_for(scope, kind)
        (before,) = self.add("read", kind, variable=name, how=self.one_of(READS), **flags)
        (mine,) = self.add("binary", kind, (x, before), scope=scope, how=self.one_of(BINARY))
        if variable.aggregates or variable.is_local:
            value = self.one_of((x, mine))
        else:
            (value,) = self.add(
                "all_reduce", kind, (mine,), scope=scope, uniform=True, how=self.one_of(("SUM", "MEAN"))
            )
        self.add("assign", None, (value,), variable=name, method=self.one_of(METHODS))
        (after,) = self.add("read", kind, variable=name, how=self.one_of(READS), **flags)
        (total,) = self.add("all_reduce", kind, (self.one_of((mine, after)),), scope=scope, uniform=True, how="SUM")
        (last,) = self.add("binary", kind, (mine, self.one_of((total, after))), scope=scope, how=self.one_of(BINARY))
        self.add("binary", kind, (self.one_of((before, after)), last), scope=scope, how=self.one_of(BINARY))
        return True

    def scatter(self, scope: Scope) -> bool:
        variables = [v for v in self.writable(scope) if v.type.shape != SCALAR and v.type.is_float and not v.on_read]
        if not variables:
            return False
        variable = self.one_of(variables)
        shared = not variable.aggregates and not variable.is_local
        methods = ["scatter_add", "scatter_sub"]
        if variable.aggregation not in ("SUM", "MEAN"):
            methods += ["scatter_update", "scatter_min", "scatter_max"]
        value = self.value_for(
            scope,
            Type(VECTOR, variable.type.dtype),
            **(self.source(scope) if variable.aggregates else {"uniform": shared, "free": False}),
        )
        self.add(
            "scatter",
            None,
            (value,),
            scope=scope,
            variable=variable.name,
            method=self.one_of(methods),
            at=[int(row) for row in self.rng.permutation(4 if variable.type.shape == TABLE else self.width)[:2]],
            shift=not shared and not scope.uniform and self.chance(0.5),
        )
        return True

    def source(self, scope: Scope) -> dict[str, bool]:
        """What a collective may take."""
        return {"uniform": scope.uniform_sources}

    # --- Collectives --------------------------------------------------------------------------------------------------
    def all_reduce(self, scope: Scope) -> bool:
        if not scope.collectives:
            return False
        # Stock strategies pack the tensors of a structure into one, so they must be of one dtype.
        dtype = self.one_of((*FLOATS, *FLOATS, *FLOATS, "int32", "int64"))
        args: list[str] = []
        for _ in range(1 if dtype == "int32" else self.one_of((1, 1, 1, 2, 3))):  # several int32: stock fails
            found = self.pick(
                scope, lambda kind: kind.shape in (SCALAR, VECTOR, TABLE) and kind.dtype == dtype, **self.source(scope)
            )
            shape = self.one_of((SCALAR, VECTOR))
            args.append(found or self.value_for(scope, Type(shape, dtype), **self.source(scope)))
        types = [scope.values[name].type for name in args]
        how = self.one_of(("SUM", "MEAN")) if all(kind.is_float for kind in types) else "SUM"
        self.add("all_reduce", types, args, scope=scope, uniform=True, how=how)
        return True

    def all_reduce_slices(self, scope: Scope) -> bool:
        if not scope.collectives or scope.uniform_sources:
            return False
        dtype = self.one_of(FLOATS)
        x = self.value_for(scope, Type(VECTOR, dtype), **self.source(scope))
        self.add(
            "all_reduce_slices", Type(TABLE, dtype), (x,), scope=scope, uniform=True, how=self.one_of(("SUM", "MEAN"))
        )
        return True

    def all_gather(self, scope: Scope) -> bool:
        if not scope.collectives:
            return False
        x = self.pick(
            scope, lambda kind: kind.shape not in ("ragged", "sparse") and kind.is_float, **self.source(scope)
        )
        if x is None:
            return False
        kind = scope.values[x].type
        if kind.is_rows and (not kind.shape.startswith("rows:even_") or self.chance(0.6)):
            group = f"rows:all_{kind.shape[5:]}".replace("all_even_", "all_")
            self.add("all_gather", Type(group, kind.dtype), (x,), scope=scope, uniform=True, axis=0)
        else:
            axis = (0,) if kind.shape in (SCALAR, VECTOR) else (0, 1)
            types = [Type(SCALAR, kind.dtype)] * self.one_of((1, 1, 2))
            self.add("all_gather", types, (x,), scope=scope, uniform=True, axis=self.one_of(axis))
        return True

    def merge_call(self, scope: Scope) -> bool:
        if not scope.collectives:
            return False
        how = self.one_of(MERGES)
        variable: Variable | None = None
        kind = Type(self.one_of((SCALAR, VECTOR)), self.one_of(FLOATS))
        if how in ("update", "update_own", "assign", "read"):
            variables = [v for v in self.usable(scope) if v.type.is_float]
            variables = [v for v in variables if v.has_cross_replica_value]
            if how != "read" and not scope.shared_writes:
                return False
            if how == "assign":
                variables = [v for v in variables if not v.on_read]
            if how == "update_own":
                variables = [v for v in variables if v.is_local]
            if not variables:
                return False
            variable = self.one_of(variables)
            kind = variable.type
        options: dict[str, Any] = {"how": how}
        args = [self.value_for(scope, kind, **self.source(scope))]
        if how == "batch_reduce":
            args.append(self.value_for(scope, Type(VECTOR, kind.dtype), **self.source(scope)))
        if how in ("reduce", "batch_reduce", "strategy_reduce", "update", "assign"):
            options["reduction"] = self.one_of(("SUM", "MEAN"))
        if how in ("update", "update_own", "assign"):
            options["method"] = self.one_of(METHODS)
        types = [scope.values[name].type for name in args]
        if how == "gather":
            types = [Type(SCALAR, kind.dtype)]
        elif how in ("update", "update_own", "assign"):
            types = []
        name = "" if variable is None else variable.name
        uniform = how != "pass"
        self.add("merge_call", types, args, scope=scope, uniform=uniform, free=how != "read", variable=name, **options)
        return True

    # --- Blocks inside ------------------------------------------------------------------------------------------------
    def sort_of_block(self, scope: Scope, uniform_condition: bool) -> dict[str, bool]:
        """Whether what is inside a branch or loop is uniform, and what may stand there."""
        uniform = uniform_condition and (scope.uniform or (scope.shared_writes and self.chance(0.5)))
        # Under a gradient, a collective's own gradient stands in the branch too, and cannot be taken out.
        collectives = scope.collectives and uniform_condition and scope.shared_writes
        return {
            "top": False,
            "uniform": uniform,
            "collectives": collectives,
            "shared_writes": uniform,
            "generator": False,
        }

    def branch(self, scope: Scope) -> bool:
        x = self.pick(scope, lambda kind: kind.shape == SCALAR and kind.is_float, uniform=scope.uniform)
        if x is None:
            return False
        sort = self.sort_of_block(scope, scope.values[x].uniform)
        first, second = scope.inner(**sort), scope.inner(**sort)
        then = self.block(first, int(self.rng.integers(1, 5)))
        types = [Type(self.one_of((SCALAR, VECTOR)), self.one_of(FLOATS)) for _ in range(self.one_of((1, 1, 2)))]
        then = self.ending(then, first, types)
        otherwise = self.ending(self.block(second, int(self.rng.integers(0, 4))), second, types)
        style = self.one_of(("tf.cond", "autograph"))
        uniform = sort["uniform"]
        self.add(
            "branch",
            types,
            (x,),
            scope=scope,
            uniform=uniform,
            free=False,
            style=style,
            above=self.real(),
            blocks=(then, otherwise),
        )
        return True

    def ending(self, block: Block, scope: Scope, types: Sequence[Type]) -> Block:
        """The block with results of these types."""
        self.out, kept = list(block.instructions), self.out
        results = tuple(self.value_for(scope, kind, uniform=scope.uniform) for kind in types)
        block, self.out = dataclasses.replace(block, instructions=tuple(self.out), results=results), kept
        return block

    def loop(self, scope: Scope) -> bool:
        count = self.pick(scope, lambda kind: kind == Type(SCALAR, "int32"), uniform=scope.uniform)
        if count is not None and self.chance(0.5):
            count = None
        sort = self.sort_of_block(scope, count is None or scope.values[count].uniform)
        types = [Type(self.one_of((SCALAR, VECTOR)), self.one_of(FLOATS)) for _ in range(self.one_of((1, 1, 2)))]
        starts = tuple(self.value_for(scope, kind, uniform=sort["uniform"]) for kind in types)
        inside = scope.inner(**sort)
        inside.uniform_sources = sort["uniform"] and self.chance(0.3)
        parameters = tuple(self.name(kind) for kind in (Type(SCALAR, "int32"), *types))
        for name in parameters:
            inside.values[name] = Info(self.types[name], sort["uniform"], False)
        body = self.ending(self.block(inside, int(self.rng.integers(1, 5))), inside, types)
        self.add(
            "loop",
            types,
            (*starts, *([count] if count else [])),
            scope=scope,
            uniform=sort["uniform"],
            free=False,
            style=self.one_of(("while", "for")),
            times=int(self.rng.integers(1, 4)),
            blocks=(dataclasses.replace(body, parameters=parameters),),
        )
        return True

    def tape(self, scope: Scope) -> tuple[Block, Scope, str]:
        """A block with a scalar result, its scope, and the result's name."""
        inside = scope.inner(shared_writes=False, generator=scope.generator)
        block = self.block(inside, int(self.rng.integers(2, 7)))
        dtype = self.one_of(FLOATS)
        block = self.ending(block, inside, [Type(SCALAR, dtype)])
        return block, inside, block.results[0]

    def gradient(self, scope: Scope) -> bool:
        if scope.uniform:
            return False
        sources = [n for n, i in scope.values.items() if i.type.is_float and i.type.shape not in ("ragged", "sparse")]
        sources = self.some_of(sources, 2) if sources else []
        variables = [v for v in self.variables if v.can_be_made and v.trainable]
        variables = self.some_of(variables, 2) if variables else []
        if not sources and not variables:
            return False
        block, _, target = self.tape(scope)
        reduce = self.one_of((None, None, "SUM", "MEAN")) if scope.collectives and scope.top else None
        kinds = [*(scope.values[name].type for name in sources), *(v.type for v in variables)]
        if any(kind.is_rows for kind in kinds) or len({kind.dtype for kind in kinds}) > 1:
            reduce = None
        types = [*(scope.values[name].type for name in sources), *(v.type for v in variables), self.types[target]]
        names = self.add(
            "gradient",
            types,
            sources,
            scope=scope,
            uniform=reduce is not None,
            free=False,
            variables=tuple(v.name for v in variables),
            reduce=reduce,
            blocks=(block,),
        )
        scope.values[names[-1]] = Info(self.types[target], False, scope.top)
        return True

    def train(self, scope: Scope) -> bool:
        if not self.optimizers or not scope.top or not scope.collectives or not scope.shared_writes:
            return False
        block, _, target = self.tape(scope)
        number = int(self.rng.integers(len(self.optimizers)))
        self.add("train", self.types[target], scope=scope, optimizer=number, blocks=(block,))
        return True

    def function(self, scope: Scope) -> bool:
        """A nested tf.function: one that holds collectives, one where all is uniform, or neither."""
        if scope.uniform:
            return False
        sort = self.one_of(("collectives", "uniform", "plain")) if scope.top else "plain"
        if sort == "collectives" and scope.collectives:
            inside = scope.inner(generator=False)
        elif sort == "uniform" and scope.shared_writes:
            inside = scope.inner(top=False, uniform=True, collectives=False, generator=False)
        else:
            inside = scope.inner(top=False, collectives=False, shared_writes=False, generator=False)
        given = [
            name
            for name, info in scope.values.items()
            if info.type.shape not in ("ragged", "sparse") and (info.uniform or not inside.uniform)
        ]
        given = self.some_of(given, 3) if given else []
        parameters = tuple(self.name(scope.values[name].type) for name in given)
        # It sees its arguments only.
        inside.values = {
            new: dataclasses.replace(scope.values[old], free=inside.top)
            for new, old in zip(parameters, given, strict=True)
        }
        inside.depth = 2
        block = self.block(inside, int(self.rng.integers(1, 6)))
        types = [Type(self.one_of((SCALAR, VECTOR)), self.one_of(FLOATS)) for _ in range(self.one_of((1, 1, 2)))]
        block = dataclasses.replace(self.ending(block, inside, types), parameters=parameters)
        if inside.top and not any(one.op in ("all_reduce", "all_gather", "merge_call") for one in block.instructions):
            return False  # without a collective it is one operation, which differs between replicas or does not
        uniform = inside.uniform
        self.add("function", types, given, scope=scope, uniform=uniform, free=False, blocks=(block,))
        return True
