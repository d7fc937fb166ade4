"""The graphs that TensorFlow runs: optimized, and cut in parts for the devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorflow.python.eager import context  # noqa: TID251 - no public name shows what is run


def graphs(call: Callable[[], Any]) -> list[Any]:
    """What runs in a call, as tf.compat.v1.RunMetadata.FunctionGraphs."""
    eager = context.context()
    eager.enable_graph_collection()
    try:
        call()
        return list(eager.export_run_metadata().function_graphs)
    finally:
        eager.disable_graph_collection()
