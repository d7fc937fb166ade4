"""Which program is measured, on which model: what the command tells a worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One program on one model.

    Attributes:
      model: a name in MODELS.
      peer: a name in PEERS.
      replicas: N, the number of micro-batches in a global batch.
      micro_batch: b, rows of a micro-batch.
      optimizer: "sgd" or "adam".
      xla: whether steps are compiled by XLA.
    """

    model: str
    peer: str
    replicas: int
    micro_batch: int = 16
    optimizer: str = "adam"
    xla: bool = False

    @property
    def global_batch(self) -> int:
        return self.replicas * self.micro_batch
