"""PyTorch's own tests of batch normalisation, run against ours.

The samples are those of its OpInfo and ModuleInfo, which its wheel brings; what is compared with is
PyTorch, in float64.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional

import backnorm.torch

methods = pytest.importorskip(
    "torch.testing._internal.common_methods_invocations",
    reason="PyTorch's samples want expecttest",
    exc_type=ImportError,
)
modules = pytest.importorskip("torch.testing._internal.common_modules", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")
DOUBLE = torch.float64
OPERATORS = {info.name: info for info in methods.op_db if info.variant_test_name == ""}
MODULES = {
    info.module_cls: info
    for info in modules.module_db
    if info.module_cls in (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
}
OURS = {
    torch.nn.BatchNorm1d: backnorm.torch.BatchNorm1d,
    torch.nn.BatchNorm2d: backnorm.torch.BatchNorm2d,
    torch.nn.BatchNorm3d: backnorm.torch.BatchNorm3d,
}
CHECKS = {"check_forward_ad": True, "check_batched_grad": True}


def ours_of(name):
    """Our function with the arguments of the operator that `name` samples."""
    if name == "nn.functional.batch_norm":
        return backnorm.torch.batch_norm

    def native(input, weight, bias, running_mean, running_var, training, momentum, eps):
        return backnorm.torch.batch_norm(
            input, running_mean, running_var, weight, bias, training, momentum, eps
        )

    return native


def theirs_of(name):
    if name == "nn.functional.batch_norm":
        return functional.batch_norm
    # It returns the statistics too, in PyTorch's form.
    return lambda *arguments: torch.native_batch_norm(*arguments)[0]


def leaves_of(sample):
    tensors = (sample.input, *sample.args)
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]


def run(function, sample):
    """Return y, the gradients, and the running statistics after a call with copies of a sample."""
    sample = copy.deepcopy(sample)
    y = function(sample.input, *sample.args, **sample.kwargs)
    wanted = [tensor for tensor in leaves_of(sample) if tensor.requires_grad]
    torch.manual_seed(0)
    gradients = torch.autograd.grad(y, wanted, torch.randn(y.shape, dtype=y.dtype))
    return y.detach(), gradients, leaves_of(sample)


def samples_of(name):
    return list(OPERATORS[name].sample_inputs("cpu", DOUBLE, requires_grad=True))


@pytest.mark.parametrize("name", ["nn.functional.batch_norm", "native_batch_norm"])
def test_samples_of_the_operator(name, close):
    samples = samples_of(name)
    assert len(samples) >= 10
    for sample in samples:
        close(run(ours_of(name), sample), run(theirs_of(name), sample), factor=16)


@pytest.mark.parametrize("name", ["nn.functional.batch_norm", "native_batch_norm"])
def test_gradients_at_the_samples(name):
    function = ours_of(name)
    for sample in samples_of(name):
        tensors = [sample.input, *sample.args]
        places = [
            place
            for place, tensor in enumerate(tensors)
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad
        ]

        def call(*wanted, sample=sample, tensors=tensors, places=places):
            given = [t.clone() if isinstance(t, torch.Tensor) else t for t in tensors]
            for place, tensor in zip(places, wanted, strict=True):
                given[place] = tensor
            return function(*given, **sample.kwargs)

        wanted = [tensors[place] for place in places]
        if sample.input.numel() > 60:
            assert torch.autograd.gradcheck(call, wanted, fast_mode=True)
            assert torch.autograd.gradgradcheck(call, wanted, fast_mode=True)
        else:
            assert torch.autograd.gradcheck(call, wanted, **CHECKS)
            assert torch.autograd.gradgradcheck(call, wanted)


@pytest.mark.parametrize("cls", MODULES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("training", [True, False])
def test_samples_of_the_module(cls, training, close):
    info = MODULES[cls]
    samples = info.module_inputs_func(
        info, device="cpu", dtype=DOUBLE, requires_grad=True, training=training
    )
    assert samples
    for sample in samples:
        arguments = sample.constructor_input
        torch.manual_seed(0)
        theirs = cls(*arguments.args, **arguments.kwargs).to(DOUBLE).train(training)
        ours = OURS[cls](*arguments.args, **arguments.kwargs).to(DOUBLE).train(training)
        for parameter in theirs.parameters():
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        ours.load_state_dict(theirs.state_dict())
        for _ in range(2):
            results = []
            for module in (ours, theirs):
                x = sample.forward_input.args[0].detach().clone().requires_grad_()
                wanted = [x, *module.parameters()]
                y = module(x)
                torch.manual_seed(1)
                dy = torch.randn(y.shape, dtype=DOUBLE)
                results.append(
                    (y.detach(), torch.autograd.grad(y, wanted, dy), [*module.buffers()])
                )
            close(*results, factor=16)


@pytest.mark.parametrize("cls", MODULES, ids=lambda cls: cls.__name__)
def test_errors_of_the_module(cls):
    info = MODULES[cls]
    samples = info.module_error_inputs_func(
        info, device="cpu", dtype=DOUBLE, requires_grad=True, training=True
    )
    assert samples
    for sample in samples:
        arguments = sample.module_error_input.constructor_input
        module = OURS[cls](*arguments.args, **arguments.kwargs).to(DOUBLE)
        with pytest.raises(sample.error_type, match=sample.error_regex):
            module(*sample.module_error_input.forward_input.args)
