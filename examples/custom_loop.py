"""A custom loop on MNIST digits: a global batch of 64 as 4 micro-batches of 16, then the same at the full batch."""

import cli
import digits
import keras
import numpy as np
import report
import tensorflow as tf

import microstrat


def build(options):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((28, 28)), keras.layers.Flatten(), *layers])
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    return model, keras.optimizers.SGD(options.learning_rate), loss_fn


def micro_batches(options, data):
    strategy = microstrat.MicroBatchStrategy(options.replicas)
    with strategy.scope():
        model, optimizer, loss_fn = build(options)

    def replica_step(x, y):  # x and y are one micro-batch; the optimizer sums the gradients of all of them
        with tf.GradientTape() as tape:
            losses = loss_fn(y, model(x, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=options.batch_size)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def step(x, y):
        return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)

    return model, step, strategy.experimental_distribute_dataset(data)


def full_batch(options, data):
    model, optimizer, loss_fn = build(options)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_fn(y, model(x, training=True)))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return model, step, data


def train(make_loop, label, options):
    (x, y), (x_validation, y_validation) = digits.load(full=options.full)
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=0)
    before, weights = report.peak_memory(), []
    model, step, batches = make_loop(options, data.batch(options.batch_size, drop_remainder=True))
    for epoch in range(options.epochs):
        with report.epoch_bar(f"{label}, epoch {epoch + 1}/{options.epochs}", len(x) // options.batch_size) as advance:
            for batch in batches:
                advance(float(step(*batch)))
                weights = [*weights[:20], model.get_weights()]  # after each of the first 20 steps, and after the last
    accuracy = np.mean(model.predict(x_validation, batch_size=options.batch_size, verbose=0).argmax(-1) == y_validation)
    print(f"{label}: validation accuracy {accuracy:.3f}, peak memory grew by {report.peak_memory() - before:.0f} MiB")
    return weights


if __name__ == "__main__":
    options = cli.parse(cli.parser(__doc__, replicas=4, batch_size=64, epochs=5, learning_rate=0.1))
    micro_batch_size = options.batch_size // options.replicas
    micro = report.in_fresh_process(train, micro_batches, f"{options.replicas} × {micro_batch_size}", options)
    full = report.in_fresh_process(train, full_batch, f"1 × {options.batch_size}", options)
    differences = [report.largest_difference(*weights) for weights in zip(micro, full, strict=True)]
    print("(In a model this small nearly all of that memory is TensorFlow's own.)")
    print(f"largest difference between the weights in the first 20 steps: {max(differences[:20]):.1e}")
    print(f"largest difference between the weights at the end: {differences[-1]:.1e}")
