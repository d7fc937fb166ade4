"""Which replicas are devices, and which are virtual: from what is wanted and what is there. Pure Python, no TensorFlow."""

from __future__ import annotations

import dataclasses

from microstrat import _errors

MODES = ("auto", "virtual", "real")


@dataclasses.dataclass(frozen=True)
class Machine:
    """What there is to run on: `devices` of one kind ("GPU" or "CPU") on each of the workers."""

    kind: str
    devices: int
    workers: int = 1


@dataclasses.dataclass(frozen=True)
class Choice:
    """Replicas = workers × devices of each × virtual replicas on each device; each cuts its batch in micro-batches."""

    kind: str
    workers: int
    devices: int
    virtual: int
    micro_batches: int

    @property
    def real(self) -> int:
        """How many devices take part, of all workers."""
        return self.workers * self.devices

    @property
    def replicas(self) -> int:
        return self.real * self.virtual

    def __str__(self) -> str:
        factors = [_count(self.workers, "worker")] * (self.workers > 1) + [_count(self.devices, self.kind)]
        if self.virtual > 1:
            factors.append(f"{self.virtual} {'micro-batches' if self.micro_batches == 1 else 'virtual replicas'}")
        cut = (
            f", {'each ' * (self.replicas > 1)}in {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        )
        return f"{_count(self.replicas, 'replica')} = {' × '.join(factors)}{cut}"


def choose(machine: Machine, replicas: int | None, micro_batches: int = 1, mode: str = "auto") -> Choice:
    """Chooses for `replicas` in all, each of which cuts its batch in `micro_batches`.

    None means all the devices there are; but one, if the batch is cut, since that is for code written for one device.

    Raises:
      ValueError: if the workers cannot share the replicas equally, or mode is "real" and there are too few devices.
    """
    if mode == "virtual":
        machine = Machine(machine.kind, 1)
    if replicas is None:
        replicas = 1 if micro_batches > 1 else machine.workers * machine.devices
    if replicas == 1:
        machine = Machine(machine.kind, 1)
    share, rest = divmod(replicas, machine.workers)
    if rest:
        raise _errors.workers_share_unequally(replicas, machine.workers)
    devices = max(number for number in range(1, machine.devices + 1) if share % number == 0)
    choice = Choice(machine.kind, machine.workers, devices, share // devices, micro_batches)
    if mode == "real" and choice.virtual > 1:
        raise _errors.devices_missing(replicas, _count(machine.devices, machine.kind), machine.workers, str(choice))
    return choice


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)
