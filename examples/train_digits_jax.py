"""Train a residual network on handwritten digits twice: with flax's normalisation and with ours.

    python examples/train_digits_jax.py [--epochs 4] [--seed 0]

Both networks begin with the same weights and see the same images in the same order. The table has
the loss and the error of the gradients of the first step, the last loss, and the test accuracy.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich
import typer
from rich.table import Table
from sklearn.datasets import load_digits

from backnorm.jax.linen import BatchNorm

# Both networks are compared with gradients in float64.
jax.config.update("jax_enable_x64", True)


class Network(nn.Module):
    """A stem and two residual blocks; `norm` is the class of the normalisation layers."""

    norm: type[nn.BatchNorm]
    dtype: Any = np.float32  # of activations
    param_dtype: Any = np.float32

    @nn.compact
    def __call__(self, x, training):
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        norm = partial(self.norm, use_running_average=not training, momentum=0.9, **types)
        conv = partial(nn.Conv, use_bias=False, **types)
        x = nn.relu(norm()(conv(16, (3, 3))(x)))
        for channels in (32, 64):
            y = nn.relu(norm()(conv(channels, (3, 3), strides=2)(x)))
            y = norm()(conv(channels, (3, 3))(y))
            x = nn.relu(y + conv(channels, (1, 1), strides=2)(x))
        return nn.Dense(10, **types)(x.mean((1, 2)))


def digits():
    """Return images of 8x8 pixels and their labels: 1347 to learn from, 450 to test with."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = data.images.astype(np.float32)[order, :, :, None] / 8 - 1
    labels = data.target[order]
    return (images[:-450], labels[:-450]), (images[-450:], labels[-450:])


def loss_of(params, net, stats, images, labels):
    """Return the loss of a batch, and the running statistics after it."""
    variables = {"params": params, "batch_stats": stats}
    logits, new = net.apply(variables, images, training=True, mutable="batch_stats")
    logits = logits.astype(net.param_dtype)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), new["batch_stats"]


# A step is compiled as a whole.
first_step = jax.jit(jax.value_and_grad(loss_of, has_aux=True), static_argnames="net")


def farthest(gradients, exact):
    """Return the largest error of a gradient, relative to the gradient's largest element."""
    errors = jax.tree.map(lambda g, e: jnp.abs(g - e).max() / jnp.abs(e).max(), gradients, exact)
    return float(max(jax.tree.leaves(errors)))


def train(net, variables, learn, test, epochs, seed, batch=64):
    """Train; return the mean loss of the last epoch and the test accuracy."""
    count = len(learn[1]) // batch
    optimiser = optax.sgd(optax.cosine_decay_schedule(0.1, epochs * count), momentum=0.9)
    params, stats = variables["params"], variables["batch_stats"]
    state, order = optimiser.init(params), np.random.default_rng(seed)
    update = jax.jit(optimiser.update)
    for _ in range(epochs):
        losses = []
        for chosen in order.permutation(len(learn[1]))[: count * batch].reshape(count, batch):
            batch_of = (learn[0][chosen], learn[1][chosen])
            (loss, stats), gradients = first_step(params, net, stats, *batch_of)
            updates, state = update(gradients, state)
            params = optax.apply_updates(params, updates)
            losses.append(float(loss))
    logits = net.apply({"params": params, "batch_stats": stats}, test[0], training=False)
    return sum(losses) / len(losses), float((logits.argmax(1) == test[1]).mean())


def main(epochs: int = 4, seed: int = 0):
    learn, test = digits()
    images, labels = learn[0][:64], learn[1][:64]
    start = Network(nn.BatchNorm).init(jax.random.key(seed), images, training=True)
    wide = jax.tree.map(partial(jnp.asarray, dtype=np.float64), start)
    exact_net = Network(nn.BatchNorm, np.float64, np.float64)
    _, exact = first_step(wide["params"], exact_net, wide["batch_stats"], images, labels)
    table = Table("", "flax.linen.BatchNorm", "backnorm.jax.linen", title="Digits in JAX")
    found = []
    for net in (Network(nn.BatchNorm), Network(BatchNorm)):
        (loss, _), gradients = first_step(
            start["params"], net, start["batch_stats"], images, labels
        )
        last, accuracy = train(net, start, learn, test, epochs, seed)
        error = farthest(gradients, exact)
        found.append((f"{loss:.7f}", f"{error:.1e}", f"{last:.4f}", f"{accuracy:.1%}"))
    rows = ("first loss", "error of its gradients", f"loss of epoch {epochs}", "test accuracy")
    for row in zip(rows, *found, strict=True):
        table.add_row(*row)
    rich.print(table)
    rich.print("Error: the largest difference from float64, over the largest element.")


if __name__ == "__main__":
    typer.run(main)
