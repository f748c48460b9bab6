"""The machine code of the loops that matter, for processors that are here and that are not.

A vector spilled to the stack, a call or a scalar operation in one of them would cost more than any
decision of a plan could win back, and no other test would notice.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from backnorm_kernels import library
from backnorm_kernels.build.demand import environment
from backnorm_kernels.levels import is_x86

x86 = pytest.mark.skipif(not is_x86(), reason="compiles for x86-64")

_LIBRARY = "float32_in_float64"

# A level, the registers of its vectors, and instructions of the loop.
_LEVELS = {"x86-64-v4": ("zmm", 12), "x86-64-v3": ("ymm", 22)}

# Libraries of the other levels have to be built.
_OWN = library.levels_of(_LIBRARY)[0]
_BUILT = [pytest.param(level, marks=[] if level == _OWN else pytest.mark.long) for level in _LEVELS]

# Prints the optimised LLVM code of a library.
_CODE = """
import sys
from backnorm_kernels.build.compile import module_of
from backnorm_kernels.build.machine import optimised, target_machine
print(optimised(module_of(sys.argv[2])[0], target_machine(sys.argv[1])))
"""


def _labelled(disassembly):
    """Return what objdump printed with a label wherever an instruction jumps to."""
    steps = re.findall(r"^ *([0-9a-f]+):\t(.*?) *(?:#.*)?$", disassembly, re.MULTILINE)
    jump = re.compile(r"(j\w+\s+)([0-9a-f]+)\b.*")
    targets = {found[2] for _, step in steps if (found := jump.match(step))}
    lines = []
    for at, step in steps:
        lines += [f".L{at}:"] if at in targets else []
        lines.append(jump.sub(r"\1.L\2", step))
    return "\n".join(lines)


def _loops(assembly, branch, mark, *, branches=False):
    """Return the innermost loops in which an instruction `mark` occurs, as lists of lines.

    Loops that contain branches are left out, unless they are wanted.
    """
    lines = [line.strip() for line in assembly.splitlines() if not line.strip().startswith(".p2")]
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    targets = [re.match(branch, line) for line in lines]
    starts = [labels.get(target[1], end) if target else end for end, target in enumerate(targets)]
    found = []
    for end, start in enumerate(starts):
        body = lines[start + 1 : end + 1]
        if branches:
            inner = all(starts[k] >= k for k in range(start + 1, end))
        else:
            inner = not any(step.endswith(":") for step in body)
        if inner and any(step.startswith(mark) for step in body):
            found.append(body)
    return found


def _streaming_loops(tool, path, *, branches=False):
    assembly = _labelled(tool("objdump", "-d", "--no-show-raw-insn", path))
    return _loops(assembly, r"j\w+\s+(\.L\w+)", "vmovnt", branches=branches)


def _has(loop, instruction):
    return any(step.startswith(instruction) for step in loop)


@x86
@pytest.mark.parametrize("level", _BUILT)
def test_streaming_loops_use_vectors_without_spills_or_calls(level, built, tool):
    register, longest = _LEVELS[level]
    (path,) = built(level, _LIBRARY)
    # A loop may be entered at its condition, which has a label.
    loops = _streaming_loops(tool, path, branches=True)
    # Each option has a loop of its own. With frozen statistics nothing is added to what dy is
    # multiplied by, and in a forward pass nothing is multiplied after that.
    cases = {
        "backward": [each for each in loops if _has(each, "vfmadd") and _has(each, "vmulpd")],
        "frozen": [each for each in loops if not _has(each, "vfmadd") and _has(each, "vmulpd")],
        "forward": [each for each in loops if _has(each, "vfmadd") and not _has(each, "vmulpd")],
    }
    for case, found in cases.items():
        assert found, case
        shortest = min(found, key=len)
        text = "\n".join(shortest)
        for needed in (f"%{register}", "vcvtps2pd"):
            assert needed in text, text
        # Without a ReLU, no loop tests whether there is one.
        assert not re.search(r"\{%k|^\.L|test", text, re.MULTILINE), text
        # Two loads, three operations, a multiplication, a conversion, a store, the loop.
        assert len(shortest) <= longest, text
        for loop in found if level == "x86-64-v4" else [shortest]:
            spilled = [step for step in loop if "rsp" in step and "mm" in step]
            assert not spilled, "\n".join(loop)
            assert not _has(loop, "call"), "\n".join(loop)


@x86
@pytest.mark.parametrize("level", _BUILT[:1])
def test_relu_mask_is_not_fused_into_loads(level, built, tool):
    """Masked loads are not prefetched: from memory they took seven times as long (AMD Zen 5)."""
    (path,) = built(level, _LIBRARY)
    # Loops of the ReLU have a branch for the residual; other loops of the library have no mask.
    loops = _streaming_loops(tool, path, branches=True)
    assert any("{%k" in step for loop in loops for step in loop if _has(loop, "vmulpd"))
    for loop in loops:
        masked = [step for step in loop if re.search(r"\).*\{%k\d\} ?\{z\}", step)]
        assert not masked, "\n".join(loop)


@pytest.mark.long
@x86
def test_streaming_loops_for_arm_use_vectors_without_spills_or_calls():
    """LLVM's code for Arm from what it was given for this processor, less what only x86 has."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple = "aarch64-unknown-linux-gnu"
    # Waiting hints are in no loop that matters.
    rules = [
        (r"target datalayout = .*\n", ""),
        (r"target triple = .*", f'target triple = "{triple}"'),
        (r".*call void @llvm\.x86\.sse2\.pause.*", ""),
        (r'"target-(cpu|features)"="[^"]*"', ""),
        # Registers of Arm hold 16 bytes: what keeps a vector in one of x86 has no equivalent.
        (r'(?:tail )?call (<[^>]*>) asm "", "=v,0"\(<[^>]*> (%[^)]*)\).*', r"bitcast \1 \2 to \1"),
    ]
    level = "x86-64-v4"
    done = subprocess.run(
        [sys.executable, "-c", _CODE, level, _LIBRARY],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(level),
    )
    assert done.returncode == 0, done.stderr
    code = done.stdout
    for pattern, replacement in rules:
        code = re.sub(pattern, replacement, code)
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu="neoverse-n1", opt=3)
    assembly = machine.emit_assembly(llvm.parse_assembly(code))
    loops = _loops(assembly, r"b\.\w+\s+(\.L\w+)", "stnp")
    loops = [loop for loop in loops if _has(loop, "fmla") and _has(loop, "fmul")]
    assert loops
    text = "\n".join(min(loops, key=len))
    for instruction in ("fcvtl", "fsub", "fmla", "fmul", "fcvtn"):
        assert re.search(rf"{instruction}2?\s+v\d+\.", text), f"{instruction}:\n{text}"
    spilled = [step for step in text.splitlines() if re.search(r"\b[qdv]\d.*\[sp", step)]
    assert not spilled, text
    assert not re.search(r"^bl\s", text, re.MULTILINE), text
