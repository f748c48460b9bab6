"""Training steps with flax.nnx, each compiled as a whole by XLA."""

from __future__ import annotations

from typing import Any

import numpy as np

import backnorm
from backnorm.steps import MOMENTUM, RATE
from benchmarks.models.cases import Case
from benchmarks.models.steps import CLASSES, limit_processors

__all__ = ["Trainer", "start"]


def start(threads: int) -> dict[str, str]:
    """Limit this process to `threads` threads; return versions of packages."""
    limit_processors(threads)
    import flax
    import jax

    return {
        "backnorm": backnorm.__version__,
        "jax": jax.__version__,
        "flax": flax.__version__,
    }


class Trainer:
    """See `steps.Trainer`."""

    def __init__(self, case: Case) -> None:
        from benchmarks.models import flax_models

        self._case, self._models = case, flax_models
        count, channels, *space = case.shape
        shape = (count, *space, channels)
        self._x = np.random.default_rng(0).standard_normal(shape, np.float32)

    def step(self, variant: str) -> _Step:
        """Return a step of a variant."""
        return _Step(self._made(variant), self._x)

    def exact(self) -> list[np.ndarray]:
        """Return the gradients of all parameters in float64."""
        import jax

        # Draw the weights in float32, because float64 draws other random numbers.
        narrow = self._made("flax")
        with jax.enable_x64(True):
            return _Step(narrow, self._x, wide=True).gradients()

    def _made(self, variant: str) -> Any:
        small = self._case.shape[-1] < 64
        return self._models.resnet18(variant, classes=CLASSES, small=small)


class _Step:
    """A training step, which continues from the state of the previous step."""

    def __init__(self, model: Any, x: np.ndarray, wide: bool = False) -> None:
        import jax
        import jax.numpy as jnp
        from flax import nnx

        from backnorm.jax.nnx import BatchNorm

        self.layers = sum(isinstance(each, BatchNorm) for _, each in nnx.iter_modules(model))
        self.fused = 0
        graph, parameters, others = nnx.split(model, nnx.Param, ...)
        dtype = jnp.float64 if wide else jnp.float32
        parameters, others, x = jax.tree.map(
            lambda each: jnp.asarray(each, dtype), (parameters, others, x)
        )
        labels = jnp.arange(len(x)) % CLASSES

        def gradients_of(parameters: Any, others: Any) -> Any:
            def loss_of(parameters: Any) -> Any:
                # flax updates statistics only of a model that is made in the same trace.
                model = nnx.merge(graph, parameters, others, copy=True)
                logs = jax.nn.log_softmax(model(x))
                loss = -jnp.take_along_axis(logs, labels[:, None], 1).mean()
                return loss, nnx.split(model, nnx.Param, ...)[2]

            return jax.grad(loss_of, has_aux=True)(parameters)

        def step(parameters: Any, momenta: Any, others: Any) -> Any:
            gradients, others = gradients_of(parameters, others)
            momenta = jax.tree.map(lambda m, g: MOMENTUM * m + g, momenta, gradients)
            parameters = jax.tree.map(lambda p, m: p - RATE * m, parameters, momenta)
            return parameters, momenta, others

        self._state = parameters, jax.tree.map(jnp.zeros_like, parameters), others
        self._step = jax.jit(step, donate_argnums=(0, 1, 2))

    def __call__(self) -> None:
        """Make a step."""
        import jax

        self._state = self._step(*self._state)
        jax.block_until_ready(self._state)

    def gradients(self) -> list[np.ndarray]:
        """Make the first step; return its gradients, which the momenta then equal."""
        import jax

        self()
        return [np.array(each) for each in jax.tree.leaves(self._state[1])]

    def normalization(self) -> None:
        """Return None, because XLA fuses normalisations with other operations."""
