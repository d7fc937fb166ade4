"""Keras' own training: compile, fit, evaluate, predict, callbacks."""

from __future__ import annotations

import functools
import pathlib
import tempfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.programs._registry import (
    ALL,
    BATCH,
    MANY,
    OWN_STATISTICS,
    TOLERANCE_LATER,
    WHOLE_MORE,
    arrays,
    batches,
    by_path,
    labels,
    mlp,
    model_state,
    per_replica,
    program,
    rows,
)


def _loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _compiled(
    strategy: tf.distribute.Strategy, build: Any = mlp, optimizer: Any = "adam", **options: Any
) -> keras.Model:
    with strategy.scope():
        model = build()
        stepper = optimizer if isinstance(optimizer, str) else optimizer()
        model.compile(stepper, _loss(), **{"metrics": ["accuracy"], **options})
    return model


def _data(*shape: int, number: int = 2 * BATCH, extra: tuple[Any, ...] = ()) -> tf.data.Dataset:
    return batches(rows(number, *(shape or (6,))), labels(number), *extra)


def _outcome(strategy: tf.distribute.Strategy, model: keras.Model, history: Any) -> dict[str, Any]:
    extra = [variable for variable in model.variables if not variable.trainable]
    return {
        **model_state(model),
        "history": {key: np.asarray(value) for key, value in history.history.items()},
        "local": per_replica(strategy, extra) if extra else [],
    }


def _fit(
    strategy: tf.distribute.Strategy, model: keras.Model, data: Any = None, epochs: int = 5, **options: Any
) -> Any:
    history = model.fit(_data() if data is None else data, epochs=epochs, verbose=0, **options)
    return _outcome(strategy, model, history)


@program(replicas=MANY, core=True, whole="mean", micro_batches=WHOLE_MORE)
def fit_mlp(strategy: tf.distribute.Strategy) -> Any:
    return _fit(strategy, _compiled(strategy))


@program(whole="mean")
def fit_sgd_momentum(strategy: tf.distribute.Strategy) -> Any:
    return _fit(strategy, _compiled(strategy, optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9)))


@program(replicas=(2, 4), core=True, why_not_whole=OWN_STATISTICS)
def fit_batch_norm_and_dropout(strategy: tf.distribute.Strategy) -> Any:
    def build() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, use_bias=False),
                keras.layers.BatchNormalization(momentum=0.8),
                keras.layers.ReLU(),
                keras.layers.Dropout(0.3, seed=2),
                keras.layers.Dense(4),
            ]
        )

    model = _compiled(strategy, build, lambda: keras.optimizers.SGD(0.1))
    out = _fit(strategy, model, validation_data=_data(number=BATCH))
    return {**out, "evaluate": model.evaluate(_data(), verbose=0), "predict": model.predict(rows(BATCH, 6), verbose=0)}


@program(replicas=(2, 4), whole="mean")
def fit_convolution(strategy: tf.distribute.Strategy) -> Any:
    def build() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((6, 6, 2)),
                keras.layers.Conv2D(4, 3, activation="relu"),
                keras.layers.GlobalAveragePooling2D(),
                keras.layers.Dense(4),
            ]
        )

    return _fit(strategy, _compiled(strategy, build, lambda: keras.optimizers.RMSprop(0.01)), _data(6, 6, 2))


@program(replicas=(2,), whole="mean")
def fit_lstm(strategy: tf.distribute.Strategy) -> Any:
    def build() -> keras.Model:
        return keras.Sequential([keras.Input((4, 3)), keras.layers.LSTM(5), keras.layers.Dense(4)])

    return _fit(strategy, _compiled(strategy, build), _data(4, 3))


@program(replicas=(2, 4), whole="mean")
def fit_embedding(strategy: tf.distribute.Strategy) -> Any:
    def build() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((5,), dtype="int64"),
                keras.layers.Embedding(11, 4),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(4),
            ]
        )

    tokens = np.random.default_rng(0).integers(0, 11, (2 * BATCH, 5))
    return _fit(strategy, _compiled(strategy, build), batches(tokens, labels(2 * BATCH)))


@program(replicas=ALL, core=True, whole="mean", micro_batches=WHOLE_MORE)
def fit_uneven_last_batch(strategy: tf.distribute.Strategy) -> Any:
    return _fit(strategy, _compiled(strategy), _data(number=BATCH + 17))


@program(replicas=(2, 4), whole="mean")
def fit_adamw_ema_clipping(strategy: tf.distribute.Strategy) -> Any:
    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_momentum=0.8, global_clipnorm=0.2)

    return _fit(strategy, _compiled(strategy, optimizer=optimizer))


