"""Small SPMD programs as data: what the sampler of replicas draws, prints, runs and shrinks. Imports no TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Type(NamedTuple):
    """What a value is.

    Attributes:
      shape: "scalar", "vector" ([w]), "table" ([4, w]), or "rows:NAME": [k, w], with the same k for the same NAME; w is the
        program's width. Or "ragged", "sparse".
      dtype: TensorFlow's name of it.
    """

    shape: str
    dtype: str

    @property
    def is_rows(self) -> bool:
        return self.shape.startswith("rows:")

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith("float")

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


@dataclasses.dataclass(frozen=True)
class Variable:
    name: str
    type: Type
    synchronization: str
    aggregation: str
    trainable: bool

    @property
    def can_be_made(self) -> bool:
        """Whether it is of any use: TensorFlow refuses most of the others."""
        if self.aggregation == "MEAN" and not self.type.is_float:
            return False
        return self.synchronization != "NONE" and not (self.on_read and self.trainable)

    @property
    def on_read(self) -> bool:
        return self.synchronization == "ON_READ"

    @property
    def is_local(self) -> bool:
        """Whether each replica may have a value of its own."""
        return self.on_read or (self.aggregation == "NONE" and not self.trainable)

    @property
    def aggregates(self) -> bool:
        """Whether an assignment in a replica function is a collective."""
        return not self.on_read and self.aggregation != "NONE"

    @property
    def has_cross_replica_value(self) -> bool:
        return not (self.on_read and self.aggregation == "NONE")

    def __str__(self) -> str:
        kind = f"{self.synchronization}, {self.aggregation}" + (", trainable" if self.trainable else "")
        return f"{self.name} = Variable({self.type}, {kind})"


@dataclasses.dataclass(frozen=True)
class Input:
    """An argument of the replica function.

    Attributes:
      source: "values" (of its own for each replica), "dataset" (a batch of a distributed dataset), "plain" (a tensor that
        all replicas get), "python" (a number), "ragged" or "sparse" (values for each replica).
      rows: of each replica, in each step; of a dataset, of the global batches.
    """

    name: str
    type: Type
    source: str
    rows: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} = {self.source}({self.type}" + (f", rows={self.rows})" if self.rows else ")")


@dataclasses.dataclass(frozen=True)
class Block:
    """Instructions that run one after another.

    Attributes:
      parameters: names of values that are given to it.
      results: names of the values that it hands out.
    """

    instructions: tuple[Instruction, ...]
    results: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One step of a program; `machine.Machine` has a method for each `op`."""

    op: str
    out: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    variable: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    blocks: tuple[Block, ...] = ()

    def __str__(self) -> str:
        options = [f"{key}={value!r}" for key, value in self.options.items()]
        call = f"{self.op}({', '.join([*filter(None, [self.variable]), *self.args, *options])})"
        return f"{', '.join(self.out)} = {call}" if self.out else call


@dataclasses.dataclass(frozen=True)
class Run:
    """One call of strategy.run.

    Attributes:
      after: (result, reduction) of what it returns; reductions are "SUM", "MEAN", "SUM 0", "MEAN 0" and "gather".
      packing: how arguments are given and results returned: "flat", "dict", "nested".
    """

    block: Block
    after: tuple[tuple[str, str], ...]
    packing: str

    @property
    def title(self) -> str:
        return f"strategy.run, {self.packing}:"


