"""Train a residual network on handwritten digits twice: with Keras's normalisation and with ours.

    python examples/train_digits_keras.py [--epochs 4] [--seed 0]

Both networks begin with the same weights and see the same images in the same order. The table has
the loss and the error of the gradients of the first step, the last loss, and the test accuracy. The
backend is that of Keras: TensorFlow by default; KERAS_BACKEND=torch or jax selects another.
"""

from functools import partial

import keras
import numpy as np
import rich
import typer
from keras import layers
from rich.table import Table
from sklearn.datasets import load_digits

import backnorm.keras

if keras.backend.backend() == "jax":
    # Both networks are compared with gradients in float64.
    import jax

    jax.config.update("jax_enable_x64", True)


def network(seed, dtype="float32"):
    """Return the network with Keras's layers: a stem and two residual blocks."""
    keras.utils.set_random_seed(seed)
    conv = partial(layers.Conv2D, padding="same", use_bias=False, dtype=dtype)
    norm = partial(layers.BatchNormalization, momentum=0.9, dtype=dtype)
    relu = partial(layers.ReLU, dtype=dtype)
    image = layers.Input((8, 8, 1))
    x = relu()(norm()(conv(16, 3)(image)))
    for channels in (32, 64):
        y = relu()(norm()(conv(channels, 3, strides=2)(x)))
        y = norm()(conv(channels, 3)(y))
        shortcut = conv(channels, 1, strides=2)(x)
        x = relu()(layers.Add(dtype=dtype)([y, shortcut]))
    logits = layers.Dense(10, dtype=dtype)(layers.GlobalAveragePooling2D(dtype=dtype)(x))
    return keras.Model(image, logits)


def digits():
    """Return images of 8x8 pixels and their labels: 1347 to learn from, 450 to test with."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = data.images.astype(np.float32)[order, :, :, None] / 8 - 1
    labels = data.target[order]
    return (images[:-450], labels[:-450]), (images[-450:], labels[-450:])


def compiled(net, rate):
    optimiser = keras.optimizers.SGD(rate, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype=net.output.dtype)
    # XLA compiles neither network, because XLA cannot call our kernels from TensorFlow's graphs.
    net.compile(optimiser, loss, metrics=["accuracy"], jit_compile=False)


def first_step(net, images, labels):
    """Return the loss of a batch, and its gradient by each parameter; `net` is unchanged."""
    copy = keras.models.clone_model(net)
    copy.set_weights(net.get_weights())
    compiled(copy, 1.0)
    loss = float(copy.train_on_batch(images, labels)[0])
    # On every backend, after the first step at a rate of 1 the momentum is minus the gradient.
    return loss, [-np.asarray(m, np.float64) for m in copy.optimizer.momentums]


def farthest(gradients, exact):
    """Return the largest error of a gradient, relative to the gradient's largest element."""
    pairs = zip(gradients, exact, strict=True)
    return max(np.abs(g - e).max() / np.abs(e).max() for g, e in pairs)


def train(net, learn, test, epochs, seed, batch=64):
    """Train; return the mean loss of the last epoch and the test accuracy."""
    steps = len(learn[1]) // batch
    compiled(net, keras.optimizers.schedules.CosineDecay(0.1, epochs * steps))
    keras.utils.set_random_seed(seed)
    history = net.fit(*learn, batch, epochs, verbose=0, shuffle=True)
    return history.history["loss"][-1], net.evaluate(*test, batch_size=450, verbose=0)[1]


def main(epochs: int = 4, seed: int = 0):
    learn, test = digits()
    images, labels = learn[0][:64], learn[1][:64]
    own, ours, wide = network(seed), network(seed), network(seed, "float64")
    wide.set_weights(own.get_weights())
    backnorm.keras.convert(ours)
    _, exact = first_step(wide, images, labels)
    title = f"Digits in Keras on {keras.backend.backend()}"
    table = Table("", "keras.layers", "backnorm.keras", title=title)
    found = []
    for net in (own, ours):
        loss, gradients = first_step(net, images, labels)
        last, accuracy = train(net, learn, test, epochs, seed)
        error = farthest(gradients, exact)
        found.append((f"{loss:.7f}", f"{error:.1e}", f"{last:.4f}", f"{accuracy:.1%}"))
    rows = ("first loss", "error of its gradients", f"loss of epoch {epochs}", "test accuracy")
    for row in zip(rows, *found, strict=True):
        table.add_row(*row)
    rich.print(table)
    rich.print("Error: the largest difference from float64, over the largest element.")


if __name__ == "__main__":
    typer.run(main)
