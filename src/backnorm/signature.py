"""The operands, options and results of every operation.

Validation (`problem`), the keys of the call cache (`executable.CALLS`), the binding of addresses
(`binding`), the rules of `out` (`aliasing`) and the dialects' tables all read the signatures. So no
operand can be in one of these modules and missing in another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

Operation = Literal[
    "backward",
    "forward",
    "inference",
    "reduce",
    "apply",
    "reduce_forward",
    "apply_forward",
    "double_backward",
    "forward_coefficients",
    "backward_coefficients",
]

#: The kinds of operands and results. data: an array with x's shape and type. channel: one value per
#: channel. mask: one bit per element, set where the output of a ReLU is positive and below its
#: ceiling. sums: two float64 per channel. count: the number of elements of a channel. coefficients:
#: four float64 per channel, see `backnorm_kernels.kernels.formulas`. bins: the sums of a
#: reproducible problem, see `reproducible_sums`.
Kind = Literal["data", "channel", "mask", "sums", "count", "coefficients", "bins"]


@dataclass(frozen=True, slots=True)
class Operand:
    """An array that an operation takes.

    Attributes
    ----------
    name : str
    kind : {"data", "channel", "mask"}
    required : bool
    field : str
        The field of a kernel's record that holds the array's address; empty if no kernel takes it.
    """

    name: str
    kind: Kind
    required: bool = True
    field: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """An array that an operation returns.

    Attributes
    ----------
    name : str
    kind : {"data", "channel", "mask", "sums", "count", "coefficients"}
        Results of kind "sums" are of kind "bins" if the problem is reproducible.
    field : str
        The field of a kernel's record that holds the array's address; empty if no kernel writes it.
    option : str or None
        The attribute of the problem that must be true for this result; None if it is always
        returned.
    """

    name: str
    kind: Kind
    field: str
    option: str | None = None


@dataclass(frozen=True, slots=True)
class Number:
    """An argument that is passed to a kernel with every call, and is not part of a cache key.

    Attributes
    ----------
    name : str
    default : object
    operand : str or None
        The number is passed only if this operand is given.
    """

    name: str
    default: object = None
    operand: str | None = None


@dataclass(frozen=True)
class Signature:
    """An operation.

    Attributes
    ----------
    operation : str
    operands : tuple of Operand
        In the order in which the package's own functions pass them; x is the first.
    results : tuple of Result
        The first is written to `out`.
    options : tuple of str
        The arguments that are not arrays, in the order in which the package's own functions pass
        them.
    overwrites : str or None
        The operand that may be passed as `out`, to work in place.
    numbers : tuple of Number
    public : bool
        Whether the package has a public function for it; only adapters and dialects call the other
        operations.
    """

    operation: Operation
    operands: tuple[Operand, ...]
    results: tuple[Result, ...]
    options: tuple[str, ...]
    overwrites: str | None = None
    numbers: tuple[Number, ...] = ()
    public: bool = True

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the operands."""
        return tuple(operand.name for operand in self.operands)

    @cached_property
    def normalises(self) -> bool:
        """Whether kernels normalise x, in forward passes."""
        return "dy" not in self.names

    def arranged(self, operands: Mapping[str, Any]) -> list[Any]:
        """Return the operands in the signature's order, with None for absent ones."""
        return [operands.get(name) for name in self.names]


_X = Operand("x", "data", field="x")
_DY = Operand("dy", "data", field="dy")
_MASK = Operand("mask", "mask", required=False, field="mask")
_RESIDUAL = Operand("residual", "data", required=False, field="residual")
_MEAN = Operand("mean", "channel", field="mean")
_VARIANCE = Operand("variance", "channel", field="variance")
_GAMMA = Operand("gamma", "channel", required=False, field="gamma")
_BETA = Operand("beta", "channel", required=False, field="beta")
_DX, _Y = Result("dx", "data", "out"), Result("y", "data", "out")
_DRESIDUAL = Result("dresidual", "data", "residual", option="residual")
_MASK_OF_Y = Result("mask", "mask", "mask", option="relu")
_DGAMMA, _DBETA = Result("dgamma", "channel", "result"), Result("dbeta", "channel", "result_2")
_MEAN_OF_X = Result("mean", "channel", "result")
_VARIANCE_OF_X = Result("variance", "channel", "result_2")
_COEFFICIENTS = Result("coefficients", "coefficients", "exchanged")
_COUNTED = Result("count", "count", "")
# `reduce` and `reduce_forward` have two results. The first result is an array with two rows: sum_dy
# and sum_dy_xmu (`reduce`), or mean and variance (`reduce_forward`). The second result is the
# number of elements per channel.
_SUMMED = (Result("sums", "sums", "exchanged"), _COUNTED)
# `_SUMS` are the sums or moments that a caller provides. `_COUNT` is the number of elements per
# channel that were summed.
_SUMS, _COUNT = Number("sums"), Number("count")

