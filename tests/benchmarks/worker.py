"""One process that builds one program and runs it on command.

Started by `driver` with a case as JSON; answers every command line on stdin with one JSON line on stdout:

    {"do": "run", "steps": K}     K steps: {"seconds": elapsed, "cpu_seconds": of all threads}
    {"do": "start"}               the first step: {"seconds", "cpu_seconds", and of a single tf.function "parts": seconds of
                                  "trace" (the Python code), "lowering" (what microstrat makes of it) and "first" (the first
                                  call of what was traced: graph optimization, and a step)}
    {"do": "peak", "steps": K}    K steps: {"bytes": the highest resident memory while they ran}
    {"do": "weights"}             {"weights": the mean absolute value of each trainable variable}

The first line, before any command: {"resident": bytes now, "gradient": bytes of one copy of all gradients}.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import pathlib
import resource
import sys
import time
from typing import Any

import numpy as np

from tests.benchmarks.case import Case

_STATUS = pathlib.Path("/proc/self/status")
_CLEAR_REFS = pathlib.Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc(5), clear_refs


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise KeyError(field)


def _warm_up() -> None:
    """Makes TensorFlow load and start what any first step would, so that it is in no program's figure."""
    import tensorflow as tf

    variable = tf.Variable(tf.ones([8, 8]))

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.matmul(variable, variable))
        return tape.gradient(loss, variable)

    for _ in tf.data.Dataset.range(2).batch(1):
        step()


def _start(program: Any, is_microstrat: bool) -> dict[str, Any]:
    marks = [time.perf_counter()]
    cpu = time.process_time()
    if program.first_call is not None:
        with contextlib.ExitStack() as stack:
            if is_microstrat:
                from microstrat import _lower

                stack.enter_context(_lower.observed(lambda *_: marks.append(time.perf_counter())))
            program.first_call.trace()
        marks.append(time.perf_counter())
    program.run(1)
    marks.append(time.perf_counter())
    names = {2: ["first"], 3: ["trace", "first"], 4: ["trace", "lowering", "first"]}[len(marks)]
    parts = {name: after - before for name, before, after in zip(names, marks[:-1], marks[1:], strict=True)}
    return {"seconds": marks[-1] - marks[0], "cpu_seconds": time.process_time() - cpu, "parts": parts}


def _answer(program: Any, command: dict[str, Any], is_microstrat: bool) -> dict[str, Any]:
    if command["do"] == "start":
        return _start(program, is_microstrat)
    if command["do"] == "run":
        start, cpu_start = time.perf_counter(), time.process_time()
        program.run(command["steps"])
        return {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu_start}
    if command["do"] == "peak":
        # Rubbish that the first step left is not what the steps need; when malloc gives it back is chance.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR_REFS.write_text(_RESET_PEAK)
        program.run(command["steps"])
        return {"bytes": _status_bytes("VmHWM")}
    return {"weights": [float(np.abs(np.asarray(variable)).mean()) for variable in program.model.trainable_variables]}


def _build(case: Case) -> Any:
    if case.peer == "jax-scan":
        from tests.benchmarks import jax_peer

        return jax_peer.build(case)
    from tests.benchmarks.peers import PEERS

    peer = PEERS[case.peer]
    peer.prepare(case.replicas)
    _warm_up()
    return peer.build(case)


def main() -> None:
    """Serves commands until stdin ends."""
    settings = json.loads(sys.argv[1])
    # Replies go to the driver only; whatever else is printed goes to stderr.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if settings["memory_limit"]:
        resource.setrlimit(resource.RLIMIT_DATA, (settings["memory_limit"], settings["memory_limit"]))
    case = Case(**settings["case"])
    program = _build(case)
    gc.collect()
    gradient = sum(np.asarray(variable).nbytes for variable in program.model.trainable_variables)
    print(json.dumps({"resident": _status_bytes("VmRSS"), "gradient": gradient}), file=replies, flush=True)
    for line in sys.stdin:
        answer = _answer(program, json.loads(line), case.peer.startswith("microstrat"))
        print(json.dumps(answer), file=replies, flush=True)


if __name__ == "__main__":
    main()
