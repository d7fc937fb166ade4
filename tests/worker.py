"""Runs parity programs in a process of its own: `python -m tests.worker DIRECTORY RUNNING KIND:N:PROGRAM ...`.

MirroredStrategy needs one logical CPU per replica, declared before TensorFlow starts, so each N is a process. Every
job's result goes to its own file in DIRECTORY as soon as it is there, and the file RUNNING names the job at work, so
that one that hangs costs no other.
"""

from __future__ import annotations

import functools
import os
import pathlib
import pickle
import sys
import time
import traceback
from typing import Any

REFERENCES = {
    "looped": "mirrored",
    "eager": "mirrored",
    "real2": "mirrored",
    "real4": "mirrored",
    "real2-eager": "mirrored",
    "workers2": "mirrored",
    "whole": "plain",
    "whole-eager": "plain-eager",
}
"""Kinds of runs, and what each is compared with. N is the number of replicas, of which "real2" and "real4" have as many on
each of two or four devices, and "workers2" on each of two processes; of the last two, N is the number of micro-batches."""


def result_file(directory: pathlib.Path, job: str) -> pathlib.Path:
    return directory / f"{job.replace(':', '-')}.pickle"


def write(directory: pathlib.Path, job: str, outcome: dict[str, Any]) -> None:
    """Writes {"results" or "error", "seconds"} at once: a reader never sees half a file."""
    path = result_file(directory, job)
    part = path.with_suffix(".part")
    part.write_bytes(pickle.dumps(outcome))
    part.rename(path)


@functools.cache
def mirrored(number: int) -> Any:
    """The one MirroredStrategy of this process: a second would use the same keys for other collectives."""
    import tensorflow as tf

    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(number)])


@functools.cache
def multi_worker() -> Any:
    """The strategy of the processes that TF_CONFIG names; TensorFlow wants it before anything else."""
    import tensorflow as tf

    return tf.distribute.MultiWorkerMirroredStrategy()


def make_strategy(kind: str, number: int, name: str) -> Any:
    """The strategy that a run of a program is about."""
    import tensorflow as tf

    import microstrat
    from tests import programs

    entry = programs.PROGRAMS[name]
    if kind == "mirrored":
        return mirrored(number)
    if kind in ("plain", "plain-eager"):
        return tf.distribute.OneDeviceStrategy("CPU:0") if entry.one_device else tf.distribute.get_strategy()
    if kind in ("whole", "whole-eager"):
        return microstrat.MicroBatchStrategy(number, semantics="whole_batch", loss_reduction=entry.whole)
    if devices := real_devices(kind):
        return microstrat.MicroBatchStrategy(number // devices, base=mirrored(devices))
    if kind == "workers2":
        return microstrat.MicroBatchStrategy(number // 2, base=multi_worker())
    return microstrat.MicroBatchStrategy(number)


def real_devices(kind: str) -> int:
    """The number of real replicas of a kind of runs, 0 if there are none."""
    return int(kind.removeprefix("real")[0]) if kind.startswith("real") else 0


def run(kind: str, number: int, name: str) -> dict[str, Any]:
    """Runs one program and says what came of it."""
    import keras
    import tensorflow as tf

    from tests import programs

    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    tf.config.run_functions_eagerly(kind.endswith("eager"))
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": is_exact(kind, number)})
    start, start_cpu = time.perf_counter(), time.process_time()
    try:
        outcome = {"results": programs.PROGRAMS[name].run(make_strategy(kind, number, name))}
    except Exception:
        outcome = {"error": traceback.format_exc()}
    return {**outcome, "seconds": time.perf_counter() - start, "cpu": time.process_time() - start_cpu}


def is_exact(kind: str, number: int) -> bool:
    """Whether two runs must agree in every bit."""
    from tests import programs

    return kind in ("mirrored", "looped", "eager", "real2") and number in programs.EXACT


def devices(kind: str, number: int) -> int:
    """How many logical CPUs a job needs."""
    return number if kind == "mirrored" else real_devices(kind) or 1


def configure(number_of_devices: int) -> None:
    """Sets TensorFlow up; before it starts."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")
    # With fewer threads, MirroredStrategy on logical CPUs can wait for itself.
    tf.config.threading.set_inter_op_parallelism_threads(8)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(number_of_devices)]
    tf.config.set_logical_device_configuration(cpu, logical)


def main(directory: pathlib.Path, running: pathlib.Path, jobs: list[str]) -> None:
    """Runs jobs that all need the same number of devices."""

    parsed = [(kind, int(number), name) for kind, number, name in (job.split(":") for job in jobs)]
    (number_of_devices,) = {devices(kind, number) for kind, number, _ in parsed}
    configure(number_of_devices)
    if any(kind == "workers2" for kind, _, _ in parsed):
        multi_worker()
    for job, (kind, number, name) in zip(jobs, parsed, strict=True):
        running.write_text(job)
        outcome = run(kind, number, name)
        write(directory, job, outcome)
        if kind == "mirrored" and "error" in outcome:
            # An aborted collective spoils all that follow; whoever started this process starts another for the rest.
            return


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:])
