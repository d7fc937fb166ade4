"""Whole batches where a worked-out value, or a difference that must be there, says more than a comparison."""

from __future__ import annotations

import pytest
import tensorflow as tf

import microstrat
from tests import compare
from tests.programs import whole


def _tokens_differ(*, weighted: bool, tolerance: float) -> list[bool]:
    """Whether losses, and weights, of five micro-batches are further from the full batch's than `tolerance`."""
    expected = whole.train_on_tokens(tf.distribute.get_strategy(), weighted=weighted)
    strategy = microstrat.MicroBatchStrategy(5, semantics="whole_batch")
    actual = whole.train_on_tokens(strategy, weighted=weighted)
    return [bool(compare.differences(expected[key], actual[key], tolerance)) for key in ("losses", "weights")]


def test_a_mean_over_tokens_needs_its_weight() -> None:
    """Without it, micro-batches weigh what they have of rows, which is not what they have of tokens."""
    assert _tokens_differ(weighted=True, tolerance=1e-6) == [False, False]
    with pytest.warns(UserWarning, match="divided by a sum"):
        assert _tokens_differ(weighted=False, tolerance=1e-3) == [True, True]
