"""The benchmark commands run, and their tables and files hold what was asked for. No time or memory is judged here."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
PEERS = ["plain-micro", "two-functions", "plain-fit"]


def test_benchmark_command(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "results.json"
    command = [sys.executable, "-m", "tests.benchmarks", "--models", "mlp", "--replicas", "2", "--micro-batch", "4"]
    command += ["--what", "time", "memory", "startup", "--peers", *PEERS, "--json", str(file)]
    command += ["--rounds", "1", "--seconds", "0.01", "--processes", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    check_results(done, file)
    # Run again, it measures nothing, and says the same.
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert again.returncode == 0, again.stderr[-3000:]
    assert again.stdout == done.stdout
    assert "round 1 of" not in again.stderr
    other = subprocess.run([*command, "--seconds", "0.02"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "run with other settings" in other.stderr
    check_report(file, tmp_path)


def check_report(file: pathlib.Path, directory: pathlib.Path) -> None:
    readme = directory / "README.md"
    readme.write_text("before\n<!-- performance: begin -->\nold\n<!-- performance: end -->\nafter\n", encoding="utf-8")
    command = [sys.executable, "-m", "tests.benchmarks.report", str(file), "--readme", str(readme)]
    with_plots = importlib.util.find_spec("matplotlib") is not None
    if with_plots:
        command += ["--plots", str(directory / "plots")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- performance: begin -->\nRatios of microstrat")
    assert text.endswith("<!-- performance: end -->\nafter\n")
    assert "old" not in text
    assert "| mlp | " in text
    if with_plots:
        assert {path.name for path in (directory / "plots").iterdir()} == {"time.png", "memory.png", "startup.png"}


def check_results(done: subprocess.CompletedProcess[str], file: pathlib.Path) -> None:
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
    assert measured == {(what, name, 2) for what in ("time", "memory", "startup") for name in programs} | {
        ("time", "plain-micro", 2),
        ("memory", "plain-micro", 1),
        ("startup", "plain-micro", 1),
    }
    # A single tf.function tells what its first step went to.
    parts = [
        result["samples"][0]["parts"] for result in results if result.get("what") == "startup" and "case" in result
    ]
    assert {"trace", "lowering", "optimization"} in [set(names) for names in parts]
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


def test_fidelity_command(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "fidelity.md"
    command = [sys.executable, "-m", "tests.benchmarks.fidelity", "--seeds", "1", "--epochs", "1", "--limit", "256"]
    command += ["--train", "whole", "replicas", "--markdown", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "[1/1] whole batch: accuracy " in done.stderr
    markdown = file.read_text(encoding="utf-8")
    assert markdown.startswith("1 seed, batch of 128 as 8 × 16, 1 × 2 steps")
    for title in ["Validation", "End of training", "First step"]:
        assert title in done.stdout
        assert f"**{title}" in markdown
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown.splitlines() if line.startswith("|")]
    trained = ["full batch", "whole batch", "replicas"]
    assert [row[0] for row in rows if len(row) == 5 and row[0] in trained] == trained
    # The statistics of micro-batches, put together, are the full batch's; averaged, or of one of them, they are not.
    distances = {row[0]: [float(cell) for cell in row[1:]] for row in rows if len(row) == 3 and row[1][0].isdigit()}
    assert list(distances) == ["whole batch", "replicas", "variances averaged (worked out)"]
    assert max(distances["whole batch"]) < 1e-4
    assert distances["variances averaged (worked out)"][0] < 1e-4
    assert distances["variances averaged (worked out)"][1] > 3e-4
    assert min(distances["replicas"]) > 1e-3
