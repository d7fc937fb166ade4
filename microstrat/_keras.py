"""The boundary to Keras: what microstrat must know of Keras' inside, and the only module that patches it.

Nothing here imports Keras: a program that has not, does not use it. Works for Keras 3 and tf_keras, whichever are loaded.

Checked on Keras 3.12 and 3.15, tf_keras 2.16 and 2.21 unless a line says otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import tensorflow as tf

from microstrat import _errors, _patches
from microstrat._tf import tape_is_recording

_MEANS = ("mean", "sum_over_batch_size", "auto")


class Combiner(Protocol):
    """How a trace over micro-batches adds and weighs what they compute."""

    def varies(self, value: Any) -> bool:
        """Whether micro-batches have different values."""
        ...

    def total(self, value: Any) -> Any:
        """Sum over the micro-batches."""
        ...

    def fraction(self) -> tf.Tensor:
        """What this micro-batch weighs in a mean over all; adds up to 1."""
        ...


def _frames() -> Iterator[Any]:
    """The calls that are running on this thread, innermost first."""
    frame = sys._getframe(1)  # noqa: SLF001 - Python's own; inspect.stack() would read the sources too
    while frame is not None:
        yield frame
        frame = frame.f_back


def _classes(*names: str) -> tuple[type, ...]:
    """Those of the classes 'module:Name' whose module is loaded."""
    found = []
    for name in names:
        module, _, attribute = name.partition(":")
        if module in sys.modules and hasattr(sys.modules[module], attribute):
            found.append(getattr(sys.modules[module], attribute))
    return tuple(found)


def _optimizers() -> tuple[type, ...]:
    return (
        *_classes("keras.src.optimizers.base_optimizer:BaseOptimizer"),
        *_classes("tf_keras.src.optimizers.optimizer:_BaseOptimizer"),
        *_classes("tf_keras.src.optimizers.legacy.optimizer_v2:OptimizerV2"),
        tf.compat.v1.train.Optimizer,
    )


def optimizer_is_applying() -> bool:
    """Whether an optimizer has been given gradients and is at work on them."""
    kinds = _optimizers()
    return any(isinstance(frame.f_locals.get("self"), kinds) for frame in _frames())


def batch_normalization_updating(variable: Any) -> Any:
    """The BatchNormalization layer that is updating `variable`, one of its moving statistics; None if none is.

    The layer computes the value to assign from the batch's statistics and its momentum. To combine those of micro-batches
    one must know the momentum, and which of the two statistics it is.
    """
    kinds = (
        *_classes("keras.src.layers.normalization.batch_normalization:BatchNormalization"),
        *_classes("tf_keras.src.layers.normalization.batch_normalization:BatchNormalizationBase"),
    )
    for frame in _frames():
        layer = frame.f_locals.get("self")
        if isinstance(layer, kinds) and not getattr(layer, "renorm", False):
            if any(plain(getattr(layer, name)) is variable for name in ("moving_mean", "moving_variance")):
                return layer
    return None


def plain(variable: Any) -> Any:
    """The tf.Variable behind a Keras variable; anything else as it is."""
    inner = getattr(variable, "_value", None)
    return inner if inner is not None and isinstance(inner, tf.Variable) else variable


def scalar_mean_updating(variable: Any, varies: Callable[[Any], bool]) -> bool:
    """Whether a Mean metric is adding one number for the whole batch (its loss, say) to `variable`, its total.

    It counts that number once, or with a weight that micro-batches have in common. So it is a value of the batch, and not
    the sum of something over rows, which is what metrics add otherwise.
    """
    kinds = (
        *_classes("keras.src.metrics.reduction_metrics:Mean"),
        *_classes("tf_keras.src.metrics.base_metric:Reduce"),
    )
    for frame in _frames():
        metric, values = frame.f_locals.get("self"), frame.f_locals.get("values")
        if frame.f_code.co_name != "update_state" or not isinstance(metric, kinds) or values is None:
            continue
        if plain(metric.total) is variable and hasattr(metric, "count"):
            return tf.convert_to_tensor(values).shape.rank == 0 and not varies(frame.f_locals.get("sample_weight"))
    return False


# --- Losses of replicas ---------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def watched_losses(warn: Callable[[str], None]) -> Iterator[None]:
    """Calls `warn(name)` for every Keras loss whose mean is not divided by the number of replicas.

    Keras divides its means by it (since `scale_loss_for_distribution` exists), but not what is one number already.
    """
    module = sys.modules.get("keras.src.losses.loss")
    if module is None:
        yield
        return
    scales = hasattr(module, "scale_loss_for_distribution")

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        def reduce_values(values: Any, *args: Any, **kwargs: Any) -> Any:
            reduction = kwargs.get("reduction", args[1] if len(args) > 1 else "sum_over_batch_size")
            if reduction in _MEANS and (values.shape.rank == 0 or not scales) and tape_is_recording():
                warn(_name_of_loss())
            return stock(values, *args, **kwargs)

        return reduce_values

    with _patches.replaced(module, "reduce_values", make):
        yield


@contextlib.contextmanager
def accumulating_together() -> Iterator[None]:
    """Makes Keras' `gradient_accumulation_steps` add the mean of the replicas' gradients, instead of each its own.

    The optimizer sums over the replicas later anyway, so one sum serves all of them: in memory, and in a checkpoint. Only
    where gradients are clipped, by each replica before they meet, are they not the same.
    """
    optimizers = _classes("keras.src.backend.tensorflow.optimizer:TFOptimizer")
    if not optimizers:
        yield
        return

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        def increment(self: Any, grads: Any, acc_grads: Any) -> Any:
            if all(getattr(self, name) is None for name in ("clipnorm", "global_clipnorm", "clipvalue")):
                grads = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, grads)
            return stock(self, grads, acc_grads)

        return increment

    with _patches.replaced(optimizers[0], "_backend_increment_gradient_accumulators", make):
        yield


def _name_of_loss() -> str:
    kinds = _classes("keras.src.losses.loss:Loss")
    for frame in _frames():
        loss = frame.f_locals.get("self")
        if isinstance(loss, kinds):
            return str(loss.name)
    return "loss"


# --- Building models ------------------------------------------------------------------------------------------------------
def build_while_tracing(is_one_replica: Callable[[Any], bool]) -> None:
    """Keeps Keras from building models before they run, where there is one replica.

    Under a strategy Keras draws a batch, drops it, and calls the model on symbols of its shapes: a generator's first batch
    is lost, a shuffled dataset gives another order, and a model that only its own train_step can call is refused. Without
    one it builds models while it traces the first step, and so it can here. The method is replaced for good, and does
    nothing for strategies of which `is_one_replica`.
    """
    for trainer in _classes("keras.src.backend.tensorflow.trainer:TensorFlowTrainer"):
        method = getattr(trainer, "_maybe_symbolic_build", None)
        if method is not None and not hasattr(method, "stock"):
            setattr(trainer, "_maybe_symbolic_build", _building(method, is_one_replica))  # noqa: B010 - a private name


def _building(stock: Callable[..., Any], is_one_replica: Callable[[Any], bool]) -> Callable[..., Any]:
    def maybe_symbolic_build(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_one_replica(self.distribute_strategy):
            return stock(self, *args, **kwargs)
        if self.built and self.optimizer is not None and not self.optimizer.built:
            with self.distribute_strategy.scope():  # callbacks that restore it are outside
                self.optimizer.build(self.trainable_variables)
        return None

    maybe_symbolic_build.stock = stock  # pyright: ignore[reportFunctionMemberAccess]
    return maybe_symbolic_build


# --- Loss scaling ---------------------------------------------------------------------------------------------------------
def support_loss_scaling(is_ours: Callable[[Any], bool]) -> None:
    """Makes tf_keras scale losses under strategies of which `is_ours`; it allows its own list of classes only.

    It asks for gradients that are unscaled once for each copy of a variable, which is so here.
    """
    module: Any = sys.modules.get("tf_keras.src.mixed_precision.loss_scale_optimizer")
    stock = getattr(module, "strategy_supports_loss_scaling", None)
    if stock is not None and not hasattr(stock, "stock"):

        def strategy_supports_loss_scaling() -> bool:
            return is_ours(tf.distribute.get_strategy()) or stock()

        strategy_supports_loss_scaling.stock = stock  # pyright: ignore[reportFunctionMemberAccess]
        module.strategy_supports_loss_scaling = strategy_supports_loss_scaling


# --- Results ------------------------------------------------------------------------------------------------------------
def weigh_results(is_weighted: Callable[[Any], bool]) -> None:
    """Makes fit's logs weigh values that do not weigh the same, and add those that are declared to be sums.

    Keras averages what replicas return with `tf.reduce_mean` (tf_keras adds it up), not with `strategy.reduce`. The function
    that does is replaced for good, and differs from Keras' for values of which `is_weighted` only.
    """
    for name in ("keras.src.backend.tensorflow.trainer", "tf_keras.src.engine.training"):
        module: Any = sys.modules.get(name)
        if module is not None and not hasattr(module.reduce_per_replica, "stock"):
            module.reduce_per_replica = _weighing(module.reduce_per_replica, is_weighted)


def _weighing(stock: Callable[..., Any], is_weighted: Callable[[Any], bool]) -> Callable[..., Any]:
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        if reduction in ("auto", "mean") and hasattr(strategy.extended, "loss_reduction"):
            how = "SUM" if strategy.extended.loss_reduction == "sum" else "MEAN"
            values = tf.nest.map_structure(
                lambda value: strategy.reduce(how, value, axis=None) if is_weighted(value) else value, values
            )
        return stock(values, strategy, reduction)

    reduce_per_replica.stock = stock  # pyright: ignore[reportFunctionMemberAccess]
    return reduce_per_replica


# --- Losses -------------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def whole_batch_losses(combiner: Combiner, loss_reduction: str) -> Iterator[None]:
    """Makes Keras' losses add up to the whole batch's, whatever they are divided by.

    Keras knows what a loss is: a sum, a mean over rows, over what a mask leaves, over the sum of the sample weights. Each
    is multiplied here by what makes the trace's combination of the micro-batches' losses the whole batch's loss: with
    `loss_reduction` "mean" their mean weighted by `fraction`, with "sum" their sum.
    """
    is_sum = loss_reduction == "sum"
    loaded = sys.modules
    patches = [
        ("keras.src.losses.loss", "apply_mask", _masked),
        ("keras.src.losses.loss", "reduce_values", functools.partial(_reduced, is_sum=is_sum)),
        ("tf_keras.src.utils.losses_utils", "apply_valid_mask", _masked_tf_keras),
        (
            "tf_keras.src.utils.losses_utils",
            "reduce_weighted_loss",
            functools.partial(_reduced_tf_keras, is_sum=is_sum),
        ),
    ]
    with contextlib.ExitStack() as stack:
        for module, name, make in patches:
            if module in loaded:
                stack.enter_context(_patches.replaced(loaded[module], name, functools.partial(make, combiner)))
        for loss in _classes("tf_keras.src.losses:Loss"):
            stack.enter_context(_patches.replaced(loss, "_get_reduction", _mean_if_auto))
        for kind in ("keras.src.layers.rnn.rnn:RNN", "tf_keras.src.layers.rnn.base_rnn:RNN"):
            for layer in _classes(kind):
                stack.enter_context(_patches.replaced(layer, "call", _not_stateful))
        for layer in _classes("keras.src.layers.layer:Layer") if not is_sum else ():
            if not _divides_activity_losses(layer):
                stack.enter_context(_patches.replaced(layer, "add_loss", functools.partial(_activity, combiner)))
        for trainer in _classes("keras.src.backend.tensorflow.trainer:TensorFlowTrainer"):
            if not is_sum:
                added = functools.partial(_added, combiner)
                stack.enter_context(_patches.replaced(trainer, "_aggregate_additional_loss", added))
        if is_sum and hasattr(loaded.get("keras.src.losses.loss"), "unscale_loss_for_distribution"):
            # Keras calls this on the loss that it logs, and nowhere else.
            new = loaded["keras.src.losses.loss"]
            unscaled = functools.partial(_totalled, combiner)
            stack.enter_context(_patches.replaced(new, "unscale_loss_for_distribution", unscaled))
        yield


def _totalled(combiner: Combiner, stock: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value: stock(combiner.total(value))


def _share(part: tf.Tensor, combiner: Combiner) -> tf.Tensor:
    """This micro-batch's share of a denominator, over what it weighs anyway."""
    whole = combiner.total(part)
    return tf.math.divide_no_nan(part, whole * tf.cast(combiner.fraction(), part.dtype))


