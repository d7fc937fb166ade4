"""MicroBatchStrategy, the public class."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from microstrat import _errors, _extended, _tf, _whole


class MicroBatchStrategy(tf.distribute.Strategy):
    """A tf.distribute.Strategy whose N replicas are virtual: they run one after another on one device.

    A global batch of B rows runs as N micro-batches of B/N rows. The replicas meet at every all-reduce, and the optimizer
    steps once. What a program computes is what it computes under `tf.distribute.MirroredStrategy` on N devices; what it
    needs is the memory of one replica. Inside a tf.function, `run` means this loop:

        gradients = 0
        for r in range(N):                       # one tf.while_loop, traced once for all r
            replica_id_in_sync_group = r
            loss[r], g = forward_and_backward(rows[r])
            gradients += g                       # the all-reduce
        optimizer.update(gradients)              # once

    Example, a custom training loop:

        strategy = microstrat.MicroBatchStrategy(4)
        with strategy.scope():
            model, optimizer = build_model(), keras.optimizers.Adam()
        dataset = strategy.experimental_distribute_dataset(dataset.batch(64))

        @tf.function
        def train_step(x, y):
            def step(x, y):                      # sees 16 rows
                with tf.GradientTape() as tape:
                    loss = tf.nn.compute_average_loss(loss_fn(y, model(x)), global_batch_size=64)
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables))
                return loss
            return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)

        for x, y in dataset:
            loss = train_step(x, y)

    Keras needs nothing but the scope: `compile` and `fit` split each batch and scale the loss themselves.

    Semantics come from tf.distribute: N replicas exist (`num_replicas_in_sync`), the optimizer's all-reduce is a SUM, and
    the code scales its loss by the global batch size. Each variable behaves as MirroredStrategy's of the same
    synchronization and aggregation does; see the table in the README. Replica r of a batch of B rows gets rows r·c …
    (r+1)·c, c = ceil(B / N), so the last replicas of a short batch get fewer rows, or none.

    Outside any tf.function, `run` takes the replicas one by one in eager mode: `.numpy()`, prints and a debugger work in
    the replica function. That is for debugging; it keeps what every replica holds until they meet.

    Args:
      num_micro_batches: N, the number of virtual replicas; a positive int.
      semantics: "replicas". ("whole_batch", for code written for one device, is not implemented yet.)
      base: a strategy whose real replicas each run N virtual ones; not implemented yet, must be None.
      device: the one device, e.g. "GPU:1". Default: the first GPU if there is one, else the CPU.

    Raises:
      ValueError: if `num_micro_batches` is not a positive int, `semantics` is unknown, or there is no such device.
      NotImplementedError: for `semantics="whole_batch"` and for `base`.
    """

    def __init__(
        self,
        num_micro_batches: int,
        *,
        semantics: str = "replicas",
        replicas: int | None = None,
        loss_reduction: str = "mean",
        batch_norm_statistics: str = "per_replica",
        dropout_masks: str = "mirrored",
        base: tf.distribute.Strategy | None = None,
        device: str | None = None,
    ):
        number = positive_int("num_micro_batches", num_micro_batches)
        if semantics not in ("replicas", "whole_batch"):
            raise _errors.bad_semantics(semantics)
        if loss_reduction not in _whole.LOSS_REDUCTIONS:
            raise _errors.bad_loss_reduction(loss_reduction)
        whole = semantics == "whole_batch"
        if not whole and (replicas is not None or loss_reduction != "mean"):
            raise _errors.only_for_whole_batch("replicas" if replicas is not None else "loss_reduction")
        if base is not None:
            raise _errors.not_yet("base (virtual replicas on top of real ones)")
        num_replicas = (1 if replicas is None else positive_int("replicas", replicas)) if whole else number
        options = {"batch_norm_statistics": batch_norm_statistics, "dropout_masks": dropout_masks}
        for argument, choices in _extended.CHOICES.items():
            if options[argument] not in choices:
                raise _errors.bad_option(argument, options[argument], choices)
            if num_replicas == 1 and whole and options[argument] != choices[0]:
                raise _errors.only_for_replicas(argument)
        extended = _extended.MicroBatchExtended(
            self,
            num_replicas,
            _existing_device(device),
            micro_batches=number if whole else 1,
            loss_reduction=loss_reduction,
            **options,
        )
        super().__init__(extended)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Runs `fn` once for each replica, each on its own part of the per-replica arguments.

        Args:
          fn: the replica function; plain Python, or a tf.function.
          args: positional arguments; per-replica values (a batch of a distributed dataset) are cut, all else is given whole
            to every replica. Any nested structure.
          kwargs: keyword arguments, likewise.
          options: ignored, as in MirroredStrategy.

        Returns:
          What `fn` returned, its tensors as per-replica values with N entries (with N = 1, plain tensors). Python values and
          variables that are the same in all replicas come back as they are.

        Raises:
          RuntimeError: under another strategy's scope, inside a replica function, or if the replica function cannot be
            kept to N replicas' meaning (replicas writing different values to one variable, a collective that not all of
            them reach); the message says which and what to do.
        """
        self._check_scope("strategy.run")
        return super().run(fn, args=args, kwargs=kwargs, options=options)

    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """Reduces a per-replica value (or a structure of them) to one, as `tf.distribute.Strategy.reduce`.

        Args:
          reduce_op: `tf.distribute.ReduceOp.SUM` or MEAN, or "SUM", "MEAN".
          value: what `run` returned, or a batch.
          axis: None adds the replicas' values elementwise (for MEAN, divides by N). An int (or tuple) reduces that axis of
            each value too: with axis=0 a MEAN weights every row alike, however unevenly they are spread.

        Returns:
          A tensor of the values' dtype (integers with MEAN: float64).
        """
        self._check_scope("strategy.reduce")
        if axis is not None and self.extended.reduces_axes_itself:
            return self.extended.reduce_axis(reduce_op, value, axis)
        return super().reduce(reduce_op, value, axis)

    def _check_scope(self, what: str) -> None:
        current = tf.distribute.get_strategy()
        if tf.distribute.has_strategy():
            if current is not self:
                raise _errors.other_strategy_scope(self, current, what)
            if not tf.distribute.in_cross_replica_context():
                raise _errors.inside_replica_function(what)

    def __repr__(self) -> str:
        replicas, micro_batches = self.num_replicas_in_sync, self.extended.micro_batches
        if micro_batches == 1:
            what = f"{replicas} virtual replicas"
        else:
            what = f"{micro_batches} micro-batches" + (
                f" on each of {replicas} virtual replicas" if replicas > 1 else ""
            )
        return f"<MicroBatchStrategy: {what} on {self.extended.parameter_devices[0]}>"


def positive_int(argument: str, value: Any) -> int:
    """`value` as an int (numpy's count); raises ValueError, naming the argument, if it is not a positive one."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or number < 1:
        raise _errors.bad_number(argument, value)
    return number


def _existing_device(device: str | None) -> str:
    """The full name of the device asked for, or of the first GPU, or of the CPU."""
    devices = [known.name for known in tf.config.list_logical_devices()]
    if device is None:
        return next((name for name in devices if "GPU" in name), "/CPU:0")
    if _tf.canonicalize_device(device) not in [_tf.canonicalize_device(name) for name in devices]:
        raise _errors.no_such_device(device, devices)
    return device
