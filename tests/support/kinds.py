"""Values that replace an operand or an option in tests of all front doors: the one list.

Imports no framework. Frameworks add their own tensors. Every kind says whether it must be refused;
if not, it may be refused all the same, or else means the plain value that is given beside it.
"""

from __future__ import annotations

import array as arrays
import ctypes
import enum
import fractions
import itertools
import math
import operator
import sys
import tempfile
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, NamedTuple
from unittest import mock

import ml_dtypes
import numpy as np

import backnorm
from backnorm.errors import shown
from backnorm.results import ChannelSums


class Kind(NamedTuple):
    """A value with a name; what it means; and whether every front door must refuse it."""

    label: str
    value: Any
    plain: Any
    refused: bool = False


class RudeError(Exception):
    """An object whose representation cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def _raise(*_: Any, **__: Any) -> Any:
    raise RudeError


_SPECIAL = (
    "__array__", "__bool__", "__eq__", "__float__", "__hash__", "__index__", "__int__", "__iter__",
    "__len__", "__ne__", "__repr__", "__str__", "__getitem__", "__contains__", "__format__",
    "__array_interface__", "__array_struct__", "__dlpack__", "__dlpack_device__", "__complex__",
)  # fmt: skip


def raising(*bases: type, methods: tuple[str, ...] = _SPECIAL) -> Any:
    """Return a class whose methods raise."""
    members = {
        name: property(_raise) if name in ("__array_interface__", "__array_struct__") else _raise
        for name in methods
    }
    return type("Raising", bases, members)


def impostor(kind: type, **members: Any) -> Any:
    """Return an object that says it is of a class, with attributes."""
    return type("Impostor", (), {"__class__": property(lambda self: kind), **members})()


class Mine(np.ndarray):
    """A subclass of NumPy's arrays."""


class Liar(np.ndarray):
    """A subclass whose attributes and methods say what is not so."""

    shape = property(lambda self: (2, 2))
    strides = property(lambda self: (0, 0))
    dtype = property(lambda self: np.dtype(np.int8))
    flags = property(lambda self: None)
    ndim = property(lambda self: 2)
    size = property(lambda self: 4)
    nbytes = property(lambda self: 1 << 40)
    itemsize = property(lambda self: 3)
    ctypes = property(_raise)
    __array_interface__ = property(_raise)

    def _other(self, *_: Any, **__: Any) -> Any:
        return np.zeros((7, 7))

    ravel = reshape = transpose = astype = view = copy = __getitem__ = __array__ = _other
    __len__ = __eq__ = __array_ufunc__ = __array_function__ = _raise
    __hash__ = None


class Gives:
    """An object that gives an array, or what it likes, when it is asked for one."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._value


class Shares:
    """An object with no more of an array than its interface."""

    def __init__(self, interface: Any) -> None:
        self.__array_interface__ = interface


class Text(str):
    """A string that compares as it likes."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash("NCX")


class Words(enum.StrEnum):
    """A string that is one of several."""

    NCX = "NCX"
    NXC = "NXC"


class Pair(tuple):
    """A tuple whose elements are not those that it shows."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        raise RudeError

    __len__ = _raise


def misaligned(array: np.ndarray) -> np.ndarray:
    """Return a copy that no element of which begins where it should."""
    memory = np.zeros(array.nbytes + 1, np.uint8)[1:]
    found = memory.view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


def read_only(array: np.ndarray) -> np.ndarray:
    """Return a copy that cannot be written to."""
    array = array.copy()
    array.flags.writeable = False
    return array


def own(array: np.ndarray) -> np.ndarray:
    """Return an array as one of NumPy's own class, whatever its methods do."""
    return np.ndarray.view(array, np.ndarray)


def byte_swapped(array: np.ndarray) -> np.ndarray:
    """Return a copy in the other byte order."""
    return array.astype(array.dtype.newbyteorder())


def mapped(array: np.ndarray) -> np.ndarray:
    """Return a copy in a file."""
    with tempfile.TemporaryFile() as file:
        found = np.memmap(file, array.dtype, "w+", shape=array.shape or (1,))
    found[...] = array
    return found


