"""Operators of layer, RMS and group normalisation, which backnorm judges and does not compute.

Sources: native_functions.yaml of PyTorch 2.13, and the page LayerNormBackward of oneDNN Graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from backnorm.conformance.battery import Case
from backnorm.conformance.verify.names import OperationName
from backnorm.conformance.verify.operations import OPERATIONS, RefusedError
from backnorm.errors import ArgumentValueError

__all__ = ["ROW_OPERATORS", "RowOperator", "row_operator"]


@dataclass(frozen=True, slots=True)
class RowOperator:
    """An operator that is only judged.

    Attributes
    ----------
    dialect, op, operation : str
    arguments : str
        The arguments in the operator's order, by what they are.
    keywords : str
        Arguments that are passed by keyword.
    returned : str
        The results, if they are not those of the operation.
    """

    dialect: str
    op: str
    operation: OperationName
    arguments: str
    keywords: str = ""
    returned: str = ""

    @property
    def results(self) -> tuple[str, ...]:
        """The results in their order."""
        return tuple(self.returned.split()) or OPERATIONS[self.operation].results

    def operands(self, inputs: dict[str, Any], case: Case) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a call, by position and by keyword; None: not passed.

        Raises
        ------
        RefusedError
            If the operator does not take the layout or the types.
        """
        x, kind = case.data.x, case.data.normalization
        if "HxW" in self.arguments and case.data.data_format != "NCX":
            raise RefusedError("the operator has no layout NXC")
        is_affine = inputs["gamma"] is not None
        if self.dialect == "aten" and not is_affine and x.dtype != case.data.variance.dtype:
            raise RefusedError("without a weight, the statistics have the type of the input")
        usual = np.zeros_like(inputs["gamma"]) if is_affine else None
        known = {"beta": usual, **inputs, "inverse_deviation": case.data.inverse_deviation}
        if "normalized_shape" in self.arguments:
            # The statistics have the rank of x.
            names = "mean", "inverse_deviation"
            known |= {name: known[name][..., None] for name in names if name in known}
        known |= {
            "normalized_shape": [x.shape[-1]], "N": x.shape[0], "C": x.shape[1],
            "HxW": math.prod(x.shape[2:]), "group": kind.groups,
            "output_mask": [True, *[is_affine] * (len(self.results) - 1)],
            "begin_norm_axis": -1, "use_affine": is_affine, "epsilon": self._epsilon(case),
        }  # fmt: skip
        by_name = {name: known[name] for name in self.keywords.split()}
        return [known[name] for name in self.arguments.split()], by_name

    def received(self, case: Case) -> Case:
        """Return the case of the numbers that the operator gets; it is judged by them."""
        data = replace(case.data, epsilon=self._epsilon(case))
        if "inverse_deviation" in self.arguments:
            data = data.with_inverse_deviation()
        return replace(case, data=data)

    def _epsilon(self, case: Case) -> float:
        """Return epsilon, whose type is f32 in oneDNN."""
        return float(np.float32(case.data.epsilon)) if self.keywords else case.data.epsilon


#: The operators.
ROW_OPERATORS = (
    RowOperator(
        "aten", "native_layer_norm_backward", "layer-norm",
        "dy x normalized_shape mean inverse_deviation gamma beta output_mask",
    ),
    RowOperator(
        "aten", "_fused_rms_norm_backward", "rms-norm",
        "dy x normalized_shape inverse_deviation gamma output_mask",
    ),
    RowOperator(
        "aten", "native_group_norm_backward", "group-norm",
        "dy x mean inverse_deviation gamma N C HxW group output_mask",
    ),
    RowOperator(
        "aten", "native_layer_norm", "layer-norm-forward",
        "x normalized_shape gamma beta epsilon", returned="y mean inverse_deviation",
    ),
    RowOperator(
        "aten", "_fused_rms_norm", "rms-norm-forward",
        "x normalized_shape gamma epsilon", returned="y inverse_deviation",
    ),
    RowOperator(
        "aten", "native_group_norm", "group-norm-forward",
        "x gamma beta N C HxW group epsilon", returned="y mean inverse_deviation",
    ),
    RowOperator(
        "onednn_graph", "LayerNormBackward", "layer-norm",
        "x dy mean variance gamma beta", "begin_norm_axis use_affine epsilon",
    ),
)  # fmt: skip


def row_operator(dialect: str, op: str | None, operation: str) -> RowOperator:
    """Return an operator; the default is the dialect's operator of the operation.

    Raises
    ------
    ArgumentValueError
        If there is no such operator.
    """
    of_operation = {(o.dialect, o.op): o for o in ROW_OPERATORS if o.operation == operation}
    for (name, known), operator in of_operation.items():
        if name == dialect and op in (None, known):
            return operator
    raise ArgumentValueError(
        "--dialect", f"has no such operator of {operation}", came=f"{dialect} {op or ''}".strip(),
        accepted=", ".join(map(" ".join, of_operation)) or None,
    )  # fmt: skip
