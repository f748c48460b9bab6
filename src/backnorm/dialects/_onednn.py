"""The parts that the dialects `onednn_graph` and `onednn_spec` have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from numpy.typing import ArrayLike

from backnorm.dialects._call import Call, CanonicalCall
from backnorm.dialects.roles import attribute, channel, data
from backnorm.dialects.schema import FormatSpec, type_rules

FORMATS = (FormatSpec("NXC", "NXC"), FormatSpec("NCX", "NCX"))
TYPE_RULES = type_rules(f32="f32", bf16="f32 bf16", f16="f32")

X = Annotated[ArrayLike, data("x", "T1")]
Dy = Annotated[ArrayLike, data("dy", "T1")]
Mean = Annotated[ArrayLike, channel("mean", "T2")]
Variance = Annotated[ArrayLike, channel("variance", "T2")]
RunningMean = Annotated[ArrayLike, channel("running_mean", "T2")]
RunningVariance = Annotated[ArrayLike, channel("running_variance", "T2")]
Gamma = Annotated[ArrayLike, channel("gamma", "T2")]
Beta = Annotated[ArrayLike, channel("beta", "T2")]
Epsilon = Annotated[float, attribute("f32", "epsilon", range="positive")]
DataFormat = Annotated[Literal["NXC", "NCX"], attribute("string", "data_format")]
Momentum = Annotated[float | None, attribute("f32", range="positive", example=0.75)]


def translate_forward(call: Call, canonical: CanonicalCall) -> CanonicalCall:
    """Return the canonical call of a forward pass in training, which updates running statistics.

    The canonical call has the weight of the batch in the new running statistics. If the batch is
    empty, this weight is 0, so that the running statistics do not change. If momentum is None, the
    weight is 0.5, the same as that of the old running statistics.
    """
    momentum = call.attributes["momentum"]
    weight = 0.5 if momentum is None else 1.0 - call.number("momentum")
    return replace(canonical, weight=weight if call.count else 0.0)
