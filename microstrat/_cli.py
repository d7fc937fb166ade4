"""`microstrat run`: an unmodified script, whose strategies are the chosen one, and all else as when it is run directly.

TensorFlow is not imported here: what a script sets up before it imports it (environment, devices, threads) must count.
"""

from __future__ import annotations

import argparse
import atexit
import builtins
import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import multiprocessing.spawn
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import microstrat
from microstrat import _choose

_DESCRIPTION = "Train TensorFlow models whose batch does not fit the machine, with the code you already have."

_RUN_DESCRIPTION = """\
Runs a script as `python SCRIPT ARG ...` would, but for the strategies it makes: tf.distribute.MirroredStrategy,
MultiWorkerMirroredStrategy and OneDeviceStrategy give the strategy that the options choose.

  microstrat run --replicas 8 train.py --epochs 3
      A script for several GPUs. Of the 8 replicas as many are real devices as there are; the rest are virtual, and
      run one after another. The numbers are those of 8 devices.

  microstrat run --micro-batches 8 train.py --epochs 3
      A script for one device, which uses `fit` or tf.distribute.get_strategy(). Each batch runs as 8 micro-batches,
      with the memory of one of them and the numbers of the whole batch.

  microstrat run --replicas 2 --micro-batches 8 -m package.train
      Two replicas, each of which cuts its own batch; as `python -m package.train` otherwise.
"""

