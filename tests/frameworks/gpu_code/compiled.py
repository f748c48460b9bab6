"""Kernels compiled for a device that is not there, and what is in their machine code."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from backnorm import problem
from backnorm.activations import RELU
from backnorm.gpu.device import KNOWN
from backnorm.gpu.launch import BackwardLaunch, ForwardLaunch
from backnorm.gpu.plan import plan_gpu
from backnorm.layout import extents_of
from backnorm.problem import Metadata

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
NAMES = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
ARRAYS = {"p_x", "p_dy", "p_dx", "p_dresidual", "p_residual", "p_y"}
WORKSPACE = {"p_partials", "p_sums", "p_moments"}


@dataclass
class Code:
    """A compiled kernel.

    Attributes
    ----------
    name : str
    ptx : str
    warps : int
        Of a program.
    registers, spilled : int
        Of a thread; bytes that it keeps in memory for want of registers.
    """

    name: str
    ptx: str
    warps: int
    registers: int
    spilled: int


def problem_of(operation, shape, axis, dtype, *, relu=False, arithmetic=None):
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    statistics = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    x, channel = Metadata(shape, dtype), Metadata((shape[axis],), statistics)
    options = {
        "epsilon": 1e-5,
        "data_format": "NCX" if axis == 1 else "NXC",
        "arithmetic": arithmetic,
    }
    if operation == "backward":
        made = problem.problem_of("backward", x, x, None, channel, channel, channel, **options)
    else:
        made = problem.problem_of("forward", x, None, channel, channel, None, None, **options)
    return dataclasses.replace(made, activation=RELU if relu else None, residual=relu)


def compiled(problem, device, tmp_path):
    """Return the kernels of a problem, compiled for one of the known devices."""
    order = tuple(range(len(problem.shape)))
    gpu = KNOWN[device]
    plan = plan_gpu(problem, extents_of(problem.shape, problem.channel_axes, order), gpu)
    if problem.operation == "backward":
        launch = BackwardLaunch(problem, plan, None)
    else:
        launch = ForwardLaunch(dataclasses.replace(problem, running=True), plan, None)
    complete = launch._complete
    kernels = [complete] if complete else [launch._sums, launch._finish, launch._apply]
    target = GPUTarget("cuda", 10 * gpu.capability[0] + gpu.capability[1], 32)
    return [_compile(kernel, problem, target, tmp_path) for kernel in kernels]


def _compile(kernel, problem, target, tmp_path):
    sizes = iter(kernel._sizes)
    signature, aligned = {}, {}
    for position, name in enumerate(kernel._function.arg_names):
        if name in kernel._constants:
            signature[name] = "constexpr"
        elif name.startswith("p_"):
            signature[name] = "*" + _type(name, problem, kernel)
            aligned[(position,)] = [["tt.divisibility", 16]]
        elif name.startswith("momentum"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if next(sizes) < 2**31 else "i64"
    source = ASTSource(kernel._function, signature, constexprs=kernel._constants, attrs=aligned)
    options = {"num_warps": kernel._warps, "enable_fp_fusion": False}
    result = triton.compile(source, target=target, options=options)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(result.asm["cubin"])
    told = subprocess.run(
        [TOOLS / "cuobjdump", "-res-usage", path], capture_output=True, text=True, check=True
    ).stdout
    registers, stack, local = (
        int(re.search(rf"{word}:(\d+)", told)[1]) for word in ("REG", "STACK", "LOCAL")
    )
    return Code(
        kernel._function.__name__, result.asm["ptx"], kernel._warps, registers, stack + local
    )


def _type(name, problem, kernel):
    if name in WORKSPACE:
        return "fp64"
    if name == "p_bits":
        return "u8" if problem.relu else NAMES[str(problem.dtype)]
    if name in ARRAYS:
        return NAMES[str(problem.dtype)]
    if name in ("p_mean", "p_variance") and kernel._function.__name__ == "forward_apply":
        return "fp64"
    return NAMES[str(problem.statistics_dtype)]
