"""What stands around a layer, compiled: ``python -m benchmarks.models.flax_layer``, by hand.

relu(norm(x) + residual) and its gradients, as at the end of a residual block, under `jax.jit`: the
normalisation is that of `flax.nnx.BatchNorm`, ours, and ours with ReLU and addition in the same
pass. All take turns. A table in Markdown, that of docs/performance.md, goes to standard output.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.models.cases import FRAMEWORKS, Variant
from benchmarks.models.of_flax import start
from benchmarks.turns import HOST, Settings, summary, take_turns

__all__ = ["SHAPES", "measured"]

#: Of ResNet-18 with 16 images of 32 x 32 and with 8 of 160 x 160.
SHAPES = ((16, 32, 32, 64), (16, 8, 8, 256), (8, 80, 80, 64), (8, 20, 20, 128))

NAMES = FRAMEWORKS["flax"].variants

_SETTINGS = Settings(rounds=12, samples=5, warm=0.02, least=0.005, limit=10.0)

#: By shape and whose the layer is: seconds of both passes.
Found = dict[tuple[tuple[int, ...], str], float]


def measured(shapes: tuple[tuple[int, ...], ...] = SHAPES, settings: Settings = _SETTINGS) -> Found:
    """Return the median of both passes of every layer."""
    found: Found = {}
    for shape in shapes:
        calls = {name: _call(name, shape) for name in NAMES}
        samples = take_turns(calls, settings, lambda _: None, dict.fromkeys(NAMES, 0.0), HOST)
        found |= {(shape, name): summary(each).median for name, each in samples.items()}
    return found


def _call(name: Variant, shape: tuple[int, ...]) -> Callable[[], object]:
    """Return what is timed."""
    import jax
    from flax import nnx

    from benchmarks.models.flax_models import activated, norm_of

    layer = norm_of(name)(shape[-1], rngs=nnx.Rngs(0))
    graph, parameters, others = nnx.split(layer, nnx.Param, ...)
    rng = np.random.default_rng(0)
    x, residual, dy = (jax.numpy.asarray(rng.standard_normal(shape, np.float32)) for _ in range(3))

    def run(parameters: Any, others: Any, x: Any, residual: Any, dy: Any) -> Any:
        def y_of(parameters: Any, x: Any, residual: Any) -> Any:
            layer = nnx.merge(graph, parameters, others, copy=True)
            y = activated(layer, x, residual, fused="fused" in name)
            return y, nnx.split(layer, nnx.Param, ...)[2]

        y, pull, moved = jax.vjp(y_of, parameters, x, residual, has_aux=True)
        return y, pull(dy), moved

    compiled, given = jax.jit(run), (parameters, others, x, residual, dy)
    return lambda: jax.block_until_ready(compiled(*given))


def main() -> None:
    """Measure all, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    start(parser.parse_args().threads)
    found = measured()
    print(f"| x | {' | '.join(NAMES)} |")
    print("|---" * (1 + len(NAMES)) + "|")
    for shape in SHAPES:
        own, *others = (found[shape, name] for name in NAMES)
        texts = [f"{1e3 * own:.2f} ms", *(f"{each / own:.2f}" for each in others)]
        print(f"| {shape} | {' | '.join(texts)} |")


if __name__ == "__main__":
    main()
