"""Checkpoints: written and read under one strategy, and across the two."""

from __future__ import annotations

import tempfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.programs._registry import (
    BATCH,
    OWN_STATISTICS,
    batches,
    by_path,
    exchange_directory,
    labels,
    local,
    per_replica,
    program,
    rows,
)


class _Trainer:
    """A model with batch norm, an optimizer, a metric and variables of every kind, in one tf.train.Checkpoint."""

    def __init__(self, strategy: tf.distribute.Strategy):
        self.strategy = strategy
        on_read = tf.VariableSynchronization.ON_READ
        with strategy.scope():
            self.model = keras.Sequential(
                [
                    keras.Input((6,)),
                    keras.layers.Dense(8, use_bias=False),
                    keras.layers.BatchNormalization(),
                    keras.layers.Dropout(0.2, seed=3),
                    keras.layers.Dense(4),
                ]
            )
            self.optimizer = keras.optimizers.Adam(0.01)
            self.optimizer.build(self.model.trainable_variables)
            self.plain = {
                "none": tf.Variable(0.0, trainable=False),
                "mean": tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.MEAN),
                "local sum": tf.Variable(0.0, synchronization=on_read, aggregation=tf.VariableAggregation.SUM),
                "local mean": tf.Variable(0.0, synchronization=on_read, aggregation=tf.VariableAggregation.MEAN),
            }
        # Keras' variables are stored as what they wrap.
        everything = [*self.model.variables, *self.optimizer.variables]
        self.checkpoint = tf.train.Checkpoint(keras=[variable.value for variable in everything], plain=self.plain)

    def train(self, epochs: int) -> dict[str, Any]:
        def replica_step(x: Any, y: Any) -> tf.Tensor:
            with tf.GradientTape() as tape:
                logits = self.model(x, training=True)
                loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)) / BATCH
            gradients = tape.gradient(loss, self.model.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
            for variable in self.plain.values():
                variable.assign_add(tf.reduce_sum(x))
            return loss

        step = tf.function(lambda inputs: self.strategy.run(replica_step, args=inputs))
        data = batches(rows(2 * BATCH, 6), labels(2 * BATCH))
        losses = []
        for _ in range(epochs):
            for inputs in self.strategy.experimental_distribute_dataset(data):
                losses.append(local(self.strategy, step(inputs)))
        return {"losses": losses, **self.state()}

    def state(self) -> dict[str, Any]:
        return {
            "weights": by_path(self.model.variables),
            "optimizer": by_path(self.optimizer.variables),
            "plain": {name: np.asarray(variable.numpy()) for name, variable in self.plain.items()},
            "own": per_replica(self.strategy, [*self.model.variables, *self.plain.values()]),
        }


@program(core=True, why_not_whole=OWN_STATISTICS)
def checkpoint_written_and_read(strategy: tf.distribute.Strategy) -> Any:
    """Restored into the same objects and into new ones; both then train on alike."""
    with tempfile.TemporaryDirectory() as directory:
        first = _Trainer(strategy)
        out = [first.train(2)]
        path = first.checkpoint.save(f"{directory}/checkpoint")
        names = sorted(name for name, _ in tf.train.list_variables(path))
        out.append(first.train(1))
        first.checkpoint.restore(path).assert_consumed()
        out.append(first.state())
        out.append(first.train(1))
        keras.backend.clear_session()
        second = _Trainer(strategy)
        second.checkpoint.restore(path).assert_consumed()
        out.append(second.state())
        out.append(second.train(1))
        return {"out": out, "names": names}


@program(replicas=(2, 4), why_not_whole=OWN_STATISTICS)
def keras_weights_written_and_read(strategy: tf.distribute.Strategy) -> Any:
    """get_weights, set_weights, and a weights file, after replicas have moved their own statistics."""
    trainer = _Trainer(strategy)
    out = [trainer.train(2)]
    weights = trainer.model.get_weights()
    trainer.train(1)
    trainer.model.set_weights(weights)
    out.append(trainer.state())
    with tempfile.TemporaryDirectory() as directory:
        trainer.model.save_weights(f"{directory}/one.weights.h5")
        trainer.train(1)
        trainer.model.load_weights(f"{directory}/one.weights.h5")
        out.append(trainer.state())
    return out


@program(replicas=(2, 4), eager=(), core=True, why_not_whole=OWN_STATISTICS)
def checkpoint_handed_over(strategy: tf.distribute.Strategy) -> Any:
    """Trains, writes a checkpoint for the other strategy's process, and goes on. See `checkpoint_taken_over`."""
    trainer = _Trainer(strategy)
    trainer.train(2)
    trainer.checkpoint.write(_exchanged(type(strategy).__name__, strategy.num_replicas_in_sync))
    return trainer.train(2)


@program(replicas=(2,), eager=(), core=True, after="checkpoint_handed_over", why_not_whole=OWN_STATISTICS)
def checkpoint_taken_over(strategy: tf.distribute.Strategy) -> Any:
    """Reads what the other strategy wrote, on as many replicas and on more; what was written without any; and trains on."""
    names = {"MirroredStrategy", "MicroBatchStrategy"} - {type(strategy).__name__}
    (other,) = names
    plain = _Trainer(tf.distribute.get_strategy())
    plain.train(1)
    paths = [_exchanged(other, 2), *[_exchanged(name, 4) for name in ("MirroredStrategy", "MicroBatchStrategy")]]
    paths += [plain.checkpoint.write(_exchanged(type(strategy).__name__, 0))]
    out = []
    for path in paths:
        keras.backend.clear_session()
        trainer = _Trainer(strategy)
        trainer.checkpoint.read(path).assert_consumed()
        out.append([trainer.state(), trainer.train(2)])
    plain.checkpoint.read(_exchanged(other, 2)).assert_consumed()
    return [*out, plain.train(1)]


def _exchanged(strategy: str, replicas: int) -> str:
    """The checkpoint that a strategy's process wrote."""
    return str(exchange_directory() / f"{strategy}-{replicas}")


class _Module(tf.Module):
    """Variables of every kind."""

    def __init__(self) -> None:
        super().__init__()
        on_read, sums = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM
        self.weight = tf.Variable(tf.ones([3]))
        self.own = tf.Variable(0.0, trainable=False)
        self.total = tf.Variable(0.0, trainable=False, synchronization=on_read, aggregation=sums)
        self.mean = tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.MEAN)

    @tf.function(input_signature=[tf.TensorSpec([3])])
    def __call__(self, x: Any) -> Any:
        return x * self.weight + 2.0 * self.own + 3.0 * self.total + 4.0 * self.mean

    @tf.function(input_signature=[])
    def count(self) -> Any:
        return self.total.assign_add(1.0)

    def write(self, factor: float) -> None:
        """In a replica function."""
        number = factor * tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group + 1, tf.float32)
        self.own.assign(number)
        self.total.assign_add(number)
        self.mean.assign(number)


