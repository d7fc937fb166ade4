"""Drives worker processes and turns their answers into results.

Time: all programs of one model and N are alive at once and idle but for the one whose turn it is. Each peer's turn
follows a turn of microstrat's (A B A C A D …), so each ratio is of two neighbours in time. A turn is as many steps as
fill the given seconds; everything a step needs is in it: the batch from tf.data, the Python call, the loop, the update.

Memory and start-up: a fresh process for each figure. Memory is the peak resident memory of the steps after the first
less the level before the first; start-up is the time of the first step less that of a later one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import selectors
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.benchmarks.peers import PEERS, Case

_ROOT = pathlib.Path(__file__).parents[2]
_LATER_STEPS = 3
_MIB = 2**20
# How far the weights of two right programs may be apart after one step, relative.
_SAME_WEIGHTS = 1e-3


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
      rounds: turns of each program, for time.
      seconds: length of a turn.
      processes: processes of each program, for memory and start-up.
      time_limit: seconds for any answer of a worker, its first step included.
      memory_limit: bytes of data a worker may hold; 0 for no limit.
    """

    rounds: int = 7
    seconds: float = 0.5
    processes: int = 3
    time_limit: float = 600.0
    memory_limit: int = 0


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one program took: milliseconds a step, MiB, or seconds; one sample for each round."""

    what: str
    case: Case
    unit: str
    samples: tuple[float, ...] = ()
    note: str = ""

    @property
    def best(self) -> float:
        return min(self.samples)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A ratio of two programs.

    Attributes:
      subject, against: what is divided by what, in words.
      best: the ratio of the best samples.
      median: the median of the rounds' ratios.
      target: the ratio must not be above it; None where it is only of interest.
    """

    what: str
    model: str
    subject: str
    against: str
    best: float
    median: float
    target: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.median <= self.target


Result = Measurement | Comparison
Report = Callable[[str], None]


class WorkerError(Exception):
    """A program could not be measured."""


