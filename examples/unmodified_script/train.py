"""MNIST digits on all the GPUs there are, by a custom loop; knows nothing of microstrat."""

import argparse
import pathlib

import keras
import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--batch-size", type=int, default=64, help="digits in one optimizer step, on all GPUs together")
parser.add_argument("--epochs", type=int, default=3, help="passes over the digits")
parser.add_argument("--learning-rate", type=float, default=1e-3, help="of the optimizer")
parser.add_argument("--save", type=pathlib.Path, help="where to save the model, as a .keras file")
options = parser.parse_args()

with np.load(pathlib.Path(__file__).parent.parent / "data" / "mnist_5k.npz") as file:
    order = np.random.default_rng(0).permutation(len(file["labels"]))
    images = file["images"][order, :, :, np.newaxis].astype("float32") / 255
    labels = file["labels"][order].astype("int32")

keras.utils.set_random_seed(0)
strategy = tf.distribute.MirroredStrategy()
print(f"Number of devices: {strategy.num_replicas_in_sync}")

train_data = tf.data.Dataset.from_tensor_slices((images[1000:], labels[1000:]))
train_data = train_data.shuffle(4000, seed=0).batch(options.batch_size, drop_remainder=True)
test_data = tf.data.Dataset.from_tensor_slices((images[:1000], labels[:1000])).batch(200)
train_data = strategy.experimental_distribute_dataset(train_data)
test_data = strategy.experimental_distribute_dataset(test_data)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
            keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    optimizer = keras.optimizers.Adam(options.learning_rate)
    optimizer.build(model.trainable_variables)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    train_accuracy = keras.metrics.SparseCategoricalAccuracy()
    test_accuracy = keras.metrics.SparseCategoricalAccuracy()


def train_step(x, y):
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss = tf.nn.compute_average_loss(loss_fn(y, logits), global_batch_size=options.batch_size)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    train_accuracy.update_state(y, logits)
    return loss


def test_step(x, y):
    test_accuracy.update_state(y, model(x, training=False))


@tf.function
def distributed_train_step(x, y):
    return strategy.reduce("SUM", strategy.run(train_step, args=(x, y)), axis=None)


@tf.function
def distributed_test_step(x, y):
    strategy.run(test_step, args=(x, y))


for epoch in range(options.epochs):
    losses = [float(distributed_train_step(x, y)) for x, y in train_data]
    for x, y in test_data:
        distributed_test_step(x, y)
    accuracies = f"accuracy {train_accuracy.result():.4f}, test accuracy {test_accuracy.result():.4f}"
    print(f"Epoch {epoch + 1}: loss {np.mean(losses):.6f}, {accuracies}")
    train_accuracy.reset_state()
    test_accuracy.reset_state()

if options.save:
    model.save(options.save)