def arrays_like(array: np.ndarray) -> Iterator[Kind]:
    """Yield arrays of other types, shapes, strides and classes, a Kind each."""
    for dtype in ("float64", "float32", "float16", "int64", "uint8", "bool", "complex64"):
        found = array.astype(dtype)
        yield Kind(f"of {dtype}", found, found)
    refused = {
        "of objects": array.astype(object),
        "of structures": np.ascontiguousarray(array).view([("a", array.dtype)]),
        "of dates": array.astype(np.int64).view("datetime64[s]"),
        "of durations": array.astype(np.int64).view("timedelta64[s]"),
        "of strings": array.astype("U5"),
        "of bytes": array.astype("S5"),
        "of strings of any length": array.astype("U5").astype(np.dtypes.StringDType()),
        "of raw memory": np.ascontiguousarray(array).view(f"V{array.itemsize}"),
        "of float8": array.astype(ml_dtypes.float8_e4m3fn),
        "of long doubles": array.astype(np.clongdouble),
        "records": np.ascontiguousarray(array).view([("a", array.dtype)]).view(np.recarray),
        "masked": np.ma.masked_array(array, array > 1),
        "masked nowhere": np.ma.masked_array(array),
        "of no dtype": np.array(None),
    }
    for label, value in refused.items():
        yield Kind(label, value, None, refused=True)
    last = array.ndim - 1
    plain = {
        "itself": array,
        "too short": array[:-1],
        "too long": np.concatenate([array, array]),
        "empty": array[:0],
        "of rank 0": own(array).reshape(-1)[0],
        "an array of rank 0": np.array(own(array).reshape(-1)[0]),
        "of a higher rank": array[None],
        "a column": array[..., None],
        "flat": array.reshape(-1),
        "of rank 40": array.reshape((1,) * (40 - array.ndim) + array.shape),
        "not contiguous": np.repeat(array, 2, axis=last)[..., ::2],
        "backwards": array[::-1].copy()[::-1],
        "backwards in every axis": np.flip(np.flip(array).copy()),
        "in another order": np.asfortranarray(array),
        "one element expanded": np.broadcast_to(array[:1], array.shape),
        "overlapping itself": np.lib.stride_tricks.as_strided(
            array, array.shape, [array.itemsize] * array.ndim
        ),
        "one number everywhere": np.lib.stride_tricks.as_strided(
            array.copy(), array.shape, [0] * array.ndim
        ),
        "misaligned": misaligned(array),
        "read-only": read_only(array),
        "in a file": mapped(array),
        "of a subclass": array.view(Mine),
        "with a note in its type": array.astype(np.dtype(array.dtype, metadata={"a": 1})),
        "records of numbers": array.view(np.recarray),
    }
    for label, value in plain.items():
        yield Kind(label, value, own(value) if isinstance(value, np.ndarray) else value)
    for label, value in (
        ("byte-swapped", byte_swapped(array)),
        ("byte-swapped and misaligned", misaligned(byte_swapped(array))),
    ):
        yield Kind(label, value, array)
    if array.ndim <= 2:
        yield Kind("a matrix", array.view(np.matrix), own(array.view(np.matrix)))
    # What a subclass makes of itself by the way is not looked at.
    yield Kind("of a subclass that lies", np.ndarray.view(array, Liar), array)


def things_like(array: np.ndarray) -> Iterator[Kind]:
    """Yield what can be read as an array, or says so, a Kind each."""
    contiguous = np.ascontiguousarray(array)
    yield Kind("a list", array.tolist(), np.asarray(array.tolist()))
    yield Kind("a tuple", tuple(array.tolist()), np.asarray(array.tolist()))
    yield Kind("a buffer", memoryview(contiguous), array)
    if array.ndim == 1 and array.dtype.char in "fd":
        yield Kind("of Python's", arrays.array(array.dtype.char, array.tolist()), array)
        kind = (ctypes.c_float if array.dtype.char == "f" else ctypes.c_double) * array.size
        yield Kind("of C's", kind(*array.tolist()), array)
    yield Kind("an object that gives it", Gives(array), array)
    yield Kind("an object with its interface", Shares(contiguous.__array_interface__), array)
    refused = {
        "an object that gives a list": Gives(array.tolist()),
        "an object that gives none": Gives(None),
        "an object with no interface": Shares(None),
        "an object with an empty interface": Shares({}),
        "an object with an interface without a shape": Shares(
            {**contiguous.__array_interface__, "shape": None}
        ),
        "an object that says it is one": impostor(
            np.ndarray, shape=array.shape, dtype=array.dtype, ndim=array.ndim, size=array.size,
            flags=array.flags, strides=array.strides, nbytes=array.nbytes,
        ),
        "an imitation": mock.MagicMock(
            spec=np.ndarray, shape=array.shape, dtype=array.dtype, ndim=array.ndim,
            flags=array.flags,
        ),
        "a ragged list": [[1.0], [1.0, 2.0]],
        "a list of objects": [object()] * len(array),
    }  # fmt: skip
    for label, value in refused.items():
        yield Kind(label, value, None, refused=True)


