"""What the examples show: accuracy, peak memory, and how far apart the weights of two runs are."""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np


class Run(NamedTuple):
    """What a custom loop has come to."""

    label: str
    accuracy: float  # on the digits kept for validation
    memory: float  # by which the peak grew, in MiB
    weights: list[list[np.ndarray]]  # after each of the first 20 steps, and after the last


def compare(train: Callable[..., Run], make_parts: Any, make_whole: Any, options: argparse.Namespace) -> None:
    """Runs train(make, label, options) for both, each in a fresh process, and prints what the two runs come to."""
    labels_of_both = labels(options)
    runs = [
        in_fresh_process(train, make, label, options)
        for make, label in zip((make_parts, make_whole), labels_of_both, strict=True)
    ]
    print()
    for run in runs:
        print(f"{run.label}: validation accuracy {run.accuracy:.3f}, peak memory grew by {run.memory:.0f} MiB")
    differences = [largest_difference(*weights) for weights in zip(*(run.weights for run in runs), strict=True)]
    print("(In a model this small nearly all of that memory is TensorFlow's own.)")
    print(f"largest difference between the weights in the first 20 steps: {max(differences[:20]):.1e}")
    print(f"largest difference between the weights at the end: {differences[-1]:.1e}")


def labels(options: argparse.Namespace) -> tuple[str, str]:
    """What to call a run in parts, and one at the full batch: "4 × 16", "1 × 64"."""
    number = options.replicas if "replicas" in options else options.micro_batches
    size = -(-options.batch_size // number)
    at_most = "" if size * number == options.batch_size else "≤"
    return f"{number} × {at_most}{size}", f"1 × {options.batch_size}"


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
