"""The eager engine is for looking inside: values, prints and a debugger in the replica function."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import threading
from typing import Any

import pytest
import tensorflow as tf

import microstrat


def test_values_can_be_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = microstrat.MicroBatchStrategy(3)
    batch = next(iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(6).batch(6))))

    def step(x: tf.Tensor) -> int:
        context = tf.distribute.get_replica_context()
        print("replica", int(context.replica_id_in_sync_group), "has", x.numpy().tolist())
        total = context.all_reduce("sum", tf.reduce_sum(x))
        print("replica", int(context.replica_id_in_sync_group), "sees", total.numpy())
        return int(total.numpy())

    assert strategy.run(step, args=(batch,)) == 15
    # Every replica runs until the all-reduce before any goes on.
    assert capsys.readouterr().out.splitlines() == [
        "replica 0 has [0, 1]",
        "replica 1 has [2, 3]",
        "replica 2 has [4, 5]",
        "replica 0 sees 15",
        "replica 1 sees 15",
        "replica 2 sees 15",
    ]


def test_one_replica_runs_at_a_time() -> None:
    strategy = microstrat.MicroBatchStrategy(4)
    running, most = 0, 0
    lock = threading.Lock()

    def step() -> tf.Tensor:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        value = tf.linalg.trace(tf.ones([50, 50]))
        with lock:
            running -= 1
        return tf.distribute.get_replica_context().all_reduce("sum", value)

    assert [value.numpy() for value in strategy.run(step).values] == [200.0] * 4
    assert most == 1


def test_a_debugger_stops_in_the_replica_function(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "debugged.py"
    script.write_text(
        "import tensorflow as tf, microstrat\n"
        "def step():\n"
        "    here = tf.constant(41) + tf.distribute.get_replica_context().replica_id_in_sync_group\n"
        "    breakpoint()\n"
        "    return here\n"
        "microstrat.MicroBatchStrategy(2).run(step)\n",
        encoding="utf-8",
    )
    root = str(pathlib.Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, script],
        input="p 'value', here.numpy()\nc\n" * 2,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert done.returncode == 0, done.stderr
    assert "('value', np.int32(41))" in done.stdout or "('value', 41)" in done.stdout
    assert "('value', np.int32(42))" in done.stdout or "('value', 42)" in done.stdout


def test_nested_functions_get_their_own_replica_and_state() -> None:
    """A tf.function is traced once for replicas that share a device; its replica id and variables must not be frozen."""
    strategy = microstrat.MicroBatchStrategy(3)
    with strategy.scope():
        own = tf.Variable(10, trainable=False)
    traces = 0

    @tf.function
    def nested() -> Any:
        nonlocal traces
        traces += 1
        return tf.distribute.get_replica_context().replica_id_in_sync_group, own + 0

    def step() -> Any:
        own.assign(10 * (1 + tf.distribute.get_replica_context().replica_id_in_sync_group))
        return nested()

    ids, values = strategy.run(step)
    assert [value.numpy() for value in ids.values] == [0, 1, 2]
    assert [value.numpy() for value in values.values] == [10, 20, 30]
    ids, values = tf.function(lambda: strategy.run(step))()
    assert [value.numpy() for value in ids.values] == [0, 1, 2]
    assert [value.numpy() for value in values.values] == [10, 20, 30]
    assert traces <= 2  # once in eager mode, at most once more in the looped engine
