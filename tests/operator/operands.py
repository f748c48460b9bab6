"""Call every function warm, then with an operand absent, of another kind or in another's place.

The functions are those of `backnorm`, their operands those of the signatures. Each line of output
is a case with what came of it; after a crash the last line names the case. A result is right if a
first call gives it, to the bit, for new arrays of the same elements.
"""

from __future__ import annotations

import inspect
import itertools
import json
import warnings

import numpy as np

import backnorm
from backnorm import Blend, ChannelSums
from backnorm.executable import forget
from backnorm.layout import mask_size, memory_order
from backnorm.signature import SIGNATURES

CHANNELS = 5
SHAPES = {"NCX": (3, CHANNELS, 4, 2), "NXC": (3, 4, 2, CHANNELS)}
# What is made of a name beside the functions that have the name of an operation.
OPERATIONS = {"explain": "backward"}


class Mine(np.ndarray):
    """A subclass of NumPy's arrays."""


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
        self.has_sums = "sums" in taken
        # What is only planned is not written.
        self.has_out = "out" in taken and name not in OPERATIONS
        self.shape = SHAPES[options["data_format"]]
        given = [
            f"{k}={'...' if k == 'blend' else v}" for k, v in options.items() if k != "epsilon"
        ]
        self.name = f"{name}({', '.join([*self.names, *given])}) in {self.dtype}"
        self.blends = "blend" in options

    def good(self):
        """Return good operands by name."""
        rng = np.random.default_rng(0)
        made = {}
        for operand in self.operands:
            if operand.kind == "mask":
                made[operand.name] = rng.integers(
                    0, 256, mask_size(int(np.prod(self.shape))), np.uint8
                )
                continue
            shape = self.shape if operand.kind == "data" else CHANNELS
            made[operand.name] = rng.uniform(0.5, 2, shape).astype(self.dtype)
        if self.has_sums:
            made["sums"] = ChannelSums(rng.normal(size=CHANNELS), rng.normal(size=CHANNELS), 24)
        return made

    def new_out(self):
        """Return arrays to write to, the same in every call; None if there are none."""
        if not self.blends:
            return None
        channels = np.full(CHANNELS, 3, self.dtype)
        return np.full(self.shape, 2, self.dtype), channels, channels.copy()

    def call(self, given, **more):
        """Return the results of a call as arrays, or the plan."""
        out = self.new_out()
        more = more if out is None else {"out": out, **more}
        found = self.function(**{**self.options, **given, **more})
        if isinstance(found, np.ndarray):
            return [found]
        if isinstance(found, ChannelSums):
            return [found.sum_dy, found.sum_dy_xmu, np.array(found.count)]
        if isinstance(found, backnorm.Plan):
            return [np.array(str(found))]
        if isinstance(found, backnorm.NormalizedWithMask):
            # Some bytes at the end are to spare.
            *found, mask = found
            found = *found, np.unpackbits(mask, count=found[0].size, bitorder="little")
        return list(found)


def operation_of(name):
    """Return the operation that a function is for, or None."""
    operation = OPERATIONS.get(name, name.removeprefix("batch_norm_"))
    return operation if operation in SIGNATURES else None


def subjects():
    for name in sorted(backnorm.__all__):
        if operation_of(name) is None:
            continue
        function = getattr(backnorm, name)
        taken = inspect.signature(function).parameters
        signature = SIGNATURES[operation_of(name)]
        choices = {
            "data_format": ["NCX", "NXC"],
            "training": [True, False],
            "relu": [False, True],
            "blend": [None, Blend((0.5, 0.25), (2.0, 0.5))],
        }
        choices = {option: values for option, values in choices.items() if option in taken}
        optional = [each.name for each in signature.operands if not each.required]
        optional = [each for each in optional if each in taken]
        for values in itertools.product(*choices.values(), [False, True]):
            *values, full = values
            options = dict(zip(choices, values, strict=True))
            if options.get("blend", 0) is None:
                del options["blend"]
            if "epsilon" in taken:
                options["epsilon"] = 1e-3
            rectified = options.get("relu", "relu" not in taken and "blend" not in options)
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


