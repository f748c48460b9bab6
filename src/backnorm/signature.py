"""What every operation takes and returns, described once.

Validation (`problem`), the keys of the call cache (`executable.CALLS`), the binding of addresses
(`binding`), the rules of `out` (`aliasing`) and the tables of the dialects read it here, so that no
operand can be in one of them and missing in another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

__all__ = [
    "REPRODUCIBLE",
    "SIGNATURES",
    "Kind",
    "Number",
    "Operand",
    "Operation",
    "Result",
    "Signature",
]

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
    "forward_reproducible",
    "backward_reproducible",
    "reduce_reproducible",
    "reduce_forward_reproducible",
    "apply_backward",
    "apply_forward_reproducible",
    "apply_backward_reproducible",
    "forward_activated",
    "inference_activated",
    "activation_backward",
]

#: data: of the shape and type of x. channel: one value per channel. mask: one bit per element, set
#: where the output of a ReLU is positive and below its ceiling. sums: two float64 per channel.
#: count: the number of elements of a channel. coefficients: four float64 per channel, see
#: `cpu.kernels.formulas`. bins: reproducible sums, see `binned`.
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
        The field of a kernel's record that holds its address; empty if no kernel takes it.
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
    kind : {"data", "channel", "mask", "sums", "count", "coefficients", "bins"}
    field : str
        The field of a kernel's record that holds its address; empty for what is copied out of the
        record, or known without it.
    option : str or None
        The option that asks for this result; None if it is always returned.
    """

    name: str
    kind: Kind
    field: str
    option: str | None = None


@dataclass(frozen=True, slots=True)
class Number:
    """Passed to a kernel with every call beside addresses, and no part of the call cache's keys.

    Attributes
    ----------
    name : str
    default : object
    operand : str or None
        The operand that it belongs to; without that it is not passed.
    field : str
        The field of a kernel's record that holds its address, if it is arrays.
    """

    name: str
    default: object = None
    operand: str | None = None
    field: str = ""


@dataclass(frozen=True)
class Signature:
    """An operation.

    Attributes
    ----------
    operation : str
    operands : tuple of Operand
        In the order in which the package's own functions pass them; x is the first.
    results : tuple of Result
        The first is the one that is written to `out`.
    options : tuple of str
        The arguments that are not arrays, in the order in which the package's own functions pass
        them.
    overwrites : str or None
        The operand that `out` may be, to work in place.
    numbers : tuple of Number
    public : bool
        Whether the package has a function of it; others are what adapters call, or what its
        functions do with other arguments.
    reproducible : bool
        Whether sums do not depend on how the batch is cut: see `binned`.
    """

    operation: Operation
    operands: tuple[Operand, ...]
    results: tuple[Result, ...]
    options: tuple[str, ...]
    overwrites: str | None = None
    numbers: tuple[Number, ...] = ()
    public: bool = True
    reproducible: bool = False

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the operands."""
        return tuple(operand.name for operand in self.operands)

    @cached_property
    def normalises(self) -> bool:
        """Whether what is written is made of normalised elements: in a forward pass, and where dy
        is the gradient of an activation behind them.
        """
        return "dy" not in self.names or "beta" in self.names

    def arranged(self, given: Mapping[str, Any]) -> list[Any]:
        """Return values by the operands' names in their order, None for those that are absent."""
        return [given.get(name) for name in self.names]


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
# Both in one array: sum_dy and sum_dy_xmu, or mean and variance.
_SUMMED = (Result("sums", "sums", "exchanged"), _COUNTED)
_BINS = (Result("bins", "bins", "exchanged"), _COUNTED)
# The same two, and the number of elements that they are over.
_SUMS, _COUNT = Number("sums", field="exchanged"), Number("count")

_GIVEN = (_MEAN, _VARIANCE, _GAMMA, _BETA)
_RUNNING = (
    Operand("running_mean", "channel", required=False, field="running_mean"),
    Operand("running_variance", "channel", required=False, field="running_variance"),
)
# The weight of the batch in the running statistics.
_MOMENTUM = Number("momentum", 0.0, "running_mean")
_ACTIVATED = ("epsilon", "data_format", "activation", "arithmetic")

