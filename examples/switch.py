"""One training that moves: 8 virtual replicas, 4 on each of 2 devices, 4 devices, no strategy; and one that stays."""

import functools
import pathlib
import tempfile

import cli
import digits
import keras
import numpy as np
import tensorflow as tf

import microstrat

DEVICES = 4  # logical CPUs, which stand for GPUs: nothing else below knows of them

PLACES = {
    "8 replicas = 1 device × 8 micro-batches": functools.partial(microstrat.make_strategy, 8, mode="virtual"),
    "8 replicas = 2 devices × 4 micro-batches": lambda: microstrat.MicroBatchStrategy(
        4, base=tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    ),
    "4 replicas = 4 devices": functools.partial(microstrat.make_strategy, 4),
    "no strategy": tf.distribute.get_strategy,
}


def build(options):
    layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((784,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(options.learning_rate), loss)
    return model


def fit(model, options):
    (x, y), _ = digits.load(full=options.full)
    # Always the same order: what is trained on must not depend on where the training is.
    dataset = tf.data.Dataset.from_tensor_slices((np.reshape(x, (-1, 784)), y)).batch(options.batch_size, True)
    return model.fit(dataset, epochs=options.epochs, verbose=0).history["loss"]


def moving(options):
    losses, path = [], pathlib.Path(tempfile.mkdtemp()) / "model.keras"
    for make in PLACES.values():
        with make().scope():
            model = keras.models.load_model(path) if path.exists() else build(options)
        losses.append(fit(model, options))
        model.save(path)
    return losses, model.get_weights()


def staying(options):
    model = build(options)
    return [fit(model, options) for _ in PLACES], model.get_weights()


def main(options):
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES)
    tf.config.threading.set_inter_op_parallelism_threads(2 * DEVICES)  # MirroredStrategy's devices wait for each other
    results = []
    for train in (moving, staying):
        keras.utils.set_random_seed(0)
        results.append(train(options))
    (moved, weights), (stayed, expected) = results
    print(f"{'epoch':5}  {'where':40}  {'loss':>10}  {'of one run':>10}  {'difference':>10}")
    for index, where in enumerate(PLACES):
        for epoch, (loss, reference) in enumerate(zip(moved[index], stayed[index]), index * options.epochs + 1):  # noqa: B905
            print(f"{epoch:5}  {where:40}  {loss:10.6f}  {reference:10.6f}  {abs(loss - reference):10.1e}")
    largest = max(abs(one - other).max() for one, other in zip(weights, expected))  # noqa: B905
    print(f"largest difference between the weights at the end: {largest:.1e}")


if __name__ == "__main__":
    main(cli.parse(cli.parser(__doc__, batch_size=64, epochs=2, learning_rate=1e-3)))
