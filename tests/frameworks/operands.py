"""Calls of a framework's functions with an operand or option absent, of another kind or swapped.

A group of tests names its functions in a subclass of `OperandContract`, which pytest collects.

From the signatures, each after a good call: an error that names what is wrong, or what the function
on NumPy's arrays gives for the same elements. Imports no framework.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import pytest

import backnorm
from backnorm.errors import shown
from backnorm.signature import SIGNATURES
from tests.support.contract import sampled

from ..support.kinds import Kind, arrays_like, is_integer, is_number, kinds, values

CHANNELS = 5
SHAPE = (3, 4, 2, CHANNELS)
#: Of the kinds of an operand, in a sample.
SHARE = 0.1
CANONICAL = {
    "batch_norm": (backnorm.batch_norm_forward, "forward"),
    "batch_norm_backward": (backnorm.batch_norm_backward, "backward"),
    "batch_norm_inference": (backnorm.batch_norm_inference, "inference"),
}


def good(function, activation=None):
    """Return good operands of a function by name, and its counterpart on NumPy's arrays.

    The mask of a ReLU, which is the last result there, is none of a framework's.
    """
    canonical, operation = CANONICAL[function.__name__]
    taken = inspect.signature(function).parameters
    rng = np.random.default_rng(0)
    made = {
        operand.name: rng.uniform(0.5, 2, SHAPE if operand.kind == "data" else CHANNELS).astype(
            np.float32
        )
        for operand in SIGNATURES[operation].operands
        if operand.name in taken and (activation or operand.name != "residual")
    }

    def without_mask(**arguments):
        results = canonical(**arguments)
        return results[:-1] if arguments.get("activation") else results

    return made, without_mask


def of_framework(array, tensor_of):
    """Yield tensors of other types and shapes, a Kind each."""
    for kind in arrays_like(array):
        # Those that lie in memory as a tensor does.
        plain = isinstance(kind.plain, np.ndarray) and kind.value.dtype.isnative
        if plain and kind.plain is kind.value and kind.value.ndim < 30:
            yield kind._replace(label=f"a tensor {kind.label}", value=tensor_of(kind.value))


def options_of(function):
    """Yield the name of an option and a Kind."""
    accepted = {
        "epsilon": lambda plain: is_number(plain) and plain >= 0,
        "axis": lambda plain: is_integer(plain) and -len(SHAPE) <= plain < len(SHAPE),
        "training": lambda plain: type(plain) is bool,
        "reproducible": lambda plain: type(plain) is bool,
        # None of these values is a name that is known.
        "activation": lambda plain: False,
        # No axis is mapped here.
        "axis_name": lambda plain: type(plain) in (tuple, list) and len(plain) == 0,
        # None of these is a word that is known.
        "arithmetic": lambda plain: False,
    }
    absent = "arithmetic", "activation"
    for name in inspect.signature(function).parameters:
        if name in accepted:
            if name != "axis_name":
                yield name, Kind("absent", None, None, refused=name not in absent)
            for kind in values():
                good = accepted[name](kind.plain)
                yield name, kind._replace(refused=kind.refused or not good)


def failures(
    function,
    tensor_of,
    least_rank=2,
    more=None,
    theirs=None,
    of_lists=np.float64,
    activation=None,
    share=1.0,
):
    """Return what is wrong, and the number of cases.

    Parameters
    ----------
    function : callable
    tensor_of : callable
        Makes a tensor of the framework of an array.
    least_rank : int
        What the framework takes as x.
    more : callable, optional
        Yields further kinds of an operand, from an array.
    theirs : dict, optional
        What the framework's own error says, by the label of a kind, where that is documented.
    of_lists : type
        What a list of numbers is made of.
    activation : str, optional
        A ReLU in all calls, with a residual before it.
    share : float
        Of the kinds of an operand or option; 1 for all.
    """
    operands, canonical = good(function, activation)
    always = {"epsilon": 1e-3} | ({"activation": activation} if activation else {})
    tensors = {name: tensor_of(array) for name, array in operands.items()}
    wrong, count, seen = [], 0, set()

    def check(name, kind, called, meant):
        nonlocal count
        function(**tensors, **always)
        seen.add(kind.label)
        for _ in range(2):
            count += 1
            what = outcome(function, name, kind, called, meant, operands, theirs or {})
            if what:
                wrong.append(f"{name} {kind.label}: {what}")

    for name, array in operands.items():
        swapped = (Kind(f"which is {other}", tensors[other], operands[other])
                   for other in operands if other != name)  # fmt: skip
        own = [] if more is None else more(array)
        of_tensors = of_framework(array, tensor_of)
        every = itertools.chain(kinds(array), of_tensors, own, swapped)
        for kind in sampled(every, share, name):
            if kind.label in ("a list", "a tuple"):
                kind = kind._replace(plain=array.astype(of_lists))
            if name == "x" and least_rank <= np.ndim(kind.plain) < 2 and not kind.refused:
                continue
            called = {**tensors, name: kind.value, **always}
            if kind.refused:
                check(name, kind, called, None)
                continue
            try:
                wanted = canonical(**operands | {name: kind.plain}, **always, data_format="NXC")
            except backnorm.ArgumentError:
                wanted = None
            check(name, kind, called, wanted)
    for name, kind in sampled(options_of(function), share, "options"):
        called = {**tensors, **always, name: kind.value}
        wanted = None
        if not kind.refused:
            settings = {**always, "axis": -1, name: kind.plain}
            settings.pop("axis_name", None)
            settings["data_format"] = (int(settings.pop("axis")) % len(SHAPE),)
            try:
                wanted = canonical(**operands, **settings)
            except backnorm.ArgumentError:
                wanted = None
        check(name, kind, called, wanted)
    assert share < 1.0 or (theirs or {}).keys() <= seen
    return list(dict.fromkeys(wrong)), count


def outcome(function, name, kind, called, wanted, operands, theirs):
    """Return what is wrong with a call, or None."""
    try:
        found = function(**called)
    except backnorm.ArgumentError as error:
        # Where x has another shape or type, the others do not go with it.
        fits = name not in ("x", "axis")
        named = name in str(error) or (not fits and error.argument in operands)
        return None if named and kind.label != "itself" else repr(error)
    except Exception as error:
        if kind.label in theirs and theirs[kind.label] in str(error):
            return None
        return f"not ours: {type(error).__name__}: {shown(error, str)}"
    return differences(found, wanted)


def differences(found, wanted):
    """Return what differs between results, None if they are the same."""
    if wanted is None:
        return "a result, but refused on arrays"
    if isinstance(wanted, np.ndarray):
        found, wanted = (found,), (wanted,)
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        one = np.asarray(one)
        scale = max(1.0, float(np.abs(other).max(initial=0)))
        tolerance = 8 * float(np.finfo(other.dtype).eps) * scale
        if one.dtype != other.dtype or one.shape != other.shape:
            return f"result {number} is {one.dtype}{one.shape}"
        if not np.allclose(one.astype(float), other.astype(float), rtol=0, atol=tolerance):
            return f"result {number} differs"
    return None


class OperandContract:
    """The tests; a subclass names the module of the functions and its kinds of tensors."""

    module: ModuleType
    #: By name, what makes an operand of an array.
    kinds: Mapping[str, Callable]
    #: What only the framework has, beside tensors of the first kind.
    own_kinds: Callable[[np.ndarray], Iterator[Kind]]
    #: Labels of kinds whose operands NumPy's functions refuse, too.
    refused_by_numpy: Sequence[str] = ()
    #: Further arguments of `failures`.
    options: Mapping[str, Any] = MappingProxyType({})
    theirs: Mapping[str, str] = MappingProxyType({})

    def check(self, name, kind, least, **options):
        """Require that all calls of a function give an error or the right result."""
        first, *_ = self.kinds
        own = {"more": self.own_kinds, "theirs": self.theirs} if kind == first else {}
        function, make = getattr(self.module, name), self.kinds[kind]
        wrong, count = failures(function, make, **own, **self.options, **options)
        assert not wrong, f"{len(wrong)} kinds in {count} calls:\n" + "\n".join(wrong)
        assert count > least

    @pytest.mark.parametrize("name", CANONICAL)
    def test_sample_of_hostile_calls_gives_documented_error_or_right_result(self, name):
        self.check(name, next(iter(self.kinds)), 60, share=SHARE)

    @pytest.mark.sweep
    @pytest.mark.parametrize("name", CANONICAL)
    def test_function_accepts_or_names_each_kind_of_operand(self, name):
        for kind in self.kinds:
            self.check(name, kind, 1200)

    def test_numpy_backward_accepts_tensors_and_names_bad_operands(self):
        arguments, canonical = good(self.module.batch_norm_backward)
        options = {"epsilon": 1e-3, "data_format": "NXC"}
        wanted = canonical(**arguments, **options)
        for name, array in arguments.items():
            for make in self.kinds.values():
                found = canonical(**arguments | {name: make(array)}, **options)
                assert differences(found, wanted) is None
            for kind in self.own_kinds(array):
                if kind.refused or kind.label in self.refused_by_numpy:
                    with pytest.raises(backnorm.ArgumentError, match=f"^{name}: "):
                        canonical(**arguments | {name: kind.value}, **options)