class OwnSteps(keras.Model):
    """An overridden train_step and test_step with a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.mean = keras.metrics.Mean(name="mean")
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")

    def call(self, x: Any, training: bool | None = None) -> Any:
        return self.inner(x, training=training)

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.mean]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            loss = tf.reduce_sum(losses) / BATCH
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.mean.update_state(losses)
        self.steps.assign_add(1.0)
        return {"loss": loss, "mean": self.mean.result(), "rows": tf.reduce_max(y)}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        losses = keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)
        self.mean.update_state(losses * 2)
        return {"mean": self.mean.result()}


@program(core=True, why_not_whole="it returns the largest label of the rows at hand, where fit averages")
def fit_own_train_step(strategy: tf.distribute.Strategy) -> Any:
    with strategy.scope():
        model = OwnSteps()
        model.build((None, 6))
        model.compile(keras.optimizers.SGD(0.1))
    out = _fit(strategy, model, validation_data=_data(number=BATCH))
    return {**out, "evaluate": model.evaluate(_data(), return_dict=True, verbose=0)}


@program(core=True, whole="mean", micro_batches=WHOLE_MORE)
def evaluate_and_predict(strategy: tf.distribute.Strategy) -> Any:
    model = _compiled(strategy)
    x, y = rows(2 * BATCH + 5, 6), labels(2 * BATCH + 5)
    return {
        "evaluate": model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True),
        "predict": model.predict(x, batch_size=BATCH, verbose=0),
        "predict dataset": model.predict(batches(x), verbose=0),
        "call": np.asarray(model(x)),
        "metrics": by_path(model.metrics_variables),
    }


@program(replicas=(2, 4), whole="mean")
def on_batch_methods(strategy: tf.distribute.Strategy) -> Any:
    model = _compiled(strategy)
    x, y = rows(BATCH, 6), labels(BATCH)
    out = [model.train_on_batch(x, y) for _ in range(5)]
    out += [model.train_on_batch(x, y, class_weight={0: 1.0, 1: 2.0, 2: 0.5, 3: 1.0}, return_dict=True)["loss"]]
    out += [model.test_on_batch(x, y), model.predict_on_batch(x)]
    return {"out": arrays(out), **model_state(model)}


@program(replicas=(2, 4), whole="mean")
def fit_class_weight(strategy: tf.distribute.Strategy) -> Any:
    model = _compiled(strategy, weighted_metrics=["accuracy"], metrics=[])
    return _fit(strategy, model, class_weight={0: 1.0, 1: 2.0, 2: 0.5, 3: 3.0})


@program(replicas=(2, 4), whole="mean")
def fit_sample_weight(strategy: tf.distribute.Strategy) -> Any:
    weights = np.abs(rows(2 * BATCH, seed=5))
    model = _compiled(strategy, weighted_metrics=["accuracy"])
    return _fit(strategy, model, _data(extra=(weights,)), validation_data=_data(extra=(weights,)))


@program(replicas=(2, 4), core=True, whole="mean", micro_batches=WHOLE_MORE)
def fit_arrays_with_validation(strategy: tf.distribute.Strategy) -> Any:
    """NumPy arrays, a validation split, a batch size that doesn't divide the rows."""
    model = _compiled(strategy)
    # 38 rows to train and 39 to validate: every replica has some of each last batch.
    x, y = rows(77, 6), labels(77)
    options = {"batch_size": BATCH, "validation_split": 0.505, "shuffle": False}
    return _outcome(strategy, model, model.fit(x, y, epochs=3, verbose=0, **options))


@program(core=True, whole="mean")
def fit_steps_per_execution(strategy: tf.distribute.Strategy) -> Any:
    # MirroredStrategy on several CPUs crashes when several steps are one execution; the results do not depend on it.
    stock = isinstance(strategy, tf.distribute.MirroredStrategy)
    model = _compiled(strategy, steps_per_execution=1 if stock else 3)
    # Of 5 steps an epoch, the second execution is cut short by the end of the data.
    return _fit(strategy, model, _data(number=5 * BATCH), epochs=2, validation_data=_data(number=4 * BATCH))


@program(replicas=(2, 4), whole="mean")
def fit_repeated_dataset(strategy: tf.distribute.Strategy) -> Any:
    model = _compiled(strategy)
    history = model.fit(_data().repeat(), epochs=2, steps_per_epoch=3, verbose=0)
    more = model.fit(_data().repeat(), epochs=4, initial_epoch=2, steps_per_epoch=2, verbose=0)
    return {**_outcome(strategy, model, history), "more": arrays(more.history)}


