"""Time the normalisation of a batch on several JAX devices, forward and backward.

Each processor of this machine is a device. The columns are a batch on one device; a batch sharded
over all devices, under `jax.jit`; a sharded batch in `jax.shard_map`, with `axis_name`; and flax's
formulas on a sharded batch, as XLA compiles them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.studies import show
from benchmarks.turns import Settings, in_turns, median

# Channels are last.
_SHAPES = ((32, 112, 112, 64), (32, 56, 56, 64), (32, 28, 28, 512), (32, 7, 7, 2048))
_SETTINGS = Settings(rounds=12, samples=1, limit=math.inf)


def _rows(devices: int) -> Iterator[Sequence[object]]:
    """Yield milliseconds of each shape."""
    import jax
    import jax.numpy as jnp
    from flax import linen
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import backnorm.jax

    mesh = jax.make_mesh((devices,), ("batch",), axis_types=(AxisType.Auto,))
    ours = partial(backnorm.jax.batch_norm, epsilon=1e-5)
    flax = linen.BatchNorm(use_running_average=False, epsilon=1e-5)

    def of_flax(x: Any, gamma: Any, beta: Any) -> tuple[Any]:
        zero = jnp.zeros_like(gamma)
        variables = {
            "params": {"scale": gamma, "bias": beta},
            "batch_stats": {"mean": zero, "var": zero},
        }
        return (flax.apply(variables, x, mutable=["batch_stats"])[0],)

    def step(function: Callable[..., Any]) -> Callable[..., Any]:
        def gradients(x: Any, dy: Any, gamma: Any, beta: Any) -> Any:
            y, back = jax.vjp(lambda *operands: function(*operands)[0], x, gamma, beta)
            return y, *back(dy)

        return gradients

    def finished(function: Callable[..., Any], operands: Any) -> Any:
        return jax.block_until_ready(function(*operands))

    flax_step = jax.jit(step(of_flax))
    spread = P("batch")
    in_map = jax.shard_map(
        step(partial(ours, axis_name="batch")),
        mesh=mesh,
        in_specs=(spread, spread, P(), P()),
        out_specs=(spread, spread, P(), P()),
    )
    yield f"shape, {devices} devices", "one device", "sharded", "`axis_name`", "flax, sharded"
    for shape in _SHAPES:
        keys = jax.random.split(jax.random.key(0), 3)
        x, dy = (jax.random.normal(key, shape) for key in keys[:2])
        gamma = 1.0 + jax.random.uniform(keys[2], shape[-1:])
        alone = (x, dy, gamma, gamma)
        where = [spread, spread, P(), P()]
        cut = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(alone, where, strict=True)]
        of_one = jax.jit(step(ours))
        pairs = [(of_one, alone), (of_one, cut), (jax.jit(in_map), cut), (flax_step, cut)]
        calls = {k: partial(finished, *pair) for k, pair in enumerate(pairs)}
        found = [call() for call in calls.values()]
        for others in found[1:]:
            for one, other in zip(found[0], others, strict=True):
                one, other = np.asarray(one), np.asarray(other)
                np.testing.assert_allclose(other, one, rtol=0, atol=1e-4 * np.abs(one).max())
        samples = in_turns(calls, _SETTINGS)
        yield shape, *(f"{1e3 * median(times):.2f} ms" for times in samples.values())


if __name__ == "__main__":
    devices = os.cpu_count() or 1
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    show(_rows(devices))
