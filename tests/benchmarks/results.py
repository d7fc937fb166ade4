"""What is measured, as values: samples, measurements of one program, comparisons of two."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from tests.benchmarks.case import Case


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
      rounds: turns of each program, for time.
      seconds: length of a turn.
      processes: processes of each program, for memory and start-up.
      time_limit: seconds for any answer of a worker, its first step included.
      memory_limit: bytes of data a worker may hold; 0 for no limit.
      budget: seconds that the rounds of one group of programs may take together; at least three are run, or one if even
        that takes longer.
    """

    rounds: int = 7
    seconds: float = 0.5
    processes: int = 3
    time_limit: float = 600.0
    memory_limit: int = 0
    budget: float = 120.0


@dataclasses.dataclass(frozen=True)
class Sample:
    """One figure: elapsed time or memory, and for times what the processors spent on it, all threads together.

    `parts`: what a start-up is made of, in seconds.
    """

    value: float
    cpu: float | None = None
    parts: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one program took, a sample for each round; `note` says why there are none, or what to know of them."""

    what: str
    case: Case
    unit: str
    samples: tuple[Sample, ...] = ()
    note: str = ""

    @property
    def best(self) -> float:
        return min(sample.value for sample in self.samples)

    @property
    def median(self) -> float:
        return statistics.median(sample.value for sample in self.samples)

    @property
    def cpu(self) -> float | None:
        cpus = [sample.cpu for sample in self.samples if sample.cpu is not None]
        return statistics.median(cpus) if cpus else None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A ratio of two programs.

    Attributes:
      subject, against: what is divided by what, in words.
      best: the ratio of the best samples.
      median: the median of the rounds' ratios.
      cpu: the same of processor time, which other work on the machine disturbs less; None for memory.
      target: the median must not be above it; None where it is only of interest.
      name: what it is in summaries, if anything: "flat peer", "full batch", "N = 1", "fit, N = 1", "growth", "micro-batch".
      replicas: N of the subject.
    """

    what: str
    model: str
    subject: str
    against: str
    best: float
    median: float
    cpu: float | None
    target: float | None = None
    name: str = ""
    replicas: int = 0

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.median <= self.target


Result = Measurement | Comparison


def describe(case: Case) -> str:
    return f"{case.peer}, N = {case.replicas}"


def compare(
    what: str,
    subject: tuple[Case, Sequence[Sample]],
    against: tuple[Case, Sequence[Sample]],
    target: float | None = None,
    name: str = "",
    *,
    less: float = 0.0,
    less_what: str = "",
) -> Comparison:
    """Divides a program's samples by another's, round by round; `less` is taken off the subject's first."""
    (case, ours), (other, theirs) = subject, against
    values = [sample.value - less for sample in ours]
    cpus = [a.cpu / b.cpu for a, b in zip(ours, theirs, strict=True) if a.cpu is not None and b.cpu is not None]
    return Comparison(
        what,
        case.model,
        describe(case) + (f", less {less_what}" if less else ""),
        describe(other),
        best=min(values) / min(sample.value for sample in theirs),
        median=statistics.median(a / b.value for a, b in zip(values, theirs, strict=True)),
        cpu=statistics.median(cpus) if cpus else None,
        target=target,
        name=name,
        replicas=case.replicas,
    )
