"""The parts that the dialects `onednn_graph` and `onednn_spec` have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from backnorm.dialects._call import Call, CanonicalCall
from backnorm.dialects.operator import Operator
from backnorm.dialects.schema import AttributeSpec, FormatSpec, type_rules

DataFormat = Literal["NCX", "NXC"]

FORMATS = (FormatSpec("NXC", "NXC"), FormatSpec("NCX", "NCX"))
EPSILON = AttributeSpec("epsilon", "f32", role="epsilon", range="positive")
DATA_FORMAT = AttributeSpec("data_format", "string", role="data_format", choices=("NCX", "NXC"))
MOMENTUM = AttributeSpec("momentum", "f32", range="positive")
TYPE_RULES = type_rules(f32="f32", bf16="f32 bf16", f16="f32")


class Forward(Operator):
    """A forward pass in training, which updates running statistics."""

    @classmethod
    def translate(cls, call: Call) -> CanonicalCall:
        """Return the canonical call.

        The canonical call has the weight of the batch in the new running statistics. If the batch
        is empty, this weight is 0, so that the running statistics do not change. If momentum is
        None, the weight is 0.5, the same as that of the old running statistics.
        """
        momentum = call.attributes["momentum"]
        weight = 0.5 if momentum is None else 1.0 - call.number("momentum")
        return replace(super().translate(call), weight=weight if call.count else 0.0)
