"""Drives worker processes and turns their answers into results.

Time: all programs of one model and N are alive at once and idle but for the one whose turn it is. Each peer's turn
follows a turn of microstrat's (A B A C A D …), so each ratio is of two neighbours in time. A turn is as many steps as
fill the given seconds; everything a step needs is in it: the batch from tf.data, the Python call, the loop, the update.

Memory and start-up: a fresh process for each figure. Memory is the peak resident memory of the steps after the first
less the level before the first. Part of it is what tracing and graph optimization left behind, which malloc does not give
back. (TensorFlow's own figures are not to be had: `tf.config.experimental.get_memory_info` refuses the CPU, whose allocator
counts nothing. Nor does the level right before those steps help: oneDNN keeps what it has needed once.)
Start-up is the time of the first step less that of a later one.

Targets are judged by the median of the rounds' ratios.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from tests.benchmarks.case import Case
from tests.benchmarks.driver import ROOT, Worker, WorkerError
from tests.benchmarks.models import MODELS
from tests.benchmarks.peers import PEERS
from tests.benchmarks.results import Comparison, Measurement, Result, Sample, Settings, compare, describe

_LATER_STEPS = 3
_MIB = 2**20
# How far the weights of two right programs may be apart after one step, relative.
_SAME_WEIGHTS = 1e-3

Report = Callable[[str], None]
Samples = dict[Case, list[Sample]]


def subject_of(peer: str) -> str:
    """The microstrat program that a peer is compared with."""
    return "microstrat-fit" if peer.endswith("-fit") else "microstrat"


# --- Time -------------------------------------------------------------------------------------------------------------
class _Runner:
    """A program that is ready for its turns: its first steps are behind it."""

    def __init__(self, case: Case, settings: Settings):
        self.case = case
        self.samples: list[Sample] = []
        self.worker = Worker(case, settings)
        try:
            self.worker.run(1)
            self.weights = self.worker.ask("weights")["weights"]
            self.steps = self._steps_in(settings.seconds)
        except BaseException:
            self.worker.close()
            raise

    def _steps_in(self, seconds: float) -> int:
        steps, elapsed = 1, self.worker.run(1).value
        while elapsed < seconds / 4:
            steps *= 4
            elapsed = self.worker.run(steps).value
        return max(1, round(seconds * steps / elapsed))

    def turn(self) -> Sample:
        """Milliseconds a step."""
        taken = self.worker.run(self.steps)
        scale = 1e3 / self.steps
        self.samples.append(Sample(taken.value * scale, taken.cpu * scale if taken.cpu is not None else None))
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
                yield Measurement("time", case, "ms/step", note=str(error))
        pairs: list[tuple[_Runner, list[Sample], _Runner]] = [
            (runners[subject_of(name)], [], peer)
            for name, peer in runners.items()
            if name != subject_of(name) and subject_of(name) in runners
        ]
        started = time.monotonic()
        for index in range(settings.rounds):
            if index and not _another_round(index, time.monotonic() - started, settings.budget):
                break
            report(f"time: {cases[0].model}, N = {cases[0].replicas}, round {index + 1} of {settings.rounds}")
            for subject, samples, peer in pairs:
                samples.append(subject.turn())
                peer.turn()
        for runner in runners.values():
            if not runner.samples:  # nothing to compare it with
                for _ in range(settings.rounds):
                    runner.turn()
            note = _weights_note(runner, runners)
            yield Measurement("time", runner.case, "ms/step", tuple(runner.samples), note)
        flat = [peer for _, _, peer in pairs if PEERS[peer.case.peer].flat]
        best = min(flat, key=lambda peer: statistics.median(s.value for s in peer.samples), default=None)
        for subject, samples, peer in pairs:
            name, target = ("flat peer", 1.0) if peer is best else _time_target(peer.case)
            yield compare("time", (subject.case, samples), (peer.case, peer.samples), target, name)
    finally:
        for runner in runners.values():
            runner.worker.close()


def _another_round(done: int, seconds: float, budget: float) -> bool:
    """Whether there is time for one more: three rounds if they fit twice the budget, more if they fit the budget."""
    return seconds / done * (done + 1) <= (budget if done >= 3 else 2 * budget)


def _time_target(peer: Case) -> tuple[str, float | None]:
    """What a comparison with a program is called in summaries, and the target."""
    if peer.replicas == 1 and peer.peer in ("plain-full", "plain-fit"):
        name = "N = 1" if peer.peer == "plain-full" else "fit, N = 1"
        return name, 1.05 if peer.model == "mlp" else 1.02
    if peer.peer == "plain-full":
        return "full batch", 1.05 if MODELS[peer.model].fills_cores else None
    return {"jax-scan": "JAX"}.get(peer.peer, ""), None


def _weights_note(runner: _Runner, runners: dict[str, _Runner]) -> str:
    """Says so if a program's weights after the first step are not those of microstrat."""
    subject = runners.get(subject_of(runner.case.peer))
    if subject is None or not (runner.case.replicas == 1 or PEERS[runner.case.peer].same_update):
        return ""
    apart = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(runner.weights, subject.weights, strict=True))
    return f"weights differ by {apart:.1e}" if apart > _SAME_WEIGHTS else ""


