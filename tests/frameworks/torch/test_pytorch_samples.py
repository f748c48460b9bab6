"""PyTorch's own tests of batch normalisation, run against ours.

Samples, errors and test bodies are those of its wheel (OpInfo, ModuleInfo, NewModuleTest, composite
compliance); what is compared with is PyTorch.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch.nn import functional

import backnorm.torch

methods = pytest.importorskip(
    "torch.testing._internal.common_methods_invocations",
    reason="PyTorch's samples want expecttest",
    exc_type=ImportError,
)
compliance = pytest.importorskip(
    "torch.testing._internal.composite_compliance", exc_type=ImportError
)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")
DOUBLE = torch.float64
FUNCTION = "nn.functional.batch_norm"
# The variant without cuDNN has no samples on a CPU.
OPERATORS = {
    info.name: info
    for info in methods.op_db
    if "batch_norm" in info.name and info.supported_dtypes("cpu")
}
CASES = [
    (name, dtype) for name, info in OPERATORS.items() for dtype in info.supported_dtypes("cpu")
]
TYPES = torch.float64, torch.float32, torch.float16, torch.bfloat16


def test_operator_database_has_expected_batch_norm_operators():
    """PyTorch's batch normalisation operators are these; `test_pytorch_modules` has its layers."""
    names = ["native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", FUNCTION]
    assert set(OPERATORS) == set(names)
    assert all(info.supported_dtypes("cpu") == set(TYPES) for info in OPERATORS.values())
    assert not any(info.error_inputs_func for info in OPERATORS.values())


def ours_of(name):
    """Our function with the arguments of the operator that `name` samples."""
    if name == FUNCTION:
        return backnorm.torch.batch_norm

    def native(input, weight, bias, *rest):
        *statistics, momentum, eps = rest
        training = True if name == "_batch_norm_with_update" else statistics.pop()
        return backnorm.torch.batch_norm(
            input, *(statistics or (None, None)), weight, bias, training, momentum, eps
        )

    return native


def theirs_of(name):
    # All but the function return the statistics too, in PyTorch's form.
    return functional.batch_norm if name == FUNCTION else lambda *a: OPERATORS[name].op(*a)[0]


def leaves_of(sample):
    tensors = (sample.input, *sample.args)
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]


def run(function, sample):
    """Return y, the gradients, and the running statistics after a call with copies of a sample."""
    sample = copy.deepcopy(sample)
    y = function(sample.input, *sample.args, **sample.kwargs)
    wanted = [tensor for tensor in leaves_of(sample) if tensor.requires_grad]
    torch.manual_seed(0)
    gradients = torch.autograd.grad(y, wanted, torch.randn(y.shape).to(y.dtype))
    return y.detach(), gradients, leaves_of(sample)


def samples_of(name, dtype=DOUBLE):
    found = list(OPERATORS[name].sample_inputs("cpu", dtype, requires_grad=True))
    # PyTorch accepts an empty input without an axis of channels.
    found = [sample for sample in found if sample.input.dim() > 1]
    assert len(found) >= 8
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize("contiguous", [True, False])
def test_batch_norm_on_opinfo_samples_matches_pytorch(name, dtype, contiguous, close):
    for sample in samples_of(name, dtype):
        operands = sample if contiguous else sample.noncontiguous()
        close(run(ours_of(name), operands), run(theirs_of(name), operands), factor=16)


def equal(actual, expected, **options):
    torch.testing.assert_close(actual, expected, **options)


@pytest.mark.long
@pytest.mark.parametrize("activation", [None, "relu"])
def test_batch_norm_of_tensor_subclasses_passes_composite_compliance(activation):
    """Under a mode, as subclasses in every choice of arguments, backward and in forward mode."""
    function = functools.partial(backnorm.torch.batch_norm, activation=activation)
    for sample in samples_of(FUNCTION):
        compliance.check_with_mode(function, [sample.input, *sample.args], sample.kwargs, equal)
        # Statistics that are moved must be of the class of the input.
        moved = sample.kwargs.get("training")
        statistics = (None, None) if moved else sample.args[:2]
        arguments = [sample.input, *statistics, *sample.args[2:]], sample.kwargs
        compliance.check_all_permutations(function, *arguments, equal)
        compliance.check_backward_formula(function, *arguments, assert_equal_fn=equal)
        compliance.check_forward_ad_formula(function, *arguments, assert_equal_fn=equal)
