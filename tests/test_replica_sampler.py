"""Random programs agree with MirroredStrategy, reach what they are meant to reach, and find a broken engine out."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from microstrat import _lower, _plan, _tracing, _variables
from tests.samplers import drawing, replicas
from tests.samplers.program import Instruction, Program, Run, smaller

ROOT = pathlib.Path(__file__).parents[1]
DRAWS = 150


def test_draws_agree() -> None:
    command = [sys.executable, "-m", "tests.samplers.replicas", "--draws", str(DRAWS), "--seed", "1", "--jobs", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    last = re.fullmatch(
        rf"{DRAWS} draws, 0 mismatches, (\d+) refused(?:, (\d+) where .*)?", done.stdout.splitlines()[-1]
    )
    assert last is not None, done.stdout[-2000:]
    # Most programs must say something.
    assert int(last[1]) <= 0.03 * DRAWS, done.stdout[-2000:]
    assert int(last[2] or 0) <= 0.03 * DRAWS, done.stdout[-2000:]


def test_a_draw_depends_on_its_seed_and_index_only() -> None:
    assert drawing.draw(0, 7) == drawing.draw(0, 7)
    assert len({str(drawing.draw(seed, index)) for seed in (0, 1) for index in range(50)}) == 100


@pytest.fixture(scope="module")
def draws() -> list[Program]:
    return [drawing.draw(0, index) for index in range(600)]


def test_draws_reach_every_instruction(draws: list[Program]) -> None:
    found: dict[str, set[Any]] = {}
    for one in (instruction for program in draws for instruction in program.instructions()):
        found.setdefault("op", set()).add(one.op)
        for option in ("how", "method", "style", "reduction", "reduce", "shift"):
            if option in one.options:
                found.setdefault(f"{one.op} {option}", set()).add(one.options[option])
    assert found["op"] == {*drawing.VALUES, *drawing.EFFECTS, *drawing.BLOCKS, *drawing.CROSS}
    assert found["unary how"] == set(drawing.UNARY)
    assert found["binary how"] == set(drawing.BINARY)
    assert found["read how"] == found["cross_read how"] == set(drawing.READS)
    assert (
        found["assign method"] == found["cross_assign method"] == found["cross_update method"] == set(drawing.METHODS)
    )
    assert found["merge_call how"] == set(drawing.MERGES)
    assert found["random how"] == set(drawing.RANDOM)
    assert found["all_reduce how"] == found["all_reduce_slices how"] == found["merge_call reduction"] == {"SUM", "MEAN"}
    assert found["scatter method"] == {f"scatter_{name}" for name in ("add", "sub", "update", "min", "max")}
    assert found["branch style"] == {"tf.cond", "autograph"}
    assert found["loop style"] == {"while", "for"}
    assert found["gradient reduce"] == {None, "SUM", "MEAN"}
    assert found["scatter shift"] == {True, False}


def test_draws_reach_every_kind_of_variable_and_input(draws: list[Program]) -> None:
    written: set[tuple[str, str, bool, str]] = set()
    for program in draws:
        for one in program.instructions():
            if one.op in ("assign", "scatter"):
                variable = program.variable(one.variable)
                kind = "float" if variable.type.is_float else "int"
                written.add((variable.synchronization, variable.aggregation, variable.trainable, kind))
    for aggregation in drawing.AGGREGATIONS:
        for synchronization in ("AUTO", "ON_WRITE", "ON_READ"):
            kinds = {kind for *which, _, kind in written if which == [synchronization, aggregation]}
            assert kinds == ({"float"} if aggregation == "MEAN" else {"float", "int"}), (synchronization, aggregation)
            assert synchronization == "ON_READ" or (synchronization, aggregation, True, "float") in written
    assert any(not variable.can_be_made for program in draws for variable in program.variables)
    sources = {one.source for program in draws for one in program.inputs}
    assert sources == {"values", "dataset", "plain", "python", "ragged", "sparse"}
    assert {program.replicas for program in draws} == {2, 3, 4}
    assert {name for program in draws for name in program.optimizers} == set(drawing.OPTIMIZERS)
    runs = [part for program in draws for part in program.parts if isinstance(part, Run)]
    assert {run.packing for run in runs} == {"flat", "dict", "nested"}
    assert {reduction for run in runs for _, reduction in run.after} == {"SUM", "MEAN", "SUM 0", "MEAN 0", "gather"}
    assert len(runs) > len(draws) + 50
    uneven = [one for program in draws for one in program.inputs if one.source == "values" and len(set(one.rows)) > 1]
    assert len(uneven) > 20


def test_draws_have_collectives_everywhere(draws: list[Program]) -> None:
    inside: dict[str, int] = {}
    for program in draws:
        for one in program.instructions():
            if any(program.holds_collective(block) for block in one.blocks):
                inside[one.op] = inside.get(one.op, 0) + 1
    assert min(inside.get(op, 0) for op in (*drawing.BLOCKS, "train")) > 10, inside


def test_a_failing_program_shrinks_to_what_fails() -> None:
    program = next(p for p in map(drawing.draw, itertools.repeat(0), itertools.count()) if _count(p, "all_gather") > 1)
    less = replicas.shrink(program, lambda program: _count(program, "all_gather") > 0)
    assert [one.op for one in less.instructions() if not one.blocks] == ["all_gather"]
    assert less.steps == len(less.parts) == 1
    assert not list(filter(lambda p: _count(p, "all_gather"), smaller(less)))


def _count(program: Program, op: str) -> int:
    return sum(one.op == op for one in program.instructions())


# --- Broken engines ---------------------------------------------------------------------------------------------------
def _zeros_are_carried(self: Any, key: Any) -> Any:
    def finish(result: tf.Tensor) -> None:
        self.lists[key] = result

    tensor = self.tensor(key)
    return self._new_list(tf.zeros_like(tensor) if key[0] in self.plan.carries else tensor, finish)


_reduce = _tracing.Tracing.reduce
_read_row = _variables._PerReplicaRows.read_row
_move_late = _plan._move_late


def _mean_for_sum(self: Any, reduce_op: Any, value: Any) -> Any:
    del reduce_op
    return _reduce(self, tf.distribute.ReduceOp.MEAN, value)


def _next_row(self: Any, replica_id: Any) -> Any:
    looped = _tracing.current_tracing() is not None
    return _read_row(self, (replica_id + 1) % self.num_replicas if looped else replica_id)


def _writes_come_last(nodes: Any, order: Any, live: Any, varying: Any, *rest: Any) -> dict[int, int]:
    stage = _move_late(nodes, order, live, varying, *rest)
    last = max(stage.values(), default=0)
    return stage | {index: last - last % 2 for index in order if nodes[index].writes and not varying[index]}


def _writes_between_reads(program: Program) -> bool:
    """Whether a large variable that all share is read, written and read in a replica function itself."""
    for block in (part.block for part in program.parts if isinstance(part, Run)):
        seen: dict[str, str] = {}
        for one in block.instructions:
            if one.op in ("read", "assign") and program.variable(one.variable).type.shape != "scalar":
                seen[one.variable] = seen.get(one.variable, "") + one.op[0]
        if any(re.search("r.*a.*r", found) and not program.variable(name).is_local for name, found in seen.items()):
            return program.width == drawing.WIDE and not program.crashes_stock_graphs
    return False


def _any(accepts: Callable[[Program, Instruction], Any]) -> Callable[[Program], bool]:
    return lambda program: any(accepts(program, one) for one in program.instructions())


BROKEN: dict[str, tuple[Any, str, Any, Callable[[Program], bool]]] = {
    "writes come in too late a stage": (_plan, "_move_late", _writes_come_last, _writes_between_reads),
    "writes do not wait for earlier stages": (_plan, "_honours", lambda node, before: False, _writes_between_reads),
    "a variable is read again after a write": (_plan, "_may_read_again", lambda *_: True, _writes_between_reads),
    "zeros are carried from loop to loop": (
        _lower._Emitter,
        "_list_variable",
        _zeros_are_carried,
        _writes_between_reads,
    ),
    "sums are means": (
        _tracing.Tracing,
        "reduce",
        _mean_for_sum,
        _any(lambda _, one: one.op == "all_reduce" and one.options["how"] == "SUM"),
    ),
    "a replica reads the next one's row": (
        _variables._PerReplicaRows,
        "read_row",
        _next_row,
        _any(lambda program, one: one.op == "read" and program.variable(one.variable).on_read),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_engine_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, replacement, exercises = BROKEN[name]
    candidates = filter(exercises, (drawing.draw(0, index) for index in itertools.count()))
    for program in itertools.islice(candidates, 20):
        program = dataclasses.replace(program, steps=1)
        with monkeypatch.context() as broken:
            broken.setattr(owner, attribute, replacement)
            found = replicas.check(program, with_stock=False)
        if not found.agrees:
            outcome = replicas.check(program, with_stock=False)
            assert outcome.agrees and not outcome.refused
            return
    pytest.fail("twenty programs did not notice")