_RUN_EPILOG = """\
What is chosen is printed in one line, for example "8 replicas = 2 GPUs × 4 micro-batches". Without --replicas and
--micro-batches, the real devices there are. The options come before MICROSTRAT_REPLICAS, MICROSTRAT_MICRO_BATCHES and
MICROSTRAT_MODE in the environment, which come before what the code gives microstrat.scope and the like.

Devices that the script names are ignored, with a line that says so. With --micro-batches, custom loops are cut where
they say strategy.run; one without runs as it is, with a warning. Of other threads, those see the strategy that make one.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script; returns when the script that it runs does."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return
    # By the environment, so that they come before what a script gives to microstrat.scope too, in its children as well.
    for name in ("replicas", "micro_batches", "mode"):
        if (value := getattr(options, name)) is not None:
            os.environ[f"MICROSTRAT_{name.upper()}"] = str(value)
    names = ("loss_reduction", "batch_norm_statistics", "dropout_masks", "device")
    chosen = {name: value for name in names if (value := getattr(options, name)) is not None}
    _run(_Run(options.script, options.as_module, chosen), options.arguments)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("microstrat", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=microstrat.__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run an unmodified script with virtual replicas or micro-batches",
        usage="%(prog)s [--replicas N] [--micro-batches N] [OPTION ...] (SCRIPT | -m MODULE) [ARG ...]",
        description=_RUN_DESCRIPTION,
        epilog=_RUN_EPILOG,
        formatter_class=raw,
        allow_abbrev=False,
    )
    add = run.add_argument
    add("--replicas", type=_positive, metavar="N", help="replicas in all, real and virtual")
    add("--micro-batches", type=_positive, metavar="N", help="parts that each replica cuts its batch in")
    add(
        "--mode",
        choices=_choose.MODES,
        help="real devices as far as they go (auto, the default), one device (virtual), or no virtual replicas (real)",
    )
    add("--loss-reduction", choices=("mean", "sum"), help="what losses are, over the rows of a batch (default: mean)")
    add(
        "--batch-norm-statistics",
        choices=("per_replica", "averaged"),
        help="what replicas keep of BatchNormalization's moving statistics (default: per_replica)",
    )
    add(
        "--dropout-masks",
        choices=("mirrored", "independent"),
        help="whether replicas draw the same random numbers from Keras' seeds (default: mirrored)",
    )
    add("--device", help="the one device to run on, for example GPU:1")
    add("-m", dest="as_module", action="store_true", help="SCRIPT is the name of a module, as for python -m")
    add("script", metavar="SCRIPT", help="the script to run")
    add("arguments", metavar="ARG", nargs=argparse.REMAINDER, help="what the script gets as sys.argv[1:]")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def _log_to_stderr() -> None:
    log = logging.getLogger("microstrat")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("microstrat: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False  # a script's own handlers would print it a second time


# --- Running ----------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class _Run:
    """What is run, and the arguments of microstrat.virtualize that the environment does not hold."""

    script: str
    as_module: bool
    chosen: dict[str, Any]

    def main_module(self) -> tuple[types.ModuleType, types.CodeType]:
        return _main_of_module(self.script) if self.as_module else _main_of_file(self.script)

    def virtualize(self) -> None:
        """Virtualizes this process, once TensorFlow is there."""

        def start() -> None:
            from microstrat import _virtualize

            _virtualize.virtualize_from_now_on(**self.chosen)

        _after_import("tensorflow", start)


_RUNNING = "MICROSTRAT_RUNNING"
"""Environment variable that tells children of the _Run."""


def _run(run: _Run, arguments: Sequence[str]) -> None:
    _log_to_stderr()
    run.virtualize()
    _set_first_path(os.getcwd() if run.as_module else os.path.dirname(os.path.realpath(run.script)))
    module, code = run.main_module()
    sys.argv = [str(module.__file__) if run.as_module else run.script, *arguments]
    # It stays there after the script has ended, for its threads and atexit functions.
    sys.modules["__main__"] = module
    if not run.as_module:
        run = dataclasses.replace(run, script=str(module.__file__))
    os.environ[_RUNNING] = json.dumps(dataclasses.asdict(run))
    _spawn_children_alike()
    atexit.register(_say_if_unused)
    try:
        exec(code, vars(module))
    except SystemExit:
        raise
    except BaseException as error:
        atexit.unregister(_say_if_unused)
        _show_without_own_frames(error, error.__traceback__.tb_next if error.__traceback__ else None)
        raise


def run_in_child(namespace: dict[str, Any]) -> None:
    """Runs the script in a process that it has spawned, as multiprocessing does for what is to be found in it."""
    run = _Run(**json.loads(os.environ[_RUNNING]))
    _log_to_stderr()
    run.virtualize()
    module, code = run.main_module()
    if module.__spec__ is not None and module.__spec__.name.endswith(".__main__"):
        return  # multiprocessing does not run those again
    namespace.update({name: value for name, value in vars(module).items() if name != "__name__"})
    exec(code, namespace)


def _spawn_children_alike() -> None:
    """Lets processes that multiprocessing spawns run the script by `run_in_child`."""
    stock = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        data = stock(name)
        if data.pop("init_main_from_path", None) or "init_main_from_name" in data:
            data["init_main_from_name"] = "microstrat._child"
        return data

    multiprocessing.spawn.get_preparation_data = get_preparation_data


def _say_if_unused() -> None:
    if "tensorflow" in sys.modules:
        from microstrat import _scope

        if not _scope.has_made_any():
            _scope.log.warning(
                "No strategy was made by the script's main process, which ran as it is. If it is for one device, use "
                "--micro-batches."
            )


def _main_of_file(script: str) -> tuple[types.ModuleType, types.CodeType]:
    path = os.path.join(os.getcwd(), script)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    try:
        source = loader.get_data(path)
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    return _main_module(loader, None, path), _compiled(lambda: loader.source_to_code(source, path))


def _main_of_module(name: str) -> tuple[types.ModuleType, types.CodeType]:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(name := f"{name}.__main__")
    except ModuleNotFoundError:
        spec = None
    loader: Any = spec and spec.loader
    if spec is None or not hasattr(loader, "get_code"):
        print(f"{sys.executable}: No module named {name}", file=sys.stderr)
        raise SystemExit(1)
    code = _compiled(lambda: loader.get_code(name))
    return _main_module(loader, spec, spec.origin), code


def _main_module(loader: Any, spec: Any, path: str | None) -> types.ModuleType:
    module = types.ModuleType("__main__")
    vars(module).update(__file__=path, __loader__=loader, __spec__=spec, __builtins__=builtins)
    if spec is not None:
        vars(module).update(__package__=spec.parent, __cached__=spec.cached)
    return module


def _set_first_path(path: str) -> None:
    """Makes `path` the first place to import from, instead of what Python put there for us."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = path


def _compiled(compile: Callable[[], Any]) -> Any:
    try:
        return compile()
    except SyntaxError as error:
        _show_without_own_frames(error, None)
        raise


def _show_without_own_frames(error: BaseException, traceback: types.TracebackType | None) -> None:
    """Lets Python print an error that is on its way out with this traceback, by whatever hook the script has set."""
    hook = sys.excepthook

    def show(kind: Any, shown: BaseException, shown_traceback: Any) -> None:
        if shown is error:
            shown_traceback = error.__traceback__ = traceback
        hook(kind, shown, shown_traceback)

    sys.excepthook = show


# --- Waiting for TensorFlow -------------------------------------------------------------------------------------------
def _after_import(name: str, act: Callable[[], None]) -> None:
    """Calls `act` as soon as a module has been imported."""
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module where others find it, and acts after it has been executed."""

    def __init__(self, name: str, act: Callable[[], None]):
        self._name = name
        self._act = act

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_act(module: types.ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                self._act()

            loader.exec_module = execute_and_act
        return spec