class Worker:
    """A process with one program in it; see worker.py for its commands."""

    def __init__(self, case: Case, settings: Settings, *, environment: dict[str, str] | None = None):
        self._time_limit = settings.time_limit
        self._errors = tempfile.TemporaryFile()
        message = json.dumps({"case": dataclasses.asdict(case), "memory_limit": settings.memory_limit})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.worker", message],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=_ROOT,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", **(environment or {})},
        )
        try:
            self.ready = self._reply()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None
        return self._reply()

    def run(self, steps: int) -> float:
        """Runs steps and returns the seconds they took."""
        return self.ask("run", steps=steps)["seconds"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(self._time_limit):
                raise WorkerError(f"no answer within {self._time_limit:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        return json.loads(line)

    def _failure(self) -> WorkerError:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines() or [""]
        return WorkerError(f"ended with code {code}: {lines[-1][:200]}")


def _failed(what: str, case: Case, unit: str, error: WorkerError) -> Measurement:
    return Measurement(what, case, unit, note=str(error))


def _ratios(subject: Sequence[float], against: Sequence[float]) -> tuple[float, float]:
    """The ratio of the best, and the median of the rounds' ratios."""
    each = [a / b for a, b in zip(subject, against, strict=True)]
    return min(subject) / min(against), statistics.median(each)


def peers_of(chosen: Sequence[str], replicas: int) -> list[str]:
    """The chosen peers that can do N replicas."""
    return [name for name in chosen if PEERS[name].can_do(replicas)]


def subject_of(peer: str) -> str:
    """The microstrat program that a peer is compared with."""
    return "microstrat-fit" if peer.endswith("-fit") else "microstrat"


# --- Time -------------------------------------------------------------------------------------------------------------
def time_target(case: Case) -> float | None:
    """What microstrat's step may take, relative to a peer's."""
    if case.replicas == 1 and case.peer.startswith("plain-f"):
        return 1.10 if case.model == "mlp" else 1.03
    return 1.0 if case.peer == "two-functions" else None


class _Runner:
    """A program that is ready for its turns: its first steps are behind it."""

    def __init__(self, case: Case, settings: Settings):
        self.case = case
        self.samples: list[float] = []
        self.worker = Worker(case, settings)
        try:
            self.worker.run(1)
            self.weights = self.worker.ask("weights")["weights"]
            self.steps = self._steps_in(settings.seconds)
        except BaseException:
            self.worker.close()
            raise

    def _steps_in(self, seconds: float) -> int:
        steps, elapsed = 1, self.worker.run(1)
        while elapsed < seconds / 4:
            steps *= 4
            elapsed = self.worker.run(steps)
        return max(1, round(seconds * steps / elapsed))

    def turn(self) -> float:
        """Milliseconds a step."""
        self.samples.append(1e3 * self.worker.run(self.steps) / self.steps)
        return self.samples[-1]


def measure_time(cases: Sequence[Case], settings: Settings, report: Report) -> Iterator[Result]:
    """Step times of programs on one model and one N, those of microstrat in turn with each peer's."""
    runners: dict[str, _Runner] = {}
    try:
        for case in cases:
            report(f"time: {case.model}, starting {describe(case)}")
            try:
                runners[case.peer] = _Runner(case, settings)
            except WorkerError as error:
                yield _failed("time", case, "ms/step", error)
        pairs = [
            (runners[subject_of(name)], runner, [], [])
            for name, runner in runners.items()
            if name != subject_of(name) and subject_of(name) in runners
        ]
        for index in range(settings.rounds):
            report(f"time: {cases[0].model}, N = {cases[0].replicas}, round {index + 1} of {settings.rounds}")
            for subject, peer, subject_samples, peer_samples in pairs:
                subject_samples.append(subject.turn())
                peer_samples.append(peer.turn())
            for runner in runners.values():
                if not any(runner in pair for pair in pairs):
                    runner.turn()
        for runner in runners.values():
            note = _weights_note(runner, runners)
            yield Measurement("time", runner.case, "ms/step", tuple(runner.samples), note)
        for subject, peer, subject_samples, peer_samples in pairs:
            best, median = _ratios(subject_samples, peer_samples)
            names = describe(subject.case), describe(peer.case)
            yield Comparison("time", peer.case.model, *names, best, median, time_target(peer.case))
    finally:
        for runner in runners.values():
            runner.worker.close()


def _weights_note(runner: _Runner, runners: dict[str, _Runner]) -> str:
    """Says so if a program's weights after the first step are not those of microstrat."""
    subject = runners.get(subject_of(runner.case.peer))
    if subject is None or not PEERS[runner.case.peer].same_update:
        return ""
    apart = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(runner.weights, subject.weights, strict=True))
    return f"weights differ by {apart:.1e}" if apart > _SAME_WEIGHTS else ""


# --- Memory and start-up ----------------------------------------------------------------------------------------------
def _start_up(case: Case, settings: Settings) -> tuple[float, int]:
    with Worker(case, settings) as worker:
        first = worker.run(1)
        later = min(worker.run(1) for _ in range(_LATER_STEPS))
        return first - later, worker.ready["gradient"]


def _peak(case: Case, settings: Settings) -> tuple[float, int]:
    # Freed blocks go back to the system at once, or the figure is malloc's hoard as much as what the step needs.
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    with Worker(case, settings, environment=environment) as worker:
        worker.run(1)
        peak = worker.ask("peak", steps=_LATER_STEPS)["bytes"]
        return (peak - worker.ready["resident"]) / _MIB, worker.ready["gradient"]


def measure_fresh(what: str, cases: Sequence[Case], settings: Settings, report: Report) -> Iterator[Result]:
    """Memory or start-up of programs on one model: some processes for each case, cases in turn."""
    unit, sample = {"memory": ("MiB", _peak), "startup": ("s", _start_up)}[what]
    samples: dict[Case, list[float]] = {case: [] for case in cases}
    failed: dict[Case, WorkerError] = {}
    gradient = 0
    for index in range(settings.processes):
        for case in cases:
            if case not in failed:
                report(f"{what}: {case.model}, {describe(case)}, process {index + 1} of {settings.processes}")
                try:
                    value, gradient = sample(case, settings)
                    samples[case].append(value)
                except WorkerError as error:
                    failed[case] = error
    for case in cases:
        if case in failed:
            yield _failed(what, case, unit, failed[case])
        else:
            yield Measurement(what, case, unit, tuple(samples[case]))
    done = {case: samples[case] for case in cases if case not in failed}
    yield from (_compare_memory(done, gradient / _MIB) if what == "memory" else _compare_start_up(done))


Samples = dict[Case, list[float]]


def _ends(done: Samples, peer: str = "microstrat") -> tuple[Case, Case] | None:
    """A microstrat program at the smallest and the largest N above 1."""
    looped = sorted((case for case in done if case.peer == peer and case.replicas > 1), key=lambda case: case.replicas)
    return (looped[0], looped[-1]) if looped else None


def _compare(what: str, done: Samples, subject: Case, against: Case, target: float | None = None) -> Comparison:
    names = describe(subject), describe(against)
    return Comparison(what, subject.model, *names, *_ratios(done[subject], done[against]), target)


def _compare_growth(what: str, done: Samples, target: float | None) -> Iterator[Comparison]:
    for peer in ("microstrat", "microstrat-fit"):
        ends = _ends(done, peer)
        if ends is not None and ends[0] != ends[1]:
            yield _compare(what, done, ends[1], ends[0], target)


def _compare_peers(what: str, done: Samples) -> Iterator[Comparison]:
    """microstrat with every other program of the same N."""
    for case in done:
        subject = dataclasses.replace(case, peer=subject_of(case.peer))
        if subject in done and subject != case and case.peer != "plain-micro":
            yield _compare(what, done, subject, case)


def _compare_memory(done: Samples, gradient: float) -> Iterator[Comparison]:
    ends, micro = _ends(done), _single_micro_batch(done)
    # Next to its fixed costs, what a perceptron's step needs is nothing.
    counts = any(case.model != "mlp" for case in done)
    yield from _compare_growth("memory", done, 1.03 if counts else None)
    if ends is not None and micro is not None:
        large = ends[1]
        ratios = _ratios([sample - gradient for sample in done[large]], done[micro])
        names = f"{describe(large)}, less a gradient copy", describe(micro)
        yield Comparison("memory", large.model, *names, *ratios, 1.10 if counts else None)
    yield from _compare_peers("memory", done)


def _compare_start_up(done: Samples) -> Iterator[Comparison]:
    ends, micro = _ends(done), _single_micro_batch(done)
    yield from _compare_growth("startup", done, 1.1)
    if ends is not None and micro is not None:
        yield _compare("startup", done, ends[1], micro, 1.5 if micro.model == "densenet121" else None)
    yield from _compare_peers("startup", done)


def _single_micro_batch(done: Samples) -> Case | None:
    return next((case for case in done if case.peer == "plain-micro"), None)


def describe(case: Case) -> str:
    return f"{case.peer}, N = {case.replicas}"