@program(replicas=(2,), whole="mean")
def fit_run_eagerly(strategy: tf.distribute.Strategy) -> Any:
    return _fit(strategy, _compiled(strategy, run_eagerly=True), epochs=2)


@program(replicas=(2, 4), whole="mean")
def fit_metrics(strategy: tf.distribute.Strategy) -> Any:
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, activation="sigmoid")])
        metrics = [
            keras.metrics.AUC(num_thresholds=20),
            keras.metrics.Precision(),
            keras.metrics.F1Score(threshold=0.5),
            keras.metrics.MeanSquaredError(),
            keras.metrics.RootMeanSquaredError(),
        ]
        model.compile("sgd", "binary_crossentropy", metrics=metrics)
    y = labels(2 * BATCH, 2).astype("float32")[:, None]
    return _fit(strategy, model, batches(rows(2 * BATCH, 6), y))


@program(
    replicas=(2, 4),
    eager=(),
    why="Keras weighs the losses of several outputs by the batch size only where it is static",
    whole="mean",
    whole_tolerance=TOLERANCE_LATER,
)
def fit_dict_inputs_and_outputs(strategy: tf.distribute.Strategy) -> Any:
    """Two named inputs, two named outputs with losses and weights of their own, regularization."""

    def build() -> keras.Model:
        a, b = keras.Input((3,), name="a"), keras.Input((2,), name="b")
        x = keras.layers.Dense(8, kernel_regularizer="l2")(keras.layers.Concatenate()([a, b]))
        one = keras.layers.Dense(4, name="one")(x)
        return keras.Model({"a": a, "b": b}, {"one": one, "two": keras.layers.Dense(1, name="two")(x)})

    with strategy.scope():
        model = build()
        model.compile(
            "adam",
            loss={"one": _loss(), "two": "mse"},
            loss_weights={"one": 1.0, "two": 0.3},
            metrics={"one": ["accuracy"], "two": ["mae"]},
        )
    number = BATCH + 19
    data = tf.data.Dataset.from_tensor_slices(
        (
            {"a": rows(number, 3), "b": rows(number, 2, seed=2)},
            {"one": labels(number), "two": rows(number, 1, seed=3)},
        )
    ).batch(BATCH)
    out = _fit(strategy, model, data)
    return {**out, "predict": model.predict(data, verbose=0)}


@program(
    replicas=(2,),
    eager=(),
    why="tapes add the gradients of several losses in another order than graphs do",
    whole="sum",
)
def fit_added_losses(strategy: tf.distribute.Strategy) -> Any:
    """add_loss in a layer, and a metric updated in call."""

    class Penalty(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.seen = keras.metrics.Mean(name="seen")

        def call(self, x: Any) -> Any:
            self.add_loss(0.01 * tf.reduce_sum(x * x))
            self.seen.update_state(x)
            return x

    def build() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), Penalty(), keras.layers.Dense(4)])

    return _fit(strategy, _compiled(strategy, build, lambda: keras.optimizers.SGD(0.05)))


@program(replicas=(2,), why_not_whole=OWN_STATISTICS)
def fit_frozen_then_unfrozen(strategy: tf.distribute.Strategy) -> Any:
    """Compiled twice, the second time with fewer trainable weights; batch norm in inference mode."""

    def build() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, use_bias=False),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(4),
            ]
        )

    model = _compiled(strategy, build, lambda: keras.optimizers.SGD(0.1))
    first = _fit(strategy, model, epochs=2)
    with strategy.scope():
        model.layers[0].trainable = model.layers[1].trainable = False
        model.compile(keras.optimizers.Adam(0.01), _loss())
    return [first, _fit(strategy, model, epochs=2)]


@program(
    replicas=(2,),
    eager=(),
    why="graphs fuse kernels and then round to bfloat16 in other places",
    why_not_whole="every micro-batch's gradients are rounded to bfloat16",
)
def fit_mixed_bfloat16(strategy: tf.distribute.Strategy) -> Any:
    def build() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activation="relu", dtype="mixed_bfloat16"),
                keras.layers.Dense(4, dtype="float32"),
            ]
        )

    return _fit(strategy, _compiled(strategy, build))