def values() -> Iterator[Kind]:
    """Yield numbers, words, flags, and what is none of them, a Kind each."""
    numbers = {
        "0": 0, "1": 1, "-1": -1, "2**63": 2**63, "2**64": 2**64, "10**400": 10**400,
        "-10**400": -(10**400), "10**5000": 10**5000,
        "1.0": 1.0, "0.5": 0.5, "-0.5": -0.5, "1e-320": 1e-320, "1e300": 1e300,
        "NaN": math.nan, "infinity": math.inf, "-infinity": -math.inf,
        "a fraction": fractions.Fraction(1, 8), "a huge fraction": fractions.Fraction(10**400),
        "float16": np.float16(0.5), "float32": np.float32(0.5), "float64": np.float64(0.5),
        "a long double": np.longdouble(0.5), "a huge long double": np.longdouble("1e4000"),
        "float64 NaN": np.float64("nan"), "int64": np.int64(1), "uint8": np.uint8(1),
        "uint64": np.uint64(2**64 - 1),
    }  # fmt: skip
    if np.finfo(np.longdouble).max == np.finfo(np.float64).max:
        del numbers["a huge long double"]
    for label, value in numbers.items():
        yield Kind(label, value, _plain_number(value))
    yield Kind("True", True, True)
    yield Kind("False", False, False)
    yield Kind("a bool of NumPy's", np.bool_(True), True)
    words = ["", "NCX", "NXC", "ncx", "true", "1e-3", "1", "x\0y", "\ud800"]
    for word in words:
        yield Kind(ascii(word), word, word)
    yield Kind("a string of NumPy's", np.str_("NCX"), "NCX")
    yield Kind("a word of several", Words.NXC, "NXC")
    yield Kind("a string that compares as it likes", Text("NXC"), "NXC")
    yield Kind("a string that compares as it likes, of none", Text("HWC"), "HWC")
    yield Kind("a range", range(2), range(2))
    yield Kind("an empty tuple", (), ())
    yield Kind("a tuple of 1", (1,), (1,))
    yield Kind("a tuple of a flag", (True,), (True,))
    yield Kind("a tuple of a tuple", ((1,),), ((1,),))
    yield Kind("a tuple of a list", ([1],), ([1],))
    yield Kind("a tuple of an array", (np.array([1, 2]),), (np.array([1, 2]),))
    yield Kind("a tuple of 2**64", (2**64,), (2**64,))
    yield Kind("a tuple that hides its elements", Pair((1,)), (1,))
    yield Kind("a list of 1", [1], [1])
    yield Kind("a list of flags", [True, False, True], [True, False, True])
    yield Kind("a 0-d array", np.array(0.5), np.array(0.5))
    yield Kind("a 0-d array of an integer", np.array(1), np.array(1))
    yield Kind("a 0-d array of a flag", np.array(True), np.array(True))
    yield Kind("a 0-d array of a string", np.array("NCX"), np.array("NCX"))
    for label, value in _nonsense().items():
        yield Kind(label, value, None, refused=True)


def _plain_number(value: Any) -> Any:
    try:
        return operator.index(value)
    except TypeError:
        try:
            return float(value)
        except OverflowError:
            return math.inf


