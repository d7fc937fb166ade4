"""Programs that make TensorFlow's strategies themselves get the chosen one, while they are virtualized."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import microstrat

MAKERS = {
    "mirrored": lambda: tf.distribute.MirroredStrategy(),
    "devices": lambda: tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"]),
    "one device": lambda: tf.distribute.OneDeviceStrategy("/gpu:0"),
    "workers": lambda: tf.distribute.MultiWorkerMirroredStrategy(),
    "old workers": lambda: tf.distribute.experimental.MultiWorkerMirroredStrategy(),
    "v1": lambda: tf.compat.v1.distribute.MirroredStrategy(),
}
CLASSES = {
    "mirrored": tf.distribute.MirroredStrategy,
    "devices": tf.distribute.MirroredStrategy,
    "one device": tf.distribute.OneDeviceStrategy,
    "workers": tf.distribute.MultiWorkerMirroredStrategy,
    "old workers": tf.distribute.experimental.MultiWorkerMirroredStrategy,
    "v1": tf.compat.v1.distribute.MirroredStrategy,
}
ROWS = tf.reshape(tf.range(12.0), [6, 2])


def virtual_replicas(strategy: Any) -> int:
    """How many replicas of ours a strategy has; 0 if it is none of ours."""
    return strategy.num_replicas_in_sync if isinstance(strategy, microstrat.MicroBatchStrategy) else 0


@pytest.mark.core
@pytest.mark.parametrize("name", MAKERS)
def test_constructors_give_the_strategy(name: str) -> None:
    with microstrat.virtualize(replicas=3):
        strategy: Any = MAKERS[name]()
        assert MAKERS[name]() is strategy
    assert virtual_replicas(strategy) == 3
    assert isinstance(strategy, CLASSES[name])
    with strategy.scope():
        assert tf.distribute.get_strategy() is strategy
    total = tf.function(lambda: strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", 1.0)))()
    assert [float(part) for part in strategy.experimental_local_results(total)] == [3.0] * 3


def test_a_strategy_is_of_the_kind_that_was_asked_for() -> None:
    with microstrat.virtualize(replicas=3):
        strategy = tf.distribute.MirroredStrategy()
        assert tf.distribute.OneDeviceStrategy("CPU:0") is strategy  # there is one, and it was named already
    assert not isinstance(strategy, (tf.distribute.OneDeviceStrategy, tf.distribute.MultiWorkerMirroredStrategy))


def test_a_strategy_for_workers_knows_of_none() -> None:
    with microstrat.virtualize(replicas=2):
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    assert strategy.cluster_resolver.task_type is tf.distribute.MultiWorkerMirroredStrategy().cluster_resolver.task_type
    assert strategy.cluster_resolver.cluster_spec().as_dict() == {}


def test_constructors_are_themselves_again() -> None:
    with microstrat.virtualize(replicas=3):
        tf.distribute.MirroredStrategy()
    with contextlib.suppress(KeyError), microstrat.virtualize(replicas=3):
        raise KeyError
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    assert type(strategy) is tf.distribute.MirroredStrategy and strategy.num_replicas_in_sync == 1
    assert type(tf.distribute.OneDeviceStrategy(device="CPU:0")) is tf.distribute.OneDeviceStrategy


def test_blocks_nest() -> None:
    with microstrat.virtualize(replicas=3):
        with microstrat.virtualize(replicas=2):
            assert virtual_replicas(tf.distribute.MirroredStrategy()) == 2
        assert virtual_replicas(tf.distribute.MirroredStrategy()) == 3


def test_real_strategies_of_our_own_are_made_as_ever() -> None:
    with microstrat.virtualize(replicas=3):
        assert str(microstrat.make_strategy(1, mode="real")) == "<MirroredStrategy: 1 replica = 1 CPU>"
    with microstrat.virtualize(mode="real"):
        strategy = tf.distribute.MirroredStrategy(["GPU:7"])
        assert str(strategy) == "<MirroredStrategy: 1 replica = 1 CPU>"
        assert tf.distribute.MirroredStrategy(["GPU:8"]) is strategy is tf.distribute.OneDeviceStrategy("GPU:7")
    assert not isinstance(strategy, tf.distribute.OneDeviceStrategy)  # TensorFlow's own is what it is


def test_a_base_must_be_real() -> None:
    with (
        microstrat.virtualize(replicas=3),
        pytest.raises(TypeError, match=r"base must be .* Got <MicroBatchStrategy: 3 rep"),
    ):
        microstrat.MicroBatchStrategy(2, base=tf.distribute.MirroredStrategy())


class Named(tf.distribute.MirroredStrategy):
    """A program's own subclass."""

    def __init__(self, name: str, devices: Any = None):
        self.name = name
        super().__init__(devices)

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        return self.name, super().run(fn, args, kwargs, options)


@pytest.mark.parametrize("first", [True, False])
def test_subclasses_keep_what_they_override(first: bool) -> None:
    with microstrat.virtualize(replicas=3):
        plain = None if first else tf.distribute.MirroredStrategy()
        strategy = Named("mine", ["GPU:0"])
    assert isinstance(strategy, Named) and strategy is not plain
    assert virtual_replicas(strategy) == 3
    name, found = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", 1.0))
    assert name == "mine" and len(strategy.experimental_local_results(found)) == 3
    assert type(Named("real", ["CPU:0"])) is Named


