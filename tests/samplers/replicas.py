"""Random SPMD programs, each run under MirroredStrategy and both our engines: `python -m tests.samplers.replicas`.

A program is a replica function (or two) made of what such functions are made of: tensors, variables of every kind,
collectives, tapes, branches, loops, random draws, nested tf.functions. It depends on nothing but the seed and its index:
`--index` runs one alone, prints it, and leaves out what a mismatch does not need. Everything that the program can see is
compared: what each replica returns, what that reduces to, and each variable from outside and in each replica.

Or one of our errors refuses the program: those are counted by kind. Where MirroredStrategy itself fails, our engines are
compared with each other.
"""

from __future__ import annotations

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import inspect
import json
import os
import pathlib
import queue
import re
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from microstrat import _errors
from tests import compare, worker
from tests.samplers import drawing
from tests.samplers.program import Program, smaller

ROOT = pathlib.Path(__file__).parents[2]
TOLERANCE = 1e-6
"""Largest difference of two arrays, relative to the largest absolute value in the expected one."""
ROUNDING = 1e-4
"""A larger difference in float32, relative to the largest number of the program, is never taken for rounding."""
IN_FLOAT64 = 1e-10
"""A program that differs by more than the tolerance runs again in float64. If that was rounding, less than this is left."""
DEVICES = 2
"""Real replicas that share the virtual ones, in programs with an even number of them."""
LIMIT = 60
"""Seconds that a program may take: MirroredStrategy on logical CPUs can deadlock. It gets a second chance."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a program.

    Attributes:
      found: what differs, one line each, or how an engine failed.
      rounding: whether what differs is rounding alone: small, and gone in float64.
      refused: engine -> which of our errors refused the program, by name, and its message.
      stock: how MirroredStrategy failed, if it did.
    """

    found: list[str] = dataclasses.field(default_factory=list)
    rounding: bool = False
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    stock: str = ""

    @property
    def agrees(self) -> bool:
        return not self.found or self.rounding


# --- Comparing --------------------------------------------------------------------------------------------------------
def check(program: Program, *, with_stock: bool = True) -> Outcome:
    """Runs a program every way and compares. In a process without MirroredStrategy, our engines with each other."""
    results: dict[str, Any] = {}
    outcome = Outcome()
    ours = ("looped", "eager") + ("real",) * (program.replicas % DEVICES == 0)
    for engine in ("mirrored", *ours) if with_stock else ours:
        try:
            results[engine] = _results(program, engine)
        except Exception as error:
            if engine == "mirrored":
                outcome = dataclasses.replace(outcome, stock=traceback.format_exc())
            elif kind := kind_of_refusal(error):
                # Devices cannot meet in a loop: that is known, and said.
                if (engine, kind) != ("real", "collective_in_loop"):
                    outcome.refused[engine] = f"{kind}: {error}"
            else:
                outcome.found.append(f"{engine}: {traceback.format_exc()}")
    reference = "mirrored" if "mirrored" in results else "eager"
    if outcome.found or reference not in results:
        return outcome
    engines = [engine for engine in results if engine != reference]
    found = _compare(results, reference, engines)
    rounding = bool(found) and _apart(results, reference, engines) < ROUNDING
    if rounding:
        wide = {engine: _results(program, engine, wide=True) for engine in results}
        rounding = _apart(wide, reference, engines) < IN_FLOAT64
    return dataclasses.replace(outcome, found=found, rounding=rounding)


def _compare(results: dict[str, Any], reference: str, engines: Sequence[str]) -> list[str]:
    return [
        f"{engine}: {line}"
        for engine in engines
        for line in compare.differences(results[reference], results[engine], TOLERANCE)
    ]


def _apart(results: dict[str, Any], reference: str, engines: Sequence[str]) -> float:
    """The largest difference, relative to the largest number of all: what cancels to nothing leaves rounding of that."""
    expected = _numbers(results[reference])
    largest = max((np.abs(array[np.isfinite(array)]).max(initial=0) for array in expected), default=0)
    apart = 0.0
    for engine in engines:
        actual = _numbers(results[engine])
        if [array.shape for array in expected] != [array.shape for array in actual]:
            return np.inf
        for left, right in zip(expected, actual, strict=True):
            finite = np.isfinite(left)
            if not np.array_equal(left[~finite], right[~finite], equal_nan=True):
                return np.inf
            apart = max(apart, np.abs(left[finite] - right[finite]).max(initial=0))
    return float(apart / max(largest, 1e-30))


