"""`microstrat run`: a script does what it does when run directly, but for its strategies."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import pytest

import microstrat
from microstrat import _cli

ROOT = pathlib.Path(microstrat.__file__).parent.parent
EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "unmodified_script" / "train.py"
RUN = ("-m", "microstrat", "run", "--replicas", "4")


def start(directory: pathlib.Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("MICROSTRAT_")}
    variables |= {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "CUDA_VISIBLE_DEVICES": ""}
    variables |= {"TF_CPP_MIN_LOG_LEVEL": "3", **environment}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=directory,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def result(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=240)
    return process.returncode, output, errors


def output_of(directory: pathlib.Path, *arguments: str, **environment: str) -> tuple[list[str], list[str]]:
    """The lines that a program prints, and those that microstrat logs."""
    code, output, errors = result(start(directory, *arguments, **environment))
    assert code == 0, errors
    return output.splitlines(), [line for line in errors.splitlines() if line.startswith("microstrat: ")]


# --- As when run directly ---------------------------------------------------------------------------------------------
SCRIPTS = {
    "facts": """
        import sys, inspect
        def function(): pass
        print(sys.argv, sys.path[0], __name__, __file__, __package__, __spec__ and __spec__.name, __builtins__)
        print(sys.modules["__main__"].function is function, inspect.getsource(function))
        """,
    "exit": "import sys; sys.exit(7)",
    "message": "import sys; sys.exit('bye')",
    "error": """
        def outer():
            try:
                {}["key"]
            except KeyError as error:
                raise ValueError("no such thing") from error
        outer()
        """,
    "syntax": "print('unseen')\n)",
    "hook": """
        import sys, traceback
        sys.excepthook = lambda kind, error, tb: print("mine", kind, error, *traceback.format_tb(tb))
        1 / 0
        """,
    "interrupt": "raise KeyboardInterrupt",
    "later": """
        import atexit, threading, time
        class Thing: pass
        def late():
            time.sleep(0.2)
            import pickle, __main__
            print(type(pickle.loads(pickle.dumps(Thing()))) is Thing, __main__.Thing is Thing)
        threading.Thread(target=late).start()
        atexit.register(late)
        """,
}


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> pathlib.Path:
    for name, code in SCRIPTS.items():
        (tmp_path / f"{name}_script.py").write_text(textwrap.dedent(code), encoding="utf-8")
    package = tmp_path / "a_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(textwrap.dedent(SCRIPTS["facts"]))
    (package / "module.py").write_text("from a_package import __name__ as package\nprint(package, __package__)\n1 / 0")
    (tmp_path / "link.py").symlink_to(package / "__main__.py")
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        *((f"{name}_script.py",) for name in SCRIPTS),
        ("facts_script.py", "--replicas", "2", "--", "-m", "-h", "--unknown=1", "a b"),
        ("./a_package/../link.py", "-x"),
        ("nowhere.py", "-x"),
        ("-m", "facts_script", "-m", "x"),
        ("-m", "a_package", "--mode", "x"),
        ("-m", "error_script"),
        ("-m", "nowhere"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_script_runs_as_directly(arguments: Sequence[str], directory: pathlib.Path) -> None:
    direct = start(directory, *arguments)
    code, output, errors = result(start(directory, *RUN, *arguments))
    direct_code, direct_output, direct_errors = result(direct)
    assert (code, output) == (direct_code, direct_output)
    # Tracebacks of modules begin with the frames of runpy, which are Python's own.
    assert errors == re.sub(r'(  File "(<frozen runpy>|.*runpy\.py)", .*\n(    .*\n)*)+', "", direct_errors)


@pytest.fixture
def signals_count() -> Iterator[None]:
    """What runs in the background is started with SIGINT ignored, and so is what it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("signals_count")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals(number: signal.Signals, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    results = []
    for run in (RUN, ()):
        process = start(tmp_path, *run, str(script))
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.1)  # to be asleep
        process.send_signal(number)
        results.append(result(process))
    assert results[0] == results[1]
    assert results[0][0] == -number


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, exits in (([], False), (["--help"], True), (["run", "--help"], True)):
        if exits:
            with pytest.raises(SystemExit, match="0"):
                _cli.main(arguments)
        else:
            _cli.main(arguments)
    shown = capsys.readouterr().out
    for part in (
        "microstrat run --replicas 8 train.py",
        "--micro-batches 8",
        "-m package.train",
        "MICROSTRAT_REPLICAS",
    ):
        assert part in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--replicas", "0", "train.py"], "argument --replicas: 0 is not a positive whole number"),
        (
            ["run", "--micro-batches", "many", "train.py"],
            "argument --micro-batches: many is not a positive whole number",
        ),
        (["run", "--mode", "both", "train.py"], "argument --mode: invalid choice: 'both'"),
        (["run", "--replicas", "4"], "the following arguments are required: SCRIPT"),
        (["run", "--replica", "4", "train.py"], "unrecognized arguments: --replica"),
    ],
)
def test_options_that_cannot_be(arguments: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        _cli.main(arguments)
    assert message in capsys.readouterr().err


# --- Strategies -------------------------------------------------------------------------------------------------------
ON_FOUR_CPUS = """
import runpy, sys
import tensorflow as tf
tf.config.threading.set_inter_op_parallelism_threads(8)  # with fewer, MirroredStrategy on CPUs can wait for itself
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.core
def test_virtual_replicas_come_to_what_four_devices_do(tmp_path: pathlib.Path) -> None:
    example = (str(EXAMPLE), "--epochs", "1", "--save")
    shown, logged = output_of(tmp_path, *RUN, *example, "virtual.keras")
    assert logged == ["microstrat: 4 replicas = 1 CPU × 4 micro-batches"]
    on_four, _ = output_of(tmp_path, "-c", ON_FOUR_CPUS, *example, "devices.keras")
    assert shown[0] == on_four[0] == "Number of devices: 4"
    numbers, expected = ([float(number) for number in re.findall(r"\d+\.\d+", lines[1])] for lines in (shown, on_four))
    assert len(expected) == 3
    np.testing.assert_allclose(numbers, expected, rtol=0, atol=2e-6)
    models = [keras.models.load_model(tmp_path / f"{name}.keras") for name in ("virtual", "devices")]
    for one, other in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)


FOR_ONE_DEVICE = """
import os
os.environ["TF_USE_LEGACY_KERAS"] = "0"
os.environ["BEFORE"] = "tensorflow" if "tensorflow" in __import__("sys").modules else "nothing"
import tensorflow as tf
from tensorflow import distribute
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
tf.config.threading.set_inter_op_parallelism_threads(2)
print("imported before:", os.environ["BEFORE"])
strategy = tf.distribute.get_strategy()
rows = tf.function(lambda: strategy.run(lambda x: tf.shape(x)[0], args=(tf.zeros([6, 2]),)))()
print(strategy, "parts:", len(strategy.experimental_local_results(rows)))
print(distribute.MirroredStrategy(["GPU:0"]) is strategy, isinstance(strategy, tf.distribute.MirroredStrategy))
"""


def test_a_script_for_one_device(tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text(FOR_ONE_DEVICE)
    # The command comes before the environment.
    command = ("-m", "microstrat", "run", "--micro-batches", "3", "script.py")
    shown, logged = output_of(tmp_path, *command, MICROSTRAT_MICRO_BATCHES="2")
    assert shown == [
        "imported before: nothing",
        "<MicroBatchStrategy: 1 replica = 1 CPU, in 3 micro-batches> parts: 3",
        "True True",
    ]
    assert logged == [
        "microstrat: 1 replica = 1 CPU, in 3 micro-batches",
        "microstrat: MirroredStrategy(['GPU:0']) gives <MicroBatchStrategy: 1 replica = 1 CPU, in 3 micro-batches>; "
        "what it says is ignored",
    ]


FIT = """
import keras
import numpy as np

keras.utils.set_random_seed(0)
with np.load("mnist_5k.npz") as file:
    order = np.random.default_rng(0).permutation(5000)[:500]
    x, y = file["images"][order].reshape([500, 784]) / 255.0, file["labels"][order]
model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
print(*model.fit(x, y, batch_size=64, epochs=2, verbose=0).history["loss"], *model.evaluate(x, y, verbose=0))
"""


def test_fit_on_one_device_comes_to_the_same(tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text(FIT)
    shutil.copy(EXAMPLE.parent.parent / "data" / "mnist_5k.npz", tmp_path)
    direct = start(tmp_path, "script.py")
    shown, logged = output_of(tmp_path, "-m", "microstrat", "run", "--micro-batches", "5", "script.py")
    assert logged == ["microstrat: 1 replica = 1 CPU, in 5 micro-batches"]
    code, expected, errors = result(direct)
    assert code == 0, errors
    np.testing.assert_allclose(
        [float(part) for part in shown[0].split()], list(map(float, expected.split())), rtol=1e-5
    )


WITH_CHILDREN = """
import concurrent.futures, multiprocessing, sys

def replicas(more):
    import tensorflow as tf
    return tf.distribute.MirroredStrategy().num_replicas_in_sync + more, sys.argv

if __name__ == "__main__":
    for method in ("spawn", "fork"):
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context(method)) as process:
            print(*process.submit(replicas, 100).result())
"""


def test_children_are_alike(tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text(WITH_CHILDREN)
    shown, logged = output_of(tmp_path, *RUN, "script.py", "-x")
    assert shown == ["104 ['script.py', '-x']"] * 2
    assert logged == ["microstrat: 4 replicas = 1 CPU × 4 micro-batches"] * 2


def test_a_script_without_a_strategy_is_told(tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text("import tensorflow as tf\nprint(float(tf.constant(1.0)))\n")
    shown, logged = output_of(tmp_path, *RUN, "script.py")
    assert shown == ["1.0"]
    assert len(logged) == 1 and re.search("No strategy was made .* one device, use --micro-batches", logged[0])
