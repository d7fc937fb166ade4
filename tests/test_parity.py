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
    return {
        "looped": entry.replicas,
        "eager": entry.eager,
        "real2": tuple(number for number in ((4, 8) if 4 in entry.replicas else (2,)) if number in entry.replicas),
        "real4": tuple(number for number in (8,) if number in entry.replicas),
        "real2-eager": (4,) if entry.core and entry.eager and 4 in entry.replicas else (),
        "whole": entry.micro_batches,
        "whole-eager": (5,) if entry.core and entry.whole else (),
    }


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
    if worker.real_devices(kind):  # each adds up its own replicas' values first, which rounds otherwise
        tolerance = max(tolerance, programs.TOLERANCE_LATER)
    tolerance = 0.0 if worker.is_exact(kind, number) else tolerance
    found = compare.differences(reference["results"], ours["results"], tolerance)
    if found:
        against = "the full batch" if whole else "MirroredStrategy"
        pytest.fail(f"differs from {against}:\n" + "\n".join(found[:20]), pytrace=False)
