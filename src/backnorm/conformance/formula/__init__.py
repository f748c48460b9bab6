"""The formulas of the backward and the forward pass in steps, and mistakes in each step.

The mistakes are a catalogue: the diagnosis of a wrong result looks for them, and a formula with a
mistake is a wrong kernel, with which tests and tolerances are tested.
"""

from backnorm.conformance.formula._backward import (
    BACKWARD,
    IMPRECISE,
    MISTAKES,
    WRONG,
    BackwardFormula,
)
from backnorm.conformance.formula._channels import Channels
from backnorm.conformance.formula._formula import FEW_BITS, Formula, Mistake, Values
from backnorm.conformance.formula._forward import FORWARD, FORWARD_MISTAKES, ForwardFormula
from backnorm.conformance.formula._forward_rows import forward_formula
from backnorm.conformance.formula._rows import backward_formula
from backnorm.conformance.formula._variations import of_images, other_inputs

__all__ = [
    "BACKWARD",
    "FEW_BITS",
    "FORWARD",
    "FORWARD_MISTAKES",
    "IMPRECISE",
    "MISTAKES",
    "WRONG",
    "BackwardFormula",
    "Channels",
    "Formula",
    "ForwardFormula",
    "Mistake",
    "Values",
    "backward_formula",
    "forward_formula",
    "of_images",
    "other_inputs",
]
