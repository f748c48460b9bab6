"""Time the end of a residual block in flax: relu(norm(x) + residual) and gradients, compiled.

The normalisation is `flax.nnx.BatchNorm`, ours, and ours with ReLU and addition fused into it; ours
also in float32 arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.models.cases import FRAMEWORKS
from benchmarks.models.of_flax import start
from benchmarks.studies import arguments, show
from benchmarks.turns import Settings, in_turns, median

# Layers of ResNet-18 with 16 images of 32 x 32 and with 8 of 160 x 160.
_SHAPES = ((16, 32, 32, 64), (16, 8, 8, 256), (8, 80, 80, 64), (8, 20, 20, 128))
_NAMES = FRAMEWORKS["flax"].variants
_SETTINGS = Settings(rounds=12, samples=5, least=0.005, limit=10.0)


def _call(name: str, shape: tuple[int, ...]) -> Callable[[], object]:
    """Return a call that runs both passes of a variant."""
    import jax
    from flax import nnx

    from benchmarks.models.flax_models import activated, norm_of

    layer = norm_of(name)(shape[-1], rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    x, residual, dy = jax.random.normal(jax.random.key(0), (3, *shape))

    def run(state: Any, x: Any, residual: Any, dy: Any) -> Any:
        def y_of(state: Any, x: Any, residual: Any) -> Any:
            layer = nnx.merge(graph, state, copy=True)
            y = activated(layer, x, residual, fused="fused" in name)
            return y, nnx.state(layer)

        y, pull, moved = jax.vjp(y_of, state, x, residual, has_aux=True)
        return y, pull(dy), moved

    compiled = jax.jit(run)
    return lambda: jax.block_until_ready(compiled(state, x, residual, dy))


def _rows() -> Iterator[Sequence[object]]:
    """Yield milliseconds of flax, and our ratios to it, for each shape."""
    yield "x", *_NAMES
    for shape in _SHAPES:
        samples = in_turns({name: _call(name, shape) for name in _NAMES}, _SETTINGS)
        own, *ours = (median(each) for each in samples.values())
        yield shape, f"{1e3 * own:.2f} ms", *(f"{each / own:.2f}" for each in ours)


if __name__ == "__main__":
    start(arguments(__doc__, threads=1).threads)
    show(_rows())
