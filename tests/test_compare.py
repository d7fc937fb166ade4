"""The comparer that all parity tests rest on: it must not agree with anything wrong."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from tests import compare

RESULTS: dict[str, Any] = {
    "losses": np.array([0.5, 0.25, -2.0], np.float32),
    "state": {"count": np.array([3, 4]), "names": ["a", "b"], "flag": np.array(True)},
    "parts": [np.array([1.0, np.nan, np.inf]), (np.zeros((2, 0), np.float32), np.float32(3.0))],
    "zeros": np.zeros(3),
    "text": np.array([b"x", b"yz"]),
}


def _changed(change: Any) -> dict[str, Any]:
    results = copy.deepcopy(RESULTS)
    change(results)
    return results


def test_equal_results_agree() -> None:
    assert compare.differences(RESULTS, copy.deepcopy(RESULTS), 0.0) == []


WRONG = {
    "a wrong value": (lambda r: r["losses"].__setitem__(0, 0.5001), "['losses']: off by 5.00e-05 relative"),
    "a wrong integer": (lambda r: r["state"]["count"].__setitem__(0, 5), "['state']['count']: [5,4] instead of [3,4]"),
    "a wrong string": (lambda r: r["state"]["names"].__setitem__(1, "c"), "['state']['names'][1]: 'c' instead of 'b'"),
    "wrong bytes": (lambda r: r["text"].__setitem__(1, b"zz"), "['text']"),
    "a wrong boolean": (lambda r: r["state"].__setitem__("flag", np.array(False)), "['state']['flag']"),
    "a missing key": (lambda r: r["state"].pop("count"), "['state']: no 'count'"),
    "one key too many": (lambda r: r.__setitem__("more", 1), "the result: unexpected 'more'"),
    "a wrong dtype": (lambda r: r.__setitem__("losses", r["losses"].astype(np.float64)), "dtype float64 instead of"),
    "a wrong shape": (lambda r: r.__setitem__("losses", r["losses"][None]), "shape (1, 3) instead of (3,)"),
    "a broadcastable shape": (lambda r: r.__setitem__("zeros", np.zeros(1)), "shape (1,) instead of (3,)"),
    "a wrong empty shape": (
        lambda r: r["parts"].__setitem__(1, (np.zeros((0, 2), np.float32), np.float32(3.0))),
        "shape (0, 2)",
    ),
    "a missing entry": (lambda r: r["parts"].pop(), "['parts']: 1 entries instead of 2"),
    "a list for an array": (lambda r: r.__setitem__("zeros", [0.0] * 3), "list instead of ndarray"),
    "a dict for a list": (lambda r: r.__setitem__("parts", {0: 1}), "dict instead of list"),
    "NaN": (lambda r: r["losses"].__setitem__(1, np.nan), "NaN or inf in other places"),
    "no NaN": (lambda r: r["parts"][0].__setitem__(1, 0.0), "NaN or inf in other places"),
    "the other infinity": (lambda r: r["parts"][0].__setitem__(2, -np.inf), "NaN or inf in other places"),
    "something for zeros": (lambda r: r["zeros"].__setitem__(0, 1e-30), "['zeros']: off by inf relative"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_results_differ(name: str) -> None:
    change, message = WRONG[name]
    found = compare.differences(RESULTS, _changed(change), 1e-6)
    assert len(found) == 1
    assert message in found[0]


def test_tolerance_is_relative_to_the_largest_expected_value() -> None:
    expected = np.array([100.0, 1e-3])
    assert compare.differences(expected, np.array([100.0, 1.09e-3]), 1e-6) == []
    assert len(compare.differences(expected, np.array([100.0, 1.11e-3]), 1e-6)) == 1
    assert len(compare.differences(expected[1:], np.array([1.09e-3]), 1e-6)) == 1


def test_integers_have_no_tolerance() -> None:
    assert len(compare.differences(np.array([10**9]), np.array([10**9 + 1]), 1.0)) == 1


def test_all_differences_are_reported() -> None:
    found = compare.differences(RESULTS, _changed(lambda r: (r.pop("zeros"), r["losses"].fill(0))), 1e-6)
    assert len(found) == 2
