"""python -m tests.benchmarks.report: results as tables, plots and the README's section, and as JSON while they come."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import microstrat
from tests.benchmarks.case import Case
from tests.benchmarks.results import Comparison, Measurement, Result, Sample, Settings

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
    "dispatch": "Dispatch: a step where computing is nothing",
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
    notes = [result.note, _parts(result)]
    if result.what == "time" and 0 < len(result.samples) < 3:
        notes.append("one round" if len(result.samples) == 1 else "two rounds")
    note = "; ".join(filter(None, notes))
    return [result.case.model, str(result.case.replicas), result.case.peer, result.unit, *texts, note]


def _parts(result: Measurement) -> str:
    names = result.samples[0].parts if result.samples else ()
    medians = {name: statistics.median(sample.parts[name] for sample in result.samples) for name in names}
    return ", ".join(f"{name} {median:.2f}" for name, median in medians.items())


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


# --- The record of a run ------------------------------------------------------------------------------------------------
class Record:
    """What a run has found so far, in a file if it is to be one: there it goes on where it was stopped.

    Attributes:
      done: keys of the groups that are in it.
      results: what they gave.
      about: when and on what they were measured.
    """

    def __init__(self, path: pathlib.Path | None, settings: Settings | None = None):
        self._path = path
        self.done: list[str] = []
        self.results: list[Result] = []
        self.about: dict[str, Any] = _about(settings)
        if path is not None and path.exists():
            content = json.loads(path.read_text(encoding="utf-8"))
            different = [key for key in ("versions", "settings") if settings and content[key] != self.about[key]]
            if different:
                raise SystemExit(f"{path} is of a run with other {' and '.join(different)}: choose another file")
            self.done = content["done"]
            self.results = [_from_json(result) for result in content["results"]]
            self.about = {key: content[key] for key in self.about}

    def add(self, key: str, results: Sequence[Result]) -> None:
        """Adds what a group gave, on disk at once."""
        self.done.append(key)
        self.results += results
        if self._path is not None:
            content = {**self.about, "done": self.done, "results": [_as_json(result) for result in self.results]}
            beside = self._path.with_suffix(".part")
            beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            beside.replace(self._path)


def _about(settings: Settings | None) -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "platform": platform.platform(),
            "python": platform.python_version(),
        },
        "versions": {"microstrat": microstrat.__version__, "tensorflow": tf.__version__, "keras": keras.__version__},
        "settings": dataclasses.asdict(settings) if settings else None,
    }


def _processor() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _as_json(result: Result) -> dict[str, Any]:
    kind = type(result).__name__.lower()
    if isinstance(result, Comparison):
        return {"kind": kind, **dataclasses.asdict(result), "met": result.met}
    return {"kind": kind, **dataclasses.asdict(result)}


def _from_json(content: dict[str, Any]) -> Result:
    values = {key: value for key, value in content.items() if key not in ("kind", "met")}
    if content["kind"] == "comparison":
        return Comparison(**values)
    samples = tuple(Sample(**sample) for sample in values["samples"])
    return Measurement(**{**values, "case": Case(**values["case"]), "samples": samples})


# --- README -----------------------------------------------------------------------------------------------------------
_BEGIN, _END = "<!-- performance: begin -->", "<!-- performance: end -->"
# Column -> what is compared, and the name of the comparison.
_COLUMNS = {
    "time: fastest flat peer": ("time", "flat peer"),
    "time: full batch": ("time", "full batch"),
    "time, N = 1: plain": ("time", "N = 1"),
    "time: JAX scan": ("time", "JAX"),
    "memory: N = 2": ("memory", "growth"),
    "memory: one micro-batch": ("memory", "micro-batch"),
    "start-up: N = 2": ("startup", "growth"),
    "start-up: one micro-batch": ("startup", "micro-batch"),
}


def readme_section(record: Record) -> str:
    """The README's performance section: one row a model, ratios only, each at the largest N that was measured."""
    about, machine = record.about, record.about["machine"]
    compared = [result for result in record.results if isinstance(result, Comparison) and result.name]
    models = list(dict.fromkeys(result.model for result in compared))
    columns = {title: key for title, key in _COLUMNS.items() if any((r.what, r.name) == key for r in compared)}
    rows = []
    for model in models:
        cells = []
        for what, name in columns.values():
            found = [r for r in compared if (r.model, r.what, r.name) == (model, what, name)]
            best = max(found, key=lambda result: result.replicas, default=None)
            cells.append("–" if best is None else f"{best.median:.2f}" + _at(best))
        rows.append([model, *cells])
    return "\n".join(
        [
            f"Ratios of microstrat to the peer (N in brackets), {about['date']}: "
            f"{machine['processor']}, {machine['cores']} cores, {machine['memory']} GiB,",
            f"TensorFlow {about['versions']['tensorflow']}, Keras {about['versions']['keras']}. By "
            "`python -m tests.benchmarks`; what is what: `--help`.",
            "",
            "| model | " + " | ".join(columns) + " |",
            "|" + "---|" * (len(columns) + 1),
            *("| " + " | ".join(row) + " |" for row in rows),
        ]
    )


