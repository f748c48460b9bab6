"""What it costs in JAX to normalise a batch that lies on several devices.

``python -m benchmarks.sharded``, by hand. The processors of this machine are as many devices. In
turns, forward and backward: a batch on one device; sharded over all, under `jax.jit`; and in
`jax.shard_map`, with `axis_name`. XLA's own code for flax' formulas stands beside them, sharded,
too. A table in Markdown goes to standard output.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["SHAPES", "main"]

#: Channels are last.
SHAPES = ((32, 112, 112, 64), (32, 56, 56, 64), (32, 28, 28, 512), (32, 7, 7, 2048))
_ROUNDS = 12


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

    def mapped(x: Any, dy: Any, gamma: Any, beta: Any) -> Any:
        return step(partial(ours, axis_name="batch"))(x, dy, gamma, beta)

    spread = P("batch")
    in_map = jax.shard_map(
        mapped, mesh=mesh, in_specs=(spread, spread, P(), P()), out_specs=(spread, spread, P(), P())
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
        calls = [
            (jax.jit(step(ours)), alone),
            (jax.jit(step(ours)), cut),
            (jax.jit(in_map), cut),
            (jax.jit(step(of_flax)), cut),
        ]
        found = [jax.block_until_ready(call(*given)) for call, given in calls]
        for others in found[1:]:
            for one, other in zip(found[0], others, strict=True):
                scale = float(jnp.abs(one).max())
                assert float(jnp.abs(jax.device_get(one) - jax.device_get(other)).max()) < (
                    1e-4 * scale
                )
        samples: list[list[float]] = [[] for _ in calls]
        for _ in range(_ROUNDS):
            for (call, given), times in zip(calls, samples, strict=True):
                jax.block_until_ready(call(*given))
                begun = time.perf_counter()
                jax.block_until_ready(call(*given))
                times.append(time.perf_counter() - begun)
        cells = [f"{1e3 * statistics.median(times):.2f} ms" for times in samples]
        print(f"| {shape} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