def _numbers(results: Any) -> list[np.ndarray]:
    """All arrays of numbers in a structure."""
    if isinstance(results, dict):
        results = [results[key] for key in sorted(results)]
    if isinstance(results, list | tuple):
        return [array for part in results for array in _numbers(part)]
    return [] if isinstance(results, str) else [np.asarray(results, np.float64)]


def _results(program: Program, engine: str, *, wide: bool = False) -> Any:
    """Runs a program as if it were the first of the process."""
    import keras
    import tensorflow as tf

    import microstrat
    from tests.samplers import machine

    keras.backend.clear_session()
    tf.random.set_seed(program.index)
    if engine == "mirrored":
        strategy: Any = worker.mirrored(program.replicas)
    elif engine == "real":
        strategy = microstrat.MicroBatchStrategy(program.replicas // DEVICES, base=worker.mirrored(DEVICES))
    else:
        strategy = microstrat.MicroBatchStrategy(program.replicas)
    eager = engine == "eager" or (engine == "mirrored" and program.crashes_stock_graphs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return machine.run(program, strategy, eager=eager, inline=eager, wide=wide)


def kind_of_refusal(error: Exception) -> str | None:
    """The name of the function in `microstrat._errors` that built an error, if one did."""
    return next((name for name, pattern in _messages().items() if pattern.search(str(error))), None)


@functools.cache
def _messages() -> dict[str, re.Pattern[str]]:
    found = {}
    for function in ast.parse(inspect.getsource(_errors)).body:
        if isinstance(function, ast.FunctionDef):
            calls = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
            for call in calls:
                if isinstance(call, ast.Call) and call.args:
                    found[function.name] = re.compile(_pattern(call.args[0]), re.DOTALL)
    return found


def _pattern(text: ast.expr) -> str:
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    return "".join(re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".*" for part in parts)


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """A small program that still fails."""
    while True:
        less = next((less for less in smaller(program) if fails(less)), None)
        if less is None:
            return program
        program = less


# --- The process that runs the programs of one number of replicas -----------------------------------------------------
def work(replicas: int, seed: int, indices: Sequence[int], *, shrinking: bool) -> None:
    """Prints a line of JSON before and after each program."""
    worker.configure(replicas)
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints, does so elsewhere

    def say(**facts: Any) -> None:
        print(json.dumps(facts), file=output, flush=True)

    for index in indices:
        say(running=index)
        program = drawing.draw(seed, index)
        start = time.perf_counter()
        outcome = check(program)
        small = ""
        if shrinking and not outcome.agrees:

            def fails(less: Program, index: int = index) -> bool:
                say(running=index)
                return not check(less).agrees

            small = str(shrink(program, fails))
        facts = dataclasses.asdict(outcome)
        say(index=index, agrees=outcome.agrees, small=small, seconds=time.perf_counter() - start, **facts)
        if "\ntensorflow.python.framework.errors_impl." in outcome.stock:
            # An aborted collective spoils all that follow; whoever started this process starts another for the rest.
            return


def _lines(command: list[str]) -> Iterator[dict[str, Any]]:
    """What a process says, until it ends or says nothing for too long; at last how it died, if it did."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    try:
        with contextlib.suppress(queue.Empty):
            while line := lines.get(timeout=LIMIT):
                yield json.loads(line)
            if code := process.wait():
                yield {"died": code}
    finally:
        process.kill()
        process.wait()


def outcomes(replicas: int, seed: int, indices: Sequence[int], *, shrinking: bool) -> Iterator[dict[str, Any]]:
    """The outcome of each program, as `work` describes it."""
    left, hung = list(indices), set[int]()
    while left:
        command = [sys.executable, "-m", "tests.samplers.replicas", "--seed", str(seed), "--worker", str(replicas)]
        command += ["--shrink"] if shrinking else []
        running, died = left[0], 0
        for line in _lines([*command, "--index", *map(str, left)]):
            if "running" in line:
                running = line["running"]
            elif "died" in line:
                died = line["died"]
            else:
                yield line
                left.remove(line["index"])
        if running in left and running in hung:
            left.remove(running)
            outcome = Outcome([f"the process died, twice ({died})"]) if died else Outcome(stock="hung, twice")
            facts = dataclasses.asdict(outcome)
            yield {"index": running, "agrees": outcome.agrees, "small": "", "seconds": 2.0 * LIMIT, **facts}
        hung.add(running)


# --- Command line -----------------------------------------------------------------------------------------------------
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs draws; 0 if all agree."""
    parser = argparse.ArgumentParser(prog="python -m tests.samplers.replicas", description=__doc__)
    parser.add_argument("--draws", type=int, default=100, help="how many, from index 0 (default: %(default)s)")
    parser.add_argument("--start", type=int, default=0, help="from this index on")
    parser.add_argument("--seed", type=int, default=0, help="of all draws (default: %(default)s)")
    parser.add_argument("--index", type=int, nargs="+", help="run these draws only, describe them, and shrink")
    parser.add_argument("--shrink", action="store_true", help="leave out of each mismatch what it does not need")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default: %(default)s)")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.worker, options.seed, options.index, shrinking=options.shrink)
        return 0
    indices = options.index or range(options.start, options.start + options.draws)
    groups: dict[int, list[int]] = {}
    for index in indices:
        program = drawing.draw(options.seed, index)
        groups.setdefault(program.replicas, []).append(index)
        if options.index:
            print(program)
    seen: queue.Queue[dict[str, Any]] = queue.Queue()

    def run(replicas: int) -> None:
        shrinking = bool(options.index) or options.shrink
        for facts in outcomes(replicas, options.seed, groups[replicas], shrinking=shrinking):
            seen.put(facts)

    start, summary = time.perf_counter(), _Summary()
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        running = [pool.submit(run, replicas) for replicas in sorted(groups, reverse=True)]  # what takes longest first
        for count in range(1, len(indices) + 1):
            summary.add(seen.get(), options.seed, describe=bool(options.index))
            if count % 50 == 0 and count < len(indices):
                seconds = (time.perf_counter() - start) / count
                print(f"{count} of {len(indices)}, {seconds:.1f} s each, {summary}", flush=True)
        for future in running:
            future.result()
    for what, kinds in (("refused", summary.refused), ("MirroredStrategy failed", summary.stock)):
        for kind, found in sorted(kinds.items()):
            print(f"{what}: {kind}: {len(found)} ({', '.join(map(str, found[:9]))}{', …' if found[9:] else ''})")
    print(f"{summary.rounding} differ by more than the tolerance in float32, but not in float64")
    print(f"{len(indices)} draws, {summary}")
    return 1 if summary.wrong else 0


class _Summary:
    """Counts outcomes, and prints those that matter."""

    def __init__(self) -> None:
        self.wrong = self.rounding = self.refusals = 0
        self.refused: dict[str, list[int]] = collections.defaultdict(list)
        self.stock: dict[str, list[int]] = collections.defaultdict(list)

    def __str__(self) -> str:
        failures = sum(map(len, self.stock.values()))
        rest = f", {failures} where MirroredStrategy fails" if failures else ""
        return f"{self.wrong} mismatches, {self.refusals} refused{rest}"

    def add(self, facts: dict[str, Any], seed: int, *, describe: bool) -> None:
        index = facts["index"]
        self.refusals += bool(facts["refused"])
        for engine, kind in facts["refused"].items():
            self.refused[f"{engine}, {kind.split(':')[0]}"].append(index)
            if describe:
                print(f"draw {index}, {engine}: {kind}")
        if facts["stock"]:
            reason = re.findall(r"^[\w.]+(?:Error|Exception).*", facts["stock"], re.MULTILINE) or [facts["stock"]]
            self.stock[reason[-1][:100]].append(index)
            print(f"draw {index}: MirroredStrategy failed: {facts['stock'] if describe else reason[-1]}", flush=True)
        if facts["rounding"]:
            self.rounding += 1
        elif not facts["agrees"]:
            self.wrong += 1
            what = facts["small"] or str(drawing.draw(seed, index))
            print("\n".join([f"MISMATCH in draw {index} of seed {seed}:", what, *facts["found"]]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
