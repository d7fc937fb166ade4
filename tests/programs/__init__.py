"""Programs that must give the same results under MirroredStrategy and MicroBatchStrategy."""

import importlib

from tests.programs._registry import EXACT, PROGRAMS, TOLERANCE, TOLERANCE_LATER, Program, program

__all__ = ["EXACT", "PROGRAMS", "TOLERANCE", "TOLERANCE_LATER", "Program", "program"]

_MODULES = (
    "loops", "functions", "training", "variables", "collectives", "inputs", "checkpoints", "legacy_keras", "whole",
    "whole_keras", "libraries",
)  # fmt: skip
for _module in _MODULES:
    # Importing a module registers its programs.
    importlib.import_module(f"tests.programs.{_module}")
