"""The examples, each run as a newcomer runs it, in a process of its own with small settings; and what else they can do."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import re
import runpy
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import microstrat

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
MICROSTRAT = str(pathlib.Path(importlib.util.find_spec("microstrat").origin).parent.parent)  # installed or not
TIME_LIMIT = 600  # seconds
NAMES = ["custom_loop.py", "fit_classifier.py", "fit_custom_train_step.py", "replicas_loop.py"]


def run(script: str | pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(EXAMPLES), MICROSTRAT, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(
        command, env=environment, cwd=EXAMPLES.parent, capture_output=True, encoding="utf-8", timeout=TIME_LIMIT
    )


def output_of(script: str | pathlib.Path, *arguments: str) -> str:
    done = run(script, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """The modules that the examples share."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import cli
    import digits
    import report

    return types.SimpleNamespace(cli=cli, digits=digits, report=report)


@pytest.fixture
def run_here(
    examples: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs an example in this process, which saves importing TensorFlow three times; returns what it prints."""
    monkeypatch.setattr(examples.report, "in_fresh_process", lambda fn, *args: fn(*args))
    monkeypatch.setenv("COLUMNS", "120")  # argparse wraps its lines there

    def run(script: str | pathlib.Path, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        runpy.run_path(str(script), run_name="__main__")
        return capsys.readouterr().out

    return run


# --- Custom loops -----------------------------------------------------------------------------------------------------
def differences(output: str) -> tuple[float, float]:
    """What a custom loop prints: the largest difference between the weights in the first 20 steps, and at the end."""
    first, last = re.findall(r"^largest difference between the weights .*: (\S+)$", output, re.MULTILINE)
    return float(first), float(last)


def check_loop(output: str, *labels: str) -> None:
    """Two runs that train alike.

    The weights, of size 0.1, are rounded at 1e-8, and what a step adds at less. In the first 20 steps nothing has grown
    beyond that yet; 63 steps may flip a few units that are all but zero, each of which moves a weight by some 1e-5.
    """
    first, last = differences(output)
    assert first < 1e-5
    assert last < 1e-4
    losses = re.findall(r"^Training loss \(for one batch\) at step 0: (\S+)$", output, re.MULTILINE)
    accuracies = re.findall(r"^Training accuracy over epoch: (\S+)$", output, re.MULTILINE)
    for shown in (losses, accuracies):
        one, other = map(float, shown)
        assert one == pytest.approx(other, abs=1e-3)
    for label in labels:
        assert f"\n{label}: start of epoch 0\n" in output
        ending = re.search(rf"^{label}: validation accuracy (\S+), peak memory grew by \d+ MiB$", output, re.MULTILINE)
        assert float(ending.group(1)) > 0.5


@pytest.mark.core
def test_custom_loop_trains_to_the_weights_of_the_full_batch() -> None:
    check_loop(output_of(EXAMPLES / "custom_loop.py", "--epochs", "1"), "4 × 16", "1 × 64")


@pytest.mark.core
def test_replicas_loop_trains_to_the_weights_of_the_full_batch() -> None:
    check_loop(output_of(EXAMPLES / "replicas_loop.py", "--epochs", "1"), "4 × 16", "1 × 64")


def test_a_training_that_moves_comes_to_the_losses_of_one_that_stays() -> None:
    lines = output_of(EXAMPLES / "switch.py", "--epochs", "1").splitlines()
    rows = [re.fullmatch(r" +(\d+)  (.+?)  +([\d.]+)  +([\d.]+)  +(\S+)", line) for line in lines[1:5]]
    assert [row and (row[1], row[2]) for row in rows] == [
        ("1", "8 replicas = 1 device × 8 micro-batches"),
        ("2", "8 replicas = 2 devices × 4 micro-batches"),
        ("3", "4 replicas = 4 devices"),
        ("4", "no strategy"),
    ]
    losses = [(float(row[3]), float(row[4]), float(row[5])) for row in rows if row is not None]
    assert all(moved == pytest.approx(stayed, rel=2e-6) for moved, stayed, _ in losses)
    assert all(difference < 2e-6 for _, _, difference in losses)
    assert losses[-1][0] < 0.5 * losses[0][0]
    assert float(lines[5].rsplit(maxsplit=1)[1]) < 1e-5  # the weights


def test_custom_loop_with_micro_batches_of_several_sizes(run_here: Callable[..., str]) -> None:
    arguments = ("--epochs", "1", "--batch-size", "62")  # 16 + 16 + 16 + 14 rows, and at the end 8 + 8 + 8 + 8
    check_loop(run_here(EXAMPLES / "custom_loop.py", *arguments), "4 × ≤16", "1 × 62")


def test_custom_loop_on_raw_pixels(run_here: Callable[..., str]) -> None:
    """As many write it: pixels of 0 to 255 and SGD(1e-3).

    Later steps are left out: this learns at the brink, and plain TensorFlow's weights too are soon 1e-2 apart if the rows of
    its batches come in another order.
    """
    first, _ = differences(
        run_here(EXAMPLES / "custom_loop.py", "--epochs", "1", "--white", "255", "--learning-rate", "1e-3")
    )
    assert first < 1e-5


def test_custom_loop_would_show_a_wrong_gradient(run_here: Callable[..., str], tmp_path: pathlib.Path) -> None:
    tape = "with tf.GradientTape() as tape:\n"
    source = (EXAMPLES / "custom_loop.py").read_text(encoding="utf-8")
    assert source.count(tape) == 1
    # All micro-batches weigh 1, so that the 14 rows of the last count for as much as the 16 of another.
    weight = "microstrat.set_weight(tf.minimum(tf.shape(x)[0], 1))\n        "
    wrong = tmp_path / "wrong_loop.py"
    wrong.write_text(source.replace(tape, weight + tape), encoding="utf-8")
    first, last = differences(run_here(wrong, "--epochs", "1", "--batch-size", "62"))
    assert first > 1e-5
    assert last > 1e-4


@pytest.mark.parametrize("name", ["custom_loop.py", "replicas_loop.py"])
def test_loops_are_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < 80


# --- fit --------------------------------------------------------------------------------------------------------------
def test_fit_comes_to_the_history_and_weights_of_the_full_batch() -> None:
    output = output_of(EXAMPLES / "fit_classifier.py", "--epochs", "2")
    found = re.findall(
        r"^largest difference between the (epochs' \w+|weights at the end): (\S+)$", output, re.MULTILINE
    )
    shown = {what: float(difference) for what, difference in found}
    # One digit of 4,000 more or less is 2.5e-4. Adam divides by the size of the gradient, small as it may be.
    assert shown["epochs' accuracy"] < 1e-3
    assert shown["epochs' loss"] < 1e-5
    assert shown["weights at the end"] < 1e-4
    assert output.count("Epoch 2/2") == 2


def test_fit_with_an_own_train_step() -> None:
    """Trains every layer; that BatchNormalization differs from the full batch's is meant, so without it is the next test.

    Of DenseNet121, every kind of layer, and an eighth of the blocks.
    """
    code = """
import functools, runpy, sys
import keras
from keras.src.applications import densenet
keras.applications.DenseNet121 = functools.partial(densenet.DenseNet, [2, 2, 2, 2])
del sys.argv[0]
model = runpy.run_path(sys.argv[0], run_name="__main__")["model"]
steps = model.optimizer.iterations.numpy()
biases = [weight.numpy() for weight in model.trainable_weights if weight.name in ("beta", "bias")]  # begin at zero
print("after", steps, "steps of", len(biases), "biases", sum(bias.any() for bias in biases), "have changed")
"""
    small = ("--limit", "60", "--batch-size", "16", "--micro-batches", "2", "--epochs", "1")
    output = output_of("-c", code, str(EXAMPLES / "fit_custom_train_step.py"), *small)
    assert "4/4" in output
    shown = dict(re.findall(r"(\w+): (\d\S*)", output))  # of each name the last value stays
    assert set(shown) >= {"accuracy", "loss"}
    assert 1.5 < float(shown["loss"]) < 4.5  # 2.6
    assert "after 4 steps of 22 biases 22 have changed" in output


def check_fit(build: Callable[[], keras.Model], data: Callable[[], Sequence[Any]], **options: Any) -> None:
    """fit comes to the same history and weights with 4 micro-batches as without."""

    def fit(scope: contextlib.AbstractContextManager[Any]) -> tuple[dict[str, Any], list[np.ndarray]]:
        keras.utils.set_random_seed(0)
        with scope:
            model = build()
        return model.fit(*data(), **options, verbose=0).history, model.get_weights()

    history, weights = fit(microstrat.scope(micro_batches=4))
    full_history, full_weights = fit(contextlib.nullcontext())
    assert history.keys() == full_history.keys()
    for name in history:
        np.testing.assert_allclose(history[name], full_history[name], rtol=1e-5, err_msg=name)
    for one, other in zip(weights, full_weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_own_train_step_without_batch_norm(examples: types.SimpleNamespace) -> None:
    example = runpy.run_path(str(EXAMPLES / "fit_custom_train_step.py"))

    def build() -> keras.Model:
        inputs = keras.Input((32, 32, 3))
        outputs = keras.layers.Conv2D(8, 5, strides=3, activation="relu")(inputs)
        outputs = keras.layers.Dense(10, activation="softmax", name="primary")(keras.layers.Flatten()(outputs))
        model = example["CustomTrainStep"](inputs=inputs, outputs=outputs)
        model.compile("adam", keras.losses.CategoricalCrossentropy(), metrics=["accuracy"])
        return model

    train, _ = examples.digits.load(limit=400)
    check_fit(build, lambda: [example["dataset"](*train, 64)], epochs=2, shuffle=False)


class AccumulatingTrainStep(keras.Model):
    """A train_step that accumulates gradients itself, as written for Keras 2 and passed on since; Keras 3 still runs it."""

    # fmt: off
    def __init__(self, n_gradients, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.n_gradients = tf.constant(n_gradients, dtype=tf.int32)
        self.n_acum_step = tf.Variable(0, dtype=tf.int32, trainable=False)
        self.gradient_accumulation = [tf.Variable(tf.zeros_like(v, dtype=tf.float32), trainable=False) for v in self.trainable_variables]  # noqa: E501

    def train_step(self, data):
        self.n_acum_step.assign_add(1)

        x, y = data
        # Gradient Tape
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compiled_loss(y, y_pred, regularization_losses=self.losses)
        # Calculate batch gradients
        gradients = tape.gradient(loss, self.trainable_variables)
        # Accumulate batch gradients
        for i in range(len(self.gradient_accumulation)):
            self.gradient_accumulation[i].assign_add(gradients[i])

        # If n_acum_step reach the n_gradients then we apply accumulated gradients to update the variables otherwise do nothing  # noqa: E501
        tf.cond(tf.equal(self.n_acum_step, self.n_gradients), self.apply_accu_gradients, lambda: None)

        # update metrics
        self.compiled_metrics.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}

    def apply_accu_gradients(self):
        # apply accumulated gradients
        self.optimizer.apply_gradients(zip(self.gradient_accumulation, self.trainable_variables))  # noqa: B905

        # reset
        self.n_acum_step.assign(0)
        for i in range(len(self.gradient_accumulation)):
            self.gradient_accumulation[i].assign(tf.zeros_like(self.trainable_variables[i], dtype=tf.float32))
    # fmt: on


@pytest.mark.filterwarnings("ignore:.*is deprecated. Instead, use:UserWarning")  # compiled_loss, compiled_metrics
def test_own_accumulation_on_top(examples: types.SimpleNamespace) -> None:
    def build() -> keras.Model:
        inputs = keras.Input(shape=(28, 28))
        outputs = keras.layers.Dense(128, activation="relu")(keras.layers.Flatten()(inputs))
        outputs = keras.layers.Dense(units=10, activation="softmax", name="primary")(outputs)
        model = AccumulatingTrainStep(n_gradients=10, inputs=[inputs], outputs=[outputs])
        model.compile(keras.optimizers.Adam(1e-3), keras.losses.CategoricalCrossentropy(), metrics=["accuracy"])
        return model

    (x, y), _ = examples.digits.load(limit=400)
    check_fit(build, lambda: [x, keras.utils.to_categorical(y, 10)], batch_size=6, epochs=2)


# --- Options ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_help(name: str, run_here: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        run_here(EXAMPLES / name, "--help")
    assert exit.value.code == 0
    shown = capsys.readouterr().out
    cut = "--replicas" if name == "replicas_loop.py" else "--micro-batches"
    for option in (cut, "--batch-size", "--epochs", "--full"):
        assert option in shown
    assert "(default: 60)" in shown if name == "fit_classifier.py" else "(default: 64)" in shown
    assert ("--replicas" in shown) != ("--micro-batches" in shown)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch-size", "4004"), "--batch-size 4004 is more than the 4000 digits to train on"),
        (("{cut}", "0"), "argument {cut}: 0 is not a positive whole number"),
        (("--epochs", "many"), "argument --epochs: invalid whole number value: 'many'"),
    ],
)
def test_options_that_cannot_be(
    name: str,
    arguments: tuple[str, ...],
    message: str,
    run_here: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    cut = "--replicas" if name == "replicas_loop.py" else "--micro-batches"
    with pytest.raises(SystemExit) as exit:
        run_here(EXAMPLES / name, *(argument.format(cut=cut) for argument in arguments))
    assert exit.value.code == 2
    assert message.format(cut=cut) in capsys.readouterr().err


def test_replicas_share_the_batch_equally(run_here: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_here(EXAMPLES / "replicas_loop.py", "--batch-size", "10")
    assert "--batch-size 10 cannot be shared equally by --replicas 4" in capsys.readouterr().err


# --- Digits -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def digits(examples: types.SimpleNamespace) -> types.ModuleType:
    return examples.digits


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


def test_full_digits(digits: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    mnist = (np.zeros((60_000, 28, 28), np.uint8), np.zeros(60_000, np.uint8)), None
    monkeypatch.setattr(keras.datasets.mnist, "load_data", lambda: mnist)
    assert [len(part) for split in digits.load(full=True) for part in split] == [50_000, 50_000, 10_000, 10_000]


def test_full_digits_without_a_connection(digits: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_data() -> None:
        raise Exception("no route to host")

    monkeypatch.setattr(keras.datasets.mnist, "load_data", load_data)
    with pytest.raises(SystemExit) as exit:
        digits.load(full=True)
    for part in ("--full downloads MNIST", "no route to host", "Leave out --full"):
        assert part in str(exit.value)


# --- An unmodified script ---------------------------------------------------------------------------------------------
def test_the_command_for_the_unmodified_script_gives_what_its_readme_shows() -> None:
    readme = (EXAMPLES / "unmodified_script" / "README.md").read_text(encoding="utf-8")
    command, shown = re.findall(r"^```(?:sh)?\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    python, *arguments = command.split()
    assert python == "python"
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    logged = [line for line in done.stderr.splitlines() if line.startswith("microstrat: ")]
    printed = [*logged, *done.stdout.splitlines()]
    number = re.compile(r"\d+\.\d+")
    assert [number.sub("…", line) for line in printed] == [number.sub("…", line) for line in shown.splitlines()]
    numbers, expected = ([float(text) for text in number.findall(" ".join(lines))] for lines in (printed, [shown]))
    assert numbers == pytest.approx(expected, abs=2e-3)  # other machines round differently; a digit is 2.5e-4
