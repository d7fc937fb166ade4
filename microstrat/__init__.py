"""microstrat: train TensorFlow models whose batch does not fit the machine, with the code written for many GPUs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from microstrat._scope import make_strategy, scope
    from microstrat._strategy import MicroBatchStrategy
    from microstrat._virtualize import virtualize
    from microstrat._whole import set_weight

__all__ = ["MicroBatchStrategy", "__version__", "make_strategy", "scope", "set_weight", "virtualize"]

__version__ = "0.1.0"

_MODULES = {
    "MicroBatchStrategy": "_strategy",
    "make_strategy": "_scope",
    "scope": "_scope",
    "set_weight": "_whole",
    "virtualize": "_virtualize",
}


def __getattr__(name: str) -> Any:
    # Not at once: a script that is run by `microstrat run` may set what TensorFlow reads when it is imported.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
