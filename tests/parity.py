"""Starts the processes that run parity programs, and keeps their results."""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from tests import programs, worker

ROOT = pathlib.Path(__file__).parent.parent
JOB_LIMIT = 120
"""Seconds that a program may take: MirroredStrategy on logical CPUs can deadlock. It gets a second chance."""


PARTS = 4
"""Processes that the jobs for one device are spread over; two run at a time."""


class _Group(NamedTuple):
    """Jobs that share a process."""

    after: str
    devices: int
    part: int

    @classmethod
    def of(cls, job: str) -> _Group:
        kind, number, name = job.split(":")
        after = programs.PROGRAMS[name].after
        devices = worker.devices(kind, int(number))
        # By name, so that a program is with its reference. With several devices there is only one MirroredStrategy.
        part = zlib.crc32(name.encode()) % PARTS if devices == 1 and not after else 0
        return cls(after, devices, part)


class Session:
    """Runs jobs (KIND:N:PROGRAM) in few processes and hands out their results."""

    def __init__(self, directory: pathlib.Path, jobs: Iterable[str], *, processes: int = 2):
        self._directory = directory
        self._pool = concurrent.futures.ThreadPoolExecutor(processes)
        self._closing = threading.Event()
        groups: dict[_Group, list[str]] = {}
        for job in jobs:
            groups.setdefault(_Group.of(job), []).append(job)
            if after := _Group.of(job).after:
                for kind, number in itertools.product(("mirrored", "looped"), programs.PROGRAMS[after].replicas):
                    earlier = f"{kind}:{number}:{after}"
                    groups.setdefault(_Group.of(earlier), []).append(earlier)
        # MirroredStrategy takes longest, and may hang, so it starts first; what waits for others starts last.
        order = sorted(groups, key=lambda group: (group.after, group.devices == 1, -len(groups[group])))
        self._runs: dict[_Group, concurrent.futures.Future[None]] = {}
        for group in order:
            waits_for = list(self._runs.values()) if group.after else []
            self._runs[group] = self._pool.submit(self._run, group, list(dict.fromkeys(groups[group])), waits_for)

    @staticmethod
    def reference(kind: str, number: int, name: str) -> tuple[str, int, str]:
        """The job that a job is compared with."""
        reference = worker.REFERENCES[kind]
        return reference, number if reference == "mirrored" else 1, name

    def outcome(self, kind: str, number: int, name: str) -> dict[str, Any]:
        """The outcome of a job, as `tests.worker.write` describes it; waits for its process."""
        job = f"{kind}:{number}:{name}"
        self._runs[_Group.of(job)].result()
        return pickle.loads(worker.result_file(self._directory, job).read_bytes())

    def close(self) -> None:
        self._closing.set()
        self._pool.shutdown(cancel_futures=True)

    def _run(self, group: _Group, jobs: list[str], waits_for: list[concurrent.futures.Future[None]]) -> None:
        # No deadlock: a pool starts its tasks in order, so these have started.
        concurrent.futures.wait(waits_for)
        directory = self._directory / "-".join(str(part) for part in group if part)
        directory.mkdir(parents=True)
        hung: set[str] = set()
        while True:
            left = [job for job in jobs if not worker.result_file(self._directory, job).exists()]
            if not left or self._closing.is_set():
                return
            running, log = self._run_once(directory, left)
            if running is None:
                continue
            if running in hung:
                worker.write(self._directory, running, {"error": f"hung or died, twice:\n{log}", "seconds": 0.0})
            hung.add(running)

    def _run_once(self, directory: pathlib.Path, jobs: list[str]) -> tuple[str | None, str]:
        """Runs a process until it ends or hangs; returns the job that it left unfinished, and the end of its output."""
        running = directory / "running"
        running.write_text("")
        command = [sys.executable, "-m", "tests.worker", str(self._directory), str(running), *jobs]
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "MICROSTRAT_EXCHANGE": str(self._directory),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        with open(directory / "log", "wb") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
            current, since = "", time.monotonic()
            while process.poll() is None:
                time.sleep(0.1)
                if (now_running := running.read_text()) != current:
                    current, since = now_running, time.monotonic()
                elif time.monotonic() - since > JOB_LIMIT or self._closing.is_set():
                    process.kill()
                    process.wait()
        current = running.read_text() or jobs[0]
        done = worker.result_file(self._directory, current).exists()
        return None if done else current, (directory / "log").read_text(errors="replace")[-3000:]
