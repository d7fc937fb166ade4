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


@program(replicas=(2, 3), why_not_whole=OWN_STATISTICS)
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


@program(replicas=(2,), eager=(), core=True, why_not_whole=OWN_STATISTICS)
def checkpoint_handed_over(strategy: tf.distribute.Strategy) -> Any:
    """Trains, writes a checkpoint for the other strategy's process, and goes on. See `checkpoint_taken_over`."""
    trainer = _Trainer(strategy)
    trainer.train(2)
    trainer.checkpoint.write(str(exchange_directory() / type(strategy).__name__))
    return trainer.train(2)


@program(replicas=(2,), eager=(), core=True, after="checkpoint_handed_over", why_not_whole=OWN_STATISTICS)
def checkpoint_taken_over(strategy: tf.distribute.Strategy) -> Any:
    """Reads what the other strategy wrote, and trains on."""
    names = {"MirroredStrategy", "MicroBatchStrategy"} - {type(strategy).__name__}
    trainer = _Trainer(strategy)
    trainer.checkpoint.read(str(exchange_directory() / names.pop())).assert_consumed()
    return [trainer.state(), trainer.train(2)]
