"""The front doors for JAX and flax, as functions of arrays."""

from __future__ import annotations

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import backnorm.jax as ours
from backnorm.jax import linen
from backnorm.jax.nnx import BatchNorm
from tests.contract.fronts import EPSILON
from tests.support.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64


class _Front:
    """A step by `jax.vjp` of a function of a dictionary of arrays."""

    operands = "arrays of JAX"

    def __init__(self, name, forward, *, compiled=False, x64=True, **takes):
        self.name, self.forward, self.takes = name, forward, takes
        self.compiled, self.x64 = compiled, x64

    def refuses(self, case):
        # A residual is added to a y that is rounded, unless a kernel has the ReLU, too; of NaN,
        # XLA's ReLU makes NaN.
        rounded = case["reproducible"] or case["activation"] != "relu"
        return (case["residual"] and rounded) or (
            case["activation"] and case["elements"] == "non-finite"
        )

    def tensor(self, array):
        return jnp.asarray(array)

    def numpy(self, tensor):
        return np.asarray(tensor)

    def run(self, data, options, backward=nullcontext):
        def step(arrays):
            return self.step(arrays, options, backward)

        with jax.enable_x64(self.x64):
            arrays = {n: self.tensor(each) for n, each in vars(data).items() if each is not None}
            found = (jax.jit(step) if self.compiled else step)(arrays)
            return {name: self.numpy(each) for name, each in found.items()}

    def step(self, arrays, options, backward):
        sources = {n: arrays[n] for n in ("x", "gamma", "beta", "residual") if n in arrays}

        def function(sources):
            found = self.forward({**arrays, **sources}, options)
            return found.pop("y"), found

        y, pull, found = jax.vjp(function, sources, has_aux=True)
        with backward():
            (gradients,) = pull(arrays["dy"])
        return found | {"y": y} | {f"d{name}": each for name, each in gradients.items()}


class Mapped(_Front):
    """The second of two instances that `jax.vmap` computes."""

    def step(self, arrays, options, backward):
        several = {name: jnp.stack([each * 2, each]) for name, each in arrays.items()}
        mapped = jax.vmap(lambda each: super(Mapped, self).step(each, options, backward))
        return {name: each[1] for name, each in mapped(several).items()}


class Linearized(_Front):
    """Forward mode: the Jacobian of y by x is symmetric."""

    def step(self, arrays, options, backward):
        def function(x):
            return self.forward({**arrays, "x": x}, options)["y"]

        y, push = jax.linearize(function, arrays["x"])
        with backward():
            return {"y": y, "dx": push(arrays["dy"])}


class Backward(_Front):
    """The function of the backward pass."""

    def step(self, arrays, options, backward):
        found = self.forward(arrays, options)
        operands = {name: arrays.get(name) for name in ("x", "dy", "gamma")}
        statistics = found if options.training else arrays
        operands |= {name: statistics[name] for name in ("mean", "variance")}
        settings = settings_of(arrays, options) | {"training": options.training}
        gradients = ours.batch_norm_backward(**operands, **settings)
        return found | dict(zip(("dx", "dgamma", "dbeta"), gradients, strict=True))


def settings_of(arrays, options):
    activation = {"activation": options.activation, "residual": arrays.get("residual")}
    activation = activation if options.activation else {}
    return {"epsilon": EPSILON, "axis": options.axis, **options.of_sums, **activation}


def by_functions(arrays, options):
    settings = settings_of(arrays, options)
    x, *channels = map(arrays.get, ("x", "mean", "variance", "gamma", "beta"))
    if not options.training:
        return {"y": ours.batch_norm_inference(x, *channels, **settings)}
    y, mean, variance = ours.batch_norm(x, *channels[2:], **settings)
    return {"y": y, "mean": mean, "variance": variance}


def _statistics(mean, variance, x, options):
    """Return running statistics that are those of the batch; flax keeps float64 in float32."""
    kept = options.training and x.dtype != np.float64
    return {"mean": mean, "variance": variance} if kept else {}


def by_state(arrays, options):
    x, *channels = map(arrays.get, ("x", "mean", "variance", "gamma", "beta"))
    state = ours.RunningStatistics(*channels[:2])
    y, after = ours.batch_norm_with_state(
        x, state, *channels[2:], training=options.training, momentum=0.0,
        **settings_of(arrays, options),
    )  # fmt: skip
    return {"y": y} | _statistics(*after, x, options)


def by_linen(arrays, options):
    settings = settings_of(arrays, options)
    call = {name: settings.pop(name) for name in ("activation", "residual") if name in settings}
    x, mean, variance, gamma, beta = map(arrays.get, ("x", "mean", "variance", "gamma", "beta"))
    params = {"scale": gamma, "bias": beta}
    layer = linen.BatchNorm(
        use_running_average=not options.training, use_scale=gamma is not None,
        use_bias=beta is not None, momentum=0.0, dtype=x.dtype, **settings,
    )  # fmt: skip
    y, after = layer.apply(
        {"params": {name: each for name, each in params.items() if each is not None},
         "batch_stats": {"mean": mean, "var": variance}},
        x, mutable=["batch_stats"], **call,
    )  # fmt: skip
    after = after["batch_stats"]
    return {"y": y} | _statistics(after["mean"], after["var"], x, options)


def by_nnx(arrays, options):
    settings = settings_of(arrays, options)
    call = {name: settings.pop(name) for name in ("activation", "residual") if name in settings}
    x, mean, variance, gamma, beta = map(arrays.get, ("x", "mean", "variance", "gamma", "beta"))
    layer = BatchNorm(
        len(mean), use_running_average=not options.training, use_scale=gamma is not None,
        use_bias=beta is not None, momentum=0.0, dtype=x.dtype,
        rngs=nnx.Rngs(0), **settings,
    )  # fmt: skip
    variables = layer.scale, layer.bias, layer.mean, layer.var
    for variable, value in zip(variables, (gamma, beta, mean, variance), strict=True):
        if value is not None:
            variable.set_value(value)
    y = layer(x, **call)
    return {"y": y} | _statistics(layer.mean[...], layer.var[...], x, options)


_WITHOUT_RELU = {"activation": [None], "residual": [False]}
FRONTS = [
    _Front("functions", by_functions),
    _Front("jit", by_functions, compiled=True),
    _Front(
        "without x64", by_functions, compiled=True, x64=False, dtype=[FLOAT32, FLOAT16, BFLOAT16]
    ),
    Mapped("vmap", by_functions, compiled=True),
    Linearized("linearize", by_functions, **_WITHOUT_RELU, reproducible=[False]),
    # A function of its own has the arithmetic of its own call.
    Backward("backward", by_functions, **_WITHOUT_RELU, backward_in=[None], narrow=[False]),
    _Front("state", by_state, **_WITHOUT_RELU, narrow=[False]),
    _Front("linen", by_linen, narrow=[False]),
    # It rounds its parameters to the type of its elements.
    _Front("nnx", by_nnx, narrow=[False], dtype=[FLOAT32, FLOAT64]),
]
