"""Virtual replicas in several processes: two workers of a MultiWorkerMirroredStrategy, over loopback.

What they compute together is what MirroredStrategy computes on as many devices, and it goes on when a worker was killed.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests import cluster, compare, programs, worker

ROOT = pathlib.Path(__file__).parents[1]
LIMIT = 240
"""Seconds that the workers may take."""
NAMES = [
    "loop_mlp_adam",
    "loop_batch_norm",
    "loop_metrics",
    "loop_embedding",
    "fit_mlp",
    "fit_metrics",
    "all_reduce",
    "all_gather",
    "variables_on_read",
]
FOR_THEMSELVES = {"loop_batch_norm"}
"""Replicas keep moving statistics to themselves, and each worker shows those of its first one."""


def _part(expected: Any, found: Any, index: int) -> Any:
    """What a worker has of a result: of four replicas' values, its own two."""
    if isinstance(found, dict):
        return {key: _part(expected[key], found[key], index) if key in found else expected[key] for key in expected}
    if not isinstance(found, list | tuple):
        return expected
    if len(found) == 2 and len(expected) == 4:
        expected = expected[2 * index : 2 * index + 2]
    if len(found) != len(expected):
        return expected
    return type(expected)(_part(one, other, index) for one, other in zip(expected, found, strict=True))


def start(command: Sequence[str], number: int = 2) -> list[subprocess.Popen[str]]:
    """Starts a program as so many workers of a cluster; "{index}" in the command is the worker's."""
    processes = []
    for index, configuration in enumerate(cluster.configurations(number)):
        environment = {
            **os.environ,
            "TF_CONFIG": configuration,
            "CUDA_VISIBLE_DEVICES": "",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONPATH": str(ROOT),
        }
        own = [part.replace("{index}", str(index)) for part in command]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen([sys.executable, *own], cwd=ROOT, env=environment, **pipes))
    return processes


def finish(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Waits for workers; what each printed. None outlives this."""
    try:
        return [process.communicate(timeout=LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Outcomes of the programs: of MirroredStrategy on four devices, and of two replicas in each of two workers."""
    directory = tmp_path_factory.mktemp("workers")
    for name in ("reference", "0", "1"):
        (directory / name).mkdir()
    reference = [f"mirrored:4:{name}" for name in NAMES]
    jobs = [f"workers2:4:{name}" for name in NAMES]
    own = str(directory / "{index}")
    workers = start(["-m", "tests.worker", own, os.path.join(own, "running"), *jobs])
    alone = [sys.executable, "-m", "tests.worker", str(directory / "reference"), str(directory / "running"), *reference]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    for _ in range(2):  # MirroredStrategy on logical CPUs can hang
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(alone, cwd=ROOT, env=environment, timeout=LIMIT, check=True)
            break
    logs = finish(workers)

    def outcome(where: str, job: str) -> dict[str, Any]:
        path = worker.result_file(directory / where, job)
        if not path.exists():
            pytest.fail(f"worker {where} did not finish {job}:\n{logs[int(where)][-3000:]}", pytrace=False)
        return pickle.loads(path.read_bytes())

    yield outcome


@pytest.mark.parametrize("name", NAMES)
def test_two_workers_agree_with_four_devices(outcomes: Any, name: str) -> None:
    expected = outcomes("reference", f"mirrored:4:{name}")
    assert "error" not in expected, expected["error"]
    for index in (0,) if name in FOR_THEMSELVES else (0, 1):
        found = outcomes(str(index), f"workers2:4:{name}")
        assert "error" not in found, found["error"]
        mine = _part(expected["results"], found["results"], index)
        differences = compare.differences(mine, found["results"], programs.PROGRAMS[name].tolerance)
        assert not differences, "\n".join(differences[:20])


TRAINING = """
import os, pathlib, sys
import numpy as np
import tensorflow as tf
base = tf.distribute.MultiWorkerMirroredStrategy()
import keras
import microstrat

directory, fail_at = pathlib.Path(sys.argv[1]), int(sys.argv[2])
index = base.cluster_resolver.task_id
strategy = microstrat.MicroBatchStrategy(2, base=base)
generator = np.random.default_rng(0)
x, y = generator.standard_normal((64, 5)).astype("float32"), generator.integers(0, 3, 64)
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)

class Dies(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if index == 1 and epoch == fail_at:
            os._exit(9)

backup = keras.callbacks.BackupAndRestore(str(directory / f"backup-{index}"))
history = model.fit(data, epochs=4, verbose=0, callbacks=[backup, Dies()])
np.savez(directory / f"weights-{index}.npz", *model.get_weights())
print("epochs", len(history.history["loss"]))
"""


def test_a_killed_worker_goes_on_where_it_was(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    logs = finish(start([str(script), str(whole), "-1"]))
    assert all(log.rstrip().endswith("epochs 4") for log in logs), logs
    first = start([str(script), str(broken), "2"])
    first[1].communicate(timeout=LIMIT)
    assert first[1].returncode == 9
    # The other one waits for it, or finds out: either way whoever started it starts both again.
    first[0].kill()
    first[0].communicate()
    logs = finish(start([str(script), str(broken), "-1"]))
    assert all(log.rstrip().endswith("epochs 2") for log in logs), logs
    for index in range(2):
        expected, found = (np.load(where / f"weights-{index}.npz") for where in (whole, broken))
        for key in expected:
            np.testing.assert_array_equal(found[key], expected[key])
