"""A custom loop on MNIST digits: batches of 64 as 4 micro-batches of 16, then the same program at the full batch."""

import cli
import digits
import keras
import numpy as np
import report
import tensorflow as tf

import microstrat


def build(options):  # a program for one device: nothing in it knows of micro-batches
    inputs = keras.Input(shape=(784,), name="digits")
    x1 = keras.layers.Dense(64, activation="relu")(inputs)
    x2 = keras.layers.Dense(64, activation="relu")(x1)
    outputs = keras.layers.Dense(10, name="predictions")(x2)
    model = keras.Model(inputs=inputs, outputs=outputs)
    optimizer = keras.optimizers.SGD(learning_rate=options.learning_rate)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    train_acc_metric = keras.metrics.SparseCategoricalAccuracy()

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss_value = loss_fn(y, logits)
        grads = tape.gradient(loss_value, model.trainable_weights)
        optimizer.apply_gradients(zip(grads, model.trainable_weights))  # noqa: B905
        train_acc_metric.update_state(y, logits)
        return loss_value

    return model, train_acc_metric, train_step


def micro_batches(options, dataset):  # what it takes to cut its batches
    with microstrat.scope(micro_batches=options.micro_batches) as strategy:
        model, train_acc_metric, train_step = build(options)

    @tf.function
    def step(x, y):
        return strategy.reduce("MEAN", strategy.run(train_step, args=(x, y)), axis=None)

    return model, train_acc_metric, step, strategy.experimental_distribute_dataset(dataset)


def full_batch(options, dataset):
    return *build(options), dataset


def train(make_loop, label, options, drop_remainder=False):
    keras.utils.set_random_seed(0)
    (x_train, y_train), (x_val, y_val) = digits.load(full=options.full)
    x_train, x_val = (options.white * np.reshape(x, (-1, 784)) for x in (x_train, x_val))
    dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(len(x_train), seed=0)
    before, weights = report.peak_memory(), []
    loop = make_loop(options, dataset.batch(options.batch_size, drop_remainder))  # the last batch may be short
    model, train_acc_metric, train_step, train_dataset = loop
    for epoch in range(options.epochs):
        print(f"\n{label}: start of epoch {epoch}")
        for step, (x_batch_train, y_batch_train) in enumerate(train_dataset):
            loss_value = train_step(x_batch_train, y_batch_train)
            weights = [*weights[:20], model.get_weights()]  # after each of the first 20 steps, and after the last
            if step % 200 == 0:
                print(f"Training loss (for one batch) at step {step}: {float(loss_value):.4f}")
        print(f"Training accuracy over epoch: {float(train_acc_metric.result()):.4f}")
        train_acc_metric.reset_state()
    accuracy = np.mean(model.predict(x_val, batch_size=options.batch_size, verbose=0).argmax(-1) == y_val)
    return report.Run(label, accuracy, report.peak_memory() - before, weights)


def parse(description, **cut):
    parser = cli.parser(description, batch_size=64, epochs=5, learning_rate=0.1, **cut)
    parser.add_argument("--white", type=float, default=1, help="brightest pixel; 255 wants a learning rate of 1e-3")
    return cli.parse(parser)


if __name__ == "__main__":
    report.compare(train, micro_batches, full_batch, parse(__doc__, micro_batches=4))
