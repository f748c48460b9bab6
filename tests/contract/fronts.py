"""The contract of all front doors: with any options, a step has the bits of NumPy's functions.

A group of tests names its front doors in a subclass of `FrontContract`, which pytest collects. Each
front door is called with each row of `OPTIONS`. In `make test-all`, any two values of the
dimensions below meet in a case of each front door that takes both.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pytest

import backnorm
from backnorm import Activation, ArgumentTypeError, ArgumentValueError
from backnorm.conformance.data import LayerData, realistic_data
from tests.support.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, is_16_bit

__all__ = ["EPSILON", "Data", "Front", "FrontContract", "Options", "truth"]

EPSILON = 1e-3
# The first has so many elements that some of float16, too, depend on the arithmetic.
SHAPES = (12, 40, 41, 5), (600, 5), (3, 2, 4, 2, 5)
NON_FINITE = np.nan, np.inf, -np.inf, np.nan


@dataclass(frozen=True)
class Data:
    """The operands of a step: x, dy and residual, and arrays of a value per channel."""

    x: np.ndarray
    dy: np.ndarray
    mean: np.ndarray
    variance: np.ndarray
    gamma: np.ndarray | None
    beta: np.ndarray | None
    residual: np.ndarray | None = None


@dataclass(frozen=True)
class Options:
    """The options of a step, whose names are those of the front doors' arguments.

    `training` False: with `mean` and `variance` of the data. A residual is an operand.
    """

    axis: int = -1
    training: bool = True
    arithmetic: str | None = None
    reproducible: bool = False
    activation: str | Activation | None = None

    @property
    def of_sums(self) -> dict[str, Any]:
        """The options that every function takes, by name, if they are not the defaults."""
        named = {"arithmetic": self.arithmetic, "reproducible": self.reproducible}
        return {name: value for name, value in named.items() if value}


#: What a case chooses, and from what; the first is the default.
DIMENSIONS: dict[str, Sequence[Any]] = {
    "dtype": (FLOAT32, FLOAT64, FLOAT16, BFLOAT16),
    "arithmetic": (None, "float32", "float64"),
    "block": (None, "float32", "float64"),
    # A block around the backward pass alone.
    "backward_in": (None, "float32", "float64"),
    "reproducible": (False, True),
    "training": (True, False),
    "shape": SHAPES,
    "axis": (-1, 1, 0, 2),
    "absent": ((), ("gamma",), ("beta",), ("gamma", "beta")),
    "narrow": (False, True),
    "activation": (None, "relu", Activation("relu", 0.75)),
    "residual": (False, True),
    "elements": ("usual", "empty", "non-finite"),
}


#: What shows that a front door obeys an option: the other dimensions have their defaults.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"arithmetic": "float32"},
    {"block": "float32"},
    {"block": "float32", "arithmetic": "float64"},
    {"block": "float32", "backward_in": "float64"},
    {"dtype": FLOAT64, "reproducible": True},
    {"training": False},
    {"training": False, "arithmetic": "float32"},
    {"axis": 1, "absent": ("gamma",)},
    {"axis": 1, "absent": ("beta",)},
    {"absent": ("gamma", "beta")},
    {"dtype": FLOAT16, "narrow": True},
    {"activation": "relu"},
    {"activation": "relu", "residual": True},
]


class Front(Protocol):
    """A front door as a function of NumPy's arrays."""

    #: What the identifiers of tests name.
    name: str
    #: What the errors call its operands.
    operands: str
    #: By the name of a dimension, the values that it takes, if it does not take all.
    takes: Mapping[str, Sequence[Any]]

    def refuses(self, case: Mapping[str, Any]) -> bool:
        """Return whether it does not take values together, or makes something else of them."""

    def tensor(self, array: np.ndarray) -> Any:
        """Return the framework's tensor of an array."""

    def numpy(self, tensor: Any) -> np.ndarray:
        """Return the array of a tensor."""

    def run(
        self,
        data: Data,
        options: Options,
        backward: Callable[[], AbstractContextManager] = nullcontext,
    ) -> dict[str, np.ndarray]:
        """Return y and dx, and what else it has of mean, variance, dgamma, dbeta, dresidual.

        The backward pass is computed within `backward()`.
        """


@functools.cache
def usual_data(dtype: np.dtype, shape: tuple[int, ...]) -> tuple[LayerData, np.ndarray]:
    """Return operands of a type, far from a mean of 0, and a residual; they are not written to."""
    rng = np.random.default_rng(zlib.crc32(repr(dtype).encode()))
    made = realistic_data(shape, dtype, data_format="NXC", rng=rng, ratio=30.0)
    return made, rng.normal(size=shape).astype(dtype)


