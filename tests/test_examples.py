"""The examples, run as a newcomer runs them: in a process of their own, with small settings."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import types

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
MICROSTRAT = str(pathlib.Path(importlib.util.find_spec("microstrat").origin).parent.parent)  # installed or not
TIME_LIMIT = 600  # seconds
NAMES = ["custom_loop.py", "fit_custom_train_step.py"]


def run(script: str | pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(EXAMPLES), MICROSTRAT, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONIOENCODING": "utf-8"}
    environment["COLUMNS"] = "120"  # argparse and rich wrap their lines there
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=TIME_LIMIT)


def differences(output: str) -> tuple[float, float]:
    """What custom_loop.py prints: the largest difference between the weights in the first 20 steps, and at the end."""
    first, last = re.findall(r"^largest difference between the weights .*: (\S+)$", output, re.MULTILINE)
    return float(first), float(last)


@pytest.fixture(scope="module")
def custom_loop() -> str:
    done = run(EXAMPLES / "custom_loop.py", "--epochs", "1")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.core
def test_custom_loop_trains_to_the_weights_of_the_full_batch(custom_loop: str) -> None:
    first, last = differences(custom_loop)
    assert first < 1e-5
    assert last < 1e-4


@pytest.mark.core
def test_custom_loop_shows_progress_accuracy_and_memory(custom_loop: str) -> None:
    for label in ("4 × 16", "1 × 64"):
        assert re.search(rf"^{label}, epoch 1/1 .* 62/62 .* loss \d\.\d+", custom_loop, re.MULTILINE), custom_loop
        accuracy, _ = re.search(
            rf"^{label}: validation accuracy (\S+), peak memory grew by (\d+) MiB$", custom_loop, re.MULTILINE
        ).groups()
        assert float(accuracy) > 0.5


def test_custom_loop_would_show_a_wrong_gradient(tmp_path: pathlib.Path) -> None:
    right = "global_batch_size=options.batch_size"
    source = (EXAMPLES / "custom_loop.py").read_text(encoding="utf-8")
    assert right in source
    wrong = tmp_path / "wrong_loop.py"
    wrong.write_text(source.replace(right, f"{right} + 1"), encoding="utf-8")
    done = run(wrong, "--epochs", "1")
    assert done.returncode == 0, done.stderr
    first, last = differences(done.stdout)
    assert first > 1e-5
    assert last > 1e-4


def test_custom_loop_is_short() -> None:
    assert len((EXAMPLES / "custom_loop.py").read_text(encoding="utf-8").splitlines()) < 80


def test_fit_with_an_own_train_step() -> None:
    small = ("--limit", "64", "--batch-size", "16", "--replicas", "2", "--epochs", "1")
    done = run(EXAMPLES / "fit_custom_train_step.py", *small)
    assert done.returncode == 0, done.stderr
    assert "4/4" in done.stdout
    shown = dict(re.findall(r"(\w+): (\d\S*)", done.stdout))  # of each name the last value stays
    assert set(shown) >= {"accuracy", "loss"}
    assert 1.5 < float(shown["loss"]) < 4.5  # 2.6; a loss not scaled back for 2 replicas is half or twice that


@pytest.mark.parametrize("name", NAMES)
def test_help(name: str) -> None:
    done = run(EXAMPLES / name, "--help")
    assert done.returncode == 0, done.stderr
    for option in ("--replicas", "--batch-size", "--epochs", "--full"):
        assert option in done.stdout
    assert "(default: 64)" in done.stdout


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--batch-size", "10", "--replicas", "4"),
            "--batch-size 10 cannot be cut into --replicas 4 equal micro-batches",
        ),
        (("--batch-size", "4004"), "--batch-size 4004 is more than the 4000 digits to train on"),
        (("--replicas", "0"), "argument --replicas: 0 is not a positive whole number"),
        (("--epochs", "many"), "argument --epochs: invalid whole number value: 'many'"),
    ],
)
def test_options_that_cannot_be(name: str, arguments: tuple[str, ...], message: str) -> None:
    done = run(EXAMPLES / name, *arguments)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    import digits

    return digits


def test_digits_are_split_and_shuffled(digits: types.ModuleType) -> None:
    (x, y), (x_validation, y_validation) = digits.load()
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((4000, 28, 28), np.float32, (4000,), np.int32)
    assert (x_validation.shape, y_validation.shape) == ((1000, 28, 28), (1000,))
    assert (x.min(), x.max()) == (0, 1)
    assert np.bincount(np.concatenate([y, y_validation])).tolist() == [500] * 10
    assert np.count_nonzero(np.diff(y[:100])) > 50  # the file is in order of class


def test_digits_of_one_seed_are_the_same(digits: types.ModuleType) -> None:
    (x, y), (x_validation, _) = digits.load(limit=8, seed=3)
    (x_again, y_again), _ = digits.load(seed=3)
    assert (len(x), len(x_validation)) == (8, 2)
    np.testing.assert_array_equal(x, x_again[:8])
    np.testing.assert_array_equal(y, y_again[:8])
    assert (digits.load(seed=4)[0][1] != y_again).any()


def test_full_digits() -> None:
    code = """
import digits, keras, numpy as np
keras.datasets.mnist.load_data = lambda: ((np.zeros((60000, 28, 28), np.uint8), np.zeros(60000, np.uint8)), None)
print([len(part) for split in digits.load(full=True) for part in split])
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[50000, 50000, 10000, 10000]"


def test_full_digits_without_a_connection() -> None:
    code = """
import digits, keras
def load_data():
    raise Exception("no route to host")
keras.datasets.mnist.load_data = load_data
digits.load(full=True)
"""
    done = run("-c", code)
    assert done.returncode == 1
    assert "--full downloads MNIST" in done.stderr
    assert "no route to host" in done.stderr
    assert "Leave out --full" in done.stderr
