"""A custom loop written for many GPUs, on MNIST digits: 4 virtual replicas of 16 each, then one device with all 64."""

import functools

import custom_loop
import keras
import report
import tensorflow as tf

import microstrat


def replicas(options, dataset):
    with microstrat.scope(replicas=options.replicas) as strategy:  # was: tf.distribute.MirroredStrategy()
        layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((784,)), *layers])
        optimizer = keras.optimizers.SGD(options.learning_rate)
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
        train_acc_metric = keras.metrics.SparseCategoricalAccuracy()

    def replica_step(x, y):  # x and y are one replica's rows; the optimizer sums the gradients of all replicas
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.nn.compute_average_loss(loss_fn(y, logits), global_batch_size=options.batch_size)
        optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
        train_acc_metric.update_state(y, logits)
        return loss

    @tf.function
    def train_step(x, y):
        return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)

    return model, train_acc_metric, train_step, strategy.experimental_distribute_dataset(dataset)


if __name__ == "__main__":
    # A last batch that is shorter than global_batch_size would count for less than its mean loss.
    train = functools.partial(custom_loop.train, drop_remainder=True)
    report.compare(train, replicas, custom_loop.full_batch, custom_loop.parse(__doc__, replicas=4))
