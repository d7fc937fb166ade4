"""The benchmark command runs, and its tables and JSON hold what was asked for. No figure is judged here."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
PEERS = ["plain-micro", "two-functions", "plain-fit"]


def test_benchmark_command(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "results.json"
    command = [sys.executable, "-m", "tests.benchmarks", "--models", "mlp", "--replicas", "2", "--micro-batch", "4"]
    command += ["--what", "time", "memory", "--peers", *PEERS, "--json", str(file)]
    command += ["--rounds", "1", "--seconds", "0.01", "--processes", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    table = done.stdout
    for name in ["Time of a step", "Memory", "microstrat", "microstrat-fit", *PEERS]:
        assert name in table
    assert "time: mlp, N = 2, round 1 of 1" in done.stderr
    results = json.loads(file.read_text())["results"]
    measured = {
        (result["what"], result["case"]["peer"], result["case"]["replicas"])
        for result in results
        if result["kind"] == "measurement"
    }
    programs = ["microstrat", "microstrat-fit", "two-functions", "plain-fit"]
    assert measured == {(what, name, 2) for what in ("time", "memory") for name in programs} | {
        ("time", "plain-micro", 2),
        ("memory", "plain-micro", 1),
    }
    # All programs made the same weights from the same batches, and every one was measured.
    assert [result["note"] for result in results if result["kind"] == "measurement"] == [""] * len(measured)
    compared = {(result["what"], result["against"]) for result in results if result["kind"] == "comparison"}
    assert ("time", "two-functions, N = 2") in compared
    assert ("memory", "plain-micro, N = 1") in compared


def test_benchmark_reports_a_program_that_fails(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "results.json"
    command = [sys.executable, "-m", "tests.benchmarks", "--models", "mlp", "--replicas", "1", "--what", "time"]
    command += ["--peers", "microstrat", "--memory-limit", "0.001", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    (result,) = json.loads(file.read_text())["results"]
    assert result["note"].startswith("ended with code ")
    assert "ended with code" in done.stdout
