"""python -m tests.benchmarks: the command."""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

from tests.benchmarks import measure, report
from tests.benchmarks.case import Case
from tests.benchmarks.models import MODELS
from tests.benchmarks.peers import PEERS
from tests.benchmarks.results import Measurement, Settings

_WHATS = ("time", "memory", "startup", "dispatch")
_EVERY_N = [1, 2, 4, 8, 16, 32, 64, 256, 1024]

_EXPLANATION = """\
what is measured
  time      milliseconds a step, all of it: the batch from tf.data, the call, N micro-batches, the update. Programs run
            in turn, microstrat before each peer, and a ratio is of neighbours in time: it holds on a noisy machine
            where milliseconds alone do not. CPU is processor time of all threads.
  memory    MiB in a fresh process: the peak of the steps after the first, less the level before the first.
  startup   seconds in a fresh process: the first step less a later one (trace, lowering, graph optimization).
  dispatch  microseconds a step where computing is nothing: the next batch and the call. (Of no model.)

targets (printed next to the ratios; the median of the rounds counts)
  time      at most 1.00 of the fastest peer whose memory is flat; at most 1.05 of the full batch at once where a
            micro-batch fills the cores; with N = 1 at most 1.02 of plain TensorFlow and of plain fit (mlp: 1.05)
  memory    at most 1.01 from the smallest N above 1 to the largest; less one gradient copy, at most 1.02 of a single
            plain micro-batch step
  startup   at most 1.05 from the smallest N above 1 to the largest; on densenet121 and resnet50 at most 1.15 of a
            single plain micro-batch step
  dispatch  at most 50 µs more than a plain tf.function, or than one that holds a hand-written tf.while_loop

examples
  python -m tests.benchmarks --models mlp --what time                      a minute or two
  python -m tests.benchmarks --models conv128 --what memory --replicas 2 64 --peers two-functions plain-micro
  python -m tests.benchmarks --models mlp lstm --json run.json             can be stopped, and goes on when run again
  python -m tests.benchmarks.report run.json --plots plots --readme README.md
"""


def _list(registry: dict[str, object]) -> str:
    return "\n".join(f"  {name:<20}{entry.title}" for name, entry in registry.items())  # type: ignore[attr-defined]


def _positive_int(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description="Measures microstrat next to the ways to do without it: same model, same batches, same update.",
        epilog=f"models\n{_list(MODELS)}\n\npeers\n{_list(PEERS)}\n\n{_EXPLANATION}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--what", nargs="+", choices=_WHATS, default=list(_WHATS), metavar="WHAT", help="time, memory, startup (all)")
    add(
        "--models",
        nargs="+",
        choices=MODELS,
        default=["mlp", "conv64"],
        metavar="MODEL",
        help="on which models (mlp conv64)",
    )
    add("--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="PEER", help="against which programs (all)")
    add("--replicas", nargs="+", type=_positive_int, default=_EVERY_N, metavar="N", help="micro-batches (1 … 1024)")
    add("--micro-batch", type=_positive_int, metavar="B", help="rows of a micro-batch (each model's own)")
    add("--optimizer", choices=("sgd", "adam"), default="adam", help="which optimizer (adam)")
    add("--xla", action="store_true", help="compile the steps of all programs with XLA")
    add("--rounds", type=_positive_int, default=7, metavar="R", help="time: turns of each program (7)")
    add("--seconds", type=float, default=0.5, metavar="S", help="time: length of a turn (0.5)")
    add(
        "--processes",
        type=_positive_int,
        default=3,
        metavar="P",
        help="memory and startup: processes of each program (3)",
    )
    add("--time-limit", type=float, default=600.0, metavar="S", help="seconds a program may take to answer (600)")
    add("--memory-limit", type=float, default=8.0, metavar="GIB", help="data a program may hold; 0: no limit (8)")
    add("--budget", type=float, default=120.0, metavar="S", help="time: seconds for all turns of a model and N (120)")
    add(
        "--json",
        type=pathlib.Path,
        metavar="FILE",
        help="keep all samples, ratios and versions there, as they come; what is there is not measured again",
    )
    return parser.parse_args(arguments)


def _plan(options: argparse.Namespace) -> list[tuple[str, list[Case]]]:
    """Groups of cases that are measured together: (what, cases)."""
    groups: list[tuple[str, list[Case]]] = []
    subjects = list(dict.fromkeys(measure.subject_of(peer) for peer in options.peers))
    chosen = list(dict.fromkeys([*subjects, *options.peers]))
    if "jax-scan" in chosen and importlib.util.find_spec("jax") is None:
        chosen.remove("jax-scan")
        print("jax-scan is left out: pip install 'jax[cpu]'", file=sys.stderr)

    def case(model: str, peer: str, replicas: int) -> Case:
        rows = options.micro_batch or MODELS[model].micro_batch
        return Case(model, peer, replicas, rows, options.optimizer, options.xla)

    for model in options.models:
        cases = [[case(model, peer, n) for peer in chosen if PEERS[peer].can_do(n)] for n in options.replicas]
        if "time" in options.what:
            groups += [("time", group) for group in cases]
        # A single micro-batch step is the same for every N, and the measure of all others.
        flat = [c for group in cases for c in group if c.peer != "plain-micro"]
        fresh = [case(model, "plain-micro", 1)] * ("plain-micro" in chosen) + flat
        groups += [(what, fresh) for what in options.what if what not in ("time", "dispatch")]
    if "dispatch" in options.what:
        groups += [("dispatch", [case("mlp", "microstrat", n)]) for n in options.replicas if n <= 8]
    return groups


def _report_progress(message: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{message}", end="", file=sys.stderr, flush=True)
    else:
        print(message, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints, and returns 1 if a program could not be measured."""
    options = _parse(arguments)
    settings = Settings(
        rounds=options.rounds,
        seconds=options.seconds,
        processes=options.processes,
        time_limit=options.time_limit,
        memory_limit=int(options.memory_limit * 2**30),
        budget=options.budget,
    )
    groups = _plan(options)
    record = report.Record(options.json, settings)
    started, fresh = time.monotonic(), 0
    for index, (what, cases) in enumerate(groups, start=1):
        key = f"{what}: {'; '.join(map(repr, cases))}"
        if key in record.done:
            continue
        each = (time.monotonic() - started) / fresh if fresh else 0.0
        left = f", about {each * (len(groups) - index + 1) / 60:.0f} min left" if fresh else ""

        def progress(message: str, index: int = index, left: str = left) -> None:
            _report_progress(f"[{index}/{len(groups)}{left}] {message}")

        if what == "time":
            results = list(measure.measure_time(cases, settings, progress))
        elif what == "dispatch":
            results = list(measure.measure_dispatch(cases[0], progress))
        else:
            results = list(measure.measure_fresh(what, cases, settings, progress))
        record.add(key, results)
        fresh += 1
    _report_progress("")
    report.print_tables(record.results)
    failed = [result for result in record.results if isinstance(result, Measurement) and not result.samples]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
