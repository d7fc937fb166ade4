"""Results as tables for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import platform
import sys
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import microstrat
from tests.benchmarks.results import Comparison, Measurement, Result, Settings

try:
    import rich.box
    import rich.console
    import rich.table
except ImportError:
    rich = None  # type: ignore[assignment]

Row = Sequence[str]

_FILE_WIDTH = 160
_TITLES = {
    "time": "Time of a step",
    "memory": "Memory: peak of the steps after the first, less the level before the first",
    "startup": "Start-up: the first step, less a later one",
}


def print_tables(results: Sequence[Result]) -> None:
    """Prints what was measured and how it compares, one pair of tables for each of time, memory and start-up."""
    for what, title in _TITLES.items():
        measured = [result for result in results if isinstance(result, Measurement) and result.what == what]
        compared = [result for result in results if isinstance(result, Comparison) and result.what == what]
        if measured:
            header = ("model", "N", "program", "unit", "best", "median", "CPU", "note")
            _print_table(title, header, [_measured(result) for result in measured])
        if compared:
            header = ("model", "program", "against", "best", "median", "CPU", "target", "met")
            _print_table(f"{title}: ratios", header, [_compared(result) for result in compared])


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _measured(result: Measurement) -> Row:
    figures = [result.best, result.median, result.cpu] if result.samples else [None, None, None]
    texts = [_number(figure, ".4g") for figure in figures]
    return [result.case.model, str(result.case.replicas), result.case.peer, result.unit, *texts, result.note]


def _compared(result: Comparison) -> Row:
    ratios = [_number(ratio, ".3f") for ratio in (result.best, result.median, result.cpu)]
    target = "" if result.target is None else f"<= {result.target:.2f}"
    met = {None: "", True: "yes", False: "NO"}[result.met]
    return [result.model, result.subject, result.against, *ratios, target, met]


def _print_table(title: str, header: Row, rows: Sequence[Row]) -> None:
    if rich is not None:
        table = rich.table.Table(*header, title=title, title_justify="left", box=rich.box.SIMPLE)
        for row in rows:
            table.add_row(*row)
        # A table in a file or pipe is not cut to the width of a terminal.
        rich.console.Console(width=None if sys.stdout.isatty() else _FILE_WIDTH).print(table)
        return
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    print(f"\n{title}\n")
    for row in [header, ["-" * width for width in widths], *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def write_json(path: pathlib.Path, results: Sequence[Result], settings: Settings) -> None:
    """Writes all samples and ratios, the settings, and what machine and versions they belong to."""
    content = {
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()},
        "versions": {"microstrat": microstrat.__version__, "tensorflow": tf.__version__, "keras": keras.__version__},
        "settings": dataclasses.asdict(settings),
        "results": [_as_json(result) for result in results],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def _as_json(result: Result) -> dict[str, Any]:
    kind = type(result).__name__.lower()
    if isinstance(result, Comparison):
        return {"kind": kind, **dataclasses.asdict(result), "met": result.met}
    return {"kind": kind, **dataclasses.asdict(result)}