def kinds(array):
    """Yield what may stand in the place of an operand, each with its name."""
    yield "absent", None
    yield "a list", array.tolist()
    yield "a string", "mean"
    yield "a number", 1.5
    yield "an object", object()
    for dtype in ("float64", "float32", "float16", "int64", "uint8", "bool", "complex64"):
        yield f"of {dtype}", array.astype(dtype)
    yield "byte-swapped", array.astype(array.dtype.newbyteorder())
    yield "too short", array[:-1]
    yield "too long", np.concatenate([array, array])
    yield "empty", array[:0]
    yield "of rank 0", array.reshape(-1)[0]
    yield "of a higher rank", array[None]
    yield "a column", array[..., None]
    yield "not contiguous", np.repeat(array, 2, axis=-1)[..., ::2]
    yield "backwards", array[::-1].copy()[::-1]
    yield "in another order", np.asfortranarray(array)
    yield "one element expanded", np.broadcast_to(array[:1], array.shape)
    yield "misaligned", misaligned(array)
    yield "read-only", read_only(array)
    yield "of a subclass", array.view(Mine)
    yield "masked", np.ma.masked_array(array, array > 1)


def misaligned(array):
    memory = np.zeros(array.nbytes + 1, np.uint8)[1:]
    found = memory.view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def kinds_of_sums(sums):
    """Yield what may stand in the place of sums."""
    yield "absent", None
    yield "a tuple", (sums.sum_dy, sums.sum_dy_xmu, sums.count)
    yield "of other channels", ChannelSums(sums.sum_dy[:-1], sums.sum_dy_xmu[:-1], 24)
    yield "of a higher rank", ChannelSums(sums.sum_dy[None], sums.sum_dy_xmu[None], 24)
    yield (
        "in float32",
        ChannelSums(sums.sum_dy.astype("float32"), sums.sum_dy_xmu.astype("float32"), 24),
    )
    yield "of a list", ChannelSums(sums.sum_dy.tolist(), sums.sum_dy_xmu.tolist(), 24)
    yield "without one", ChannelSums(sums.sum_dy, None, 24)


def renewed(value):
    """Return a new plain array of the same elements, if it is an array."""
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        return value
    order = memory_order(value)
    dense = np.array(value.transpose(order), value.dtype.newbyteorder("="), order="C", subok=False)
    return dense.transpose(np.argsort(order))


def outcome(subject, name, given):
    """Return what came of a call: an error that names the operand, the right result, or what."""
    expected = error = None
    try:
        results = subject.call(given)
    except backnorm.ArgumentError as found:
        error = found
    except Exception as found:
        return f"not ours: {found!r}"
    forget()
    try:
        expected = subject.call({each: renewed(value) for each, value in given.items()})
    except backnorm.ArgumentError as found:
        first = found
    except Exception as found:
        return f"at first not ours: {found!r}"
    if error is not None:
        if expected is not None or str(first) != str(error):
            return f"{error!r}, but not at first"
        # Where x has another shape or type, the others do not go with it.
        named = name in str(error) or (name == "x" and error.argument in subject.names)
        return "error" if named else f"another is named: {error!r}"
    if expected is None:
        return f"a result, but at first {first!r}"
    same = all(
        a.dtype == e.dtype and a.shape == e.shape and a.tobytes() == e.tobytes()
        for a, e in zip(results, expected, strict=True)
    )
    return "result" if same else "another result"


def cases(subject):
    """Yield operand, label, and what makes the arguments."""
    good = subject.good()
    for name, spare in itertools.product(subject.names, subject.spare):
        # As many as before, but others.
        label = f"absent, and {spare.name} given"
        yield name, label, good | {name: None, spare.name: np.ones(CHANNELS, subject.dtype)}
    for name in good:
        found = kinds_of_sums(good[name]) if name == "sums" else kinds(good[name])
        others = ((f"which is {other}", good[other]) for other in good if other != name)
        for label, value in itertools.chain(found, others):
            yield name, label, good | {name: value}