def _at(result: Comparison) -> str:
    return "" if result.replicas == 1 else f" ({result.replicas})"


def update_readme(path: pathlib.Path, section: str) -> None:
    """Puts the section between its two marks."""
    text = path.read_text(encoding="utf-8")
    if _BEGIN not in text or _END not in text:
        raise SystemExit(f"{path} has no lines {_BEGIN} and {_END}")
    before, _, rest = text.partition(_BEGIN)
    path.write_text(f"{before}{_BEGIN}\n{section}\n{_END}{rest.partition(_END)[2]}", encoding="utf-8")


# --- Plots ------------------------------------------------------------------------------------------------------------
_PLOTTED = {
    "time": "Time of a step for each micro-batch, ms",
    "memory": "Memory, MiB",
    "startup": "Start-up, s",
}


def plot(record: Record, directory: pathlib.Path) -> list[pathlib.Path]:
    """Writes one PNG each of time, memory and start-up over N, a panel for each model, a line for each program."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("plots need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for what, title in _PLOTTED.items():
        found = [r for r in record.results if isinstance(r, Measurement) and r.what == what and r.samples]
        models = list(dict.fromkeys(result.case.model for result in found))
        if not models:
            continue
        peers = list(dict.fromkeys(result.case.peer for result in found if not result.case.peer.endswith("-fit")))
        figure, panels = pyplot.subplots(1, len(models), figsize=(3.2 * len(models), 3.4), squeeze=False)
        for model, panel in zip(models, panels[0], strict=True):
            panel.set_title(model, fontsize=10)
            panel.spines[["top", "right"]].set_visible(False)
            if what == "startup":
                _bars(panel, [result for result in found if result.case.model == model])
                continue
            for number, peer in enumerate(peers):
                line = sorted(
                    (r.case.replicas, r.median / (r.case.replicas if what == "time" else 1))
                    for r in found
                    if (r.case.model, r.case.peer) == (model, peer)
                )
                if line:
                    ours = peer.startswith("microstrat")
                    panel.plot(
                        *zip(*line, strict=True), "o-", ms=3, lw=2.5 if ours else 1, color=f"C{number}", label=peer
                    )
            panel.set_xscale("log", base=2)
            panel.set_ylim(bottom=0)
            panel.set_xlabel("N")
        panels[0][0].set_ylabel(title, fontsize=9)
        labels = {
            label: handle
            for panel in panels[0]
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
        }
        figure.legend(labels.values(), labels, loc="lower center", ncols=min(len(labels), 6), fontsize=8, frameon=False)
        figure.tight_layout(rect=(0, 0.1, 1, 1))
        written.append(directory / f"{what}.png")
        figure.savefig(written[-1], dpi=120)
        pyplot.close(figure)
    return written


def _bars(panel: Any, found: Sequence[Measurement]) -> None:
    """What every program's start-up is made of."""
    labels = [f"{result.case.peer}\nN = {result.case.replicas}" for result in found]
    bottom = [0.0] * len(found)
    for part in ("trace", "lowering", "optimization"):
        heights = [statistics.median(s.parts.get(part, 0.0) for s in result.samples) for result in found]
        panel.bar(labels, heights, bottom=bottom, label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    panel.tick_params(axis="x", labelsize=6)


def main(arguments: list[str] | None = None) -> None:
    """Reports what a file of results holds."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.report", description=__doc__)
    parser.add_argument("file", type=pathlib.Path, help="what `python -m tests.benchmarks --json` wrote")
    parser.add_argument("--plots", type=pathlib.Path, metavar="DIR", help="write plots there, as PNG")
    parser.add_argument(
        "--readme", type=pathlib.Path, metavar="FILE", help="renew the performance section of this README"
    )
    options = parser.parse_args(arguments)
    if not options.file.exists():
        parser.error(f"there is no {options.file}")
    record = Record(options.file)
    print_tables(record.results)
    for path in plot(record, options.plots) if options.plots else ():
        print(path)
    if options.readme:
        update_readme(options.readme, readme_section(record))


if __name__ == "__main__":
    main()
