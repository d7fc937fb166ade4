"""What is chosen, as a table of numbers; and what is made of it, in processes that have the devices."""

from __future__ import annotations

import logging
import os
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import microstrat
from microstrat import _choose
from tests import cluster

GPU1, GPU2, GPU3, GPU8, CPU1 = (
    _choose.Machine(*what) for what in [("GPU", 1), ("GPU", 2), ("GPU", 3), ("GPU", 8), ("CPU", 1)]
)
TWO_BY_TWO = _choose.Machine("GPU", 2, workers=2)


@pytest.mark.parametrize(
    ("machine", "replicas", "micro_batches", "mode", "words"),
    [
        (GPU2, 8, 1, "auto", "8 replicas = 2 GPUs × 4 micro-batches"),
        (GPU8, 8, 1, "auto", "8 replicas = 8 GPUs"),
        (GPU3, 8, 1, "auto", "8 replicas = 2 GPUs × 4 micro-batches"),
        (GPU3, 7, 1, "auto", "7 replicas = 1 GPU × 7 micro-batches"),
        (GPU8, 6, 1, "auto", "6 replicas = 6 GPUs"),
        (GPU1, 8, 1, "auto", "8 replicas = 1 GPU × 8 micro-batches"),
        (CPU1, 4, 1, "auto", "4 replicas = 1 CPU × 4 micro-batches"),
        (GPU8, 8, 1, "virtual", "8 replicas = 1 GPU × 8 micro-batches"),
        (GPU8, 8, 1, "real", "8 replicas = 8 GPUs"),
        (GPU8, 2, 1, "real", "2 replicas = 2 GPUs"),
        # Without a number: what is there; one device, if its batch is cut.
        (GPU8, None, 1, "auto", "8 replicas = 8 GPUs"),
        (CPU1, None, 1, "auto", "1 replica = 1 CPU"),
        (GPU8, None, 1, "virtual", "1 replica = 1 GPU"),
        (GPU8, None, 4, "auto", "1 replica = 1 GPU, in 4 micro-batches"),
        (GPU8, 1, 1, "auto", "1 replica = 1 GPU"),
        # Both numbers.
        (GPU2, 2, 4, "auto", "2 replicas = 2 GPUs, each in 4 micro-batches"),
        (GPU2, 8, 4, "auto", "8 replicas = 2 GPUs × 4 virtual replicas, each in 4 micro-batches"),
        (GPU2, 8, 4, "virtual", "8 replicas = 1 GPU × 8 virtual replicas, each in 4 micro-batches"),
        # Workers: all take part, with as many devices each.
        (TWO_BY_TWO, None, 1, "auto", "4 replicas = 2 workers × 2 GPUs"),
        (TWO_BY_TWO, 16, 1, "auto", "16 replicas = 2 workers × 2 GPUs × 4 micro-batches"),
        (TWO_BY_TWO, 6, 1, "auto", "6 replicas = 2 workers × 1 GPU × 3 micro-batches"),
        (TWO_BY_TWO, 2, 8, "auto", "2 replicas = 2 workers × 1 GPU, each in 8 micro-batches"),
        (TWO_BY_TWO, 3, 1, "virtual", "3 replicas = 1 GPU × 3 micro-batches"),
        (TWO_BY_TWO, None, 8, "auto", "1 replica = 1 GPU, in 8 micro-batches"),
    ],
)  # fmt: skip
def test_choices(machine: _choose.Machine, replicas: int | None, micro_batches: int, mode: str, words: str) -> None:
    choice = _choose.choose(machine, replicas, micro_batches, mode)
    assert str(choice) == words
    assert replicas is None or choice.replicas == replicas


