"""make_strategy() and scope(): virtual or real replicas, whichever the machine has room for."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from microstrat import _choose, _errors, _extended, _strategy

log = logging.getLogger("microstrat")
_logged: set[str] = set()

_AS_BY_DEFAULT = {"loss_reduction": "mean", "batch_norm_statistics": "per_replica", "dropout_masks": "mirrored"}


class RealReplicas:
    """What a plain strategy of TensorFlow gets from us: it says in one line what it is."""

    choice: _choose.Choice

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        return object.__new__(cls)  # tf.distribute's classes may be giving other strategies: see _virtualize

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.choice}>"


class MirroredStrategy(RealReplicas, tf.distribute.MirroredStrategy):
    """tf.distribute.MirroredStrategy on the devices of a choice."""

    def __init__(self, choice: _choose.Choice, device: str | None = None):
        self.choice = choice
        tf.distribute.MirroredStrategy.__init__(
            self, [device] if device else [f"{choice.kind}:{index}" for index in range(choice.devices)]
        )


class MultiWorkerMirroredStrategy(RealReplicas, tf.distribute.MultiWorkerMirroredStrategy):
    """tf.distribute.MultiWorkerMirroredStrategy on the workers in TF_CONFIG, with the devices of a choice on each."""

    def __init__(self, choice: _choose.Choice):
        self.choice = choice
        cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        tf.distribute.MultiWorkerMirroredStrategy.__init__(
            self,
            tf.distribute.cluster_resolver.SimpleClusterResolver(
                cluster.cluster_spec(),
                task_type=cluster.task_type,
                task_id=cluster.task_id,
                num_accelerators={"GPU": choice.devices} if choice.kind == "GPU" else {},
                rpc_layer=cluster.rpc_layer or "grpc",
            ),
        )


def make_strategy(
    replicas: int | None = None,
    *,
    micro_batches: int = 1,
    mode: str = "auto",
    loss_reduction: str = "mean",
    batch_norm_statistics: str = "per_replica",
    dropout_masks: str = "mirrored",
    device: str | None = None,
) -> tf.distribute.Strategy:
    """Makes the strategy for so many replicas that this machine has room for: on real devices, virtual, or both.

        strategy = microstrat.make_strategy(8)
        print(strategy)         # <MicroBatchStrategy: 8 replicas = 2 GPUs × 4 micro-batches>
        with strategy.scope():
            model = build_model()

    | what is there | `make_strategy(8)` is |
    |---|---|
    | 8 GPUs | MirroredStrategy on them |
    | 2 GPUs | 4 virtual replicas on each |
    | 3 GPUs | 4 virtual replicas on each of 2, the largest number that divides 8 |
    | 1 GPU, or a CPU | 8 virtual replicas |
    | `TF_CONFIG` with 2 workers of 2 GPUs | MultiWorkerMirroredStrategy, and 2 virtual replicas on each GPU |

    Without GPUs, logical CPUs count as devices if there are several. On one device it is always a MicroBatchStrategy, for
    one replica too, so that what a program may do does not depend on a number (but for `mode="real"`).

    The environment comes before what the code says: `MICROSTRAT_REPLICAS`, `MICROSTRAT_MICRO_BATCHES`, `MICROSTRAT_MODE`.

    Args:
      replicas: N, the number of replicas in all; a positive int. Default: the real devices there are; with
        `micro_batches` above 1 it is one replica, since that is for code written for one device.
      micro_batches: n, the number of parts that each replica cuts its batch in; a positive int. Whole-batch semantics.
      mode: "auto", real devices as far as they go; "virtual", one device; or "real", no virtual replicas.
      loss_reduction: with `micro_batches`, "mean" or "sum": what the losses are, over the rows of the batch.
      batch_norm_statistics: "per_replica" or "averaged"; see `MicroBatchStrategy`.
      dropout_masks: "mirrored" or "independent"; see `MicroBatchStrategy`.
      device: the one device to run on. Default: as `mode` says.

    Returns:
      A `MicroBatchStrategy`; or, if every replica is a device and none of the options asks for more, TensorFlow's own
      `MirroredStrategy` or `MultiWorkerMirroredStrategy` (a subclass that differs in its `repr`).

    Raises:
      ValueError: if a number is not a positive int, an option is unknown or has no meaning here, there is no such
        device, mode is "real" and there are too few devices, or the workers cannot share the replicas equally.
    """
    if replicas is not None:
        replicas = _strategy.positive_int("replicas", replicas)
    micro_batches = _strategy.positive_int("micro_batches", micro_batches)
    choice, mode = _choose_here(replicas, micro_batches, mode, device)
    options = {
        "loss_reduction": loss_reduction,
        "batch_norm_statistics": batch_norm_statistics,
        "dropout_masks": dropout_masks,
    }
    # What the code says of replicas or of micro-batches is no mistake where the environment leaves one of them.
    if replicas is not None and choice.replicas == 1:
        options |= {
            argument: choices[0] for argument, choices in _extended.CHOICES.items() if options[argument] in choices
        }
    whole_batch = micro_batches > 1 or choice.micro_batches > 1
    strategy = _build(choice, options, whole_batch=whole_batch, mode=mode, device=device)
    if str(choice) not in _logged:
        _logged.add(str(choice))
        log.info("%s", choice)
    return strategy


@contextlib.contextmanager
def scope(
    replicas: int | None = None,
    *,
    micro_batches: int = 1,
    mode: str = "auto",
    loss_reduction: str = "mean",
    batch_norm_statistics: str = "per_replica",
    dropout_masks: str = "mirrored",
    device: str | None = None,
) -> Iterator[tf.distribute.Strategy]:
    """Makes a strategy, enters its scope and yields it.

        with microstrat.scope(micro_batches=4):  # code written for one device
            model = build_model()
            model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(train, epochs=3)               # batch 64 runs as 4 micro-batches of 16, with the numbers of 64

        with microstrat.scope(replicas=4):       # was: with tf.distribute.MirroredStrategy().scope():
            ...                                  # 4 devices of 16 rows each, of which those that are missing are virtual

    Args:
      replicas: N, the number of replicas in all. Default: the real devices there are; with `micro_batches`, one.
      micro_batches: n, the number of parts that each replica cuts its batch in.
      mode: "auto", "virtual" or "real".
      loss_reduction: "mean" or "sum".
      batch_norm_statistics: "per_replica" or "averaged".
      dropout_masks: "mirrored" or "independent".
      device: the one device to run on.
        These are `make_strategy`'s arguments, which says more of each.

    Yields:
      The strategy, which is also `tf.distribute.get_strategy()` inside the block.

    Raises:
      ValueError: as `make_strategy`.
    """
    strategy = make_strategy(
        replicas,
        micro_batches=micro_batches,
        mode=mode,
        loss_reduction=loss_reduction,
        batch_norm_statistics=batch_norm_statistics,
        dropout_masks=dropout_masks,
        device=device,
    )
    with strategy.scope():
        yield strategy


def has_made_any() -> bool:
    """Whether make_strategy has made a strategy in this process."""
    return bool(_logged)


def is_for_one_device(replicas: int | None, micro_batches: int) -> bool:
    """Whether these arguments of make_strategy, or the environment, mean code that knows nothing of replicas."""
    replicas, micro_batches = _with_environment(replicas, micro_batches)
    return micro_batches > 1 and replicas in (None, 1)


def _with_environment(replicas: int | None, micro_batches: int) -> tuple[Any, Any]:
    return (
        _number_from_environment("MICROSTRAT_REPLICAS", replicas),
        _number_from_environment("MICROSTRAT_MICRO_BATCHES", micro_batches),
    )


def _choose_here(replicas: int | None, micro_batches: int, mode: str, device: str | None) -> tuple[_choose.Choice, str]:
    """What is chosen on this machine for what the environment says, or else the code; and the mode."""
    replicas, micro_batches = _with_environment(replicas, micro_batches)
    name, mode = ("MICROSTRAT_MODE", said) if (said := os.environ.get("MICROSTRAT_MODE")) else ("mode", mode)
    if mode not in _choose.MODES:
        raise _errors.bad_option(name, mode, _choose.MODES)
    return _choose.choose(_machine(device), replicas, micro_batches, mode), mode


def _build(
    choice: _choose.Choice, options: dict[str, str], *, whole_batch: bool, mode: str, device: str | None
) -> tf.distribute.Strategy:
    is_real = choice.virtual == choice.micro_batches == 1 and options == _AS_BY_DEFAULT
    if is_real and (choice.real > 1 or mode == "real"):
        return _real(choice, device)
    base = _real(choice, device) if choice.real > 1 else None
    on: Any = {"base": base, "device": device, **options}
    if whole_batch:
        return _strategy.MicroBatchStrategy(
            choice.micro_batches, semantics="whole_batch", replicas=choice.virtual, **on
        )
    return _strategy.MicroBatchStrategy(choice.virtual, **on)


def _real(choice: _choose.Choice, device: str | None) -> tf.distribute.Strategy:
    return MultiWorkerMirroredStrategy(choice) if choice.workers > 1 else MirroredStrategy(choice, device)


def _number_from_environment(variable: str, otherwise: int | None) -> Any:
    said = os.environ.get(variable)
    if not said:
        return otherwise
    return _strategy.positive_int(variable, int(said) if said.strip().isdecimal() else said)


def _machine(device: str | None) -> _choose.Machine:
    """What there is to run on, found without starting TensorFlow: its multi-worker strategy must do that itself."""
    if device is not None:
        return _choose.Machine("GPU" if "GPU" in device.upper() else "CPU", 1)
    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    jobs = cluster.cluster_spec().as_dict() if cluster.task_type in ("chief", "worker") else {}
    workers = max(sum(len(jobs.get(job, ())) for job in ("chief", "worker")), 1)
    gpus = _count("GPU")
    # On CPUs, MultiWorkerMirroredStrategy uses one device of each worker.
    return (
        _choose.Machine("GPU", gpus, workers)
        if gpus
        else _choose.Machine("CPU", _count("CPU") if workers == 1 else 1, workers)
    )


def _count(kind: str) -> int:
    """The number of logical devices of a kind."""
    return sum(
        len(tf.config.get_logical_device_configuration(device) or [None])
        for device in tf.config.get_visible_devices(kind)
    )