@program(replicas=(2,), eager=(2,), core=True, why_not_whole="what replicas write differs")
def saved_models(strategy: tf.distribute.Strategy) -> Any:
    """tf.saved_model.save of a module that replicas have written, loaded in scope and outside; used in replicas."""
    x = tf.ones([3])
    with strategy.scope():
        module = _Module()
    tf.function(lambda: strategy.run(lambda: module.write(1.0)))()
    out = [module(x)]
    with tempfile.TemporaryDirectory() as directory:
        tf.saved_model.save(module, directory)
        outside = tf.saved_model.load(directory)
        out += [outside(x), outside.count(), outside(x)]
        names = sorted(name for name, _ in tf.train.list_variables(f"{directory}/variables/variables"))
        with strategy.scope():
            tf.saved_model.save(module, f"{directory}/again")
            inside: Any = tf.saved_model.load(f"{directory}/again")

    def replica_step(factor: float) -> Any:
        before = inside(x)
        _Module.write(inside, factor)
        total = tf.distribute.get_replica_context().all_reduce("sum", inside(x))
        return before, total, inside(x)

    step = tf.function(lambda: strategy.run(replica_step, args=(5.0,)))
    seen = [[local(strategy, value) for value in step()] for _ in range(2)]
    values = [variable.numpy() for variable in (inside.weight, inside.own, inside.total, inside.mean)]
    return {"out": [value.numpy() for value in out], "seen": seen, "values": values, "names": names}


@program(replicas=(2,), eager=(), why="the same in both engines, and long", why_not_whole=OWN_STATISTICS)
def keras_models_saved(strategy: tf.distribute.Strategy) -> Any:
    """.keras and .h5 files, export, and a CheckpointManager of a compiled model, after training; all go on to train."""

    def compiled() -> Any:
        trainer = _Trainer(strategy)
        with strategy.scope():
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            trainer.model.compile("adam", loss, metrics=["accuracy"])
            trainer.model.optimizer.build(trainer.model.trainable_variables)
        return trainer.model

    def fit(model: Any) -> Any:
        history = model.fit(batches(rows(2 * BATCH, 6), labels(2 * BATCH)), verbose=0)
        return {"loss": history.history["loss"], **by_path([*model.variables, *model.optimizer.variables])}

    out = []
    with tempfile.TemporaryDirectory() as directory:
        model = compiled()
        fit(model)
        manager = tf.train.CheckpointManager(tf.train.Checkpoint(model), f"{directory}/checkpoints", max_to_keep=1)
        manager.save()
        model.save(f"{directory}/model.keras")
        model.save(f"{directory}/model.h5")
        model.export(f"{directory}/exported", verbose=False)
        out.append(fit(model))
        for name in ("model.keras", "model.h5"):
            keras.backend.clear_session()
            with strategy.scope():
                loaded = keras.models.load_model(f"{directory}/{name}", compile=name == "model.keras")
                if name == "model.h5":
                    loaded.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            out.append(fit(loaded))
        keras.backend.clear_session()
        again = compiled()
        tf.train.Checkpoint(again).restore(manager.latest_checkpoint)
        out.append(fit(again))
        with strategy.scope():
            exported: Any = tf.saved_model.load(f"{directory}/exported")
        step = tf.function(lambda x: strategy.run(lambda part: exported.serve(part), args=(x,)))
        for x in strategy.experimental_distribute_dataset(batches(rows(BATCH, 6))):
            out.append(local(strategy, step(x)))
    return out