# --- Memory and start-up ----------------------------------------------------------------------------------------------
def _start_up(case: Case, settings: Settings) -> tuple[Sample, int]:
    with Worker(case, settings) as worker:
        first = worker.start()
        later = min((worker.run(1) for _ in range(_LATER_STEPS)), key=lambda sample: sample.value)
        assert first.cpu is not None and later.cpu is not None
        parts = dict(first.parts)
        parts["optimization"] = parts.pop("first") - later.value
        return Sample(first.value - later.value, first.cpu - later.cpu, parts), worker.ready["gradient"]


def _peak(case: Case, settings: Settings) -> tuple[Sample, int]:
    # Freed blocks go back to the system at once, or the figure is malloc's hoard as much as what the step needs.
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    with Worker(case, settings, environment=environment) as worker:
        worker.run(1)
        peak = worker.ask("peak", steps=_LATER_STEPS)["bytes"]
        return Sample((peak - worker.ready["resident"]) / _MIB), worker.ready["gradient"]


def measure_fresh(what: str, cases: Sequence[Case], settings: Settings, report: Report) -> Iterator[Result]:
    """Memory or start-up of programs on one model: some processes for each case, cases in turn."""
    unit, take_sample = {"memory": ("MiB", _peak), "startup": ("s", _start_up)}[what]
    done: Samples = {case: [] for case in cases}
    gradient = 0
    for index in range(settings.processes):
        for case in list(done):
            report(f"{what}: {case.model}, {describe(case)}, process {index + 1} of {settings.processes}")
            try:
                sample, gradient = take_sample(case, settings)
                done[case].append(sample)
            except WorkerError as error:
                del done[case]
                yield Measurement(what, case, unit, note=str(error))
    for case, samples in done.items():
        yield Measurement(what, case, unit, tuple(samples))
    yield from _compare_memory(done, gradient / _MIB) if what == "memory" else _compare_start_up(done)
    for case in done:
        subject = dataclasses.replace(case, peer=subject_of(case.peer))
        if subject in done and subject != case and case.peer != "plain-micro":
            yield compare(what, (subject, done[subject]), (case, done[case]))


def _ends(done: Samples, peer: str = "microstrat") -> tuple[Case, Case] | None:
    """A microstrat program at the smallest and the largest N above 1."""
    looped = sorted((case for case in done if case.peer == peer and case.replicas > 1), key=lambda case: case.replicas)
    return (looped[0], looped[-1]) if looped else None


def _single_micro_batch(done: Samples) -> Case | None:
    return next((case for case in done if case.peer == "plain-micro"), None)


def _compare_growth(what: str, done: Samples, target: float | None) -> Iterator[Comparison]:
    for peer, name in (("microstrat", "growth"), ("microstrat-fit", "fit, growth")):
        ends = _ends(done, peer)
        if ends is not None and ends[0] != ends[1]:
            small, large = ends
            yield compare(what, (large, done[large]), (small, done[small]), target, name)


def _compare_memory(done: Samples, gradient: float) -> Iterator[Comparison]:
    # Next to the fixed costs of TensorFlow, what a perceptron's step needs is nothing.
    counts = any(MODELS[case.model].activations_dominate for case in done)
    yield from _compare_growth("memory", done, 1.01 if counts else None)
    ends, micro = _ends(done), _single_micro_batch(done)
    if ends is not None and micro is not None:
        yield compare(
            "memory",
            (ends[1], done[ends[1]]),
            (micro, done[micro]),
            1.02 if counts else None,
            "micro-batch",
            less=gradient,
            less_what="a gradient copy",
        )


def _compare_start_up(done: Samples) -> Iterator[Comparison]:
    yield from _compare_growth("startup", done, 1.05)
    ends, micro = _ends(done), _single_micro_batch(done)
    if ends is not None and micro is not None:
        target = 1.15 if micro.model in ("densenet121", "resnet50") else None
        yield compare("startup", (ends[1], done[ends[1]]), (micro, done[micro]), target, "micro-batch")


# --- Dispatch ---------------------------------------------------------------------------------------------------------
def measure_dispatch(case: Case, report: Report) -> Iterator[Result]:
    """What a step takes beyond TensorFlow's execution, in microseconds: see dispatch.py."""
    report(f"dispatch: N = {case.replicas}")
    command = [sys.executable, "-m", "tests.benchmarks.dispatch", str(case.replicas)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        yield Measurement("dispatch", case, "µs/step", note=done.stderr.strip().splitlines()[-1][:200])
        return
    taken = {peer: [Sample(value) for value in values] for peer, values in json.loads(done.stdout).items()}
    cases = {peer: dataclasses.replace(case, peer=peer) for peer in taken}
    median = {peer: statistics.median(sample.value for sample in samples) for peer, samples in taken.items()}
    # The hand-written loop of N turns is TensorFlow's work, not Python's.
    least = median["while-loop" if case.replicas > 1 else "plain-full"]
    for peer, samples in taken.items():
        note = f"{median[peer] - least:+.0f} µs in Python (at most 50)" if peer == "microstrat" else ""
        yield Measurement("dispatch", cases[peer], "µs/step", tuple(samples), note)
