"""`torch.func`: grad, jacobians in both modes, Hessians, vmap, and their combinations."""

from __future__ import annotations

import pytest
import torch
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)

import backnorm.torch

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


def formula(x, mean, variance, weight, bias, training, momentum=0.1, eps=1e-5):
    """Batch normalisation as PyTorch differentiates it itself, operator by operator.

    PyTorch's own batch_norm is not the one to compare with: of 2.13, forward over reverse mode
    (`torch.func.hessian`) is wrong for weight in training.
    """
    axes = [0, *range(2, x.dim())]
    shape = [1, -1] + [1] * (x.dim() - 2)
    if training:
        mean = x.mean(axes)
        variance = (x - mean.view(shape)).pow(2).mean(axes)
    normal = (x - mean.view(shape)) * (variance.view(shape) + eps).rsqrt()
    return normal * weight.view(shape) + bias.view(shape)


TRANSFORMS = {
    "grad": lambda f, x, w, b: grad(f, (0, 1, 2))(x, w, b),
    "grad of x": lambda f, x, w, b: grad(lambda x: f(x, w, b))(x),
    "vjp": lambda f, x, w, b: vjp(f, x, w, b)[1](torch.ones(()).double()),
    "jvp": lambda f, x, w, b: jvp(f, (x, w, b), (x * x, w * 2, b * 3)),
    "jvp of x": lambda f, x, w, b: jvp(lambda x: f(x, w, b), (x,), (x * x,)),
    "jvp of bias": lambda f, x, w, b: jvp(lambda b: f(x, w, b), (b,), (b * b,)),
    "hessian": lambda f, x, w, b: hessian(f, (0, 1, 2))(x, w, b),
    "reverse twice": lambda f, x, w, b: jacrev(jacrev(f, (0, 1, 2)), (0, 1, 2))(x, w, b),
    "reverse over forward": lambda f, x, w, b: jacrev(jacfwd(f, (0, 1, 2)), (0, 1, 2))(x, w, b),
    "vmap of grad": lambda f, x, w, b: vmap(grad(f, (0, 1, 2)), (1, None, 0))(
        torch.stack([x, x * x], 1), w, torch.stack([b, -b])
    ),
    "grad of vmap": lambda f, x, w, b: grad(
        lambda w: vmap(f, (None, None, 0))(x, w, torch.stack([b, 2 * b])).prod()
    )(w),
    "vmap twice": lambda f, x, w, b: vmap(vmap(f, (0, None, None)), (None, 0, None))(
        torch.stack([x, x + x * x]), torch.stack([w, -w]), b
    ),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("relu", [False, True])
def test_the_same_as_of_the_formula(training, name, relu, parameters, close):
    weight, bias, mean, variance = parameters(3)
    x, factor = torch.randn(4, 3, 2).double(), torch.randn(4, 3, 2).double()
    running = (None, None) if training else (mean, variance)

    def ours(x, w, b):
        if relu:
            y = backnorm.torch.batch_norm_add_relu(x, factor, *running, w, b, training)
        else:
            y = backnorm.torch.batch_norm(x, *running, w, b, training)
        return (y * factor).pow(2).sum()

    def theirs(x, w, b):
        y = formula(x, mean, variance, w, b, training)
        y = torch.relu(y + factor) if relu else y
        return (y * factor).pow(2).sum()

    transform = TRANSFORMS[name]
    close(transform(ours, x, weight, bias), transform(theirs, x, weight, bias), factor=16)


def test_running_statistics_move_under_grad(close):
    modules = [backnorm.torch.BatchNorm1d(3), torch.nn.BatchNorm1d(3)]
    x, factor = torch.randn(4, 3), torch.randn(4, 3)
    gradients = []
    for module in modules:
        parameters = dict(module.named_parameters())

        def loss(parameters, x, module=module):
            return (functional_call(module, parameters, (x,)) * factor).pow(2).sum()

        module.num_batches_tracked = None  # PyTorch lets no transform count it
        gradients.append(grad(loss, (0, 1))(parameters, x))
    close(*gradients)
    close(*(list(module.state_dict().values()) for module in modules))


def test_an_ensemble_moves_the_running_statistics_of_each_model(close):
    models = [backnorm.torch.BatchNorm1d(3) for _ in range(2)]
    for model in models:
        model.num_batches_tracked = None
    parameters, buffers = stack_module_state(models)
    x = torch.randn(2, 4, 3)

    def call(parameters, buffers, x):
        return functional_call(models[0], (parameters, buffers), (x,))

    y = vmap(call)(parameters, buffers, x)
    expected = [model(part) for model, part in zip(models, x, strict=True)]
    close(list(y), expected)
    close(list(buffers["running_mean"]), [model.running_mean for model in models])
    close(list(buffers["running_var"]), [model.running_var for model in models])


def test_one_set_of_running_statistics_for_all_of_vmap_is_refused(parameters):
    *_, mean, variance = parameters(3)
    with pytest.raises(backnorm.torch.TensorValueError, match="running_mean: would be moved"):
        vmap(lambda x: backnorm.torch.batch_norm(x, mean, variance, training=True))(
            torch.randn(2, 4, 3).double()
        )


def test_the_third_order_is_refused():
    def f(x):
        return backnorm.torch.batch_norm(x, None, None, training=True).pow(3).sum()

    x = torch.randn(4, 2).double()
    for transform in (jacrev(jacrev(jacrev(f))), jacfwd(jacrev(jacrev(f))), jacrev(hessian(f))):
        with pytest.raises(backnorm.torch.ThirdOrderError, match="twice"):
            transform(x)


@pytest.mark.parametrize("training", [True, False])
def test_forward_mode_twice_is_refused_where_pytorch_loses_the_derivative(training, parameters):
    *_, mean, variance = parameters(2)

    def f(x):
        running = (None, None) if training else (mean, variance)
        return backnorm.torch.batch_norm(x, *running, training=training).pow(3).sum()

    with pytest.raises(backnorm.torch.UnsupportedTransformError, match="jacrev"):
        jacfwd(jacfwd(f))(torch.randn(4, 2).double())


def test_that_pytorch_loses_it():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x**3

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_forward(*inputs)

        @staticmethod
        def jvp(ctx, tangent):
            (x,) = ctx.saved_tensors
            return 3 * x**2 * tangent

    one = torch.ones(1)
    _, second = jvp(lambda x: jvp(Cube.apply, (x,), (one,))[1], (2 * one,), (one,))
    assert second.item() == 0.0, "PyTorch keeps it now: allow forward mode twice"


def test_dual_tensors_without_a_gradient(parameters, close):
    from torch.autograd import forward_ad

    weight, bias, mean, variance = parameters(3)
    x = torch.randn(4, 3, 2).double()
    for training in (True, False):
        running = (None, None) if training else (mean, variance)
        tangents = []
        for function in (
            lambda x, r=running, t=training: backnorm.torch.batch_norm(x, *r, weight, bias, t),
            lambda x, t=training: formula(x, mean, variance, weight, bias, t),
        ):
            with forward_ad.dual_level():
                y = function(forward_ad.make_dual(x, x * x))
                tangents.append(forward_ad.unpack_dual(y).tangent)
        close(*tangents)


def recorded():
    """Return the output of an eager call with residual and ReLU, and what wants its gradient."""
    x, residual = (torch.randn(4, 3, 2).double().requires_grad_() for _ in range(2))
    weight, bias = (torch.rand(3).double().requires_grad_() for _ in range(2))
    leaves = x, residual, weight, bias
    return backnorm.torch.batch_norm_add_relu(x, residual, None, None, weight, bias, True), leaves


def test_vmap_over_the_gradients_of_an_eager_call(close):
    y, leaves = recorded()

    def gradients(dy):
        return torch.autograd.grad(y, leaves, dy, retain_graph=True)

    dys = torch.randn(5, *y.shape).double()
    apart = [gradients(dy) for dy in dys]
    close(vmap(gradients)(dys), tuple(map(torch.stack, zip(*apart, strict=True))))


def test_forward_mode_over_the_gradients_of_an_eager_call(close):
    from torch.autograd import forward_ad

    y, leaves = recorded()
    dy, tangent = torch.randn(4, 3, 2).double(), torch.randn(4, 3, 2).double()
    with forward_ad.dual_level():
        gradients = torch.autograd.grad(
            y, leaves, forward_ad.make_dual(dy, tangent), retain_graph=True
        )
        tangents = [forward_ad.unpack_dual(gradient).tangent for gradient in gradients]
    # Gradients are linear in dy.
    close(tangents, list(torch.autograd.grad(y, leaves, tangent)))
