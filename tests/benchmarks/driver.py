"""A worker process, seen from the process that gives it commands."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import selectors
import subprocess
import sys
import tempfile
from typing import Any

from tests.benchmarks.case import Case
from tests.benchmarks.results import Sample, Settings

ROOT = pathlib.Path(__file__).parents[2]


_OUT_OF_MEMORY = ("bad_alloc", "MemoryError", "OOM when allocating", "RESOURCE_EXHAUSTED", "Cannot allocate memory")
_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}


def _backend(case: Case) -> dict[str, str]:
    return {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"} if case.peer == "jax-scan" else {}


class WorkerError(Exception):
    """A program could not be measured."""


class Worker:
    """A process with one program in it; see worker.py for its commands.

    Attributes:
      ready: what it said of itself before its first step.
    """

    def __init__(self, case: Case, settings: Settings, *, environment: dict[str, str] | None = None):
        self._time_limit = settings.time_limit
        self._errors = tempfile.TemporaryFile()
        message = json.dumps({"case": dataclasses.asdict(case), "memory_limit": settings.memory_limit})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.worker", message],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=ROOT,
            env={**os.environ, **_ENVIRONMENT, **_backend(case), **(environment or {})},
        )
        try:
            self.ready = self._reply()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None
        return self._reply()

    def start(self) -> Sample:
        """Runs the first step and returns the seconds it took, and what they went to."""
        answer = self.ask("start")
        return Sample(answer["seconds"], answer["cpu_seconds"], answer["parts"])

    def run(self, steps: int) -> Sample:
        """Runs steps and returns the seconds they took."""
        answer = self.ask("run", steps=steps)
        return Sample(answer["seconds"], answer["cpu_seconds"])

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(self._time_limit):
                raise WorkerError(f"no answer within {self._time_limit:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        return json.loads(line)

    def _failure(self) -> WorkerError:
        code = self._process.wait()
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")
        if any(sign in text for sign in _OUT_OF_MEMORY):
            return WorkerError(f"ended with code {code}: out of memory")
        return WorkerError(f"ended with code {code}: {(text.strip().splitlines() or [''])[-1][:200]}")
