"""Programs give under MicroBatchStrategy(N) what they give under MirroredStrategy on N devices, and in micro-batches what
the full batch gives without a strategy."""

from __future__ import annotations

import importlib.util

import pytest

from tests import compare, parity, programs, worker


def _marks(entry: programs.Program) -> list[pytest.MarkDecorator]:
    missing = entry.needs and importlib.util.find_spec(entry.needs) is None
    marks = [pytest.mark.skip(reason=f"needs {entry.needs}")] if missing else []
    return [*marks, pytest.mark.core] if entry.core else marks


def _kinds(entry: programs.Program) -> dict[str, tuple[int, ...]]:
    """Kinds of runs of a program, and at which numbers."""
    whole_eager = (5,) if entry.core and entry.whole else ()
    return {"looped": entry.replicas, "eager": entry.eager, "whole": entry.micro_batches, "whole-eager": whole_eager}


CASES = [
    pytest.param(kind, number, entry.name, marks=_marks(entry), id=f"{entry.name}-{kind}-{number}")
    for entry in programs.PROGRAMS.values()
    for kind, numbers in _kinds(entry).items()
    for number in numbers
]


@pytest.mark.parametrize(("kind", "number", "name"), CASES)
def test_parity(parity_outcomes: parity.Session, kind: str, number: int, name: str) -> None:
    reference = parity_outcomes.outcome(*parity_outcomes.reference(kind, number, name))
    ours = parity_outcomes.outcome(kind, number, name)
    if "error" in reference:
        pytest.fail(f"the reference failed:\n{reference['error']}", pytrace=False)
    if "error" in ours:
        pytest.fail(f"raised under MicroBatchStrategy({number}):\n{ours['error']}", pytrace=False)
    entry = programs.PROGRAMS[name]
    whole = worker.REFERENCES[kind] != "mirrored"
    tolerance = entry.whole_tolerance if whole else entry.tolerance
    tolerance = 0.0 if worker.is_exact(kind, number) else tolerance
    found = compare.differences(reference["results"], ours["results"], tolerance)
    if found:
        against = "the full batch" if whole else "MirroredStrategy"
        pytest.fail(f"differs from {against}:\n" + "\n".join(found[:20]), pytrace=False)
