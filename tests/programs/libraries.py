"""Libraries that people use on top of TensorFlow and Keras; each is given the strategy as it is."""

from __future__ import annotations

import importlib
import pathlib
import tempfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.programs._registry import BATCH, arrays, batches, by_path, labels, program, rows

NUMBER = 2 * BATCH + 8
"""Rows of the data: two full batches, and a third of one."""


# --- KerasHub ---------------------------------------------------------------------------------------------------------
def _classifier() -> Any:
    models = importlib.import_module("keras_hub.models")
    backbone = models.BertBackbone(
        vocabulary_size=14,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        dropout=0.0,
        max_sequence_length=12,
    )
    return models.BertTextClassifier(backbone, num_classes=4, dropout=0.0)


def _tokens() -> dict[str, np.ndarray]:
    """Padded rows of tokens, of which half have two segments."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 12, (NUMBER, 1))
    padding_mask = np.arange(12) < lengths
    return {
        "token_ids": np.where(padding_mask, rng.integers(5, 14, (NUMBER, 12)), 0),
        "segment_ids": (padding_mask & (np.arange(12) > lengths // 2) & (rng.random((NUMBER, 1)) < 0.5)).astype(int),
        "padding_mask": padding_mask.astype(int),  # MirroredStrategy cannot add up the booleans of a first batch
    }


@program(replicas=(2,), eager=(), needs="keras_hub", whole="mean")
def keras_hub_classifier(strategy: tf.distribute.Strategy) -> Any:
    """As its constructor compiles it: AdamW, sparse losses and metrics."""
    with strategy.scope():
        model = _classifier()
    x, y = _tokens(), labels(NUMBER)
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    # What is added to all keys changes no attention: their biases' gradients are rounding errors, of which none is right.
    variables = [variable for variable in model.variables if not variable.path.endswith("key/bias")]
    return {
        "weights": by_path(variables),
        "history": arrays(history.history),
        "evaluate": arrays(model.evaluate(x, y, batch_size=BATCH, verbose=0)),
        "predict": arrays(model.predict(x, batch_size=BATCH, verbose=0)),
    }


# --- keras-tuner ------------------------------------------------------------------------------------------------------
def _tunable(choices: Any) -> keras.Model:
    units, rate = choices.Int("units", 4, 12), choices.Float("rate", 0.01, 0.3, sampling="log")
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(units, "tanh"), keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    return model


@program(replicas=(2,), eager=(), needs="keras_tuner", whole="mean")
def keras_tuner_search(strategy: tf.distribute.Strategy) -> Any:
    keras_tuner = importlib.import_module("keras_tuner")
    x, y = rows(NUMBER, 6), labels(NUMBER)
    with tempfile.TemporaryDirectory() as directory:
        tuner = keras_tuner.RandomSearch(
            _tunable,
            objective="val_loss",
            max_trials=2,
            executions_per_trial=1,
            seed=5,
            distribution_strategy=strategy,
            directory=directory,
        )
        fit = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
        tuner.search(x, y, validation_data=(x, y), **fit)
        (best,) = tuner.get_best_models(1)
        trials = tuner.oracle.get_best_trials(2)
        return {
            "hyperparameters": [trial.hyperparameters.values for trial in trials],
            "scores": [trial.score for trial in trials],
            "steps": [trial.best_step for trial in trials],
            "best": by_path(best.variables),
            "evaluate": arrays(best.evaluate(x, y, batch_size=BATCH, verbose=0)),
        }


# --- Orbit ------------------------------------------------------------------------------------------------------------
TIMES = "steps_per_second"
"""What differs from run to run."""


def _orbit_classes(tf_keras: Any) -> tuple[type, type]:
    """A trainer and an evaluator as Orbit's documentation has them."""
    orbit = importlib.import_module("orbit")

    class Trainer(orbit.StandardTrainer):
        def __init__(self, strategy: Any, data: Any, options: Any):
            self.strategy = strategy
            with strategy.scope():
                layers = [tf_keras.layers.Dense(8, "tanh", input_shape=(6,)), tf_keras.layers.Dense(4)]
                self.model = tf_keras.Sequential(layers)
                self.optimizer = tf_keras.optimizers.Adam(0.02)
                self.optimizer.build(self.model.trainable_variables)
                self.loss = tf_keras.metrics.Mean("loss")
                self.accuracy = tf_keras.metrics.SparseCategoricalAccuracy("accuracy")
                self.global_step = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
            super().__init__(orbit.utils.make_distributed_dataset(strategy, data), options)

        def train_loop_begin(self) -> None:
            self.loss.reset_states()
            self.accuracy.reset_states()

        def train_step(self, iterator: Any) -> None:
            def step(inputs: Any) -> None:
                x, y = inputs
                with tf.GradientTape() as tape:
                    logits = self.model(x, training=True)
                    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
                    loss = tf.reduce_mean(losses) / self.strategy.num_replicas_in_sync
                gradients = tape.gradient(loss, self.model.trainable_variables)
                self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
                self.loss.update_state(loss)
                self.accuracy.update_state(y, logits)
                self.global_step.assign_add(1)
                tf.summary.scalar("loss_of_a_step", loss)

            self.strategy.run(step, args=(next(iterator),))

        def train_loop_end(self) -> Any:
            return {"loss": self.loss.result(), "accuracy": self.accuracy.result()}

    class Evaluator(orbit.StandardEvaluator):
        def __init__(self, trainer: Any, data: Any, options: Any):
            self.strategy, self.model = trainer.strategy, trainer.model
            with self.strategy.scope():
                self.accuracy = tf_keras.metrics.SparseCategoricalAccuracy("accuracy")
            super().__init__(orbit.utils.make_distributed_dataset(self.strategy, data), options)

        def eval_begin(self) -> Any:
            self.accuracy.reset_states()
            return tf.constant(0.0), tf.constant(0, tf.int64)

        def eval_step(self, iterator: Any) -> Any:
            def step(inputs: Any) -> Any:
                x, y = inputs
                logits = self.model(x, training=False)
                self.accuracy.update_state(y, logits)
                return tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)), tf.reduce_sum(y)

            return self.strategy.run(step, args=(next(iterator),))

        def eval_reduce(self, state: Any = None, step_outputs: Any = None) -> Any:
            losses, classes = (self.strategy.reduce("SUM", value, axis=None) for value in step_outputs)
            return state[0] + losses, state[1] + classes

        def eval_end(self, state: Any = None) -> Any:
            return {"loss": state[0], "classes": state[1], "accuracy": self.accuracy.result()}

    return Trainer, Evaluator


