"""microstrat: train TensorFlow models whose batch does not fit the machine, with the code written for many GPUs."""

from microstrat._scope import scope
from microstrat._strategy import MicroBatchStrategy

__all__ = ["MicroBatchStrategy", "__version__", "scope"]

__version__ = "0.1.0"
