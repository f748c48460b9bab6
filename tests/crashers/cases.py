"""Inputs that crashed or corrupted other implementations, for every operator.

A case says what must come of it: an error of a given kind that names the argument, or the value
of the formula. As a script, the module runs all cases.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from backnorm import BacknormError, ChannelSums, apply, batch_norm_backward, reduce, reference
from backnorm.conformance.judge import judge
from tests.support.calls import CHANNELS, OTHER_LAYOUTS, SUBJECTS, Subject
from tests.support.contract import begin, report
from tests.support.dtypes import BFLOAT16

Arrays = dict[str, np.ndarray]
ROLES = ("x", "dy", "mean", "variance", "gamma", "beta")


@dataclass(frozen=True)
class Case:
    """One call. `error` is None where a value is due; `run` then raises if it is wrong."""

    name: str
    run: Callable[[], object]
    error: type[Exception] | None = None
    argument: str = ""

    def outcome(self) -> str:
        """Return "result" or "error", or the fault if another one was due."""
        try:
            self.run()
        except Exception as error:
            if self.error is None:
                return f"no result: {error!r}"
            if not isinstance(error, self.error) or not isinstance(error, BacknormError):
                return f"not a {self.error.__name__} of ours: {error!r}"
            named = str(error).startswith(f"{self.argument}:")
            return "error" if named else f"does not name {self.argument}: {error}"
        return "result" if self.error is None else f"no {self.error.__name__}"


def all_cases() -> Iterator[Case]:
    """Every case of every operator, in a fixed order."""
    for subject in (*SUBJECTS.values(), *OTHER_LAYOUTS):
        yield from cases_of(subject)
    yield from _partial_sums()


def cases_of(subject: Subject) -> Iterator[Case]:
    """Every case of an operator."""
    for make in (_shapes, _types, _missing, _epsilons, _variances, _values, _memory):
        yield from make(subject)


def _rejects(
    subject: Subject, name: str, error: type[Exception], argument: str, epsilon: object = 1e-3,
    **changes: object,
) -> Case:  # fmt: skip
    arrays = subject.arrays() | changes
    return Case(
        f"{subject.name}: {name}", lambda: subject.run(arrays, epsilon), error,
        subject.schema.words.get(argument, argument),
    )  # fmt: skip


def _shapes(subject: Subject) -> Iterator[Case]:
    good = subject.arrays()
    if "dy" in good:
        dy = good["dy"]
        twice = np.concatenate([dy, dy])
        for label, bad in {
            "larger": twice, "smaller": dy[:1], "wider": np.concatenate([dy, dy], axis=-1),
            "of lower rank": dy[0], "of higher rank": dy[None], "flat": dy.reshape(-1),
            "a scalar": np.float32(1), "empty": dy[:0], "permuted": dy.transpose(3, 1, 2, 0),
        }.items():  # fmt: skip
            yield _rejects(subject, f"gradient {label}", ValueError, "dy", dy=bad)
    for tensor in subject.schema.inputs:
        if tensor.kind != "channel":
            continue
        value = good[tensor.role]
        for label, bad in {
            "too short": value[:-1], "too long": np.append(value, value), "of one": value[:1],
            "empty": value[:0], "of rank 0": value[0], "of rank 2": value[None],
            "a column": value[:, None], "of rank 4": value[None, None, None],
        }.items():  # fmt: skip
            yield _rejects(
                subject, f"{tensor.name} {label}", ValueError, tensor.role, **{tensor.role: bad}
            )
    for shape in ((), (3,))[: subject.schema.ranks[0]]:
        flat = np.ones(shape, np.float32)
        data = {role: flat for role in ("x", "dy") if role in good}
        yield _rejects(subject, f"x of rank {len(shape)}", ValueError, "x", **data)


def _types(subject: Subject) -> Iterator[Case]:
    good = subject.arrays()
    unusable = {
        "of integers": np.arange(good["x"].size).reshape(good["x"].shape),
        "of booleans": good["x"] > 0,
        "of complex numbers": good["x"].astype(complex),
        "of objects": good["x"].astype(object),
        "of strings": np.full(good["x"].shape, "1.0"),
        "of dates": np.zeros(good["x"].shape, "datetime64[s]"),
        "of records": np.zeros(good["x"].shape, [("a", "f4")]),
        "ragged": [[1.0], [1.0, 2.0]],
        "masked": np.ma.masked_array(good["x"], good["x"] > 0),
        "a dictionary": {"a": 1},
        "long double": good["x"].astype(np.longdouble),
    }
    for label, bad in unusable.items():
        yield _rejects(subject, f"x {label}", TypeError, "x", x=bad)
        if "dy" in good and label not in ("ragged", "a dictionary"):
            yield _rejects(subject, f"gradient {label}", TypeError, "dy", dy=bad)
    if "dy" in good:
        for dtype in (np.float64, np.float16, BFLOAT16):
            yield _rejects(
                subject, f"gradient in {np.dtype(dtype)} beside float32", TypeError, "dy",
                dy=good["dy"].astype(dtype),
            )  # fmt: skip
    for tensor in subject.schema.inputs:
        if tensor.kind in ("channel", "vector"):
            for dtype in (np.int32, complex, object, bool):
                yield _rejects(
                    subject, f"{tensor.name} in {np.dtype(dtype)}", TypeError, tensor.role,
                    **{tensor.role: good[tensor.role].astype(dtype)},
                )  # fmt: skip
    # NumPy compares float64 equal to None, the answer for "no supported type".
    doubles = [pair for pair in subject.type_pairs if pair[0] == np.float64]
    if doubles and "dy" in good:
        arrays = subject.arrays(None, *doubles[0])
        arrays["dy"] = arrays["dy"].astype(np.int64)
        yield Case(
            f"{subject.name}: gradient of integers beside doubles",
            lambda: subject.run(arrays), TypeError, subject.schema.words["dy"],
        )  # fmt: skip


def _missing(subject: Subject) -> Iterator[Case]:
    for tensor in subject.schema.inputs:
        if tensor.required:
            yield _rejects(
                subject, f"no {tensor.name}", TypeError, tensor.role, **{tensor.role: None}
            )


def _epsilons(subject: Subject) -> Iterator[Case]:
    bad = {"negative": -0.5, "tiny negative": -1e-30, "nan": np.nan, "infinite": np.inf}
    if subject.epsilon is None:
        return
    if subject.epsilon.range == "positive":
        bad["zero"] = 0.0
    for label, value in bad.items():
        yield _rejects(subject, f"{label} epsilon", ValueError, subject.epsilon.name, value)
    for wrong in ("1e-3", None, True, 1j, [1e-3], np.ones(1)):
        yield _rejects(subject, f"epsilon {wrong!r}", TypeError, subject.epsilon.name, wrong)


def _variances(subject: Subject) -> Iterator[Case]:
    good = subject.arrays()
    if "inverse_deviation" in good:
        for value in (-1.0, -np.inf):
            inverse = good["inverse_deviation"].copy()
            inverse[2] = value
            yield _rejects(
                subject, f"inverse deviation {value}", ValueError, "inverse_deviation",
                inverse_deviation=inverse,
            )  # fmt: skip
    if "variance" not in good:
        return
    for label, value in {"negative": -1.0, "minus infinity": -np.inf}.items():
        variance = good["variance"].copy()
        variance[2] = value
        if np.isfinite(value):
            yield _rejects(subject, f"{label} variance", ValueError, "variance", variance=variance)
        else:
            yield _propagates(subject, f"{label} variance", "variance", value)
    if subject.epsilon is not None and subject.epsilon.range != "positive":
        variance = good["variance"].copy()
        variance[0] = 0
        yield _rejects(
            subject, "no variance and no epsilon", ValueError, "variance", 0.0, variance=variance
        )


def _values(subject: Subject) -> Iterator[Case]:
    for dtype, channel in subject.type_pairs:
        yield _right(subject, f"{dtype} with {channel}", subject.arrays(None, dtype, channel))
    good = subject.arrays()
    for label, reshape in {
        "reversed": lambda a: a[::-1, :, ::-1],
        "every other": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
        "transposed": lambda a: np.asfortranarray(a),
        "byte-swapped": lambda a: a.astype(a.dtype.newbyteorder()),
        "misaligned": _misaligned,
        "read-only": _read_only,
    }.items():
        changed = {role: reshape(good[role]) for role in ("x", "dy") if role in good}
        yield _right(subject, f"{label} data", good | changed)
    swapped = {
        t.role: good[t.role].astype(">f4") for t in subject.schema.inputs if t.kind == "channel"
    }
    yield _right(subject, "byte-swapped parameters", good | swapped)
    if "dy" in good:
        expanded = np.broadcast_to(good["dy"][:1], good["dy"].shape)
        yield _right(subject, "expanded gradient", good | {"dy": expanded})
    constant = good | {"x": np.zeros_like(good["x"])}
    np.moveaxis(constant["x"], subject.axis, -1)[...] = np.arange(CHANNELS)
    if "mean" in good:
        constant |= {"mean": np.arange(CHANNELS, dtype="f")}
    if "variance" in good:
        constant |= {"variance": np.zeros(CHANNELS, "f")}
    yield _right(subject, "constant channels", constant)
    # The offset is what single precision loses; the spread is 1.
    for offset in (1e4, 1e6):
        yield _right(subject, f"mean {offset:g} times the spread",
                     subject.arrays(offset=offset, scale=1.0))  # fmt: skip
    yield _right(subject, "values near 1e30", subject.arrays(offset=1e30, scale=1e18))
    # Paddle's forward copies a batch of one element per channel.
    if subject.schema.dialect != "paddle":
        one = subject.arrays(subject.shape(1, 1, 1))
        yield _right(subject, "one element per channel", one)
    yield from _empties(subject)
    yield from _half_sums(subject)
    for role in good:
        if role in ("x", "dy", "mean", "variance", "inverse_deviation", "gamma"):
            for value in (np.nan, np.inf):
                yield _propagates(
                    subject, f"{subject.schema.words[role]} with {value}", role, value
                )


def _empties(subject: Subject) -> Iterator[Case]:
    for label, shape in {
        "N": subject.shape(0, 5, 2),
        "space": subject.shape(4, 0, 2),
        "C": subject.shape(4, 5, 2, channels=0),
    }.items():
        arrays = subject.arrays(shape)
        name = f"{subject.name}: {label} = 0"
        if label == "C" and subject.schema.min_channels:
            call = lambda a=arrays: subject.run(a)  # noqa: E731
            yield Case(name, call, ValueError, subject.schema.words["x"])
        else:
            yield Case(name, lambda a=arrays: _check_empty(subject.run(a), a["x"].shape))


def _half_sums(subject: Subject) -> Iterator[Case]:
    halves = [pair for pair in subject.type_pairs if pair[0] == np.float16]
    for dtype, channel in halves:
        if channel == np.float16:
            continue
        arrays = subject.arrays(subject.shape(64, 8, 8), dtype, channel)
        if "dy" in arrays:
            arrays["dy"] = (100 + np.abs(arrays["dy"])).astype(dtype)
        else:
            arrays["x"] = (100 + np.abs(arrays["x"])).astype(dtype)
        yield _right(subject, "float16 sums beyond 65504", arrays)


def _memory(subject: Subject) -> Iterator[Case]:
    if not subject.memory:
        return
    good = subject.arrays()
    room = np.append(good["x"].ravel(), good["x"].dtype.type(0))
    x = good["x"] = room[:-1].reshape(good["x"].shape)
    readonly = np.empty_like(x)
    readonly.flags.writeable = False
    for label, out, error in (
        ("of another shape", np.empty(x.shape[1:], "f"), ValueError),
        ("of another type", np.empty(x.shape, "f8"), TypeError),
        ("read-only", readonly, ValueError),
        ("a list", [1.0], TypeError),
        ("half over x", room[1:].reshape(x.shape), ValueError),
        *([("over x", x, ValueError)] if "dy" in good else []),
        ("expanded", np.broadcast_to(np.float32(0), x.shape), ValueError),
    ):
        yield Case(
            f"{subject.name}: output {label}", lambda o=out: subject.run(good, 1e-3, o), error,
            subject.memory,
        )  # fmt: skip
    overwritten = "dy" if "dy" in good else "x"
    for label in (overwritten, "nothing"):
        yield Case(f"{subject.name}: output over {label}", partial(_in_place, subject, label))
    if "dy" in good:
        room = np.zeros(x.size + 1, "f")
        dy, shifted = room[:-1].reshape(x.shape), room[1:].reshape(x.shape)
        yield Case(
            f"{subject.name}: output half over the gradient",
            lambda: subject.run(good | {"dy": dy}, 1e-3, shifted), ValueError, subject.memory,
        )  # fmt: skip


def _in_place(subject: Subject, overwritten: str) -> None:
    arrays = subject.arrays()
    expected = subject.run(arrays)
    out = np.full_like(arrays["x"], np.nan)
    if overwritten in arrays:
        out = arrays[overwritten] = arrays[overwritten].copy()
    results = subject.run(arrays, 1e-3, out)
    assert results["dx" if "dx" in results else "y"] is out
    for role, array in expected.items():
        np.testing.assert_array_equal(results[role], array)


def _partial_sums() -> Iterator[Case]:
    """Uneven and empty shares of a batch, as data parallelism has them."""
    subject = SUBJECTS["backnorm.batch_norm_backward"]

    def run() -> None:
        a = subject.arrays()
        whole = batch_norm_backward(**a, epsilon=1e-3)
        total = ChannelSums.zero(CHANNELS)
        shares = (slice(0, 0), slice(0, 1), slice(1, 4))
        for part in shares:
            total = total + reduce(a["x"][part], a["dy"][part], a["mean"])
        pieces = [
            apply(a["x"][part], a["dy"][part], a["mean"], a["variance"], a["gamma"], total,
                  epsilon=1e-3)
            for part in shares
        ]  # fmt: skip
        np.testing.assert_allclose(np.concatenate(pieces), whole.dx, rtol=1e-6, atol=1e-7)

    yield Case("backnorm.batch_norm_backward: uneven and empty shares", run)


def _right(subject: Subject, name: str, arrays: Arrays) -> Case:
    def run() -> None:
        _check(subject, arrays, subject.run(arrays))

    return Case(f"{subject.name}: {name}", run)


def _propagates(subject: Subject, name: str, role: str, value: float) -> Case:
    """A value that is not finite spoils its own channel, raises nothing, and spoils no other."""

    def run() -> None:
        arrays = subject.arrays()
        arrays[role] = arrays[role].copy()
        np.moveaxis(arrays[role], subject.axis if role in ("x", "dy") else 0, 0)[2:3].flat[0] = (
            value
        )
        results = subject.run(arrays)
        first = np.moveaxis(results["dx" if "dx" in results else "y"], subject.axis, 0)
        keep = [0, 1]
        assert np.isfinite(first[keep]).all()
        clean = next(iter(subject.run(subject.arrays()).values()))
        clean = np.moveaxis(clean, subject.axis, 0)
        np.testing.assert_array_equal(first[keep], clean[keep])
        if not (role == "variance" and value == np.inf):
            touched = [first[2], *(a[2] for r, a in results.items() if r in ("dgamma", "dbeta"))]
            assert not all(np.isfinite(a).all() for a in touched)

    return Case(f"{subject.name}: {name}", run)


def _check(subject: Subject, arrays: Arrays, results: Arrays) -> None:
    """Judge results by the formula in double-double arithmetic."""
    schema, epsilon = subject.schema, subject.epsilon
    names = inspect.signature(oracle := getattr(reference, schema.operation)).parameters
    operands = {role: np.asarray(a, a.dtype.newbyteorder("=")) for role, a in arrays.items()}
    options = {"data_format": subject.layout}
    options["epsilon"] = np.float32(1e-3) if epsilon and epsilon.type == "f32" else 1e-3
    if "inverse_deviation" in operands:
        operands["variance"] = 1 / operands["inverse_deviation"].astype(np.float64) ** 2
        options["epsilon"] = 0.0
    if schema.operation == "backward":
        options["training"] = not schema.frozen
    exact = oracle(**{name: operands.get(name) for name in names if name in ROLES}, **options)
    for role in ("dx", "dgamma", "dbeta", "y"):
        if role in results:
            terms = getattr(exact, f"{role}_terms")
            grade = judge(role, results[role], getattr(exact, role), terms, arrays["x"].dtype)
            assert grade.passed, grade.detail


def _check_empty(results: Arrays, shape: tuple[int, ...]) -> None:
    assert results["dx" if "dx" in results else "y"].shape == shape
    for role in ("dgamma", "dbeta", "mean", "variance"):
        if role in results:
            assert (results[role] == 0).all(), f"{role} is {results[role]}"


def _misaligned(array: np.ndarray) -> np.ndarray:
    room = np.zeros(array.nbytes + 1, np.uint8)
    moved = room[1:].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


def _read_only(array: np.ndarray) -> np.ndarray:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


if __name__ == "__main__":
    warnings.simplefilter("error")
    for each in all_cases():
        begin(each.name)
        report(each.name, [each.outcome()])
