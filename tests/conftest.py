"""Parity programs run in other processes from the start, and are asked for their outcomes last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


def _waits(item: Any) -> bool:
    return "parity_outcomes" in getattr(item, "fixturenames", ())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_waits)


@pytest.fixture(scope="session")
def parity_outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The outcomes of the parity programs that this session asks for: a `parity.Session`."""
    from tests import parity  # which imports TensorFlow

    jobs: dict[str, None] = {}
    for item in filter(_waits, request.session.items):
        if item.get_closest_marker("skip") is None:
            asked = tuple(item.callspec.params[key] for key in ("kind", "number", "name"))  # type: ignore[attr-defined]
            for job in (parity.Session.reference(*asked), asked):
                jobs[":".join(map(str, job))] = None
    session = parity.Session(tmp_path_factory.mktemp("parity"), jobs)
    yield session
    session.close()


@pytest.fixture(scope="session", autouse=True)
def parity_programs_run_beside(request: pytest.FixtureRequest) -> None:
    if any(map(_waits, request.session.items)):
        request.getfixturevalue("parity_outcomes")
