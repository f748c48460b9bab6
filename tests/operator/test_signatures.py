"""The public functions take what their signatures say, and their documentation says it too."""

from __future__ import annotations

import inspect
import re

import pytest

import backnorm
from backnorm.signature import SIGNATURES

FUNCTIONS = {
    "backward": backnorm.batch_norm_backward,
    "forward": backnorm.batch_norm_forward,
    "inference": backnorm.batch_norm_inference,
    "reduce": backnorm.reduce,
    "apply": backnorm.apply,
    "reduce_forward": backnorm.reduce_forward,
    "apply_forward": backnorm.apply_forward,
    "double_backward": backnorm.batch_norm_double_backward,
}
PUBLIC = list(FUNCTIONS)
# NumPy's forward pass returns the statistics of the batch; who moves running ones has tensors.
INSIDE = {"running_mean", "running_variance"}


@pytest.mark.parametrize("operation", PUBLIC)
def test_public_function_has_parameters_of_its_signature(operation):
    signature, parameters = (
        SIGNATURES[operation],
        inspect.signature(FUNCTIONS[operation]).parameters,
    )
    taken = {operand.name for operand in signature.operands} - INSIDE | set(signature.options)
    # The type of the moments says whether they are reproducible.
    taken -= {"reproducible"} if operation == "apply_forward" else set()
    assert taken <= set(parameters)
    # Of what else there is, ChannelSums and ChannelMoments mean that there are numbers; two calls
    # of operations serve weights.
    assert set(parameters) - taken <= {"out", "blend", "sums", "moments", "weights"}
    for operand in signature.operands:
        if operand.name in parameters and operand.required:
            assert parameters[operand.name].default is inspect.Parameter.empty


@pytest.mark.parametrize("operation", PUBLIC)
def test_docstring_of_public_function_lists_all_parameters(operation):
    text = inspect.getdoc(FUNCTIONS[operation])
    listed = set()
    for line in re.findall(r"^(\w[\w, ]*)(?: : .*)?$", text, re.MULTILINE):
        listed |= set(re.split(r", ?", line))
    assert set(inspect.signature(FUNCTIONS[operation]).parameters) <= listed


@pytest.mark.parametrize("operation", ["backward", "forward"])
def test_result_tuple_has_fields_of_signature(operation):
    names = [r.name for r in SIGNATURES[operation].results]
    types = {
        "backward": backnorm.GradientsWithResidual._fields,
        "forward": backnorm.NormalizedWithMask._fields,
    }
    assert tuple(names) == types[operation]
