"""virtualize(): programs that make TensorFlow's strategies themselves get the chosen one instead."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from microstrat import _scope, _strategy, _tf

CONSTRUCTORS: tuple[Any, ...] = (
    tf.distribute.MirroredStrategy,
    tf.distribute.OneDeviceStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.experimental.MultiWorkerMirroredStrategy,
    tf.compat.v1.distribute.MirroredStrategy,
    tf.compat.v1.distribute.OneDeviceStrategy,
    tf.compat.v1.distribute.experimental.MultiWorkerMirroredStrategy,
)
"""The classes whose constructors give the chosen strategy."""


@contextlib.contextmanager
def virtualize(
    replicas: int | None = None,
    *,
    micro_batches: int = 1,
    mode: str = "auto",
    loss_reduction: str = "mean",
    batch_norm_statistics: str = "per_replica",
    dropout_masks: str = "mirrored",
    device: str | None = None,
) -> Iterator[None]:
    """Inside the block, the constructors of tf.distribute's strategies give the strategy that `make_strategy` makes.

        with microstrat.virtualize(replicas=8):
            train.main()     # unchanged: makes tf.distribute.MirroredStrategy(), and gets 8 replicas

        with microstrat.virtualize(micro_batches=8):
            train.main()     # unchanged, for one device: `fit`, or tf.distribute.get_strategy().run

    They are `MirroredStrategy`, `MultiWorkerMirroredStrategy` (also under `experimental`) and `OneDeviceStrategy`, by
    whatever name they are reached, in all threads. There is one strategy, however often it is asked for; their arguments
    (devices) are ignored, which is logged. Where it is virtual, its class is a subclass of the one first asked for, so that
    `isinstance(strategy, tf.distribute.MirroredStrategy)` says what the program expects. (Not of MultiWorkerMirroredStrategy
    where there are several workers: Keras' `fit` fails with that class.) A program's own subclasses keep what they override.

    With `micro_batches` alone, the block is under the strategy's scope too: `fit` and `tf.distribute.get_strategy()` use
    it. A custom loop is cut where it says `strategy.run`; one that says nothing of strategies runs as it is, with a warning.
    Scopes belong to a thread: code in others sees the strategy only if it makes one.

    Args:
      replicas: as the other arguments, see `make_strategy`. The choice is made when the strategy is first needed.
      micro_batches: see there.
      mode: see there.
      loss_reduction: see there.
      batch_norm_statistics: see there.
      dropout_masks: see there.
      device: see there.

    Raises:
      ValueError: as `make_strategy`, inside the block.
    """
    options: Any = {
        "micro_batches": micro_batches,
        "mode": mode,
        "loss_reduction": loss_reduction,
        "batch_norm_statistics": batch_norm_statistics,
        "dropout_masks": dropout_masks,
        "device": device,
    }
    virtualization = Virtualization(lambda: _scope.make_strategy(replicas, **options))
    virtualization.start()
    try:
        for_one_device = _scope.is_for_one_device(replicas, micro_batches)
        with virtualization.strategy.scope() if for_one_device else contextlib.nullcontext():
            yield
    finally:
        virtualization.stop()


def virtualize_from_now_on(**options: Any) -> None:
    """`virtualize` for all that this process does, before TensorFlow has started."""
    virtualization = Virtualization(lambda: _scope.make_strategy(**options))
    virtualization.start()
    if _scope.is_for_one_device(options.get("replicas"), options.get("micro_batches", 1)):
        # Not yet: making it would start TensorFlow, and programs set devices and threads up first.
        _tf.when_started(lambda: tf.distribute.experimental_set_strategy(virtualization.strategy))


class Virtualization:
    """One strategy, made when it is first needed, for whoever asks one of the constructors."""

    def __init__(self, make: Callable[[], tf.distribute.Strategy]):
        self._make = make
        self._strategy: Any = None
        self._is_named = False
        self._ignored: set[str] = set()
        self._lock = threading.RLock()
        self.thread = threading.get_ident()

    def start(self) -> None:
        _install()
        _active.append(self)

    def stop(self) -> None:
        _active.remove(self)

    @property
    def strategy(self) -> Any:
        with self._lock:
            if self._strategy is None:
                made = self._made()
                # Making it starts TensorFlow, upon which somebody may have asked for it already.
                self._strategy = self._strategy or made
            return self._strategy

    def give(self, asked: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `asked(*args, **kwargs)` gives."""
        with self._lock:
            strategy = self.strategy
            if not isinstance(strategy, asked) and _can_be(strategy, asked):
                if self._is_named and asked not in CONSTRUCTORS:
                    strategy = self._made()
                if not self._is_named or asked not in CONSTRUCTORS:
                    strategy.__class__ = _class_for(type(strategy), asked)
            self._is_named = True
            self._say_what_is_ignored(asked, args, kwargs)
            return strategy

    def _made(self) -> Any:
        strategy = self._make()
        strategy.__class__ = type(type(strategy).__name__, (_Given, type(strategy)), {})
        return strategy

    def _say_what_is_ignored(self, asked: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        said = [repr(value) for value in args] + [f"{name}={value!r}" for name, value in kwargs.items()]
        call = f"{asked.__name__}({', '.join(said)})"
        if said and asked in CONSTRUCTORS and call not in self._ignored:
            self._ignored.add(call)
            _scope.log.info("%s gives %r; what it says is ignored", call, self.strategy)


class _Given:
    """A strategy that is there already when a constructor is called."""

    def __init__(self, *args: Any, **kwargs: Any):
        # Python calls this after __new__, with what the program says.
        del args, kwargs


class _OfWorkers(tf.distribute.Strategy):
    """What programs read of a MultiWorkerMirroredStrategy, on one device too."""

    @property
    def cluster_resolver(self) -> Any:
        return super().cluster_resolver or tf.distribute.cluster_resolver.TFConfigClusterResolver()


def _can_be(strategy: Any, asked: Any) -> bool:
    """Whether the strategy can have a class that is `asked` too."""
    constructor = _constructor(asked)
    if not isinstance(strategy, _strategy.MicroBatchStrategy):
        return isinstance(strategy, constructor)  # TensorFlow's own strategies are what they are
    # Keras 3.15 reduces what workers report by axes that it does not have, if a strategy for workers is of this class.
    return not (
        issubclass(constructor, tf.distribute.MultiWorkerMirroredStrategy) and strategy.extended.real.workers > 1
    )


def _constructor(asked: Any) -> Any:
    """The class of TensorFlow's that `asked` is, or is a subclass of."""
    return next(cls for cls in asked.__mro__ if cls in CONSTRUCTORS)


def _class_for(given: Any, asked: Any) -> Any:
    """A class of what the strategy is, and is asked for: all that we override, and before it what the program does."""
    constructor = _constructor(asked)
    bases = (given,) if issubclass(given, constructor) else (given, constructor)
    if issubclass(constructor, tf.distribute.MultiWorkerMirroredStrategy):
        bases = (_OfWorkers, *bases)
    cls: Any = type(constructor)(given.__name__, bases, {})
    return cls if asked is constructor else type(asked)(asked.__name__, (asked, cls), {})


_active: list[Virtualization] = []
_installing = threading.Lock()


def _current() -> Virtualization | None:
    """The virtualization that this thread entered last; else the last that any did."""
    active = list(_active)
    mine = [entered for entered in active if entered.thread == threading.get_ident()]
    return (mine or active or [None])[-1]


def _install() -> None:
    """Makes the constructors ask for the current virtualization.

    This stays: once a class has had a __new__, Python cannot give it back object's (it then refuses all arguments).
    """

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        current = _current()
        return object.__new__(cls) if current is None else current.give(cls, args, kwargs)

    with _installing:
        for constructor in CONSTRUCTORS:
            if "__new__" not in vars(constructor):
                constructor.__new__ = new
