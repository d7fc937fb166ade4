"""Each program gives under MicroBatchStrategy(N) what it gives under MirroredStrategy on N devices."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests import compare, parity, programs


def _marks(entry: programs.Program) -> list[pytest.MarkDecorator]:
    missing = entry.needs and importlib.util.find_spec(entry.needs) is None
    marks = [pytest.mark.skip(reason=f"needs {entry.needs}")] if missing else []
    return [*marks, pytest.mark.core] if entry.core else marks


CASES = [
    pytest.param(kind, number, entry.name, marks=_marks(entry), id=f"{entry.name}-{kind}-{number}")
    for entry in programs.PROGRAMS.values()
    for kind, numbers in (("looped", entry.replicas), ("eager", entry.eager))
    for number in numbers
]


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[parity.Session]:
    """The outcomes of the programs of all tests that this session is going to run."""
    jobs = {}
    for item in request.session.items:
        if item.function is test_parity and item.get_closest_marker("skip") is None:
            kind, number, name = (item.callspec.params[key] for key in ("kind", "number", "name"))
            jobs[f"mirrored:{number}:{name}"] = jobs[f"{kind}:{number}:{name}"] = None
    session = parity.Session(tmp_path_factory.mktemp("parity"), jobs)
    yield session
    session.close()


@pytest.mark.parametrize(("kind", "number", "name"), CASES)
def test_parity(outcomes: parity.Session, kind: str, number: int, name: str) -> None:
    reference, ours = outcomes.outcome("mirrored", number, name), outcomes.outcome(kind, number, name)
    if "error" in reference:
        pytest.fail(f"the reference failed:\n{reference['error']}", pytrace=False)
    if "error" in ours:
        pytest.fail(f"raised under MicroBatchStrategy({number}):\n{ours['error']}", pytrace=False)
    tolerance = 0.0 if number in programs.EXACT else programs.PROGRAMS[name].tolerance
    found = compare.differences(reference["results"], ours["results"], tolerance)
    if found:
        pytest.fail("differs from MirroredStrategy:\n" + "\n".join(found[:20]), pytrace=False)
