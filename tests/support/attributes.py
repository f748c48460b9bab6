"""The attributes of calls of the dialects' operators."""

from __future__ import annotations

from backnorm.dialects.schema import OperatorSchema


def attributes_in_training(schema: OperatorSchema, epsilon: float) -> dict[str, object]:
    """Return the attributes that a call in training must have, by the dialect's names.

    Flags are among them even if they have a default, which may be for constant statistics.
    """
    values = {
        "epsilon": epsilon,
        "channel_axis": 1,
        "data_format": schema.formats[0].name,
        "training": True,
        "frozen": False,
    }
    return {
        spec.name: values.get(spec.role, spec.usual)
        for spec in schema.attributes
        if spec.required or spec.role in ("epsilon", "training", "frozen")
    }