_ALL = (
    Signature(
        "backward",
        (_X, _DY, _MASK, _MEAN, _VARIANCE, _GAMMA),
        (
            _DX,
            _DGAMMA,
            _DBETA,
            _DRESIDUAL,
        ),
        ("epsilon", "data_format", "training", "residual", "arithmetic"),
        overwrites="dy",
    ),
    Signature(
        "forward",
        (
            _X,
            _RESIDUAL,
            _GAMMA,
            _BETA,
            *_RUNNING,
        ),
        (
            _Y,
            _MEAN_OF_X,
            _VARIANCE_OF_X,
            _MASK_OF_Y,
        ),
        ("epsilon", "data_format", "relu", "ceiling", "arithmetic"),
        numbers=(_MOMENTUM,),
    ),
    Signature(
        "inference",
        (_X, _RESIDUAL, *_GIVEN),
        (_Y,),
        ("epsilon", "data_format", "relu", "ceiling", "arithmetic"),
    ),
    # See `results.ChannelSums`.
    Signature(
        "reduce",
        (_X, _DY, _MASK, _MEAN),
        _SUMMED,
        ("data_format", "arithmetic"),
    ),
    Signature(
        "apply",
        (_X, _DY, _MASK, _MEAN, _VARIANCE, _GAMMA),
        (_DX, _DRESIDUAL),
        ("epsilon", "data_format", "training", "residual", "arithmetic"),
        overwrites="dy",
        numbers=(_SUMS, _COUNT),
    ),
    # See `results.ChannelMoments`.
    Signature(
        "reduce_forward",
        (_X,),
        _SUMMED,
        ("data_format", "arithmetic"),
    ),
    Signature(
        "apply_forward",
        (_X, _RESIDUAL, _GAMMA, _BETA),
        (_Y, _MEAN_OF_X, _VARIANCE_OF_X, _MASK_OF_Y),
        ("epsilon", "data_format", "relu", "ceiling", "arithmetic"),
        numbers=(_SUMS,),
    ),
    # Before another activation than a ReLU, whose gradient wants what it was applied to: that is
    # not kept. `backward` goes on with dz.
    Signature(
        "forward_activated",
        (_X, _GAMMA, _BETA, *_RUNNING),
        (_Y, _MEAN_OF_X, _VARIANCE_OF_X),
        _ACTIVATED,
        numbers=(_MOMENTUM,),
        public=False,
    ),
    Signature("inference_activated", (_X, *_GIVEN), (_Y,), _ACTIVATED, public=False),
    Signature(
        "activation_backward",
        (_X, _DY, *_GIVEN),
        (Result("dz", "data", "out"),),
        _ACTIVATED,
        overwrites="dy",
        public=False,
    ),
    # `apply` with all results, for a compiler that tells sums by itself.
    Signature(
        "apply_backward",
        (_X, _DY, _MEAN, _VARIANCE, _GAMMA),
        (_DX, _DGAMMA, _DBETA),
        ("epsilon", "data_format", "training", "arithmetic"),
        numbers=(_SUMS, _COUNT),
        public=False,
    ),
    # What a compiler needs that computes the elements itself, with what stands around them.
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
        (
            _X,
            _DY,
            Operand("ddx", "data", required=False),
            _MEAN,
            _VARIANCE,
            _GAMMA,
            Operand("ddgamma", "channel", required=False),
            Operand("ddbeta", "channel", required=False),
        ),
        (),
        ("epsilon", "data_format", "training"),
    ),
)

#: The operations that have a reproducible form, and its name.
REPRODUCIBLE: Mapping[Operation, Operation] = {
    "forward": "forward_reproducible",
    "backward": "backward_reproducible",
    "reduce": "reduce_reproducible",
    "reduce_forward": "reduce_forward_reproducible",
    # Of sums that are not rounded yet.
    "apply_forward": "apply_forward_reproducible",
    "apply_backward": "apply_backward_reproducible",
}


def _reproducible(signature: Signature, name: Operation) -> Signature:
    """Return the same with reproducible sums, which phases return and take as they are."""
    return replace(
        signature,
        operation=name,
        results=_BINS if signature.results is _SUMMED else signature.results,
        numbers=(_SUMS, _COUNT) if _SUMS in signature.numbers else signature.numbers,
        public=False,
        reproducible=True,
    )


_BY_NAME = {each.operation: each for each in _ALL}

#: The signatures of all operations.
SIGNATURES: Mapping[Operation, Signature] = _BY_NAME | {
    name: _reproducible(_BY_NAME[usual], name) for usual, name in REPRODUCIBLE.items()
}