def _nonsense() -> dict[str, Any]:
    """Return what is no number, no word, no flag and no array."""
    return {
        "bytes": b"NCX",
        "a byte array": bytearray(b"NCX"),
        "a decimal": Decimal("0.001"),
        "a decimal NaN": Decimal("NaN"),
        "a signalling NaN": Decimal("sNaN"),
        "a complex number": 1j,
        "a date": np.datetime64("2020-01-01"),
        "an array": np.array([0.5, 2.0]),
        "an array of strings": np.array(["NCX", "NXC"]),
        "an empty array": np.array([]),
        "a dictionary": {"a": 1},
        "a set": {1, 2},
        "a list of itself": _endless_list(),
        "a generator": (k for k in (True, False, True)),
        "an iterator without an end": itertools.count(),
        "an object": object(),
        "a class": np.ndarray,
        "a function": len,
        "a module": sys,
        "an ellipsis": ...,
        "not implemented": NotImplemented,
        "an enumeration": enum.Enum("Enumeration", "NCX").NCX,
        "an object that raises": raising()(),
        "an object that raises in a comparison": raising(methods=("__eq__", "__repr__"))(),
        "an object that cannot be hashed": raising(methods=("__hash__", "__repr__"))(),
        "an object without attributes": raising(methods=("__getattribute__",))(),
        "an object that says it is a float": impostor(float, __float__=_raise),
        "an object that says it is a flag": impostor(bool, __bool__=_raise),
        "an object that says it is an integer": impostor(int, __index__=_raise),
        "an object that says it is a string": impostor(str, __hash__=_raise, __eq__=_raise),
        "an object that says it is a tuple": impostor(tuple, __len__=_raise),
        "an object that says it is a sum": impostor(ChannelSums),
        "a float that raises": raising(float, methods=("__float__", "__repr__", "__eq__"))(0.5),
        "a sequence without a length": raising(list, methods=("__len__", "__iter__"))(),
    }


def _endless_list() -> list[Any]:
    found: list[Any] = [1.0]
    found.append(found)
    return found


def kinds(array: np.ndarray) -> Iterator[Kind]:
    """Yield what may stand in the place of an operand, a Kind each."""
    yield Kind("absent", None, None)
    yield from arrays_like(array)
    yield from things_like(array)
    for kind in values():
        # A number, a word and so on as an array of rank 0: never an operand.
        yield kind._replace(plain=None, refused=True)


class Attempt(NamedTuple):
    """The outcome of a call: results, an error of backnorm's, or another error in words."""

    results: list[np.ndarray] | None = None
    error: backnorm.ArgumentError | None = None
    other: str | None = None


def attempt(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Attempt:
    """Call a function that returns arrays in a list."""
    try:
        return Attempt(results=call(*args, **kwargs))
    except backnorm.ArgumentError as error:
        return Attempt(error=error)
    except Exception as error:
        return Attempt(other=f"not ours: {type(error).__name__}: {shown(error, str)}")


def same(results: list[Any], expected: list[Any]) -> bool:
    """Whether arrays agree to the bit."""
    return len(results) == len(expected) and all(
        one is other
        if one is None or other is None
        else (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
        for one, other in zip(results, expected, strict=True)
    )


def verdict(found: Attempt, expected: Attempt, *names: str) -> str:
    """Return "error" if one of the names is named, "result" if it is the expected one, or what."""
    if found.other is not None or expected.other is not None:
        return found.other or f"expected, {expected.other}"
    if found.error is not None:
        if expected.error is None:
            return f"refused: {found.error!r}"
        if type(found.error) is not type(expected.error):
            return f"{found.error!r} where {expected.error!r} was expected"
        named = any(name in str(found.error) for name in names)
        return "error" if named else f"another is named: {found.error!r}"
    if expected.error is not None:
        return f"a result where {expected.error!r} was expected"
    return "result" if same(found.results, expected.results) else "another result"


def verdict_of_refused(found: Attempt, *names: str) -> str:
    """Return "error" if there is one that names one of the names, or what there is."""
    if found.other is not None:
        return found.other
    if found.error is None:
        return "a result"
    named = any(name in str(found.error) for name in names)
    return "error" if named else f"another is named: {found.error!r}"


def is_number(plain: Any) -> bool:
    """Whether a plain value is a finite real number."""
    try:
        return type(plain) in (int, float) and math.isfinite(plain)
    except OverflowError:
        return False


def is_integer(plain: Any) -> bool:
    """Whether a plain value is an integer, or an array of one without axes."""
    try:
        return type(plain) is not bool and operator.index(plain) is not None
    except TypeError:
        return False
