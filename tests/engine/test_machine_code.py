"""The machine code of the loops that matter, for processors that are here and that are not.

A vector spilled to the stack, a call or a scalar operation in one of them would cost more than any
decision of a plan could win back, and no other test would notice.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys

import pytest

_X86 = platform.machine() in ("x86_64", "AMD64")

# Compiles both kernels and prints assembly and optimised LLVM code.
_CODE = """
import json
import sys
import numpy as np
import backnorm
from backnorm.kernels.cpu import columns, segments

backnorm.set_num_threads(1)
ones = np.ones(64, np.float32)
for shape, data_format in (((2, 64, 64), "NCX"), ((128, 64), "NXC")):
    x = np.zeros(shape, np.float32)
    options = {"epsilon": 1e-5, "data_format": data_format}
    if sys.argv[1] == "plain":
        backnorm.batch_norm_backward(x, x.copy(), ones, ones, ones, **options)
    else:
        mask = np.zeros(x.size // 8 + 8, np.uint8)
        backnorm.batch_norm_relu_backward(x, x.copy(), ones, ones, ones, mask=mask, **options)
print(json.dumps({
    kernel.__module__.rpartition(".")[2]: [
        next(iter(kernel.inspect_asm().values())), next(iter(kernel.inspect_llvm().values()))
    ]
    for kernel in (segments.run, columns.run)
}))
"""

# Name and features of a processor, the registers of its vectors, and instructions in a loop.
_PROCESSORS = {
    "znver4": ("", "zmm", 12),
    "haswell": ("+avx,+avx2,+fma,+f16c,+sse4.2,+bmi,+bmi2", "ymm", 22),
}


def _compiled(tmp_path, which="plain", **environment):
    done = subprocess.run(
        [sys.executable, "-c", _CODE, which],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "BACKNORM_CACHE_DIR": str(tmp_path), **environment},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _loops(assembly, branch, mark):
    """Return the innermost loops in which an instruction `mark` occurs, as lists of lines."""
    lines = [line.strip() for line in assembly.splitlines() if not line.strip().startswith(".p2")]
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    found = []
    for end, line in enumerate(lines):
        target = re.match(branch, line)
        start = labels.get(target[1], end) if target else end
        body = lines[start + 1 : end + 1]
        inner = not any(step.endswith(":") for step in body)
        if inner and any(step.startswith(mark) for step in body):
            found.append(body)
    return found


@pytest.mark.skipif(not _X86, reason="compiles for x86-64")
@pytest.mark.parametrize("name", _PROCESSORS)
def test_streaming_loops_are_nothing_but_vectors(tmp_path, name):
    features, register, longest = _PROCESSORS[name]
    code = _compiled(tmp_path, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features)
    for kernel, (assembly, _) in code.items():
        loops = _loops(assembly, r"j\w+\s+(\.L\w+)", "vmovntp")
        assert loops, kernel
        shortest = min(loops, key=len)
        text = "\n".join(shortest)
        for needed in (f"%{register}", "vfmadd", "vcvtps2pd"):
            assert needed in text, f"{kernel}:\n{text}"
        spilled = [step for step in shortest if "rsp" in step and "mm" in step]
        assert not spilled, f"{kernel}:\n{text}"
        assert "call" not in text, f"{kernel}:\n{text}"
        if kernel == "segments":
            # Two loads, three operations, a multiplication, a conversion, a store, the loop.
            assert len(shortest) <= longest, text


@pytest.mark.skipif(not _X86, reason="compiles for x86-64")
def test_no_load_is_masked_where_a_rectifier_masks_the_gradient(tmp_path):
    """Masked loads are not prefetched: from memory they took seven times as long (AMD Zen 5)."""
    features = "+avx512f,+avx512vl,+avx512bw,+avx512dq,+avx2,+fma,+f16c,+sse4.2,+bmi,+bmi2"
    code = _compiled(tmp_path, "rectified", NUMBA_CPU_NAME="znver4", NUMBA_CPU_FEATURES=features)
    for kernel, (assembly, _) in code.items():
        loops = _loops(assembly, r"j\w+\s+(\.L\w+)", "vmovntp")
        assert loops, kernel
        for loop in loops:
            masked = [step for step in loop if re.search(r"\).*\{%k\d\} \{z\}", step)]
            assert not masked, f"{kernel}:\n" + "\n".join(loop)
            assert any("{%k" in step for step in loop)


@pytest.mark.skipif(not _X86, reason="rewrites LLVM code made for x86-64")
def test_arm_gets_vectors_too(tmp_path):
    """LLVM's code for Arm from what it was given for this processor, less what only x86 has."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple = "aarch64-unknown-linux-gnu"
    # Waiting hints and reference counts, neither of them in a loop that matters.
    rules = [
        (r"target datalayout = .*\n", ""),
        (r"target triple = .*", f'target triple = "{triple}"'),
        (r".*call void @llvm\.x86\.sse2\.pause.*", ""),
        (r"(%\S+ = )(?:tail )?call i8 @llvm\.x86\.atomic.*", r"\1add i8 0, 0"),
        (r'"target-(cpu|features)"="[^"]*"', ""),
    ]
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu="neoverse-n1", opt=3)
    for kernel, (_, code) in _compiled(tmp_path).items():
        for pattern, replacement in rules:
            code = re.sub(pattern, replacement, code)
        assembly = machine.emit_assembly(llvm.parse_assembly(code))
        loops = _loops(assembly, r"b\.\w+\s+(\.L\w+)", "stnp")
        assert loops, kernel
        text = "\n".join(min(loops, key=len))
        for instruction in ("fcvtl", "fsub", "fmla", "fmul", "fcvtn"):
            assert re.search(rf"{instruction}2?\s+v\d+\.", text), (
                f"{kernel}, {instruction}:\n{text}"
            )
        spilled = [step for step in text.splitlines() if re.search(r"\b[qdv]\d.*\[sp", step)]
        assert not spilled, f"{kernel}:\n{text}"
        assert not re.search(r"^bl\s", text, re.MULTILINE), f"{kernel}:\n{text}"
