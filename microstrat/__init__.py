"""microstrat: train TensorFlow models whose batch does not fit the machine, with the code written for many GPUs."""

from microstrat._scope import make_strategy, scope
from microstrat._strategy import MicroBatchStrategy
from microstrat._virtualize import virtualize
from microstrat._whole import set_weight

__all__ = ["MicroBatchStrategy", "__version__", "make_strategy", "scope", "set_weight", "virtualize"]

__version__ = "0.1.0"