@pytest.mark.parametrize(
    ("machine", "replicas", "mode", "message"),
    [
        (GPU2, 8, "real", r"replicas=8 .*'real' needs 8 devices; .* sees 2 GPUs here.*8 replicas = 2 GPUs × 4 micro-"),
        (CPU1, 2, "real", r"needs 2 devices; TensorFlow sees 1 CPU here"),
        (TWO_BY_TWO, 8, "real", r"needs 4 devices on each of 2 workers; TensorFlow sees 2 GPUs here"),
        (TWO_BY_TWO, 5, "auto", r"replicas=5 cannot be shared equally by the 2 workers in TF_CONFIG.*replicas=4 or 6,"),
        (_choose.Machine("CPU", 1, workers=4), 3, "real", r"Say replicas=4, or mode='virtual'"),
    ],
)
def test_choices_that_cannot_be(machine: _choose.Machine, replicas: int, mode: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _choose.choose(machine, replicas, 1, mode)


@given(st.integers(1, 64), st.integers(1, 9), st.integers(1, 5), st.sampled_from(_choose.MODES))
def test_every_choice_has_all_replicas_on_devices_that_are_there(
    replicas: int, devices: int, workers: int, mode: str
) -> None:
    try:
        choice = _choose.choose(_choose.Machine("GPU", devices, workers), replicas, 1, mode)
    except ValueError:
        assert replicas > 1 and (replicas % workers or replicas > devices * workers) and mode != "virtual"
        return
    assert choice.replicas == replicas
    assert choice.devices <= devices and choice.workers in (1, workers)
    if mode == "auto" and replicas > 1:
        more = range(choice.devices + 1, devices + 1)
        assert choice.workers == workers and not any(replicas // workers % number == 0 for number in more)


# --- Strategies made of choices ---------------------------------------------------------------------------------------
def run(code: str, logical_cpus: int = 1, **environment: str) -> list[str]:
    """The lines that a program prints in a process with so many logical CPUs."""
    return finish(start(code, logical_cpus, **environment))


def start(code: str, logical_cpus: int = 1, **environment: str) -> subprocess.Popen[str]:
    setup = f"""
import os, logging
import tensorflow as tf
import microstrat
tf.config.set_visible_devices([], "GPU")
cpu = tf.config.list_physical_devices("CPU")[0]
if {logical_cpus} > 1:
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * {logical_cpus})
def total(strategy):  # 1 + 2 + ... of every replica, and what each replica knows of their number
    def ranks():
        context = tf.distribute.get_replica_context()
        return context.all_reduce("SUM", context.replica_id_in_sync_group + 1)
    found = strategy.experimental_local_results(tf.function(lambda: strategy.run(ranks))())
    return strategy.num_replicas_in_sync, sorted({{int(value) for value in found}})
"""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("MICROSTRAT_")}
    variables |= {"PYTHONPATH": str(pathlib.Path(microstrat.__file__).parent.parent), "TF_CPP_MIN_LOG_LEVEL": "3"}
    variables |= {"PYTHONIOENCODING": "utf-8", **environment}
    command = [sys.executable, "-c", setup + textwrap.dedent(code)]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")


def finish(process: subprocess.Popen[str]) -> list[str]:
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output.splitlines()


@pytest.fixture(autouse=True)
def environment_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REPLICAS", "MICRO_BATCHES", "MODE"):
        monkeypatch.delenv(f"MICROSTRAT_{name}", raising=False)


def test_on_four_devices() -> None:
    lines = run(
        """
        for arguments in [{}, {"replicas": 2}, {"replicas": 4, "mode": "real"}, {"replicas": 3, "mode": "virtual"},
                          {"micro_batches": 8}, {"replicas": 2, "device": "CPU:3"}, {"replicas": 8},
                          {"replicas": 6, "micro_batches": 2}, {"replicas": 4, "dropout_masks": "independent"},
                          {"replicas": 4, "micro_batches": 2, "batch_norm_statistics": "averaged"}]:
            strategy = microstrat.make_strategy(**arguments)
            print(strategy, isinstance(strategy, tf.distribute.MirroredStrategy), *total(strategy))
        """,
        logical_cpus=4,
    )
    assert lines == [
        "<MirroredStrategy: 4 replicas = 4 CPUs> True 4 [10]",
        "<MirroredStrategy: 2 replicas = 2 CPUs> True 2 [3]",
        "<MirroredStrategy: 4 replicas = 4 CPUs> True 4 [10]",
        "<MicroBatchStrategy: 3 replicas = 1 CPU × 3 micro-batches> False 3 [6]",
        "<MicroBatchStrategy: 1 replica = 1 CPU, in 8 micro-batches> False 1 [1]",
        "<MicroBatchStrategy: 2 replicas = 1 CPU × 2 micro-batches> False 2 [3]",
        "<MicroBatchStrategy: 8 replicas = 4 CPUs × 2 micro-batches> False 8 [36]",
        "<MicroBatchStrategy: 6 replicas = 3 CPUs × 2 virtual replicas, each in 2 micro-batches> False 6 [21]",
        # Options that MirroredStrategy does not have.
        "<MicroBatchStrategy: 4 replicas = 4 CPUs> False 4 [10]",
        "<MicroBatchStrategy: 4 replicas = 4 CPUs, each in 2 micro-batches> False 4 [10]",
    ]


@pytest.mark.parametrize(
    ("replicas", "printed"),
    [
        ("", "<MultiWorkerMirroredStrategy: 2 replicas = 2 workers × 1 CPU> 2 [3]"),
        ("6", "<MicroBatchStrategy: 6 replicas = 2 workers × 1 CPU × 3 micro-batches> 6 [21]"),
    ],
)
def test_two_workers(replicas: str, printed: str) -> None:
    code = f"strategy = microstrat.make_strategy({replicas})\nprint(strategy, *total(strategy))"
    assert run_on_two_workers(code) == [[printed]] * 2


def test_virtualized_fit_on_two_workers() -> None:
    """Keras' `fit` with a MultiWorkerMirroredStrategy of TensorFlow's own fails in its first epoch."""
    code = """
    import keras
    microstrat_virtualize = microstrat.virtualize(replicas=4)
    microstrat_virtualize.__enter__()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    print(strategy, strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((tf.eye(4), tf.ones([4, 1]))).repeat(4)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    print(model.fit(data.with_options(options), epochs=2, verbose=0).history["loss"])
    """
    one, other = run_on_two_workers(code)
    assert [lines[0] for lines in (one, other)] == [
        f"<MicroBatchStrategy: 4 replicas = 2 workers × 1 CPU × 2 micro-batches> worker {index}" for index in range(2)
    ]
    losses = [float(loss) for loss in one[1].strip("[]").split(",")]
    assert one[1] == other[1] and losses[1] < losses[0]


def run_on_two_workers(code: str) -> list[list[str]]:
    """The lines that a program prints on each of two workers."""
    workers = [start(code, TF_CONFIG=configuration) for configuration in cluster.configurations(2)]
    return [finish(worker) for worker in workers]


@pytest.mark.core
@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        ({"replicas": 4}, {}, "4 replicas = 1 CPU × 4 micro-batches"),
        ({}, {}, "1 replica = 1 CPU"),
        ({"micro_batches": 4}, {"REPLICAS": "2"}, "2 replicas = 1 CPU × 2 virtual replicas, each in 4 micro-batches"),
        ({"replicas": 4}, {"REPLICAS": " 2 ", "MODE": ""}, "2 replicas = 1 CPU × 2 micro-batches"),
        ({"replicas": 4}, {"MICRO_BATCHES": "3"}, "4 replicas = 1 CPU × 4 virtual replicas, each in 3 micro-batches"),
        ({"replicas": 4, "mode": "real"}, {"MODE": "virtual"}, "4 replicas = 1 CPU × 4 micro-batches"),
        # What the code says besides stays without a meaning, and is no mistake.
        ({"micro_batches": 4, "loss_reduction": "sum"}, {"MICRO_BATCHES": "1"}, "1 replica = 1 CPU"),
        ({"replicas": 2, "micro_batches": 4, "dropout_masks": "independent"}, {"REPLICAS": "1"},
         "1 replica = 1 CPU, in 4 micro-batches"),
    ],
)  # fmt: skip
def test_the_environment_comes_before_the_code(
    arguments: dict[str, Any], environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(f"MICROSTRAT_{name}", value)
    with microstrat.scope(**arguments) as strategy:
        assert str(strategy) == f"<MicroBatchStrategy: {words}>"
        assert tf.distribute.get_strategy() is strategy


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"REPLICAS": "many"}, "MICROSTRAT_REPLICAS must be a positive int, not 'many'"),
        ({"MICRO_BATCHES": "0"}, "MICROSTRAT_MICRO_BATCHES must be a positive int, not 0"),
        ({"MODE": "both"}, "MICROSTRAT_MODE must be 'auto' or 'virtual' or 'real', not 'both'"),
        ({"MODE": "real"}, "replicas=4 with mode='real' needs 4 devices; TensorFlow sees 1 CPU here"),
    ],
)
def test_an_environment_that_cannot_be(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(f"MICROSTRAT_{name}", value)
    with pytest.raises(ValueError, match=message):
        microstrat.make_strategy(4)


def test_one_real_replica() -> None:
    strategy = microstrat.make_strategy(1, mode="real", device="CPU:0")
    assert str(strategy) == "<MirroredStrategy: 1 replica = 1 CPU>"
    assert isinstance(strategy, tf.distribute.MirroredStrategy)


def test_a_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "microstrat"):
        for _ in range(2):
            microstrat.make_strategy(17, micro_batches=19)
    assert caplog.messages == ["17 replicas = 1 CPU × 17 virtual replicas, each in 19 micro-batches"]
