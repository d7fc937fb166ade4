"""fit() on MNIST digits: batches of 60 as 10 micro-batches of 6, then the same model at the full batch."""

import cli
import digits
import keras
import report

import microstrat


def build(options):
    inputs = keras.Input(shape=(28, 28))
    outputs = keras.layers.Flatten()(inputs)
    outputs = keras.layers.Dense(128, activation="relu")(outputs)
    outputs = keras.layers.Dense(10, activation="softmax", name="primary")(outputs)
    model = keras.Model(inputs, outputs)
    optimizer = keras.optimizers.Adam(options.learning_rate)
    model.compile(optimizer, keras.losses.CategoricalCrossentropy(), metrics=["accuracy"])
    return model


def build_for_micro_batches(options):
    with microstrat.scope(micro_batches=options.micro_batches):
        return build(options)


def train(make_model, label, options):
    print(label)
    keras.utils.set_random_seed(0)
    (x_train, y_train), _ = digits.load(full=options.full)
    model = make_model(options)
    y_train = keras.utils.to_categorical(y_train, 10)
    fitted = model.fit(x_train, y_train, batch_size=options.batch_size, epochs=options.epochs)
    return fitted.history, model.get_weights()


if __name__ == "__main__":
    options = cli.parse(cli.parser(__doc__, micro_batches=10, batch_size=60, epochs=3, learning_rate=1e-3))
    parts, whole = report.labels(options)
    history, weights = report.in_fresh_process(train, build_for_micro_batches, parts, options)
    full_history, full_weights = report.in_fresh_process(train, build, whole, options)
    for name in full_history:
        difference = report.largest_difference(history[name], full_history[name])
        print(f"largest difference between the epochs' {name}: {difference:.1e}")
    print(f"largest difference between the weights at the end: {report.largest_difference(weights, full_weights):.1e}")
