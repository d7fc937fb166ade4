"""What the engine makes of a replica function, for people: `MicroBatchStrategy.explain`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from microstrat import _lower, _plan, _trace

_MANY = 1 << 20  # bytes, of results that are kept for all replicas
_KINDS = {
    "sum": "sum",
    "max": "maximum",
    "min": "minimum",
    "first": "replica 0's",
    "concat": "gather",
}


@dataclass(frozen=True)
class Stage:
    """A part of the replica function that runs together.

    Attributes:
      repeated: whether it runs once for each replica (or micro-batch), in a loop, or once.
      operations: how many TensorFlow operations it has.
      writes: names of the variables it assigns.
    """

    repeated: bool
    operations: int
    writes: tuple[str, ...]


@dataclass(frozen=True)
class Collective:
    """A place where replicas (or micro-batches) meet.

    Attributes:
      kind: "sum", "gather", "maximum", "minimum" or "replica 0's".
      name, dtype, shape: of the tensor that each brings.
      num_bytes: of that; None if the shape is only known when it runs.
      after_stage: the stage that computes it.
      where: the line of the user's code, as "file:line"; empty if there is none.
    """

    kind: str
    name: str
    dtype: str
    shape: str
    num_bytes: int | None
    after_stage: int
    where: str


@dataclass(frozen=True)
class Kept:
    """A value that is held for all replicas (or micro-batches) at once.

    Attributes:
      what: "carried" from one loop to a later one, "returned", or a "variable" with a value for each replica.
      name, dtype, shape: of one replica's.
      num_bytes: of one replica's; None if the shape is only known when it runs.
      where: see `Collective`.
    """

    what: str
    name: str
    dtype: str
    shape: str
    num_bytes: int | None
    where: str


@dataclass(frozen=True)
class Explanation:
    """What the engine makes of a replica function. `str()` gives it as text, `print()` shows it.

    Attributes:
      function: the replica function's name.
      number: how often its repeated stages run: replicas, or micro-batches.
      unit: "replica" or "micro-batch".
      stages, collectives, kept: see those classes.
      warnings: what is worth a second look.
      parts: of functions that are lowered within this one: micro-batches of a replica, turns of a tf.while_loop.
    """

    function: str
    number: int
    unit: str
    stages: tuple[Stage, ...]
    collectives: tuple[Collective, ...]
    kept: tuple[Kept, ...]
    warnings: tuple[str, ...]
    parts: tuple[Explanation, ...] = field(default=())

    @property
    def title(self) -> str:
        return f"Replica function {self.function!r}: {self.number} {self.unit}{'s' * (self.number > 1)}"

    def tables(self) -> Iterator[tuple[str, list[str], list[list[str]]]]:
        """(heading, names of columns, rows) of each table."""
        stages = [
            [
                str(index),
                f"for each {self.unit}" if stage.repeated else "once",
                str(stage.operations),
                ", ".join(stage.writes[:3]) + (f" and {len(stage.writes) - 3} more" if len(stage.writes) > 3 else ""),
            ]
            for index, stage in enumerate(self.stages)
            if stage.operations
        ]
        yield "Stages, in order", ["stage", "runs", "operations", "assigns"], stages
        if self.collectives:
            rows = [
                [
                    one.kind,
                    one.name,
                    f"{one.dtype} {one.shape}",
                    _size(one.num_bytes),
                    str(one.after_stage),
                    one.where,
                ]
                for one in self.collectives
            ]
            yield f"Where {self.unit}s meet", ["kind", "tensor", "of", "bytes", "after stage", "in your code"], rows
        if self.kept:
            rows = [
                [
                    one.what,
                    one.name,
                    f"{one.dtype} {one.shape}",
                    _size(one.num_bytes),
                    _size(None if one.num_bytes is None else one.num_bytes * self.number),
                    one.where,
                ]
                for one in self.kept
            ]
            yield (
                f"Kept for every {self.unit}",
                ["what", "name", "of", "bytes each", f"bytes, all {self.number}", "in your code"],
                rows,
            )

    def __str__(self) -> str:
        lines = [self.title]
        for heading, names, rows in self.tables():
            widths = [max(len(row[column]) for row in [names, *rows]) for column in range(len(names))]
            lines += ["", f"{heading}:"]
            for row in [names, *rows]:
                cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
                lines.append(("  " + "  ".join(cells)).rstrip())
        if self.warnings:
            lines += ["", *(f"Note: {warning}" for warning in self.warnings)]
        for part in self.parts:
            lines += ["", f"Within it: {part}"]
        return "\n".join(lines)

    def print(self) -> None:
        """Shows it on standard output, as tables if rich is installed (`pip install microstrat[rich]`)."""
        if importlib.util.find_spec("rich") is None:
            print(self)
            return
        import rich.console
        import rich.table

        console = rich.console.Console()
        console.print(self.title, style="bold", markup=False)
        for heading, names, rows in self.tables():
            table = rich.table.Table(title=heading, title_justify="left")
            for name in names:
                right = name.startswith("bytes") or name == "operations"
                table.add_column(name, justify="right" if right else "left", overflow="fold")
            for row in rows:
                table.add_row(*(cell.replace("[", r"\\[") for cell in row))
            console.print(table)
        for warning in self.warnings:
            console.print(f"Note: {warning}", markup=False)
        for part in self.parts:
            console.print("Within it:")
            part.print()


def explain(strategy: Any, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None) -> Explanation:
    """Traces `strategy.run(fn, args, kwargs)` as a tf.function would, runs nothing, and says what came out."""
    whole: list[Explanation] = []
    parts: dict[Any, Explanation] = {}

    def observe(trace: _trace.Trace, graph: _trace.Graph, plan: _plan.Plan) -> None:
        tracing = trace.tracing
        found = _describe(strategy, trace, graph, plan, tuple(parts.values()))
        if tracing.continues is not None:
            if found.collectives:
                parts[id(tracing.continues), "loop"] = found
        elif tracing.around is not None:
            parts[id(tracing.around), "micro-batches"] = found
        else:
            whole[:] = [found]
            parts.clear()

    function = tf.function(lambda: strategy.run(fn, args=args, kwargs=kwargs))
    with _lower.observed(observe):
        function.get_concrete_function()
    return whole[0]


def _describe(
    strategy: Any, trace: _trace.Trace, graph: _trace.Graph, plan: _plan.Plan, parts: tuple[Explanation, ...]
) -> Explanation:
    tracing = trace.tracing
    owner_of = strategy.extended.owner_of
    is_batch = tracing.around is not None or strategy.num_replicas_in_sync == 1
    unit = "micro-batch" if is_batch and strategy.extended.micro_batches > 1 else "replica"
    stages = []
    for index, stage in enumerate(plan.stages):
        members = [graph.operations[node] for node in (*stage.nodes, *stage.copies)]
        owners = [owner_of(handle) for op in members for handle in graph.written(op)]
        names = dict.fromkeys(_name(owner) for owner in owners if owner is not None)
        count = sum(op.type != "NoOp" for op in members)
        stages.append(Stage(index % 2 == 1, count, tuple(names)))
    collectives = []
    for at, nodes in plan.collectives.items():
        for op in (graph.operations[node] for node in nodes):
            source = op.inputs[0]
            kind = _KINDS[tracing.collectives[op].kind]
            collectives.append(Collective(kind, _name(source), *_form(source), at, _where(op)))
    kept = [
        Kept("carried", _name(tensor), *_form(tensor), _where(tensor.op))
        for node in sorted(plan.carries)
        for tensor in graph.operations[node].outputs
        if tensor.consumers()
    ]
    varying = graph.colours()
    for leaf in graph.returned:
        if varying[graph.ids[leaf.op]]:
            kept.append(Kept("returned", _name(leaf), *_form(leaf), _where(leaf.op)))
    for handle, _ in tracing.graph.captures:
        owner = owner_of(handle)
        if owner is not None and owner.handle_is_rows(handle):
            kept.append(Kept("variable", _name(owner), *_form(owner), ""))
    number = tracing.turns.most
    return Explanation(
        tracing.function_name,
        number,
        unit,
        tuple(stages),
        tuple(collectives),
        tuple(kept),
        tuple(_warnings(number, unit, plan, collectives, kept)),
        parts,
    )


def _warnings(
    number: int, unit: str, plan: _plan.Plan, collectives: Sequence[Collective], kept: Sequence[Kept]
) -> Iterator[str]:
    if plan.num_loops > 1:
        yield (
            f"All {number} {unit}s are gone through {plan.num_loops} times: the result of one collective is needed before "
            "the next."
        )
    carried = [one for one in kept if one.what == "carried"]
    if carried:
        yield f"{_together(carried, number, unit)} They are computed before a collective, and read after it."
    own = [one for one in kept if one.what == "variable"]
    if own:
        yield f"{_together(own, number, unit)} Each {unit} assigns values of its own to these variables."
    large = [
        one for one in kept if one.what == "returned" and (one.num_bytes is None or one.num_bytes * number > _MANY)
    ]
    if large:
        yield f"{_together(large, number, unit)} Return less, or reduce it in the replica function."
    gathered = [one for one in collectives if one.kind == "gather"]
    if gathered:
        yield f"{_together(gathered, number, unit)} They are gathered."


def _together(values: Sequence[Any], number: int, unit: str) -> str:
    known = [one.num_bytes for one in values if one.num_bytes is not None]
    more = " or more" if len(known) < len(values) else ""
    largest = max(values, key=lambda one: one.num_bytes or 0)
    place = f" at {largest.where}" if largest.where else ""
    return (
        f"{len(values)} value{'s are' if len(values) > 1 else ' is'} kept for all {number} {unit}s, so memory grows with "
        f"their number: {sum(known):,}{more} bytes each, {sum(known) * number:,}{more} in all; the largest is "
        f"{largest.name}{place}."
    )


def _where(op: tf.Operation) -> str:
    return _trace.where(op).removeprefix(" at ")


def _name(value: Any) -> str:
    return str(value.name).removesuffix(":0")


def _form(value: Any) -> tuple[str, str, int | None]:
    """dtype, shape and bytes of a tensor or variable."""
    shape = tf.TensorShape(value.shape)
    count = shape.num_elements()
    size = value.dtype.size if value.dtype not in (tf.string, tf.variant, tf.resource) else None
    text = "?" if shape.rank is None else f"[{', '.join('?' if dim is None else str(dim) for dim in shape)}]"
    return value.dtype.name, text, None if count is None or size is None else count * size


def _size(num_bytes: int | None) -> str:
    return "?" if num_bytes is None else f"{num_bytes:,}"