def _written(directory: str) -> dict[str, list[Any]]:
    """Tags, steps and values of the scalars in a directory of event files."""
    found: dict[str, list[Any]] = {}
    for file in sorted(pathlib.Path(directory).rglob("events.*")):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                if value.tag != TIMES:
                    scalar = tf.make_ndarray(value.tensor)
                    found.setdefault(f"{file.parent.name}/{value.tag}", []).append((event.step, scalar))
    return found


@program(replicas=(2,), eager=(), needs="orbit", whole="mean")
def orbit_controller(strategy: tf.distribute.Strategy) -> Any:
    """Trains and evaluates in turns, with summaries and checkpoints, from which a second controller goes on."""
    orbit, tf_keras = importlib.import_module("orbit"), importlib.import_module("tf_keras")
    tf_keras.backend.clear_session()
    tf_keras.utils.set_random_seed(7)
    make_trainer, make_evaluator = _orbit_classes(tf_keras)
    data = batches(rows(NUMBER, 6), labels(NUMBER))

    def make(directory: str) -> Any:
        trainer = make_trainer(strategy, data.take(2).repeat(), orbit.StandardTrainerOptions())
        evaluator = make_evaluator(trainer, data, orbit.StandardEvaluatorOptions())
        checkpoint = tf.train.Checkpoint(
            model=trainer.model, optimizer=trainer.optimizer, global_step=trainer.global_step
        )
        manager = tf.train.CheckpointManager(
            checkpoint,
            f"{directory}/checkpoints",
            max_to_keep=2,
            step_counter=trainer.global_step,
            checkpoint_interval=2,
        )
        controller = orbit.Controller(
            trainer=trainer,
            evaluator=evaluator,
            strategy=strategy,
            global_step=trainer.global_step,
            steps_per_loop=2,
            checkpoint_manager=manager,
            summary_interval=2,
            summary_dir=f"{directory}/train",
            eval_summary_dir=f"{directory}/eval",
        )
        return trainer, controller

    with tempfile.TemporaryDirectory() as directory:
        trainer, controller = make(directory)
        output = controller.train_and_evaluate(train_steps=6, eval_steps=-1, eval_interval=3)
        results = {
            "output": {name: np.asarray(value) for name, value in output.items() if name != TIMES},
            "step": trainer.global_step.numpy(),
            "values": arrays(trainer.model.variables + trainer.optimizer.variables),
            "checkpoints": sorted(path.name for path in pathlib.Path(directory, "checkpoints").iterdir()),
            "written": _written(directory),
        }
        # A second one goes on where the first stopped.
        trainer, controller = make(directory)
        controller.train(steps=8, checkpoint_at_completion=False)
        results["again"] = {
            "step": trainer.global_step.numpy(),
            "output": {
                name: np.asarray(value) for name, value in controller.evaluate(steps=2).items() if name != TIMES
            },
            "values": arrays(trainer.model.variables + trainer.optimizer.variables),
        }
    return results
