"""Programs that must give the same results under MirroredStrategy and MicroBatchStrategy."""

from tests.programs import checkpoints, collectives, functions, inputs, loops, training, variables
from tests.programs._registry import PROGRAMS, TOLERANCE, Program, program

__all__ = ["PROGRAMS", "TOLERANCE", "Program", "program"]
