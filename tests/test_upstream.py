"""Test suites that nobody here wrote: those in the wheels of TensorFlow, Keras and tf_keras, see tests/upstream.py."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests import upstream

ROOT = pathlib.Path(__file__).parent.parent
LIMIT = 300
"""Seconds that a suite may take."""
SUITES = [suite for suite in upstream.SUITES if suite != "tf_keras" or importlib.util.find_spec("tf_keras") is not None]
ALL = {suite: upstream.cases(suite) for suite in SUITES}
CASES = [
    pytest.param(suite, case, id=case.replace(" ", "-"))
    for suite in SUITES
    for case in ALL[suite]
    if upstream.why_not(case) is None
]


def _run(suite: str, directory: pathlib.Path) -> dict[str, Any]:
    """Outcomes of a suite's cases, as far as it came, and what it printed under ""."""
    file = directory / f"{suite}.json"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with open(directory / f"{suite}.log", "w+b") as log:
        command = [sys.executable, "-m", "tests.upstream", suite, "ours", str(file)]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.seek(0)
        printed = log.read().decode(errors="replace")[-3000:]
    return {"": printed, **(json.loads(file.read_text()) if file.exists() else {})}


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, concurrent.futures.Future[dict[str, Any]]]]:
    """What came of the suites that this session asks for, each in a process."""
    asked = {item.callspec.params["suite"]: None for item in request.session.items if item.function is test_upstream}
    directory = tmp_path_factory.mktemp("upstream")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield {suite: pool.submit(_run, suite, directory) for suite in sorted(asked, reverse=True)}


@pytest.mark.parametrize(("suite", "case"), CASES)
def test_upstream(outcomes: dict[str, Any], suite: str, case: str) -> None:
    found = outcomes[suite].result()
    if case not in found:
        pytest.fail(f"it did not end:\n{found['']}", pytrace=False)
    if found[case]["outcome"] == "skipped":
        pytest.skip(found[case]["text"])
    if found[case]["outcome"] == "failed":
        pytest.fail(found[case]["text"], pytrace=False)


def test_what_is_not_applicable_is_still_there() -> None:
    known = [f"{case} " for cases in ALL.values() for case in cases]
    assert [start for start in upstream.NOT_APPLICABLE if not any(case.startswith(start) for case in known)] == []


@pytest.mark.parametrize(("suite", "least"), [("tensorflow", 70), ("keras", 20), ("tf_keras", 28)])
def test_the_suites_are_found(suite: str, least: int) -> None:
    if suite not in ALL:
        pytest.skip("needs tf_keras")
    assert len(ALL[suite]) >= least
