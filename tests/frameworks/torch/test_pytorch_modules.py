"""PyTorch's own tests of batch normalisation layers, run against backnorm's layers.

Samples and errors are those of PyTorch's ModuleInfo. The test body is its NewModuleTest: gradients
of two orders, also batched, memory with gaps, pickling.
"""

from __future__ import annotations

import re

import pytest
import torch

import backnorm.torch

modules = pytest.importorskip(
    "torch.testing._internal.common_modules",
    reason="PyTorch's samples want expecttest",
    exc_type=ImportError,
)
bodies = pytest.importorskip("torch.testing._internal.common_nn", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")
NAMES = "BatchNorm1d", "BatchNorm2d", "BatchNorm3d"
OURS = {getattr(torch.nn, name): getattr(backnorm.torch, name) for name in NAMES}
RELU = {
    getattr(torch.nn, name): getattr(backnorm.torch, f"BatchNormReLU{name[-2:]}") for name in NAMES
}
MODULES = {info.module_cls: info for info in modules.module_db if info.module_cls in OURS}
TYPES = torch.float64, torch.float32, torch.float16, torch.bfloat16
each_layer = pytest.mark.parametrize("cls", MODULES, ids=lambda cls: cls.__name__)
each_mode = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])


def samples_of(cls, training, dtype=torch.float64, function="module_inputs_func"):
    options = {"device": "cpu", "dtype": dtype, "requires_grad": True, "training": training}
    return getattr(MODULES[cls], function)(MODULES[cls], **options)


def test_module_info_has_samples_of_each_layer_and_older_lists_have_none():
    assert set(MODULES) == set(OURS)
    assert all(len(samples_of(cls, True)) >= 7 for cls in MODULES)
    older = [*bodies.module_tests, *bodies.get_new_module_tests()]
    assert not any("BatchNorm" in options.get("module_name", "") for options in older)


@pytest.mark.covering(1)
@each_layer
@each_mode
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
def test_layer_on_module_info_samples_matches_pytorch(cls, training, dtype, relu, close):
    for sample in samples_of(cls, training, dtype):
        arguments = sample.constructor_input
        theirs, ours = (
            layer(*arguments.args, **arguments.kwargs).to(dtype).train(training)
            for layer in (cls, (RELU if relu else OURS)[cls])
        )
        torch.manual_seed(0)
        for parameter in theirs.parameters():
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        ours.load_state_dict(theirs.state_dict())
        # A 16-bit result that rounds to 0 or not may be on either side of the ReLU.
        compares_gradients = dtype.itemsize > 2 or not relu
        for _ in range(2):
            results = []
            for module in (ours, theirs):
                x = sample.forward_input.args[0].detach().clone().requires_grad_()
                y = torch.relu(module(x)) if relu and module is theirs else module(x)
                torch.manual_seed(1)
                dy = torch.randn(y.shape).to(dtype)
                gradients = torch.autograd.grad(y, [x, *module.parameters()], dy)
                values = y.detach(), [*module.buffers()]
                results.append((*values, gradients) if compares_gradients else values)
            close(*results, factor=16)


@each_layer
@each_mode
def test_layer_on_module_info_error_inputs_raises_where_pytorch_does(cls, training):
    samples = samples_of(cls, training, function="module_error_inputs_func")
    assert len(samples) == 2
    for sample in samples:
        arguments = sample.module_error_input.constructor_input
        inputs = sample.module_error_input.forward_input.args
        raised = []
        for layer in (OURS[cls], RELU[cls], cls):
            module = layer(*arguments.args, **arguments.kwargs).double().train(training)
            try:
                module(*inputs)
                raised.append(None)
            except sample.error_type as error:
                raised.append(error)
        if training:
            assert all(re.search(sample.error_regex, str(error)) for error in raised)
            assert None not in raised
        # An eps of 0 is valid in evaluation.
        assert len({error is None for error in raised}) == 1


class Case(bodies.NNTestCase):
    """The methods that NewModuleTest calls."""

    def _forward(self, module, input):
        return module(*input) if isinstance(input, tuple) else module(input)

    def _backward(self, module, input, output, grad_output, create_graph=False):
        output.backward(grad_output, retain_graph=True, create_graph=create_graph)
        return input.grad

    def _get_parameters(self, module):
        parameters = [*module.parameters()]
        return parameters, [parameter.grad for parameter in parameters]

    def _zero_grad_parameters(self, module):
        module.zero_grad(set_to_none=False)


@pytest.mark.covering(2)
@each_layer
@each_mode
@pytest.mark.parametrize("replacements", [OURS, RELU], ids=["", "relu"])
def test_layer_passes_new_module_test(cls, training, replacements):
    for sample in samples_of(cls, training):
        arguments = sample.constructor_input
        whole = sample.forward_input.args[0].detach()
        if not whole.numel():
            continue
        # Numerical gradients of hundreds of elements take seconds.
        part = whole[:3] if whole.dim() == 2 else whole[..., :2]
        x = part if whole.dim() < 4 else part[..., :2, :]

        def constructor(arguments=arguments):
            return replacements[cls](*arguments.args, **arguments.kwargs).train(training)

        bodies.NewModuleTest(
            constructor,
            fullname=f"{cls.__name__}_{sample.desc}",
            input=x.clone().requires_grad_(),
            default_dtype=torch.float64,
            gradcheck_fast_mode=True,
        )(Case())
