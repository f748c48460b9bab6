"""The type `Activation`: the activation after a normalisation, for all operations and adapters."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from backnorm.dtypes import FLOAT64
from backnorm.errors import ArgumentValueError, described, shown
from backnorm.scalars import check_number


class Activation(NamedTuple):
    """An activation after the normalisation.

    Attributes
    ----------
    name : {"relu", "silu", "hardswish"}
    ceiling : float, optional
        The upper bound of a ReLU: 6.0 makes it a ReLU6. None: no bound.
    """

    name: Literal["relu", "silu", "hardswish"]
    ceiling: float | None = None


RELU = Activation("relu")

#: The activations that a string can name.
ACTIVATIONS = {
    "relu": RELU,
    "relu6": Activation("relu", 6.0),
    "silu": Activation("silu"),
    "hardswish": Activation("hardswish"),
}

_RELUS = ("relu", "relu6")


def check_activation(
    value: object,
    dtype: np.dtype = FLOAT64,
    accepted: tuple[str, ...] = tuple(ACTIVATIONS),
    *,
    hint: str | None = None,
) -> Activation | None:
    """Return `value` as an Activation with its ceiling rounded to `dtype`; None stays None.

    Parameters
    ----------
    value : None, str or Activation
        A name of `ACTIVATIONS`, or an activation.
    dtype : numpy.dtype
        The element type of the output, to which the ceiling is rounded. A ceiling that rounds to
        infinity becomes None.
    accepted : tuple of str
        The names of the activations that the caller supports.
    hint : str, optional
        The hint of the error for an activation that the caller does not support.

    Raises
    ------
    ArgumentValueError
        For any other value, or a ceiling that is not more than 0 after rounding.
    """
    if value is None:
        return None
    found: Any = ACTIVATIONS.get(str.__str__(value)) if issubclass(type(value), str) else value
    if not issubclass(type(found), Activation) or found.name not in accepted:
        names = ["None", *map(repr, accepted), "backnorm.Activation('relu', ceiling)"]
        raise ArgumentValueError(
            "activation",
            "must be a supported activation",
            came=described(value),
            accepted=", ".join(names),
            hint=hint,
        )
    if found.ceiling is None:
        return cast("Activation", found)
    if found.name != "relu":
        raise ArgumentValueError(
            "activation", "must not have a ceiling unless it is a ReLU", came=repr(found)
        )
    ceiling = check_ceiling(found.ceiling, dtype)
    return RELU if math.isinf(ceiling) else Activation("relu", ceiling)


def check_relu(value: object, dtype: np.dtype = FLOAT64) -> Activation | None:
    """Do what `check_activation` does for callers that support only a ReLU."""
    return check_activation(value, dtype, _RELUS, hint="apply other activations to y")


def check_ceiling(ceiling: object, dtype: np.dtype = FLOAT64) -> float:
    """Return a ReLU's ceiling rounded to `dtype`; raise if the result is not more than 0."""
    accepted = "a number more than 0, or None"
    value = check_number("ceiling", ceiling, accepted=accepted)
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float64(value).astype(dtype))
    if not rounded > 0.0:
        raise ArgumentValueError(
            "ceiling",
            f"must be more than 0, also when rounded to {dtype}",
            came=shown(ceiling),
            accepted=accepted,
        )
    return rounded