@program(
    replicas=(2,),
    eager=(),
    why="one engine for many optimizers",
    whole="mean",
    whole_tolerance=TOLERANCE_LATER,
    one_device=True,  # without a strategy, ScheduleFreeAdamW sets its averages back in every step
)
def fit_more_optimizers(strategy: tf.distribute.Strategy) -> Any:
    """Those that no other program has, with decay, averages, constraints and the kinds of clipping."""

    def build() -> keras.Model:
        first = keras.layers.Dense(8, activation="tanh", kernel_constraint="max_norm", bias_constraint="non_neg")
        return keras.Sequential([keras.Input((6,)), first, keras.layers.Dense(4)])

    optimizers = {
        "Adadelta": {"learning_rate": 1.0, "weight_decay": 0.05},
        "Adafactor": {"learning_rate": 0.01, "weight_decay": 0.01},
        "Lamb": {"learning_rate": 0.01, "use_ema": True, "ema_momentum": 0.9},
        "Muon": {"learning_rate": 0.01},
        "ScheduleFreeAdamW": {"learning_rate": 0.01},
    }
    made = {name: options for name, options in optimizers.items() if hasattr(keras.optimizers, name)}
    out = {}
    for name, options in made.items():
        optimizer = functools.partial(getattr(keras.optimizers, name), **options)
        out[name] = _fit(strategy, _compiled(strategy, build, optimizer), epochs=2)
    return out


@program(replicas=(2,), eager=(2,), why_not_whole="every replica's gradients are clipped and checked by themselves")
def fit_clipped_mixed_float16(strategy: tf.distribute.Strategy) -> Any:
    """One row overflows: its step is left out once, and the scale halved once."""
    seen: list[Any] = []

    class Watching(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            stepper = self.model.optimizer
            seen.append(
                [np.asarray(value) for value in (stepper.dynamic_scale, stepper.step_counter, stepper.iterations)]
            )

    def build() -> keras.Model:
        half = keras.layers.Dense(8, activation="relu", dtype="mixed_float16")
        return keras.Sequential([keras.Input((6,)), half, keras.layers.Dense(4, dtype="float32")])

    def optimizer() -> keras.optimizers.Optimizer:
        inner = keras.optimizers.SGD(0.125, momentum=0.5, clipvalue=0.25)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0, dynamic_growth_steps=3)

    # In replica 0: Keras looks at its gradients only.
    x = rows(4 * BATCH, 6)
    x[BATCH + 1] = 65000.0
    model = _compiled(strategy, build, optimizer)
    return {**_fit(strategy, model, batches(x, labels(4 * BATCH)), epochs=2, callbacks=[Watching()]), "seen": seen}


@program(replicas=(2,), eager=(2,), why_not_whole="rows keep state from batch to batch")
def fit_stateful_and_masked(strategy: tf.distribute.Strategy) -> Any:
    """A stateful RNN, whose state is each replica's own; masks; predictions for every step."""

    def build() -> keras.Model:
        share = BATCH // strategy.num_replicas_in_sync
        layers = [
            keras.Input(batch_shape=(share, 5), dtype="int64"),
            keras.layers.Embedding(11, 4, mask_zero=True),
            keras.layers.GRU(4, return_sequences=True, stateful=True),
            keras.layers.Dense(4),
        ]
        return keras.Sequential(layers)

    generator = np.random.default_rng(0)
    tokens, targets = generator.integers(0, 6, (2 * BATCH, 5)), generator.integers(0, 4, (2 * BATCH, 5))
    model = _compiled(strategy, build, metrics=[], weighted_metrics=["accuracy"])
    out = _fit(strategy, model, batches(tokens, targets), epochs=2)
    out["predict"] = model.predict(tokens, batch_size=BATCH, verbose=0)
    states = per_replica(strategy, model.layers[1].states)
    model.layers[1].reset_states()
    return {**out, "states": [states, per_replica(strategy, model.layers[1].states)]}


