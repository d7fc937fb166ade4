"""Whole batches where a worked-out value, or a difference that must be there, says more than a comparison."""

from __future__ import annotations

import tensorflow as tf

import microstrat
from tests import compare
from tests.programs import whole


def test_a_mean_over_tokens_needs_its_weight() -> None:
    """Without it, micro-batches weigh what they have of rows, which is not what they have of tokens."""
    keys = ("losses", "weights")
    for weighted in (True, False):
        expected = whole.train_on_tokens(tf.distribute.get_strategy(), weighted=weighted)
        strategy = microstrat.MicroBatchStrategy(5, semantics="whole_batch")
        actual = whole.train_on_tokens(strategy, weighted=weighted)
        for key in keys:
            assert bool(compare.differences(expected[key], actual[key], 1e-6 if weighted else 1e-3)) != weighted
