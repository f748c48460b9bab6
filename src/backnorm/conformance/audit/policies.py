"""Tolerances with which other projects test batch normalisation, most of them its gradient."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType

import numpy as np

from backnorm.conformance.audit.data import Run, runs
from backnorm.conformance.audit.tolerances import Comparison, Test, close, from_function, from_text
from backnorm.errors import ArgumentValueError

__all__ = ["POLICIES", "Policy", "of_function", "of_text", "policy_of"]

_TYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, slots=True)
class Policy:
    """A test, such as a project's.

    Attributes
    ----------
    source : str
        The repository on GitHub, and the file or pull request with the tolerance; or a package.
    tolerance : mapping of str to str
        The tolerance of dx by the element type of x; of all results if `parameters` is absent.
    parameters : mapping of str to str, optional
        The tolerance of dgamma and dbeta.
    decides : callable, optional
        Tests a result. `tolerance` is then only a description.
    data, loss, epsilon, operation
        The data of the test: see :func:`backnorm.conformance.audit.data.runs`.
    shapes : sequence of shapes
        The shapes of the test's x. Empty: they are not part of the policy.
    compared : sequence of str, optional
        The results that the test compares; None: all.
    forgives : str
        Why wrong kernels pass.
    """

    source: str
    tolerance: Mapping[str, str]
    parameters: Mapping[str, str] | None = None
    decides: Test | None = None
    data: str = "randn"
    loss: str = "none"
    epsilon: float = 1e-5
    operation: str = "backward"
    shapes: Sequence[Sequence[int]] = ()
    compared: Sequence[str] | None = None
    forgives: str = ""

    def text(self, dtype: str) -> str:
        """Return the policy's tolerance in words, for an x of the type `dtype`.

        Raises
        ------
        ArgumentValueError
            If the project has no tolerance for the type.
        """
        if dtype not in self.tolerance:
            raise ArgumentValueError(
                "--dtype", "the policy has no tolerance for it", came=dtype,
                accepted=", ".join(self.tolerance),
            )  # fmt: skip
        own, parameters = self.tolerance[dtype], (self.parameters or self.tolerance)[dtype]
        return own if parameters == own else f"{own}; dgamma, dbeta {parameters}"

    def test(self, dtype: str) -> Test:
        """Return the policy's test of results, for an x of the type `dtype`, or raise as
        :meth:`text` does.
        """
        self.text(dtype)
        if self.decides is not None:
            return self.decides
        own = from_text(self.tolerance[dtype])
        parameters = from_text((self.parameters or self.tolerance)[dtype])
        return lambda c: (
            (self.compared is not None and c.output not in self.compared)
            or (own if c.output == "dx" else parameters)(c)
        )

    def runs(self, dtype: np.dtype, shapes: Iterable[Sequence[int]] = ()) -> Iterator[Run]:
        """Yield the data of the test, of its shapes, or of `shapes` if it has none."""
        for shape in self.shapes or shapes:
            yield from runs(self.data, tuple(shape), self.loss, self.epsilon, dtype, self.operation)


def of_text(tolerance: str) -> Policy:
    """Return a policy of one tolerance for all types; :func:`from_text` reads it."""
    from_text(tolerance)
    return Policy("", _all(tolerance))


def of_function(name: str, function: Callable[[np.ndarray, np.ndarray], object]) -> Policy:
    """Return a policy that calls a function of the actual and the expected array."""
    return Policy("", _all(name), decides=from_function(function))


def policy_of(name: str) -> Policy:
    """Return the policy called `name`.

    Raises
    ------
    ArgumentValueError
        If there is no such policy. The error lists the names.
    """
    if name not in POLICIES:
        accepted = ", ".join(POLICIES)
        raise ArgumentValueError("--policy", "unknown", came=repr(name), accepted=accepted)
    return POLICIES[name]


def _all(text: str) -> dict[str, str]:
    return dict.fromkeys(_TYPES, text)


def _hipdnn(comparison: Comparison) -> bool:
    """Test a gradient with the tolerance that hipDNN derives from the inputs."""
    tolerance = _hipdnn_tolerance(comparison)
    return close(tolerance, tolerance)(comparison)


def _hipdnn_tolerance(comparison: Comparison) -> float:
    """Return hipDNN's tolerance for float32, computed from the largest magnitudes of the inputs.

    hipDNN's formula assumes that the inverse deviation is 1/max|x| (apart from epsilon), so that a
    normalised element is x/max|x|. Let M be the number of elements of a channel, eps the epsilon of
    float32, and n = 2 M eps. If n is below 0.01, the formula assumes that a sum has the relative
    error n/(1 - n), and otherwise 6 sqrt(2 M) eps.
    """
    data, count = comparison.data, comparison.channel_size
    largest_x, largest_dy, largest_gamma = (
        float(np.abs(a).max()) for a in (data.x, data.dy, data.gamma)
    )
    unit = float(np.finfo(np.float32).eps)
    growth = 2 * count * unit
    growth = growth / (1 - growth) if growth < 0.01 else 6 * math.sqrt(2 * count) * unit
    inverse = 1 / math.sqrt(max(largest_x**2, data.epsilon) + data.epsilon)
    normalized = largest_x * inverse
    if comparison.output == "dbeta":
        return growth * largest_dy
    if comparison.output == "dgamma":
        return (growth + unit) * normalized * largest_dy
    element = (2 + normalized**2) * largest_dy
    means = (growth + unit) * largest_dy + normalized**2 * (growth + 2 * unit) * largest_dy
    return largest_gamma * inverse * (means + 5 * unit * element)


def _policies() -> Iterator[tuple[str, Policy]]:
    text = (
        resources.files("backnorm.conformance.audit").joinpath("policies.toml").read_text("utf-8")
    )
    for name, fields in tomllib.loads(text).items():
        for key in {"tolerance", "parameters"} & fields.keys():
            if isinstance(fields[key], str):
                fields[key] = _all(fields[key])
        yield name, Policy(**fields, decides=_DECIDES.get(name))


_DECIDES: Mapping[str, Test] = {"hipdnn-derived": _hipdnn}
#: Policies by name.
POLICIES: Mapping[str, Policy] = MappingProxyType(dict(_policies()))
