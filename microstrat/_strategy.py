"""MicroBatchStrategy, the public class."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from microstrat import _choose, _errors, _explain, _extended, _keras, _real, _tf, _whole


class MicroBatchStrategy(tf.distribute.Strategy):
    """A tf.distribute.Strategy that runs a batch in micro-batches, one after another on one device.

    Two semantics, for two kinds of code. What is the same for all micro-batches happens once, around one loop that is
    traced once for any number of them.

    **"whole_batch"**: code for one device. There is one replica (`num_replicas_in_sync` is 1). Its batch of B rows runs as
    at most n micro-batches of ceil(B / n) rows, and what the program computes is what it computes on the whole batch:
    losses, gradients, metrics, state. Inside a tf.function, `run` means this loop:

        for r in range(n):                       # one tf.while_loop
            loss[r], g = forward_and_backward(rows[r])
            gradients += g * (rows of r / B)     # the gradient by the model's variables
        optimizer.update(gradients)              # once

    Example, a custom training loop:

        strategy = microstrat.MicroBatchStrategy(4, semantics="whole_batch")
        with strategy.scope():
            model, optimizer = build_model(), keras.optimizers.Adam()
        dataset = strategy.experimental_distribute_dataset(dataset.batch(64))

        def train_step(x, y):                    # as for one device
            with tf.GradientTape() as tape:
                loss = loss_fn(y, model(x))      # a mean
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss

        @tf.function
        def step(x, y):
            return strategy.reduce("MEAN", strategy.run(train_step, args=(x, y)), axis=None)

    A tensor that is one number for the micro-batch is a mean over its rows (`loss_reduction="mean"`) or a sum ("sum"); one
    with a value for each row is the micro-batch's part of the whole batch's. From this follows the rest: see
    `microstrat.set_weight` for losses divided by something else, and the README for state, collectives and what differs.

    **"replicas"**: code for many devices. N replicas exist, the optimizer's all-reduce is a SUM, and the code scales its
    loss by the global batch size; each variable behaves as `tf.distribute.MirroredStrategy`'s of the same synchronization
    and aggregation. Replica r of a batch of B rows gets rows r·c … (r+1)·c, c = ceil(B / N); one without rows does not run.

    Keras needs nothing but the scope in either case: `compile` and `fit` are split and scaled by themselves.

    Outside any tf.function, `run` is for debugging: `.numpy()`, prints and a debugger work in the replica function.
    Replicas then run in threads, one at a time; the batch of one replica is not cut.

    Args:
      num_micro_batches: a positive int: n, or with "replicas" N; with `base`, the number of replicas on each of its devices.
      semantics: "replicas" or "whole_batch".
      replicas: with "whole_batch", the number of virtual replicas (with `base`, on each device), each of which cuts its own
        batch in n. Default: 1.
      loss_reduction: with "whole_batch", what a number that differs between micro-batches is, over the rows: a "mean" or a
        "sum". (Keras' own losses are right with either.)
      batch_norm_statistics: what replicas keep of BatchNormalization's moving statistics: each its own ("per_replica", as
        MirroredStrategy; outside, replica 0's are seen), or the mean over replicas ("averaged").
      dropout_masks: whether replicas draw the same random numbers from Keras' seeds ("mirrored", as MirroredStrategy) or
        each its own ("independent").
      base: a `tf.distribute.MirroredStrategy` or `MultiWorkerMirroredStrategy`. Each of its devices, of all workers, has its
        own copy of the variables and runs a loop over its virtual replicas; what the loops come to is added up by the base,
        once where replicas meet. With M devices there are M · N replicas, the first N of them on the first device. The same
        trace runs on all devices. Default: none, there is one device.
      device: the one device, e.g. "GPU:1". Default: the first GPU if there is one, else the CPU.

    Raises:
      ValueError: if a number is not a positive int, an option is unknown or not for these semantics, or there is no such
        device.
      TypeError: if `base` is another strategy.
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
        num_replicas = (1 if replicas is None else positive_int("replicas", replicas)) if whole else number
        options = {"batch_norm_statistics": batch_norm_statistics, "dropout_masks": dropout_masks}
        for argument, choices in _extended.CHOICES.items():
            if options[argument] not in choices:
                raise _errors.bad_option(argument, options[argument], choices)
            if num_replicas == 1 and base is None and whole and options[argument] != choices[0]:
                raise _errors.only_for_replicas(argument)
        extended = _extended.MicroBatchExtended(
            self,
            num_replicas,
            _real.Real((_existing_device(device),)) if base is None else _real_replicas(base, device),
            micro_batches=number if whole else 1,
            loss_reduction=loss_reduction,
            **options,
        )
        super().__init__(extended)

    def scope(self) -> Any:
        """Makes this strategy the current one, for making variables: as `tf.distribute.Strategy.scope`."""
        _keras.support_loss_scaling(lambda strategy: isinstance(strategy, MicroBatchStrategy))
        return super().scope()

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Runs `fn` once for each replica, or micro-batch, each on its own part of the per-replica arguments.

        Args:
          fn: the replica function; plain Python, or a tf.function.
          args: positional arguments; per-replica values (a batch of a distributed dataset) are cut, all else is given whole
            to every replica. Any nested structure. With whole-batch semantics, and no per-replica value among the arguments,
            the tensors and arrays of rank 1 and more are the batch; they must have the same number of rows.
          kwargs: keyword arguments, likewise.
          options: ignored, as in MirroredStrategy.

        Returns:
          What `fn` returned, its tensors as per-replica values with N entries. Of one replica: plain tensors, and
          per-replica values with an entry for each micro-batch where those differ. Python values and variables that are
          the same in all come back as they are.

        Raises:
          RuntimeError: under another strategy's scope, inside a replica function, or if the replica function cannot be
            kept to N replicas' meaning (replicas writing different values to one variable, a collective that not all of
            them reach); the message says which and what to do.
        """
        self._check_scope("strategy.run")
        return super().run(fn, args=args, kwargs=kwargs, options=options)

    def explain(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> _explain.Explanation:
        """Prints and returns what the engine makes of a replica function: `run`, with nothing run.

        Args:
          fn: the replica function.
          args: as for `run`.
          kwargs: as for `run`.

        Returns:
          The stages and what they hold, the collectives, and what is kept for every replica, with sizes in bytes. Printed as
          tables if rich is installed, else as text.

        Raises:
          What `run` raises in a tf.function. As there, `fn` is traced: Python side effects happen, and it may create
          variables.
        """
        self._check_scope("strategy.explain")
        explanation = _explain.explain(self, fn, args, kwargs)
        explanation.print()
        return explanation

    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """Reduces a per-replica value (or a structure of them) to one, as `tf.distribute.Strategy.reduce`.

        Args:
          reduce_op: `tf.distribute.ReduceOp.SUM` or MEAN, or "SUM", "MEAN".
          value: what `run` returned, or a batch.
          axis: None adds the values elementwise; MEAN divides by their number, and weights micro-batches by their rows (or
            `set_weight`). Micro-batches' values with an entry for each row are together one value, the batch's. An int
            (or tuple) reduces that axis of each value too: with axis=0 a MEAN weights every row alike, however unevenly
            they are spread.

        Returns:
          A tensor of the values' dtype (integers with MEAN: float64).
        """
        self._check_scope("strategy.reduce")
        if axis is not None and self.extended.reduces_axes_itself:
            return self.extended.reduce_axis(reduce_op, value, axis)
        return super().reduce(reduce_op, value, axis)

    @property
    def cluster_resolver(self) -> Any:
        """The base's, which says which worker this process is; None without one."""
        base = self.extended.real.base
        return None if base is None else base.cluster_resolver

    def __getattr__(self, name: str) -> Any:
        # An AttributeError, so that hasattr() tells a strategy for TPUs from this one, as from any other.
        if name.startswith("experimental_") and "logical_device" in name:
            raise _errors.no_logical_devices(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _check_scope(self, what: str) -> None:
        current = tf.distribute.get_strategy()
        if tf.distribute.has_strategy():
            if current is not self:
                raise _errors.other_strategy_scope(self, current, what)
            if not tf.distribute.in_cross_replica_context():
                raise _errors.inside_replica_function(what)

    def __repr__(self) -> str:
        real = self.extended.real
        kind = "GPU" if "GPU" in real.devices[0] else "CPU"
        virtual = self.num_replicas_in_sync // real.number
        choice = _choose.Choice(kind, real.workers, len(real.devices), virtual, self.extended.micro_batches)
        return f"<MicroBatchStrategy: {choice}>"


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
        return _tf.canonicalize_device(next((name for name in devices if "GPU" in name), "/CPU:0"))
    if _tf.canonicalize_device(device) not in [_tf.canonicalize_device(name) for name in devices]:
        raise _errors.no_such_device(device, devices)
    return _tf.canonicalize_device(device)


def _real_replicas(base: Any, device: str | None) -> _real.Real:
    stock = isinstance(base, tf.distribute.MirroredStrategy | tf.distribute.MultiWorkerMirroredStrategy)
    if not stock or isinstance(
        base, MicroBatchStrategy
    ):  # which it may be too, where it is made by microstrat.virtualize
        raise _errors.bad_base(base)
    if device is not None:
        raise _errors.base_and_device(base, device)
    return _real.of_base(base)