class Histogram(keras.metrics.Metric):
    """A metric with several values, an integer one among them."""

    def __init__(self) -> None:
        super().__init__(name="histogram")
        self.sums = self.add_weight(name="sums", shape=(4,), initializer="zeros")
        self.updates = self.add_weight(name="updates", shape=(), dtype="int32", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.sums.assign_add(tf.reduce_sum(y_pred, 0))
        self.updates.assign_add(1)

    def result(self) -> Any:
        return {"share": self.sums[0] / tf.reduce_sum(self.sums), "updates": self.updates + 0}


class UnevenBatches(keras.utils.PyDataset):
    """Three batches, the last one short."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        number = BATCH if index < 2 else 19
        return rows(number, 6, seed=index), np.eye(4, dtype="float32")[labels(number, seed=index)]


@program(replicas=(2,), eager=(2,), why_not_whole="a metric counts its updates")
def fit_many_metrics_and_a_pydataset(strategy: tf.distribute.Strategy) -> Any:
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, activation="softmax")])
        metrics = [
            keras.metrics.AUC(curve="PR", num_thresholds=20, multi_label=True, num_labels=4),
            keras.metrics.OneHotMeanIoU(num_classes=4),
            keras.metrics.PrecisionAtRecall(0.5, num_thresholds=20),
            keras.metrics.Recall(top_k=2, class_id=1),
            keras.metrics.R2Score(),
            Histogram(),
        ]
        model.compile("adam", "categorical_crossentropy", metrics=metrics)
    out = _fit(strategy, model, UnevenBatches(), epochs=2, shuffle=False, validation_data=UnevenBatches())
    return {**out, "evaluate": model.evaluate(UnevenBatches(), verbose=0, return_dict=True)}


# --- Callbacks --------------------------------------------------------------------------------------------------------
@program(replicas=(2,), core=True, whole="mean")
def fit_model_checkpoint(strategy: tf.distribute.Strategy) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        model = _compiled(strategy)
        whole, weights = f"{directory}/{{epoch}}.keras", f"{directory}/best.weights.h5"
        callbacks = [
            keras.callbacks.ModelCheckpoint(whole),
            keras.callbacks.ModelCheckpoint(weights, save_weights_only=True, save_best_only=True, monitor="loss"),
        ]
        out = _fit(strategy, model, epochs=3, callbacks=callbacks)
        files = sorted(path.name for path in pathlib.Path(directory).iterdir())
        with strategy.scope():
            loaded = keras.models.load_model(f"{directory}/3.keras")
        again = _fit(strategy, loaded, epochs=2)
        model.load_weights(weights)
        return {**out, "files": files, "again": again, "best": by_path(model.variables)}


@program(replicas=(2,), whole="mean")
def fit_callbacks(strategy: tf.distribute.Strategy) -> Any:
    """Early stopping with the best weights restored, schedules, a log, a callback that reads and writes variables."""
    seen: list[Any] = []

    class Watching(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            kernel = self.model.trainable_variables[0]
            seen.append(
                [float(logs["loss"]), float(np.abs(kernel).sum()), int(np.asarray(self.model.optimizer.iterations))]
            )

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            bias = self.model.trainable_variables[1]
            bias.assign(np.full(bias.shape, 0.01 * epoch, "float32"))

    with tempfile.TemporaryDirectory() as directory:
        model = _compiled(strategy, optimizer=lambda: keras.optimizers.SGD(2.0))
        callbacks = [
            keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 1.1),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1),
            keras.callbacks.CSVLogger(f"{directory}/log.csv"),
            keras.callbacks.TerminateOnNaN(),
            Watching(),
        ]
        out = _fit(strategy, model, epochs=8, validation_data=_data(number=BATCH), callbacks=callbacks)
        header = pathlib.Path(directory, "log.csv").read_text().splitlines()[0]
    return {**out, "seen": arrays(seen), "header": header}


@program(replicas=(2,), needs="tensorboard", whole="mean")
def fit_tensorboard(strategy: tf.distribute.Strategy) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        model = _compiled(strategy)
        callback = keras.callbacks.TensorBoard(directory, histogram_freq=1, update_freq=1, write_graph=False)
        out = _fit(strategy, model, epochs=2, validation_data=_data(number=BATCH), callbacks=[callback])
        logged = {}
        for path in sorted(pathlib.Path(directory).rglob("*tfevents*")):
            for event in tf.compat.v1.train.summary_iterator(str(path)):
                for value in event.summary.value:
                    if value.HasField("tensor") and "loss" in value.tag:
                        logged[f"{path.parent.name} {value.tag} {event.step}"] = tf.make_ndarray(value.tensor)
    return {**out, "logged": logged}


@program(replicas=(2,), whole="mean")
def fit_backup_and_restore(strategy: tf.distribute.Strategy) -> Any:
    """Interrupted in the third epoch, then resumed by a new model."""

    class Interrupting(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise KeyboardInterrupt

    with tempfile.TemporaryDirectory() as directory:
        model = _compiled(strategy)
        try:
            _fit(strategy, model, callbacks=[keras.callbacks.BackupAndRestore(directory), Interrupting()])
        except KeyboardInterrupt:
            pass
        keras.backend.clear_session()
        resumed = _compiled(strategy)
        return _fit(strategy, resumed, callbacks=[keras.callbacks.BackupAndRestore(directory)])


@program(replicas=(2,), eager=(2,), whole="mean", whole_tolerance=TOLERANCE_LATER)
def fit_swapped_averages(strategy: tf.distribute.Strategy) -> Any:
    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.9)

    model = _compiled(strategy, optimizer=optimizer)
    callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]
    return _fit(strategy, model, epochs=2, validation_data=_data(number=BATCH), callbacks=callbacks)
