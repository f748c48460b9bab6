"""What it costs in JAX to normalise a batch that lies on several devices.

``python -m benchmarks.sharded``, by hand. The processors of this machine are as many devices. In
turns, forward and backward: a batch on one device; sharded over all, under `jax.jit`; and in
`jax.shard_map`, with `axis_name`. XLA's own code for flax' formulas stands beside them, sharded,
too. A table in Markdown goes to standard output.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.turns import HOST, Settings, take_turns

__all__ = ["SHAPES", "main"]

#: Channels are last.
SHAPES = ((32, 112, 112, 64), (32, 56, 56, 64), (32, 28, 28, 512), (32, 7, 7, 2048))
_SETTINGS = Settings(rounds=12, samples=1, limit=math.inf)


def main() -> None:
    """Measure, and print the table."""
    devices = os.cpu_count() or 1
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
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
            y, back = jax.vjp(lambda *given: function(*given)[0], x, gamma, beta)
            return y, *back(dy)

        return gradients

    def finished(function: Callable[..., Any], given: Any) -> Any:
        return jax.block_until_ready(function(*given))

    flax_step = jax.jit(step(of_flax))
    spread = P("batch")
    in_map = jax.shard_map(
        step(partial(ours, axis_name="batch")),
        mesh=mesh,
        in_specs=(spread, spread, P(), P()),
        out_specs=(spread, spread, P(), P()),
    )
    print(f"| shape, {devices} devices | one device | sharded | `axis_name` | flax, sharded |")
    print("|---|---|---|---|---|")
    for shape in SHAPES:
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
        samples = take_turns(calls, _SETTINGS, lambda key: None, dict.fromkeys(calls, 0.0), HOST)
        cells = [f"{1e3 * statistics.median(times):.2f} ms" for times in samples.values()]
        print(f"| {shape} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