def cases_of_out(subject):
    """Yield a label, and what makes the operands, `out`, and whether that is accepted."""
    good, number = subject.good(), len(subject.new_out() or ())
    shapes = [subject.shape, (CHANNELS,), (CHANNELS,)][: max(1, number)]
    for place, shape in enumerate(shapes):

        def whole(array, place=place):
            return array if not number else replaced(subject.new_out(), place, array)

        array = np.full(shape, 2, subject.dtype)
        for label, value in kinds(array):
            if label == "absent" and not number:
                continue
            yield f"{place} {label}", good, whole(value), None
        for operand in subject.operands:
            memory = np.full(int(np.prod(shape)) + 1, 1, subject.dtype)
            array = memory[:-1].reshape(shape)
            overwritten = operand.name == subject.signature.overwrites and place == 0
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
                given = good | {operand.name: inside}
                fine = overwritten and not start
                yield f"{place} {label} {operand.name}", given, whole(array), fine or operand.name


def replaced(arrays, place, array):
    """Return a tuple with another array at a place."""
    return *arrays[:place], array, *arrays[place + 1 :]


def outcome_of_out(subject, given, out, verdict):
    """Return what came of a call: an error that names what overlaps, or the right result."""
    plain = {name: renewed(value) for name, value in given.items()}
    held = [renewed(each) for each in out] if subject.blends else None
    before = copies(given), copies(dict(enumerate(out if subject.blends else [out])))
    try:
        results = subject.call(given, out=out)
    except backnorm.ArgumentError as error:
        after = copies(given), copies(dict(enumerate(out if subject.blends else [out])))
        if error.argument != "out":
            return f"another is named: {error!r}"
        if before != after:
            return f"written to before {error!r}"
        if verdict is True:
            return f"refused: {error!r}"
        return "error" if verdict is None or verdict in str(error) else f"no name: {error!r}"
    except Exception as error:
        return f"not ours: {error!r}"
    if verdict not in (None, True):
        return "a result in shared memory"
    expected = subject.call(plain, **({"out": tuple(held)} if subject.blends else {}))
    wanted = out if subject.blends else (out,)
    if not all(
        one is other for one, other in zip(results, wanted, strict=False) if other is not None
    ):
        return "another array"
    same = all(
        np.array_equal(one, other) and one.shape == other.shape
        for one, other in zip(results, expected, strict=True)
    )
    return "result" if same else "another result"


def copies(arrays):
    """Return the elements of arrays, to compare."""
    return [(n, np.asarray(a).tobytes()) for n, a in arrays.items() if isinstance(a, np.ndarray)]


def main() -> None:
    warnings.simplefilter("error")
    for subject in subjects():
        for number in range(len(list(cases_of_out(subject))) if subject.has_out else 0):
            found = []
            # Of each call its own memory. Twice: what the first call may have kept is there then.
            for _ in range(2):
                subject.call(subject.good())
                label, *how = next(itertools.islice(cases_of_out(subject), number, None))
                print(json.dumps({"begins": f"{subject.name}: out {label}"}), flush=True)
                found.append(outcome_of_out(subject, *how))
            case = f"{subject.name}: out {label}"
            print(json.dumps({"case": case, "found": sorted(set(found))}))
        for name, label, changed in cases(subject):
            case = f"{subject.name}: {name} {label}"
            print(json.dumps({"begins": case}), flush=True)
            for _ in range(2):
                subject.call(subject.good())
            # Twice: what the first call may have kept is there for the second.
            found = [outcome(subject, name, changed)]
            for _ in range(2):
                subject.call(changed if found == ["result"] else subject.good())
            found.append(outcome(subject, name, changed))
            print(json.dumps({"case": case, "found": sorted(set(found))}))


if __name__ == "__main__":
    main()
