"""Compares the results of two runs of a program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def differences(expected: Any, actual: Any, tolerance: float) -> list[str]:
    """What differs, one line each; empty if the results agree.

    Structures, keys, dtypes, shapes, integers, booleans and strings must be equal, and NaN and inf in the same places.
    Floating-point arrays may differ by `tolerance` times the largest absolute value of the expected array.
    """
    return list(_differences("", expected, actual, tolerance))


def _differences(path: str, expected: Any, actual: Any, tolerance: float) -> list[str]:
    where = path or "the result"
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        found = [f"{where}: no {key!r}" for key in expected if key not in actual]
        found += [f"{where}: unexpected {key!r}" for key in actual if key not in expected]
        for key in expected:
            if key in actual:
                found += _differences(f"{path}[{key!r}]", expected[key], actual[key], tolerance)
        return found
    if isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
        if len(expected) != len(actual):
            return [f"{where}: {len(actual)} entries instead of {len(expected)}"]
        found = []
        for index, (left, right) in enumerate(zip(expected, actual, strict=True)):
            found += _differences(f"{path}[{index}]", left, right, tolerance)
        return found
    if isinstance(expected, Mapping | list | tuple) or isinstance(actual, Mapping | list | tuple):
        return [f"{where}: {type(actual).__name__} instead of {type(expected).__name__}"]
    return _array_differences(where, np.asarray(expected), np.asarray(actual), tolerance)


def _array_differences(where: str, expected: np.ndarray, actual: np.ndarray, tolerance: float) -> list[str]:
    if expected.dtype != actual.dtype:
        return [f"{where}: dtype {actual.dtype} instead of {expected.dtype}"]
    if expected.shape != actual.shape:
        return [f"{where}: shape {actual.shape} instead of {expected.shape}"]
    if np.array_equal(expected, actual):
        return []
    if expected.dtype.kind not in "fc":
        return [f"{where}: {_short(actual)} instead of {_short(expected)}"]
    finite = np.isfinite(expected)
    if not np.array_equal(expected[~finite], actual[~finite], equal_nan=True) or not np.isfinite(actual[finite]).all():
        return [f"{where}: {_short(actual)} instead of {_short(expected)} (NaN or inf in other places)"]
    if not finite.any():
        return []
    largest = np.abs(expected[finite]).max()
    error = np.abs(expected[finite] - actual[finite]).max()
    if error <= tolerance * largest:
        return []
    relative = error / largest if largest else np.inf
    return [f"{where}: off by {relative:.2e} relative ({_short(actual)} instead of {_short(expected)})"]


def _short(array: np.ndarray) -> str:
    return np.array2string(array, threshold=6, edgeitems=2, precision=8, separator=",").replace("\n", "")
