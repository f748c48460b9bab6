"""The libraries of machine code, and the functions that each exports.

A *kind* is the compile-time part of a kernel: geometry, element type, arithmetic and direction. All
other parameters are in a record, which the kernel reads when it runs. The function of a kind, named
`Kind.symbol`, takes the address of a record and the index of a participant, and returns an int64.
The kinds of one element type and arithmetic are in one library, because they share most of their
code.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

# For each element type, the arithmetics for which there are kernels.
_ARITHMETICS = {
    "float64": ("float64",),
    "float32": ("float64", "float32"),
    "float16": ("float32",),
    "bfloat16": ("float32",),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """The compile-time parameters of a kernel.

    Attributes
    ----------
    geometry : {"segments", "columns"}
    element : str
        Name of the element type.
    arithmetic : {"float32", "float64"}
        The type in which elements are computed and short runs of sums are added up.
    direction : {"forward", "backward"}
        forward: y from x. backward: dx from x and dy, or from dy alone.
    """

    geometry: str
    element: str
    arithmetic: str
    direction: str

    @property
    def symbol(self) -> str:
        """The name of the function that a library exports for this kind."""
        return f"bn_{self.geometry}_{self.library}_{self.direction}"

    @property
    def library(self) -> str:
        """The name of the library that exports the function."""
        return f"{self.element}_in_{self.arithmetic}"


@dataclass(frozen=True, slots=True)
class Library:
    """A shared library.

    Attributes
    ----------
    name : str
    kinds : tuple of Kind
        The kinds of its functions.
    """

    name: str
    kinds: tuple[Kind, ...] = ()


#: The names of three libraries. `XLA` has the handler of XLA's calls, `THREADS` the code of
#: threads, and `PROBE` the code that reports the processor's features.
XLA, THREADS, PROBE = "xla", "threads", "probe"

#: The libraries that do not depend on the processor's level.
OF_ALL = (THREADS, PROBE)


def _libraries() -> dict[str, Library]:
    loops = tuple(itertools.product(("segments", "columns"), ("forward", "backward")))
    found = {name: Library(name) for name in (XLA, *OF_ALL)}
    for element, arithmetics in _ARITHMETICS.items():
        for arithmetic in arithmetics:
            kinds = tuple(Kind(loop, element, arithmetic, direction) for loop, direction in loops)
            found[kinds[0].library] = Library(kinds[0].library, kinds)
    return found


#: All libraries by their names.
LIBRARIES = _libraries()
