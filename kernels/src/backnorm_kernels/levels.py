"""Levels of processors: the features of each level, and the levels of this processor.

The x86-64 levels are those of the psABI; ``x86-64-v4-bf16`` is v4 with AVX512_BF16, the
instructions that convert float32 to bfloat16. Other processors have one level, the host's.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from backnorm_kernels.kinds import LIBRARIES, OF_ALL

#: The folder of the compiled libraries. It has one subfolder for each processor level.
FOLDER = Path(__file__).parent / "lib"


@dataclass(frozen=True, slots=True)
class Level:
    """A set of processor features, for which backnorm has its own compiled libraries. These
    libraries run on the processors that have all features of the set.

    Attributes
    ----------
    name : str
    processor : str
        LLVM's name of a processor of the level.
    features : tuple of str
        All features beyond those of every x86-64 processor, by LLVM's names.
    elements : tuple of str or None
        The element types for which the level has its own libraries; None: all. For other types, the
        libraries of the level below are used.
    """

    name: str
    processor: str
    features: tuple[str, ...]
    elements: tuple[str, ...] | None = None


_V3 = (
    "sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "cx16", "sahf", "movbe", "lzcnt", "xsave",
    "avx", "avx2", "bmi", "bmi2", "f16c", "fma",
)  # fmt: skip
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")

#: The levels by name, the best first.
LEVELS = {
    level.name: level
    for level in (
        Level("x86-64-v4-bf16", "x86-64-v4", (*_V4, "avx512bf16"), ("bfloat16",)),
        Level("x86-64-v4", "x86-64-v4", _V4),
        Level("x86-64-v3", "x86-64-v3", _V3),
        Level("x86-64", "x86-64", ()),
    )
}

#: The level of processors that are not x86-64.
HOST = "host"

# The position of each feature in the results of cpuid: leaf, subleaf, register (eax, ebx, ecx,
# edx), bit.
_CPUID = {
    "sse3": (1, 0, 2, 0),
    "ssse3": (1, 0, 2, 9),
    "fma": (1, 0, 2, 12),
    "cx16": (1, 0, 2, 13),
    "sse4.1": (1, 0, 2, 19),
    "sse4.2": (1, 0, 2, 20),
    "movbe": (1, 0, 2, 22),
    "popcnt": (1, 0, 2, 23),
    # The bit at this position is OSXSAVE, not XSAVE. OSXSAVE is set if the processor has the
    # instruction `xsave` and the operating system has enabled this instruction.
    "xsave": (1, 0, 2, 27),
    "avx": (1, 0, 2, 28),
    "f16c": (1, 0, 2, 29),
    "bmi": (7, 0, 1, 3),
    "avx2": (7, 0, 1, 5),
    "bmi2": (7, 0, 1, 8),
    "avx512f": (7, 0, 1, 16),
    "avx512dq": (7, 0, 1, 17),
    "avx512cd": (7, 0, 1, 28),
    "avx512bw": (7, 0, 1, 30),
    "avx512vl": (7, 0, 1, 31),
    "avx512bf16": (7, 1, 0, 5),
    "sahf": (0x80000001, 0, 2, 0),
    "lzcnt": (0x80000001, 0, 2, 5),
}

# The instruction xgetbv returns a bit mask of the registers that the system saves. If the system
# saves the ymm registers, all bits of `_YMM` are set in the mask; if it saves the zmm registers,
# all bits of `_ZMM` are set.
_YMM, _ZMM = 0b110, 0b11100110

Cpuid = Callable[[int, int], tuple[int, int, int, int]]


def is_x86() -> bool:
    """Whether this is an x86-64 processor."""
    return platform.machine() in ("x86_64", "AMD64")


def features_by(cpuid: Cpuid, xgetbv: Callable[[], int]) -> frozenset[str]:
    """Return the features that a processor has and its system supports.

    Parameters
    ----------
    cpuid : callable
        Takes (leaf, subleaf); returns eax, ebx, ecx, edx.
    xgetbv : callable
        Returns the mask of the registers that the system saves; called only if the processor has
        the instruction.
    """
    most = {start: cpuid(start, 0)[0] for start in (0, 0x80000000)}

    def has(leaf: int, subleaf: int, register: int, bit: int) -> bool:
        if leaf > most[leaf & 0x80000000] or (subleaf and cpuid(leaf, 0)[0] < subleaf):
            return False
        return bool(cpuid(leaf, subleaf)[register] >> bit & 1)

    found = {name for name, place in _CPUID.items() if has(*place)}
    saved = xgetbv() if "xsave" in found else 0
    vectors = {"avx", "avx2", "f16c", "fma"}
    if saved & _YMM != _YMM:
        found -= vectors
    if saved & _ZMM != _ZMM:
        found = {name for name in found if not name.startswith("avx512")}
    return frozenset(found)


def supported(features: frozenset[str]) -> tuple[str, ...]:
    """Return the names of the levels that a processor with these features supports, best first."""
    return tuple(name for name, level in LEVELS.items() if features.issuperset(level.features))


def below(name: str) -> tuple[str, ...]:
    """Return the names of a level and of all levels below it, best first."""
    names = tuple(LEVELS)
    return names[names.index(name) :] if name in LEVELS else (name,)


def has(level: str, name: str) -> bool:
    """Whether `level` has a build of the library `name`, which must not be in `OF_ALL`."""
    elements = LEVELS[level].elements if level in LEVELS else None
    kinds = LIBRARIES[name].kinds
    return elements is None or any(kind.element in elements for kind in kinds)


def levels_of(name: str, best: str) -> tuple[str, ...]:
    """Return the levels from `best` downwards that have a library, the best first."""
    if name in OF_ALL:
        return ("x86-64",) if is_x86() else (HOST,)
    return tuple(found for found in below(best) if has(found, name))


@functools.cache
def probed(library: ctypes.CDLL) -> tuple[str, ...]:
    """Return the levels of this processor, best first, using the library `kinds.PROBE`."""
    answer = (ctypes.c_uint32 * 4)()
    library.bn_cpuid.argtypes = (ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)
    library.bn_cpuid.restype = None
    library.bn_xgetbv.argtypes, library.bn_xgetbv.restype = (), ctypes.c_uint64

    def cpuid(leaf: int, subleaf: int) -> tuple[int, int, int, int]:
        library.bn_cpuid(leaf, subleaf, ctypes.addressof(answer))
        eax, ebx, ecx, edx = answer
        return eax, ebx, ecx, edx

    return supported(features_by(cpuid, library.bn_xgetbv))
