"""Processes of a cluster on this machine."""

from __future__ import annotations

import contextlib
import json
import socket


def configurations(number: int) -> list[str]:
    """TF_CONFIG for each of so many workers, at ports that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        workers = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    tasks = [{"type": "worker", "index": index} for index in range(number)]
    return [json.dumps({"cluster": {"worker": workers}, "task": task}) for task in tasks]