def data_of(case: Mapping[str, Any]) -> Data:
    """Return the operands of a case."""
    dtype, axis = case["dtype"], case["axis"]
    made, residual = usual_data(dtype, case["shape"])
    x, dy = made.x, made.dy
    if case["elements"] == "empty":
        x, dy, residual = (each[:0] for each in (x, dy, residual))
    if case["elements"] == "non-finite":
        x, dy = x.copy(), dy.copy()
        rows = x.reshape(-1, 5), dy.reshape(-1, 5)
        rows[0][30, 0], rows[0][47, 1], rows[1][0, 2], rows[1][9, 3] = NON_FINITE
    large = [np.ascontiguousarray(np.moveaxis(each, -1, axis)) for each in (x, dy, residual)]
    kept = dtype if case["narrow"] else made.gamma.dtype
    channels = (
        None if name in case["absent"] else getattr(made, name).astype(kept)
        for name in ("mean", "variance", "gamma", "beta")
    )  # fmt: skip
    return Data(*large[:2], *channels, large[2] if case["residual"] else None)


SMALL = Data(
    *np.random.default_rng(0).normal(size=(2, 6, 3, 4, 5)).astype("f"),
    *np.random.default_rng(1).uniform(0.5, 2, (4, 5)).astype("f"),
)

#: What is wrong, with which option, and the error.
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("a name", {"arithmetic": "float16"}, ArgumentValueError,
     "unknown; got 'float16'; expected 'float32' or 'float64'"),
    ("a type", {"arithmetic": np.float32}, ArgumentTypeError, "must be a string"),
    ("a type", {"reproducible": "yes"}, ArgumentTypeError, "must be a boolean"),
    ("a type", {"reproducible": 1}, ArgumentTypeError, "must be a boolean"),
]  # fmt: skip

WITHOUT_KERNELS = """
from tests.contract.fronts import SMALL, Options
for front in fronts:
    for _ in range(2):
        try:
            front.run(SMALL, Options())
        except Exception as error:
            print(type(error).__name__, error)
"""


def truth(data: Data, options: Options) -> dict[str, np.ndarray]:
    """Return what NumPy's functions make of a step."""
    x, dy, axes = data.x, data.dy, (options.axis % data.x.ndim,)
    settings = {"epsilon": EPSILON, "data_format": axes, "arithmetic": options.arithmetic}
    # Parameters of 16 bits are converted; what comes back has their type.
    kept, wide = data.mean.dtype, FLOAT64 if x.dtype == FLOAT64 else FLOAT32
    mean, variance, gamma, beta = (
        None if each is None else each.astype(wide)
        for each in (data.mean, data.variance, data.gamma, data.beta)
    )
    found = {}
    if options.training:
        settings["reproducible"] = options.reproducible
        activated = {"activation": options.activation} if options.activation else {}
        if data.residual is not None:
            activated["residual"] = data.residual
        forward = backnorm.batch_norm_forward(x, gamma, beta, **settings, **activated)
        y, mean, variance, *mask = forward
        found = {"mean": mean.astype(kept), "variance": variance.astype(kept)}
        if activated:
            settings |= {"mask": mask[0], "residual": data.residual is not None}
    else:
        y = backnorm.batch_norm_inference(x, mean, variance, gamma, beta, **settings)
        settings["training"] = False
    gradients = backnorm.batch_norm_backward(x, dy, mean, variance, gamma, **settings)
    found |= {"y": y, **gradients._asdict()}
    return found | {name: found[name].astype(kept) for name in ("dgamma", "dbeta")}


def is_legal(case: Mapping[str, Any]) -> bool:
    """Whether all front doors that take the values take them together."""
    return not (
        (case["dtype"] == FLOAT64 and case["arithmetic"] == "float32")
        or (case["narrow"] and not is_16_bit(case["dtype"]))
        or (case["narrow"] and len(case["absent"]) == 2)
        or (case["residual"] and case["activation"] is None)
        or (case["axis"] == 2 and len(case["shape"]) == 2)
        or (not case["training"] and (case["reproducible"] or case["activation"]))
    )


def values_of(front: Front) -> dict[str, list[Any]]:
    """Return the values that a front door takes, by dimension."""
    return {
        name: [each for each in every if each in front.takes.get(name, every)]
        for name, every in DIMENSIONS.items()
    }


def rows_of(front: Front) -> Iterator[dict[str, Any]]:
    """Yield the cases of the rows of options that a front door takes."""
    values = values_of(front)
    for options in OPTIONS:
        case = {name: each[0] for name, each in values.items()} | options
        taken = all(value in values[name] for name, value in options.items())
        if taken and not front.refuses(case):
            yield case


def cases_of(front: Front) -> list[dict[str, Any]]:
    """Return cases in which every two values that a front door takes meet, if they may."""
    values = values_of(front)
    rng, found = random.Random(front.name), []
    missing = [
        dict(zip(names, pair, strict=True))
        for names in itertools.combinations(values, 2)
        for pair in itertools.product(*(values[name] for name in names))
    ]

    def drawn(pair: Mapping[str, Any]) -> dict[str, Any]:
        return {name: rng.choice(each) for name, each in values.items()} | pair

    def new_in(case: Mapping[str, Any]) -> int:
        return sum(pair.items() <= case.items() for pair in missing)

    while missing:
        cases = [drawn(missing[0]) for _ in range(60)]
        legal = [case for case in cases if is_legal(case) and not front.refuses(case)]
        # Two values may have no legal case.
        best = max(legal, key=new_in, default=missing[0])
        found += [best] if legal else []
        missing = [pair for pair in missing if not pair.items() <= best.items()]
    return found


