"""MicroBatchStrategy, the public class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from microstrat import _errors, _extended


class MicroBatchStrategy(tf.distribute.Strategy):
    """A tf.distribute.Strategy whose N replicas are virtual: they run one after another on one device."""

    def __init__(
        self,
        num_micro_batches: int,
        *,
        semantics: str = "replicas",
        base: tf.distribute.Strategy | None = None,
        device: str | None = None,
    ):
        if isinstance(num_micro_batches, bool) or not isinstance(num_micro_batches, int) or num_micro_batches < 1:
            raise _errors.bad_num_micro_batches(num_micro_batches)
        if semantics not in ("replicas", "whole_batch"):
            raise _errors.bad_semantics(semantics)
        if semantics == "whole_batch":
            raise _errors.not_yet("semantics='whole_batch' (single-device code, cut into micro-batches)")
        if base is not None:
            raise _errors.not_yet("base (virtual replicas on top of real ones)")
        super().__init__(_extended.MicroBatchExtended(self, num_micro_batches, device or _default_device()))

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Runs `fn` once for each replica."""
        self._check_scope("strategy.run")
        return super().run(fn, args=args, kwargs=kwargs, options=options)

    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """Reduces a per-replica value."""
        self._check_scope("strategy.reduce")
        return super().reduce(reduce_op, value, axis)

    def _check_scope(self, what: str) -> None:
        current = tf.distribute.get_strategy()
        if tf.distribute.has_strategy():
            if current is not self:
                raise _errors.other_strategy_scope(self, current, what)
            if not tf.distribute.in_cross_replica_context():
                raise _errors.inside_replica_function(what)

    def __repr__(self) -> str:
        number = self.num_replicas_in_sync
        return f"<MicroBatchStrategy: {number} virtual replicas on {self.extended.parameter_devices[0]}>"


def _default_device() -> str:
    return "/GPU:0" if tf.config.list_logical_devices("GPU") else "/CPU:0"