def test_threads() -> None:
    found: dict[str, int] = {}
    inside, leave = threading.Event(), threading.Event()

    def own() -> None:
        with microstrat.virtualize(replicas=5):
            inside.set()
            leave.wait()
            found["own"] = virtual_replicas(tf.distribute.MirroredStrategy())

    def other() -> None:
        found["other"] = virtual_replicas(tf.distribute.MirroredStrategy(["CPU:0"]))

    with microstrat.virtualize(replicas=3):
        worker = threading.Thread(target=other)
        worker.start()
        worker.join()
        waiting = threading.Thread(target=own)
        waiting.start()
        inside.wait()
        assert virtual_replicas(tf.distribute.MirroredStrategy()) == 3  # the other thread's block is its own
    leave.set()
    waiting.join()
    other_after = threading.Thread(target=lambda: found.update(after=virtual_replicas(MAKERS["mirrored"]())))
    other_after.start()
    other_after.join()
    assert found == {"own": 5, "other": 3, "after": 0}


def test_what_a_program_says_is_ignored_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "microstrat"), microstrat.virtualize(replicas=3):
        for _ in range(2):
            MAKERS["devices"]()
        tf.distribute.MirroredStrategy()
    ignored = [message for message in caplog.messages if "ignored" in message]
    assert ignored == [
        "MirroredStrategy(['GPU:0', 'GPU:1']) gives <MicroBatchStrategy: 3 replicas = 1 CPU × 3 micro-batches>; "
        "what it says is ignored"
    ]


def test_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MICROSTRAT_REPLICAS", "2")
    with microstrat.virtualize(replicas=3):
        assert virtual_replicas(tf.distribute.MirroredStrategy()) == 2


# --- Code for one device ----------------------------------------------------------------------------------------------
def train(scope: contextlib.AbstractContextManager[Any], how: str) -> tuple[Any, list[np.ndarray]]:
    """A program for one device that knows nothing of microstrat."""
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=[60, 8]).astype("float32")
    y = (x[:, :1] > 0).astype("float32")
    with scope:
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
        loss_fn, optimizer = keras.losses.BinaryCrossentropy(from_logits=True), keras.optimizers.Adam(0.01)
        accuracy = keras.metrics.BinaryAccuracy(threshold=0.0)
        if how == "fit":
            model.compile(optimizer, loss_fn, metrics=[accuracy])
            history = model.fit(x, y, batch_size=25, epochs=2, shuffle=False, verbose=0).history
            return {**history, "evaluated": model.evaluate(x, y, verbose=0)}, model.get_weights()

        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                logits = model(x, training=True)
                loss = loss_fn(y, logits)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            accuracy.update_state(y, logits)
            return loss

        @tf.function
        def in_strategy(x: Any, y: Any) -> Any:
            strategy = tf.distribute.get_strategy()
            return strategy.reduce("MEAN", strategy.run(step, args=(x, y)), axis=None)

        run: Any = {"run": in_strategy, "loop": tf.function(step), "eager loop": step}[how]
        losses = [float(run(*batch)) for batch in tf.data.Dataset.from_tensor_slices((x, y)).batch(25)]
        return {"losses": losses, "accuracy": float(accuracy.result())}, model.get_weights()


@pytest.mark.filterwarnings("ignore:An optimizer stepped outside strategy.run:UserWarning")  # looked at below
@pytest.mark.parametrize("how", ["fit", "run", "loop", "eager loop"])
def test_code_for_one_device_comes_to_the_same(how: str) -> None:
    shown, weights = train(microstrat.virtualize(micro_batches=4), how)
    plain, plain_weights = train(contextlib.nullcontext(), how)
    assert shown.keys() == plain.keys()
    for name in plain:
        np.testing.assert_allclose(shown[name], plain[name], rtol=1e-5, err_msg=name)
    for one, other in zip(weights, plain_weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_a_loop_that_runs_uncut_says_so() -> None:
    with pytest.warns(
        UserWarning, match=r"stepped outside strategy\.run, so its batch was not cut.*get_strategy\(\)\.run"
    ):
        train(microstrat.virtualize(micro_batches=4), "loop")


def parts_of_a_batch(strategy: Any) -> int:
    rows = tf.function(lambda: strategy.run(lambda x: tf.shape(x)[0], args=(ROWS,)))()
    return len(strategy.experimental_local_results(rows))


def test_code_for_one_device_is_cut() -> None:
    with microstrat.virtualize(micro_batches=3):
        strategy = tf.distribute.get_strategy()
        assert parts_of_a_batch(strategy) == 3
        made = tf.distribute.MirroredStrategy(["GPU:0"])
        assert made is strategy and isinstance(made, tf.distribute.MirroredStrategy)
        with made.scope():
            assert tf.distribute.get_strategy() is strategy
    assert not tf.distribute.has_strategy()


def test_replicas_that_cut_need_a_constructor() -> None:
    with microstrat.virtualize(replicas=2, micro_batches=3):
        assert not tf.distribute.has_strategy()
        assert str(tf.distribute.MirroredStrategy()).endswith("1 CPU × 2 virtual replicas, each in 3 micro-batches>")
