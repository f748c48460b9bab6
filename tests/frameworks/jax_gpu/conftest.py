"""The process of JAX's calls of the GPU's kernels: Triton interprets, in the place of the CPU."""

from __future__ import annotations

import os

# Read when the kernels are imported.
os.environ["TRITON_INTERPRET"] = "1"

# What JAX is told before it makes its devices, and fixtures.
from ..jax.conftest import layer as layer
from ..jax.conftest import normal as normal