def name_of(case: Mapping[str, Any]) -> str:
    """Return the type and what is not the default."""
    parts = [str(case["dtype"])]
    for name, (default, *_) in DIMENSIONS.items():
        if name != "dtype" and case[name] != default:
            value = "+".join(case[name]) if name == "absent" else case[name]
            value = f"relu{value.ceiling}" if isinstance(value, Activation) else value
            parts.append(name if value is True else f"{name}={value}")
    return "-".join(parts)


def within(arithmetic: str | None) -> AbstractContextManager:
    """Return the block of an arithmetic, or none."""
    return backnorm.arithmetic(arithmetic) if arithmetic else nullcontext()


def options_of(case: Mapping[str, Any]) -> Options:
    """Return the options of a case."""
    return Options(**{name: case[name] for name in Options.__dataclass_fields__})


def assert_same_bits(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Require equal bits; NaN have many patterns, which are equal."""
    assert found.keys() <= expected.keys()
    for name, each in found.items():
        other = expected[name]
        assert (each.dtype, each.shape) == (other.dtype, other.shape), name
        each, other = (np.asarray(array, np.float64) for array in (each, other))
        np.testing.assert_array_equal(each, other, err_msg=name)
        np.testing.assert_array_equal(
            *(np.signbit(array) | np.isnan(array) for array in (each, other)), err_msg=name
        )


@contextmanager
def raises(error: type[Exception], text: str) -> Iterator[None]:
    """Require an error one line of which matches; Keras writes lines around it, in colours."""
    with pytest.raises(error) as raised:
        yield
    lines = re.sub("\x1b\\[\\d+m", "", str(raised.value)).splitlines()
    assert any(re.match(text, line) for line in lines), lines


class FrontContract:
    """The tests; a subclass names the front doors."""

    fronts: Sequence[Front]
    #: Code that makes `fronts` in a new process.
    imports: str = ""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each front door its cases."""
        if "case" in metafunc.fixturenames:
            cases = cases_of if "any_two" in metafunc.function.__name__ else rows_of
            sets = [
                pytest.param(front, case, id=f"{front.name}-{name_of(case)}")
                for front in self.fronts
                for case in cases(front)
            ]
            metafunc.parametrize(("front", "case"), sets)
        elif "front" in metafunc.fixturenames:
            metafunc.parametrize("front", self.fronts, ids=lambda front: front.name)

    def test_front_with_options_has_the_bits_of_numpy(
        self, front: Front, case: dict[str, Any]
    ) -> None:
        data, options = data_of(case), options_of(case)
        with within(case["block"]), np.errstate(all="ignore"):
            found = front.run(data, options, lambda: within(case["backward_in"]))
            # The front door's argument, else the block around its forward pass, decides.
            expected = truth(data, options)
        assert {"y", "dx"} <= found.keys()
        assert_same_bits(found, expected)

    @pytest.mark.covering(1, facets={"case": lambda case: tuple(map(str, case.values()))})
    def test_front_with_any_two_options_has_the_bits_of_numpy(
        self, front: Front, case: dict[str, Any]
    ) -> None:
        self.test_front_with_options_has_the_bits_of_numpy(front, case)

    def test_front_with_invalid_option_raises_error_naming_it(self, front: Front) -> None:
        for kind, options, error, text in REFUSED:
            (name,) = options
            takes = len(front.takes.get(name, DIMENSIONS[name])) > 1
            if takes and kind in front.takes.get("wrong", ("a name", "a type")):
                with raises(error, f"{name}: {text}"):
                    front.run(SMALL, Options(**options))

    def test_float32_arithmetic_of_float64_raises_except_of_a_block(self, front: Front) -> None:
        if FLOAT64 not in front.takes.get("dtype", DIMENSIONS["dtype"]):
            pytest.skip("takes no float64")
        data = Data(*(each.astype("d") for each in vars(SMALL).values() if each is not None))
        with raises(ArgumentValueError, "arithmetic: float64 elements are computed in float64"):
            front.run(data, Options(arithmetic="float32"))
        with backnorm.arithmetic("float32"):
            assert_same_bits(front.run(data, Options()), truth(data, Options()))

    def test_front_within_numpy_engine_raises_until_the_block_ends(self, front: Front) -> None:
        for _ in range(2 * len(front.takes.get("engine", ("numpy",)))):
            text = f"engine: calls on {front.operands}.*got 'numpy'; expected 'kernels'"
            with raises(ArgumentValueError, text), backnorm.engine("numpy"):
                front.run(SMALL, Options())
            front.run(SMALL, Options())

    def test_front_without_kernels_raises_one_line(self, without_kernels: Callable) -> None:
        done = without_kernels(f"{self.imports}\n{WITHOUT_KERNELS}")
        assert done.returncode == 0, done.stderr
        for front in self.fronts:
            line = f"calls on {front.operands} on the CPU need the kernels: "
            line += "pip install ./kernels in a checkout of backnorm"
            assert done.stdout.count(line) >= 2 * len(self.fronts)
        assert done.stdout.count("MachineCodeError") >= 2 * len(self.fronts)
