"""python -m tests.benchmarks.dispatch N: what a step costs in Python, on a model where computing is nothing.

Prints JSON: for the plain tf.function, the hand-written tf.while_loop and microstrat, microseconds a step in each round:
the next batch from tf.data and the call of the tf.function. Beyond the hand-written loop all of it is Python; beyond the
plain function, some of it is TensorFlow running N turns of a loop.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import numpy as np
import tensorflow as tf

import microstrat

_ROWS = 4
_ROUNDS = 9
_CALLS = 2000


def main(number: int) -> None:
    """Measures the three in turn."""
    x, y = np.zeros((4 * _ROWS * number, 8), np.float32), np.zeros((4 * _ROWS * number,), np.int32)
    data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(_ROWS * number, drop_remainder=True).prefetch(2)
    strategy = microstrat.MicroBatchStrategy(number)

    def work(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        del y
        return tf.reduce_sum(x)

    @tf.function
    def by_hand(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        def turn(index: tf.Tensor, total: tf.Tensor) -> Any:
            start = index * _ROWS
            return index + 1, total + work(x[start : start + _ROWS], y)

        return tf.while_loop(lambda index, _: index < number, turn, [0, 0.0], parallel_iterations=1)[1]

    @tf.function
    def ours(x: Any, y: Any) -> tf.Tensor:
        return strategy.reduce("SUM", strategy.run(work, args=(x, y)), axis=None)

    steps = {
        "plain-full": _step(tf.function(work), data),
        "while-loop": _step(by_hand, data),
        "microstrat": _step(ours, strategy.experimental_distribute_dataset(data)),
    }
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(_ROUNDS):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(_CALLS):
                step()
            taken[name].append((time.perf_counter() - start) / _CALLS * 1e6)
    print(json.dumps(taken))


def _step(function: Callable[..., Any], data: Any) -> Callable[[], Any]:
    iterator = iter(data)

    def step() -> Any:
        return function(*next(iterator))

    step()
    return step


if __name__ == "__main__":
    main(int(sys.argv[1]))
