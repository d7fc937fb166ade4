"""What the examples show: a progress bar for each epoch, peak memory, and how far apart two sets of weights are."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from rich import progress  # Keras 3 requires rich


@contextlib.contextmanager
def epoch_bar(label: str, steps: int) -> Iterator[Callable[[float], None]]:
    """Shows a progress bar; yields advance(loss), to call once a step."""
    columns = ("{task.description}", progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeElapsedColumn())
    with progress.Progress(*columns, "loss {task.fields[loss]:.4f}") as bar:
        task = bar.add_task(label, total=steps, loss=float("nan"))
        yield lambda loss: bar.update(task, advance=1, loss=loss)


def peak_memory() -> float:
    """The largest resident memory that this process has had so far, in MiB."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():  # Linux' ru_maxrss starts at the parent's peak; VmHWM is this program's own
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status.read_text())[0]) / 2**10
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def in_fresh_process(fn: Callable[..., Any], *args: Any) -> Any:
    """Returns fn(*args), run in a process of its own, so that peak_memory() there is of this run only."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(fn, *args).result()


def largest_difference(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    """The largest absolute difference between two models' weights, as get_weights() returns them."""
    return max(float(np.max(np.abs(a - b))) for a, b in zip(some, others, strict=True))
