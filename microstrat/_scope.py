"""scope(): the one line that users add."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from microstrat import _strategy


@contextlib.contextmanager
def scope(*, replicas: int, device: str | None = None) -> Iterator[_strategy.MicroBatchStrategy]:
    """Makes a MicroBatchStrategy with `replicas` virtual replicas, enters its scope and yields it."""
    strategy = _strategy.MicroBatchStrategy(replicas, device=device)
    with strategy.scope():
        yield strategy