_GIVEN = (_MEAN, _VARIANCE, _GAMMA, _BETA)
_RUNNING = (
    Operand("running_mean", "channel", required=False, field="running_mean"),
    Operand("running_variance", "channel", required=False, field="running_variance"),
)
_DDX = Operand("ddx", "data", required=False)
_DDCHANNELS = tuple(Operand(name, "channel", required=False) for name in ("ddgamma", "ddbeta"))
# The weight of the batch in the running statistics.
_MOMENTUM = Number("momentum", 0.0, "running_mean")
# With the option `reproducible`, the bits of sums do not depend on how the batch is divided into
# parts (see the module `reproducible_sums`).
_NORMALISE = ("epsilon", "data_format", "activation", "arithmetic", "reproducible")

_SPLIT = "data_format", "arithmetic", "reproducible"

_ALL = (
    Signature(
        "backward",
        (_X, _DY, _MASK, _MEAN, _VARIANCE, _GAMMA),
        (_DX, _DGAMMA, _DBETA, _DRESIDUAL),
        ("epsilon", "data_format", "training", "residual", "arithmetic", "reproducible"),
        overwrites="dy",
    ),
    Signature(
        "forward",
        (_X, _RESIDUAL, _GAMMA, _BETA, *_RUNNING),
        (_Y, _MEAN_OF_X, _VARIANCE_OF_X, _MASK_OF_Y),
        _NORMALISE,
        overwrites="x",
        numbers=(_MOMENTUM,),
    ),
    Signature(
        "inference",
        (_X, _RESIDUAL, *_GIVEN),
        (_Y,),
        ("epsilon", "data_format", "activation", "arithmetic"),
        overwrites="x",
    ),
    # See `results.ChannelSums`.
    Signature("reduce", (_X, _DY, _MASK, _MEAN), _SUMMED, _SPLIT),
    Signature(
        "apply",
        (_X, _DY, _MASK, _MEAN, _VARIANCE, _GAMMA),
        (_DX, _DRESIDUAL),
        ("epsilon", "data_format", "training", "residual", "arithmetic"),
        overwrites="dy",
        numbers=(_SUMS, _COUNT),
    ),
    # See `results.ChannelMoments`.
    Signature("reduce_forward", (_X,), _SUMMED, _SPLIT),
    # If a problem is reproducible, the argument `sums` of `apply_forward` has bins (integers). The
    # operation itself rounds the bins to floating-point sums.
    Signature(
        "apply_forward",
        (_X, _RESIDUAL, _GAMMA, _BETA),
        (_Y, _MEAN_OF_X, _VARIANCE_OF_X, _MASK_OF_Y),
        _NORMALISE,
        overwrites="x",
        numbers=(_SUMS, _COUNT),
    ),
    # The next two signatures return coefficients. They are for the compilers of frameworks:
    # compiled code computes y or dx from the coefficients, fused with other operations. Dialects
    # also run `backward_coefficients`, if only the gradients of the parameters are needed.
    Signature(
        "forward_coefficients",
        (_X, _GAMMA, _BETA),
        (_MEAN_OF_X, _VARIANCE_OF_X, _COEFFICIENTS),
        ("epsilon", "data_format", "arithmetic"),
        public=False,
    ),
    Signature(
        "backward_coefficients",
        (_X, _DY, _MEAN, _VARIANCE, _GAMMA),
        (_DGAMMA, _DBETA, _COEFFICIENTS),
        ("epsilon", "data_format", "training", "arithmetic"),
        public=False,
    ),
    Signature(
        "double_backward",
        (_X, _DY, _DDX, _MEAN, _VARIANCE, _GAMMA, *_DDCHANNELS),
        (),
        ("epsilon", "data_format", "training"),
    ),
)

#: The signatures of all operations.
SIGNATURES: Mapping[Operation, Signature] = {each.operation: each for each in _ALL}
