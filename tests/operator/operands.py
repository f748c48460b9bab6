"""Call every function warm, then with an operand or option absent, of another kind or swapped.

The functions are those of `backnorm`, their operands those of the signatures. Each line of output
is a case with what came of it; after a crash the last line names the case. A result is right if a
first call gives it, to the bit, for new arrays of the same elements. With `all` as an argument of
the command every combination of options and operands is called, without it a few of each function.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import warnings

import numpy as np

import backnorm
from backnorm import Activation, ChannelMoments, ChannelSums
from backnorm.activations import ACTIVATIONS
from backnorm.errors import shown
from backnorm.executable import forget
from backnorm.layout import MARK_BYTES, mask_size, memory_order
from backnorm.results import arrays_of
from backnorm.signature import SIGNATURES
from tests.support.contract import begin, report, sampled, share_of

from ..support.kinds import (
    Attempt,
    Kind,
    attempt,
    is_integer,
    is_number,
    kinds,
    own,
    values,
    verdict,
    verdict_of_refused,
)

CHANNELS = 5
SHAPES = {"NCX": (3, CHANNELS, 4, 2), "NXC": (3, 4, 2, CHANNELS)}
# What is made of a name beside the functions that have the name of an operation.
OPERATIONS = {"explain": "backward"}
# Options that may be absent; no value that stands in the place of an option is one of theirs.
OPTIONAL = "out", "arithmetic", "weights"
WHOLE = {"sums": ChannelSums, "moments": ChannelMoments}


class Subject:
    """A function with what is given in every call."""

    def __init__(self, name, function, options, operands, dtype):
        self.function, self.options, self.dtype = function, options, np.dtype(dtype)
        taken = inspect.signature(function).parameters
        self.signature = SIGNATURES[operation_of(name)]
        self.operands = [each for each in self.signature.operands if each.name in operands]
        self.names = [each.name for each in self.operands]
        self.spare = [
            each
            for each in self.signature.operands
            if each.name in taken and each.name not in operands and each.kind == "channel"
        ]
        # What comes from all parts of a batch.
        self.whole = next((each for each in WHOLE if each in taken), None)
        # What is only planned is not written.
        self.has_out = "out" in taken and name not in OPERATIONS
        self.shape = SHAPES[options["data_format"]]
        arguments = [f"{k}={v}" for k, v in options.items() if k != "epsilon"]
        self.name = f"{name}({', '.join([*self.names, *arguments])}) in {self.dtype}"
        options = ["epsilon", "data_format", "training", "activation", "residual", "out"]
        options += ["arithmetic", "reproducible", "weights"]
        self.changeable = [
            option
            for option in options
            if option in taken
            and option not in self.signature.names
            and (option != "out" or self.has_out)
        ]

    def good(self):
        """Return good operands by name."""
        rng = np.random.default_rng(0)
        made = {}
        for operand in self.operands:
            if operand.kind == "mask":
                mask = rng.integers(0, 256, mask_size(int(np.prod(self.shape))), np.uint8)
                mask[-MARK_BYTES:] = 0  # row-major order
                made[operand.name] = mask
                continue
            shape = self.shape if operand.kind == "data" else CHANNELS
            made[operand.name] = rng.uniform(0.5, 2, shape).astype(self.dtype)
        if self.whole:
            # Either may stand in the place of a variance.
            made[self.whole] = WHOLE[self.whole](*rng.uniform(0.5, 2, (2, CHANNELS)), 24)
        return made

    def call(self, arguments, **more):
        """Return the results of a call as arrays, or the plan."""
        found = self.function(**{**self.options, **arguments, **more})
        if isinstance(found, np.ndarray):
            return [found]
        if isinstance(found, tuple(WHOLE.values())):
            return [*arrays_of(found), np.array(found.count)]
        if isinstance(found, backnorm.ReproducibleSums | backnorm.ReproducibleMoments):
            return [found.bins, np.array(found.count)]
        if isinstance(found, backnorm.Plan):
            return [np.array(str(found))]
        if isinstance(found, backnorm.NormalizedWithMask):
            # Some bytes at the end are to spare.
            *found, mask = found
            found = *found, np.unpackbits(mask, count=own(found[0]).size, bitorder="little")
        return list(found)


def operation_of(name):
    """Return the operation that a function is for, or None."""
    operation = OPERATIONS.get(name, name.removeprefix("batch_norm_"))
    return operation if operation in SIGNATURES else None


def subjects(*, everything):
    """Yield all functions with all options, or a few."""
    for name in sorted(backnorm.__all__):
        if operation_of(name) is None:
            continue
        function = getattr(backnorm, name)
        taken = inspect.signature(function).parameters
        signature = SIGNATURES[operation_of(name)]
        choices = {
            "data_format": ["NCX", "NXC"],
            "training": [True, False],
            "activation": [None, "relu"],
        }
        choices = {option: values for option, values in choices.items() if option in taken}
        optional = [each.name for each in signature.operands if not each.required]
        optional = [each for each in optional if each in taken]
        for chosen in itertools.product(*choices.values(), [False, True]):
            *chosen, full = chosen
            options = dict(zip(choices, chosen, strict=True))
            usual = options["data_format"] == "NCX" and options.get("training", True)
            if not everything and usual != full:
                continue
            if "epsilon" in taken:
                options["epsilon"] = 1e-3
            rectified = options.get("activation", "activation" not in taken)
            present = [
                each.name
                for each in signature.operands
                if each.name in taken
                and (each.required or full)
                and (rectified or each.name not in ("mask", "residual"))
            ]
            if "mask" in present and "residual" in taken:
                options["residual"] = True
            if name == "apply" and "gamma" not in present:
                options["gamma"] = None
            types = ["float32", "float16"] if full and optional else ["float32"]
            for dtype in types:
                yield Subject(name, function, options, present, dtype)


def kinds_of_whole(sums):
    """Yield what may stand in the place of sums or moments."""
    yield Kind("absent", None, None, refused=True)
    cls, (one, other), count = type(sums), arrays_of(sums), sums.count
    yield Kind("a tuple", (one, other, count), None, refused=True)
    for kind in values():
        yield kind._replace(refused=True)
        accepted = is_integer(kind.plain) and 24 <= kind.plain < 1 << 63
        made = cls(one, other, kind.value)
        yield Kind(f"with the count {kind.label}", made, made, refused=not accepted)
    for more in (25, np.int64(48), (1 << 63) - 1, 23):
        made = cls(one, other, more)
        plain = cls(one, other, int(more))
        yield Kind(f"with the count {more}", made, plain, refused=more < 24)
    for kind in kinds(one):
        plain = kind.plain
        accepted = (
            not kind.refused and isinstance(plain, np.ndarray)
            and plain.shape == one.shape and plain.dtype.kind == "f"
        )  # fmt: skip
        for place in (0, 1):
            arguments, meant = [one, other], [one, other]
            arguments[place], meant[place] = kind.value, plain
            made, expected = cls(*arguments, count), cls(*meant, count)
            yield Kind(f"with array {place} {kind.label}", made, expected, refused=not accepted)


def kinds_of_option(option, subject):
    """Yield what may stand in the place of an option."""
    if option == "activation":
        for name, value in ACTIVATIONS.items():
            mask = value.name == "relu"
            inference = "mean" in subject.names
            rectified = "residual" in subject.names
            refused = not mask and (rectified or not inference)
            yield Kind(f"of the name {name}", name, value, refused=refused)
        for kind in values():
            yield kind._replace(refused=True)
            made, plain = Activation("relu", kind.value), Activation("relu", kind.plain)
            refused = kind.refused or not is_ceiling(kind.plain, subject.dtype)
            yield Kind(f"with the ceiling {kind.label}", made, plain, refused=refused)
        return
    absent = option in OPTIONAL
    yield Kind("absent", None, None, refused=not absent)
    for kind in values():
        yield kind._replace(refused=kind.refused or not accepts(option, kind.plain, subject))


def accepts(option, plain, subject):
    """Whether an option may have a plain value."""
    if option == "epsilon":
        return is_number(plain) and plain >= 0
    if option == "data_format":
        rank = len(subject.shape)
        return plain in ("NCX", "NXC") if isinstance(plain, str) else (
            type(plain) is tuple
            and all(type(axis) is int and 0 <= axis < rank for axis in plain)
        )  # fmt: skip
    return option not in OPTIONAL and type(plain) is bool


def is_ceiling(plain, dtype):
    """Whether a value is a number that is more than 0 when it is an element.

    Infinity is one, and what no float64 can hold.
    """
    if type(plain) not in (int, float):
        return False
    try:
        value = float(plain)
    except OverflowError:
        return plain > 0
    with np.errstate(over="ignore"):
        return bool(np.float64(value).astype(dtype) > 0)


def renewed(value):
    """Return a new plain array of the same elements, if it is an array."""
    kind = type(value)
    if not issubclass(kind, np.ndarray) or issubclass(kind, np.ma.MaskedArray):
        return value
    value = own(value)
    order = memory_order(value)
    dtype = value.dtype if value.dtype.isnative else value.dtype.newbyteorder("=")
    dense = np.array(value.transpose(order), dtype, order="C", subok=False)
    return dense.transpose(np.argsort(order))


def at_first(subject, arguments):
    """Return what comes of a first call with new arrays of the same elements."""
    forget()
    return attempt(subject.call, {name: renewed(value) for name, value in arguments.items()})


def outcome(subject, name, kind, arguments):
    """Return what came of a call: an error that names what is wrong, the right result, or what."""
    found = attempt(subject.call, {**arguments, name: kind.value})
    # Where x has another shape or type, the others do not go with it.
    names = (name, *subject.names, *WHOLE) if name in ("x", "data_format") else (name,)
    if kind.refused:
        return verdict_of_refused(found, "ceiling" if "ceiling" in kind.label else name)
    return verdict(found, at_first(subject, {**arguments, name: kind.plain}), *names)


def cases(subject):
    """Yield the name of an operand or option, what stands in its place, and the other operands."""
    good = subject.good()
    for name, spare in itertools.product(subject.names, subject.spare):
        # As many as before, but others.
        others = good | {spare.name: np.ones(CHANNELS, subject.dtype)}
        yield name, Kind(f"absent, and {spare.name} given", None, None), others
    for name in good:
        found = kinds_of_whole(good[name]) if name in WHOLE else kinds(good[name])
        for other in good:
            if other != name:
                kind = Kind(f"which is {other}", good[other], good[other])
                yield name, kind._replace(refused=name in WHOLE), good
        for kind in found:
            yield name, kind, good
    for option in subject.changeable:
        for kind in kinds_of_option(option, subject):
            yield option, kind, good


def cases_of_out(subject):
    """Yield a label, and what makes the operands, `out`, and whether that is accepted."""
    good, shape = subject.good(), subject.shape
    array = np.full(shape, 2, subject.dtype)
    for kind in kinds(array):
        if kind.label != "absent":
            yield kind.label, good, kind.value, None
    for operand in subject.operands:
        memory = np.full(int(np.prod(shape)) + 1, 1, subject.dtype)
        array = memory[:-1].reshape(shape)
        overwritten = operand.name == subject.signature.overwrites
        for label, start in (("at the memory of", 0), ("beside part of", 1)):
            wanted = good[operand.name]
            raw = memory[start:].view(wanted.dtype)
            count = min(wanted.size, raw.size)
            if count < wanted.size:
                # Of a channel's array: the operand is the longer one.
                memory = np.ones(wanted.size + 1, wanted.dtype)
                raw = memory[start:]
                array = memory[: int(np.prod(shape))].reshape(shape)
            inside = raw[: wanted.size].reshape(wanted.shape)
            inside[...] = wanted
            arguments = good | {operand.name: inside}
            fine = overwritten and not start
            yield f"{label} {operand.name}", arguments, array, fine or operand.name


def outcome_of_out(subject, arguments, out, allowed):
    """Return what came of a call: an error that names what overlaps, or the right result."""
    plain = {name: renewed(value) for name, value in arguments.items()}
    before = copies(arguments), copies({"out": out})
    try:
        results = subject.call(arguments, out=out)
    except backnorm.ArgumentError as error:
        after = copies(arguments), copies({"out": out})
        if error.argument != "out":
            return f"another is named: {error!r}"
        if before != after:
            return f"written to before {error!r}"
        if allowed is True:
            return f"refused: {error!r}"
        return "error" if allowed is None or allowed in str(error) else f"no name: {error!r}"
    except Exception as error:
        return f"not ours: {type(error).__name__}: {shown(error, str)}"
    if allowed not in (None, True):
        return "a result in shared memory"
    expected = subject.call(plain)
    if out is not None and results[0] is not out:
        return "another array"
    results = [own(each) for each in results]
    equal = all(
        np.array_equal(one, other) and one.shape == other.shape
        for one, other in zip(results, expected, strict=True)
    )
    return "result" if equal else "another result"


def copies(arrays):
    """Return the elements of arrays, to compare."""
    return [(n, own(a).tobytes()) for n, a in arrays.items() if issubclass(type(a), np.ndarray)]


def cases_of_values():
    """Yield a label, a call, its argument, whether that is accepted, and what an error names."""

    def within(n):
        with backnorm.num_threads(n):
            return backnorm.get_num_threads()

    def computing(name):
        with backnorm.arithmetic(name):
            return name

    before = backnorm.get_num_threads()
    sums = ChannelSums(np.ones(CHANNELS), np.ones(CHANNELS), 3)
    for kind in values():
        whole = is_integer(kind.plain) and not kind.refused
        some = whole and kind.plain >= 1
        yield f"set_num_threads: n {kind.label}", backnorm.set_num_threads, kind.value, some, "n"
        backnorm.set_num_threads(before)
        yield f"num_threads: n {kind.label}", within, kind.value, some, "n"
        yield f"arithmetic: {kind.label}", computing, kind.value, False, "arithmetic"
        few = whole and 0 <= kind.plain < 1000
        label = f"ChannelSums.zero: channels {kind.label}"
        yield label, ChannelSums.zero, kind.value, few, "channels"
        made = ChannelSums(np.ones(CHANNELS), np.ones(CHANNELS), kind.value)
        few = whole and 0 <= kind.plain < 1 << 63
        yield f"sums: count {kind.label}", lambda each: sums + each, made, few, "sums"
    for kind in kinds(np.ones(CHANNELS)):
        plain = kind.plain
        good = (
            not kind.refused and isinstance(plain, np.ndarray)
            and plain.shape == (CHANNELS,) and plain.dtype.kind == "f"
        )  # fmt: skip
        made = ChannelSums(kind.value, np.ones(CHANNELS), 3)
        yield f"sums: sum_dy {kind.label}", lambda each: each + sums, made, good, "sums"


def outcome_of_call(call, value, accepted, name):
    """Return what came of a call with one argument."""
    found = attempt(call, value)
    if not accepted:
        return verdict_of_refused(found, name)
    return "result" if found.results is not None or found == Attempt() else repr(found)


def main() -> None:
    warnings.simplefilter("error")
    share = share_of()
    for label, *settings in sampled(cases_of_values(), share, "values"):
        begin(label)
        report(label, [outcome_of_call(*settings)])
    for subject in subjects(everything="all" in sys.argv[1:]):
        found = {}
        # Twice, of each call its own memory: what the first call may have kept is there then.
        for _ in range(2 if subject.has_out else 0):
            for label, *settings in sampled(cases_of_out(subject), share, f"{subject.name} out"):
                begin(f"{subject.name}: out {label}")
                subject.call(subject.good())
                found.setdefault(label, []).append(outcome_of_out(subject, *settings))
        for label, outcomes in found.items():
            report(f"{subject.name}: out {label}", outcomes)
        for name, kind, arguments in sampled(cases(subject), share, subject.name):
            case = f"{subject.name}: {name} {kind.label}"
            begin(case)
            for _ in range(2):
                subject.call(subject.good())
            # Twice: what the first call may have kept is there for the second.
            found = [outcome(subject, name, kind, arguments)]
            for _ in range(2):
                subject.call(
                    {**arguments, name: kind.value} if found == ["result"] else subject.good()
                )
            found.append(outcome(subject, name, kind, arguments))
            report(case, found)


if __name__ == "__main__":
    main()