@dataclasses.dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
      width: entries of a vector.
      parts: what one call of the step is made of: runs of a replica function, and instructions in cross-replica context.
      outside: instructions in cross-replica context after each step, outside its tf.function.
    """

    seed: int
    index: int
    replicas: int
    steps: int
    width: int
    variables: tuple[Variable, ...]
    optimizers: tuple[str, ...]
    inputs: tuple[Input, ...]
    parts: tuple[Run | Block, ...]
    outside: tuple[Block, ...]
    types: Mapping[str, Type]

    def __str__(self) -> str:
        lines = [
            f"draw {self.index} of seed {self.seed}: {self.replicas} replicas, {self.steps} steps, width {self.width}"
        ]
        lines += [f"  {thing}" for thing in (*self.variables, *self.inputs)]
        lines += [f"  optimizer {number} = {name}" for number, name in enumerate(self.optimizers)]
        for part in self.parts:
            if isinstance(part, Run):
                lines += [f"  {part.title}", *_lines(part.block, 4)]
                lines += [f"    then {reduction} of {name}" for name, reduction in part.after]
            else:
                lines += ["  between replicas:", *_lines(part, 4)]
        for part in self.outside:
            lines += ["  outside the step:", *_lines(part, 4)]
        return "\n".join(lines)

    def instructions(self) -> Iterator[Instruction]:
        for part in (*self.parts, *self.outside):
            yield from walk(part.block if isinstance(part, Run) else part)

    def variable(self, name: str) -> Variable:
        return next(variable for variable in self.variables if variable.name == name)

    def is_collective(self, instruction: Instruction) -> bool:
        if instruction.op in ("assign", "scatter"):
            return self.variable(instruction.variable).aggregates
        return instruction.op in COLLECTIVES or instruction.options.get("reduce") is not None

    def holds_collective(self, block: Block) -> bool:
        return any(self.is_collective(instruction) for instruction in walk(block))

    @property
    def crashes_stock_graphs(self) -> bool:
        """Whether a collective stands in a branch, loop or tf.function inside the replica function.

        MirroredStrategy refuses those ("merge_call called while defining a new graph"), but not outside tf.functions.
        """
        return any(
            self.holds_collective(block)
            for instruction in self.instructions()
            if instruction.op in ("branch", "loop", "function")
            for block in instruction.blocks
        )


COLLECTIVES = ("all_reduce", "all_reduce_slices", "all_gather", "merge_call", "train")


def _lines(block: Block, indent: int) -> Iterator[str]:
    for instruction in block.instructions:
        yield " " * indent + str(instruction)
        for inner in instruction.blocks:
            yield " " * (indent + 2) + f"block({', '.join(inner.parameters)}):"
            yield from _lines(inner, indent + 4)
    if block.results:
        yield " " * indent + f"return {', '.join(block.results)}"


def walk(block: Block) -> Iterator[Instruction]:
    """All instructions, also those inside others."""
    for instruction in block.instructions:
        yield instruction
        for inner in instruction.blocks:
            yield from walk(inner)


# --- Smaller programs -------------------------------------------------------------------------------------------------
def pruned(program: Program, pure: frozenset[str]) -> Program:
    """Without operations of the names in `pure` that nobody reads."""
    parts = list(program.parts)
    read_later: set[str] = set()
    for position in reversed(range(len(parts))):
        part = parts[position]
        if isinstance(part, Run):
            block = _pruned(part.block, set(), pure)
            parts[position] = dataclasses.replace(part, block=block)
        else:
            block = parts[position] = _pruned(part, read_later, pure)
        read_later |= {name for instruction in walk(block) for name in instruction.args}
    return dataclasses.replace(program, parts=tuple(parts))


def _pruned(block: Block, wanted: set[str], pure: frozenset[str]) -> Block:
    wanted = wanted | set(block.results)
    kept: list[Instruction] = []
    for instruction in reversed(block.instructions):
        if instruction.op in pure and not wanted & set(instruction.out):
            continue
        blocks = tuple(_pruned(inner, set(), pure) for inner in instruction.blocks)
        instruction = dataclasses.replace(instruction, blocks=blocks)
        kept.append(instruction)
        wanted |= set(instruction.args)
        wanted |= {name for inner in blocks for name in (*inner.results, *(a for i in walk(inner) for a in i.args))}
        wanted |= {name for inner in blocks for i in walk(inner) for b in i.blocks for name in b.results}
    return dataclasses.replace(block, instructions=tuple(reversed(kept)))


def smaller(program: Program) -> Iterator[Program]:
    """Programs with a little less in them. A value that is no longer computed is a constant wherever it is read."""
    if program.steps > 1:
        yield dataclasses.replace(program, steps=1)
    if program.outside:
        yield dataclasses.replace(program, outside=())
    for position, part in enumerate(program.parts):
        before, after = program.parts[:position], program.parts[position + 1 :]
        if len(program.parts) > 1:
            yield dataclasses.replace(program, parts=(*before, *after))
        if isinstance(part, Run):
            candidates: Iterator[Run | Block] = (
                dataclasses.replace(part, block=b, after=tuple(a for a in part.after if a[0] in b.results))
                for b in _smaller(part.block)
            )
            if part.after:
                yield dataclasses.replace(program, parts=(*before, dataclasses.replace(part, after=()), *after))
        else:
            candidates = _smaller(part)
        for less in candidates:
            yield dataclasses.replace(program, parts=(*before, less, *after))
    for variable in program.variables:
        if not any(variable.name in _variables_of(instruction) for instruction in program.instructions()):
            rest = tuple(other for other in program.variables if other is not variable)
            yield dataclasses.replace(program, variables=rest)


def _variables_of(instruction: Instruction) -> tuple[str, ...]:
    return (instruction.variable, *instruction.options.get("variables", ()))


def _smaller(block: Block, *, drop_results: bool = True) -> Iterator[Block]:
    size = len(block.instructions)
    step = size
    while step:
        for start in range(0, size, step):
            yield dataclasses.replace(
                block, instructions=block.instructions[:start] + block.instructions[start + step :]
            )
        step //= 2
    if drop_results:
        for name in block.results:
            yield dataclasses.replace(block, results=tuple(other for other in block.results if other != name))
    for position, instruction in enumerate(block.instructions):
        before, after = block.instructions[:position], block.instructions[position + 1 :]
        for number, inner in enumerate(instruction.blocks):
            for less in _smaller(inner, drop_results=False):
                blocks = (*instruction.blocks[:number], less, *instruction.blocks[number + 1 :])
                changed = dataclasses.replace(instruction, blocks=blocks)
                yield dataclasses.replace(block, instructions=(*before, changed, *after))
        if instruction.blocks and not instruction.blocks[0].parameters:
            # What a block holds, without the block.
            yield dataclasses.replace(block, instructions=(*before, *instruction.blocks[0].instructions, *after))