def _masked(combiner: Combiner, stock: Callable[..., Any]) -> Callable[..., Any]:
    def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        weights = stock(sample_weight, mask, dtype, reduction)
        if mask is None or reduction not in _MEANS or not combiner.varies(mask):
            return weights
        return weights * _share(tf.reduce_sum(tf.cast(mask, dtype)), combiner)

    return apply_mask


def _masked_tf_keras(combiner: Combiner, stock: Callable[..., Any]) -> Callable[..., Any]:
    def apply_valid_mask(losses: Any, sw: Any, mask: Any, reduction: Any) -> Any:
        weights = stock(losses, sw, mask, reduction)
        if mask is None or reduction not in _MEANS or not combiner.varies(mask):
            return weights
        return weights * _share(tf.reduce_sum(tf.cast(mask, losses.dtype)), combiner)

    return apply_valid_mask


def _reduced(combiner: Combiner, stock: Callable[..., Any], *, is_sum: bool) -> Callable[..., Any]:
    def reduce_values(values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size") -> Any:
        loss = stock(values, sample_weight, reduction)
        if values.shape.rank == 0 or not combiner.varies(loss):
            return loss
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            loss = loss * _share(tf.cast(tf.reduce_sum(sample_weight), loss.dtype), combiner)
            reduction = "mean"
        return _as_declared(loss, reduction, combiner, is_sum=is_sum)

    return reduce_values


def _reduced_tf_keras(combiner: Combiner, stock: Callable[..., Any], *, is_sum: bool) -> Callable[..., Any]:
    def reduce_weighted_loss(weighted_losses: Any, reduction: Any = "sum_over_batch_size") -> Any:
        loss = stock(weighted_losses, reduction)
        if weighted_losses.shape.rank == 0 or not combiner.varies(loss):
            return loss
        return _as_declared(loss, reduction, combiner, is_sum=is_sum)

    return reduce_weighted_loss


def _as_declared(loss: tf.Tensor, reduction: Any, combiner: Combiner, *, is_sum: bool) -> tf.Tensor:
    """A sum where means are declared, or a mean where sums are, scaled to be what is declared."""
    if reduction == "sum" and not is_sum:
        return loss / tf.cast(combiner.fraction(), loss.dtype)
    if reduction in (*_MEANS, "mean_with_sample_weight") and is_sum:
        return loss * tf.cast(combiner.fraction(), loss.dtype)
    return loss


@functools.cache
def _divides_activity_losses(layer: type) -> bool:
    """Whether activity regularizers are divided by the batch size: Keras 3.15 does, 3.12 does not; no version says so."""
    return "divide_no_nan" in inspect.getsource(layer.__call__)


def _mean_if_auto(stock: Callable[..., Any]) -> Callable[..., Any]:
    """tf_keras refuses means under any strategy: between replicas they come out wrong. Of one replica they are right."""
    del stock
    return lambda self: "sum_over_batch_size" if self.reduction == "auto" else self.reduction


def _not_stateful(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.stateful:
            raise _errors.stateful_rnn(self.name)
        return stock(self, *args, **kwargs)

    return call


def _activity(combiner: Combiner, stock: Callable[..., Any]) -> Callable[..., Any]:
    def add_loss(self: Any, loss: Any) -> Any:
        # The layer's own __call__ adds the activity regularizer's loss, a sum over rows; anybody else adds a mean.
        if (
            next(itertools.islice(_frames(), 1 + _patches.CALLS_BETWEEN, None)).f_code.co_name == "__call__"
            and isinstance(loss, tf.Tensor)
            and combiner.varies(loss)
        ):
            loss = loss / tf.cast(combiner.fraction(), loss.dtype)
        return stock(self, loss)

    return add_loss


def _added(combiner: Combiner, stock: Callable[..., Any]) -> Callable[..., Any]:
    def aggregate_additional_loss(self: Any, loss: Any) -> Any:
        total = stock(self, loss)
        # Keras adds the entries of an add_loss() of one for each row.
        of_rows = isinstance(loss, tf.Tensor) and loss.shape.rank and loss.shape[0] is None and combiner.varies(loss)
        return total / tf.cast(combiner.fraction(), total.dtype) if of_rows else total

    return aggregate_additional_loss
