"""Kernels compiled for a device that is not there, and what is in their machine code."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from backnorm import problem
from backnorm.activations import RELU
from backnorm.gpu.launch import BackwardLaunch, ForwardLaunch, Kernel
from backnorm.gpu.plan import plan_gpu
from backnorm.layout import extents_of
from backnorm.problem import Metadata

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
NAMES = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "uint8": "u8"}

#: Compute capabilities of devices by name.
CAPABILITIES = {"h200": 90, "a100": 80, "l40s": 89, "t4": 75}


@dataclass
class Code:
    """A compiled kernel.

    Attributes
    ----------
    name : str
    ptx : str
    ttgir : str
        Triton's intermediate code, which says how a tile is divided among threads.
    warps : int
        Of a program.
    registers, spilled : int
        Of a thread; bytes that it keeps in memory for want of registers.
    """

    name: str
    ptx: str
    ttgir: str
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


def compiled(problem, device, tmp_path, stages=4):
    """Return the kernels of a problem, compiled for a device.

    Kernels that are tuned are compiled with a number of stages.
    """
    target = GPUTarget("cuda", CAPABILITIES[device], 32)
    return [
        _compile(kernel, arrays, stages, target, tmp_path) for kernel, arrays in launches(problem)
    ]


def launches(problem):
    """Return the kernels of a problem, and the arrays that they are launched with."""
    order, seen = tuple(range(len(problem.shape))), []
    plan = plan_gpu(problem, extents_of(problem.shape, problem.channel_axes, order))
    data = torch.empty(problem.shape, dtype=_torch(problem.dtype), device="meta")
    channel = torch.empty(problem.channels, dtype=_torch(problem.statistics_dtype), device="meta")
    bits = torch.empty(1, dtype=torch.uint8, device="meta") if problem.relu else None
    residual = data if problem.residual else None

    def new(count):
        return torch.empty(count, dtype=torch.float64, device="meta")

    def record(kernel, *arrays):
        seen.append((kernel, arrays))

    with mock.patch.object(Kernel, "__call__", record):
        if problem.operation == "backward":
            operands = data, data, bits, channel, channel, channel
            BackwardLaunch(plan, new).run(operands, data, residual, (channel, channel))
        else:
            operands, outputs = (data, residual, channel, channel), (data, bits, channel, channel)
            ForwardLaunch(plan, new).run(operands, outputs, (channel, channel), 0.1)
    return seen


def _torch(dtype):
    return getattr(torch, dtype.name)


def _compile(kernel, arrays, stages, target, tmp_path):
    function, constants = kernel._function, dict(kernel._constants)
    if hasattr(function, "configs"):
        function, constants["STAGES"] = function.fn, stages
    arguments = [*arrays, kernel._sizes, *(constants[name] for name in constants)]
    names = [*function.arg_names[: len(arrays) + 1], *constants]
    assert names == function.arg_names
    described = _described(arguments[: len(arrays) + 1])
    signature = dict(zip(names, [*described, *("constexpr" for _ in constants)], strict=True))
    absent = {path: None for path, argument in _leaves(arguments) if argument is None}
    aligned = {
        path: [["tt.divisibility", 16]]
        for path, argument in _leaves(arguments)
        if isinstance(argument, torch.Tensor)
    }
    known = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(function, signature, constexprs={**absent, **known}, attrs=aligned)
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
        function.__name__,
        result.asm["ptx"],
        result.asm["ttgir"],
        kernel._warps,
        registers,
        stack + local,
    )


def _leaves(arguments, path=()):
    """Yield the path and the value of each argument that is not a tuple."""
    for position, argument in enumerate(arguments):
        if isinstance(argument, tuple):
            yield from _leaves(argument, (*path, position))
        else:
            yield (*path, position), argument


def _described(argument):
    """Return the type of an argument, as Triton writes it."""
    if isinstance(argument, (list, tuple)):
        parts = map(_described, argument)
        return type(argument)(*parts) if hasattr(argument, "_fields") else list(parts)
    if argument is None:
        return "constexpr"
    if isinstance(argument, torch.Tensor):
        return "*" + NAMES[str(argument.dtype).removeprefix("torch.")]
    if isinstance(argument, float):
        return "fp32"
    return "i32" if argument < 2**31 else "i64"
