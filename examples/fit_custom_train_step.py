"""fit() with a train_step of your own: DenseNet121 on MNIST digits at 32×32×3, each batch of 64 as 4 micro-batches."""

import cli
import digits
import keras
import tensorflow as tf

import microstrat


class CustomTrainStep(keras.Model):
    """A model whose train_step is written out, for one device: nothing in it knows of micro-batches."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))  # noqa: B905
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


def build(learning_rate):
    inputs = keras.Input((32, 32, 3))
    features = keras.applications.DenseNet121(weights=None, include_top=False, input_tensor=inputs).output
    outputs = keras.layers.GlobalAveragePooling2D()(features)
    outputs = keras.layers.Dense(10, activation="softmax", name="primary")(outputs)
    model = CustomTrainStep(inputs=inputs, outputs=outputs)
    model.compile(keras.optimizers.Adam(learning_rate), keras.losses.CategoricalCrossentropy(), metrics=["accuracy"])
    return model


def dataset(images, labels, batch_size):
    def as_densenet_wants(image, label):
        image = tf.image.resize(tf.repeat(image[..., tf.newaxis], 3, axis=-1), (32, 32))
        return image, tf.one_hot(label, 10)

    data = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(images), seed=0)
    return data.map(as_densenet_wants).batch(batch_size).prefetch(1)


if __name__ == "__main__":
    parser = cli.parser(__doc__, micro_batches=4, batch_size=64, epochs=2, learning_rate=1e-3)
    parser.add_argument("--limit", type=cli.positive, default=50_000, help="train on at most this many digits")
    options = cli.parse(parser)
    train, validation = digits.load(full=options.full, limit=options.limit)
    keras.utils.set_random_seed(0)
    with microstrat.scope(micro_batches=options.micro_batches):
        model = build(options.learning_rate)
    # BatchNormalization normalizes each micro-batch by its own rows; but for that, the numbers are the full batch's.
    # Validation uses its moving statistics, which at Keras' momentum of 0.99 take hundreds of steps to mean anything (so
    # too without micro-batches): an epoch of the 4,000 digits has 63 steps, one of all MNIST 782.
    validation = dataset(*validation, options.batch_size) if options.full else None
    train = dataset(*train, options.batch_size)
    model.fit(train, validation_data=validation, epochs=options.epochs, shuffle=False)
