"""The libraries of machine code, and the functions that each exports.

A *kind* is the compile-time part of a kernel: geometry, element type, arithmetic, operation and
epilogue. All other parameters are in a record, which the kernel reads when it runs. The function of
a kind, named `Kind.symbol`, takes the address of a record and the index of a participant, and
returns an int64. The kinds of one geometry, element type, arithmetic and direction are in one
library, because they share most of their code.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

# For each element type, the arithmetics for which there are kernels. The first one is the usual
# arithmetic. The name of a kernel contains its arithmetic only if it is not the usual one.
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
    geometry : {"segments", "columns", "floor"}
    element : str
        Name of the element type.
    arithmetic : {"float32", "float64"}
        The type in which elements are computed and short runs of sums are added up.
    operation : {"forward", "backward", "frozen", "move"}
        forward: y from x. backward: dx from x and dy. frozen: dx from dy alone. move: the kernel of
        `floor`.
    follows : {"", "relu", "activation"}
        The epilogue. "activation": any activation other than a ReLU, only in a forward pass.
    """

    geometry: str
    element: str
    arithmetic: str
    operation: str
    follows: str = ""

    @property
    def symbol(self) -> str:
        """The name of the function that a library exports for this kind."""
        return "_".join(filter(None, ("bn", self._loop, self.operation, self.follows)))

    @property
    def library(self) -> str:
        """The name of the library that exports the function."""
        if self.geometry == "floor":
            return FLOOR
        direction = "forward" if self.operation == "forward" else "backward"
        return f"{self._loop}_{direction}"

    @property
    def _loop(self) -> str:
        usual = self.arithmetic == _ARITHMETICS[self.element][0]
        return f"{self.geometry}_{self.element}{'' if usual else f'_in_{self.arithmetic}'}"


@dataclass(frozen=True, slots=True)
class Library:
    """A shared library.

    Attributes
    ----------
    name : str
    kinds : tuple of Kind
        The kinds of its functions.
    family : str
        Determines its sources besides the common ones: see `build.sources`.
    """

    name: str
    kinds: tuple[Kind, ...]
    family: str


#: The names of four libraries. `FLOOR` has the benchmark kernel `floor`, `XLA` the handler of XLA's
#: calls, `THREADS` the code of threads, and `PROBE` the code that reports the processor's features.
FLOOR, XLA, THREADS, PROBE = "floor", "xla", "threads", "probe"

#: The libraries that do not depend on the processor's level.
OF_ALL = (THREADS, PROBE)


def _kinds() -> list[Kind]:
    computed = [(element, one) for element, every in _ARITHMETICS.items() for one in every]
    operations = itertools.product(("forward", "backward", "frozen"), ("", "relu"))
    passes = (*operations, ("forward", "activation"))
    of_all = itertools.product(("segments", "columns"), computed, passes)
    return [Kind(geometry, *elements, *each) for geometry, elements, each in of_all]


def _libraries() -> dict[str, Library]:
    grouped: dict[str, list[Kind]] = {}
    for kind in _kinds():
        grouped.setdefault(kind.library, []).append(kind)
    libraries = [Library(name, tuple(kinds), kinds[0].geometry) for name, kinds in grouped.items()]
    floor = Library(FLOOR, (Kind("floor", "float64", "float64", "move"),), "floor")
    special = [floor, *(Library(name, (), name) for name in (XLA, *OF_ALL))]
    return {library.name: library for library in (*libraries, *special)}


#: All libraries by their names.
LIBRARIES = _libraries()
