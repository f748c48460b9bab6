"""PyTorch's own tests of the layers of batch normalisation, run against ours.

Samples and errors are those of its ModuleInfo, the test body is its NewModuleTest: gradients of two
orders, also batched, memory with gaps, pickling.
"""

from __future__ import annotations

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


def samples_of(cls, training, dtype=torch.float64):
    info = MODULES[cls]
    samples = info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=True, training=training
    )
    assert len(samples) >= 7
    return samples


def test_these_are_all():
    """There are samples of each layer, and older ones are gone from PyTorch."""
    assert set(MODULES) == set(OURS)
    older = [*bodies.module_tests, *bodies.get_new_module_tests()]
    assert not [each for each in older if "BatchNorm" in each.get("module_name", "")]


@each_layer
@each_mode
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
def test_samples_of_the_module(cls, training, dtype, relu, close):
    for sample in samples_of(cls, training, dtype):
        arguments = sample.constructor_input
        theirs, ours = (
            each(*arguments.args, **arguments.kwargs).to(dtype).train(training)
            for each in (cls, (RELU if relu else OURS)[cls])
        )
        torch.manual_seed(0)
        for parameter in theirs.parameters():
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        ours.load_state_dict(theirs.state_dict())
        # Where 16-bit results round to 0 or not, both sides of the ReLU are right.
        far = sample.forward_input.args[0].detach() if dtype.itemsize > 2 or not relu else None
        for _ in range(2):
            results = []
            for module in (ours, theirs):
                x = sample.forward_input.args[0].detach().clone().requires_grad_()
                y = module(x)
                if relu and module is theirs:
                    y = torch.relu(y)
                torch.manual_seed(1)
                dy = torch.randn(y.shape).to(dtype)
                gradients = torch.autograd.grad(y, [x, *module.parameters()], dy)
                found = [y.detach(), [*module.buffers()]]
                results.append(found if far is None else [*found, gradients])
            close(*results, factor=16)


@each_layer
@each_mode
def test_errors_of_the_module(cls, training):
    info = MODULES[cls]
    samples = info.module_error_inputs_func(
        info, device="cpu", dtype=torch.float64, requires_grad=True, training=training
    )
    assert len(samples) == 2
    for sample in samples:
        given = sample.module_error_input
        arguments, error = given.constructor_input, sample.error_type
        outcomes = []
        for kind in (OURS[cls], RELU[cls], cls):
            module = kind(*arguments.args, **arguments.kwargs).double().train(training)
            try:
                outcomes.append(module(*given.forward_input.args))
            except error as found:
                outcomes.append(found)
        if training:
            for found in outcomes:
                with pytest.raises(error, match=sample.error_regex):
                    raise found
        else:
            # The errors are those of training; an eps of 0 is good in evaluation.
            assert len({type(found) is torch.Tensor for found in outcomes}) == 1


class Case(bodies.NNTestCase):
    """What the test body wants to be told of layers."""

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


@each_layer
@each_mode
@pytest.mark.parametrize("kinds", [OURS, RELU], ids=["", "relu"])
def test_with_the_body_of_pytorchs_tests(cls, training, kinds):
    for sample in samples_of(cls, training):
        arguments = sample.constructor_input
        x = sample.forward_input.args[0]
        if not x.numel():
            continue
        # Numerical gradients of hundreds of elements take seconds.
        x = x[..., :2].detach() if x.dim() < 4 else x[..., :2, :2].detach()
        x = x if x.dim() > 2 else sample.forward_input.args[0].detach()[:3]

        def constructor(arguments=arguments):
            return kinds[cls](*arguments.args, **arguments.kwargs).train(training)

        body = bodies.NewModuleTest(
            constructor,
            fullname=f"{cls.__name__}_{sample.desc}",
            input=x.clone().requires_grad_(),
            default_dtype=torch.float64,
            gradcheck_fast_mode=True,
        )
        body(Case())
