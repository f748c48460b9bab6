"""The parts that the dialects `onednn_graph` and `onednn_spec` have in common."""

from __future__ import annotations

from typing import Annotated, Literal

from numpy.typing import ArrayLike

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
Momentum = Annotated[float | None, attribute("f32", "old_weight", range="positive", example=0.75)]
