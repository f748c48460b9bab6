"""`torch.func`: grad, jacobians in both modes, Hessians, vmap, and their combinations."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)

import backnorm.torch

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    # Of `linearize`, with anything that the function closes over.
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),
]


def formula(x, mean, variance, weight, bias, training, momentum=0.1, eps=1e-5):
    """Batch normalisation as PyTorch differentiates it itself, operator by operator.

    PyTorch's own batch_norm is not the one to compare with: of 2.13, several second derivatives of
    `torch.func` are wrong in training (`docs/pytorch.md`).
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
    "vjp": lambda f, x, w, b: vjp(f, x, w, b)[1](torch.ones(()).double()),
    "jvp": lambda f, x, w, b: jvp(f, (x, w, b), (x * x, w * 2, b * 3)),
    "forward twice": lambda f, x, w, b: jacfwd(jacfwd(f, (0, 1, 2)), (0, 1, 2))(x, w, b),
    "jvp of jvp": lambda f, x, w, b: jvp(
        lambda x, w, b: jvp(f, (x, w, b), (x * x, w * w, b * b))[1], (x, w, b), (3 * x, 2 * w, b)
    ),
    "grad of jvp": lambda f, x, w, b: grad(
        lambda x, w, b: jvp(f, (x, w, b), (x * x, w * w, b * b))[1], (0, 1, 2)
    )(x, w, b),
    "jvp of grad": lambda f, x, w, b: jvp(grad(f, (0, 1, 2)), (x, w, b), (3 * x, 2 * w, b)),
    "linearize": lambda f, x, w, b: linearize(f, x, w, b)[1](3 * x, 2 * w, b),
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


@pytest.mark.covering(2)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("relu", [False, True])
def test_transforms_give_derivatives_of_formula(training, name, relu, parameters, close):
    weight, bias, mean, variance = parameters(3)
    x, factor = torch.randn(4, 3, 2).double(), torch.randn(4, 3, 2).double()
    running = (None, None) if training else (mean, variance)

    def ours(x, w, b):
        options = {"activation": "relu", "residual": factor} if relu else {}
        y = backnorm.torch.batch_norm(x, *running, w, b, training, **options)
        return (y * factor).pow(2).sum()

    def theirs(x, w, b):
        y = formula(x, mean, variance, w, b, training)
        y = torch.relu(y + factor) if relu else y
        return (y * factor).pow(2).sum()

    transform = TRANSFORMS[name]
    close(transform(ours, x, weight, bias), transform(theirs, x, weight, bias), factor=16)


def test_grad_of_layer_matches_gradients_and_running_statistics_of_pytorch(close):
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


def test_third_derivatives_match_formula(close):
    def ours(x):
        return backnorm.torch.batch_norm(x, None, None, training=True).pow(3).sum()

    def formula(x):
        return ((x - x.mean(0)) * (x.var(0, unbiased=False) + 1e-5).rsqrt()).pow(3).sum()

    x = torch.randn(4, 2).double()
    for transform in (
        lambda f: jacrev(jacrev(jacrev(f))),
        lambda f: jacfwd(jacrev(jacrev(f))),
        lambda f: jacrev(hessian(f)),
        lambda f: jacfwd(jacfwd(jacfwd(f))),
    ):
        close(transform(ours)(x), transform(formula)(x), factor=100)


CHOICES = [choice for size in range(1, 6) for choice in itertools.combinations(range(5), size)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("relu", [False, True])
def test_forward_mode_of_each_choice_of_dual_arguments_matches_pytorch(
    training, relu, parameters, close
):
    weight, bias, mean, variance = parameters(3)
    x, residual = torch.randn(4, 3, 2).double(), torch.randn(4, 3, 2).double()

    def ours(*arguments):
        options = {"activation": "relu", "residual": residual} if relu else {}
        return backnorm.torch.batch_norm(*arguments, **options)

    def theirs(*arguments):
        y = torch.nn.functional.batch_norm(*arguments)
        return torch.relu(y + residual) if relu else y

    for choice in CHOICES:
        outcomes = []
        for function in (ours, theirs):
            # Statistics are moved in place.
            tensors = [each.clone() for each in (x, mean, variance, weight, bias)]
            with forward_ad.dual_level():
                operands = [
                    forward_ad.make_dual(each, each * each) if k in choice else each
                    for k, each in enumerate(tensors)
                ]
                try:
                    y, tangent = forward_ad.unpack_dual(function(*operands, training))
                except RuntimeError as error:
                    outcomes.append(error)
                    continue
                # A tangent of 0 may be none.
                tangent = torch.zeros_like(y) if tangent is None else tangent
                left = [forward_ad.unpack_dual(each).tangent for each in operands[1:3]]
                outcomes.append([y, tangent, *tensors[1:3], *left])
        mine, expected = outcomes
        if isinstance(expected, RuntimeError):
            assert "cannot have forward grad" in str(expected)
            assert "must not have a tangent" in str(mine)
            assert not training
        else:
            close(mine, expected)


def recorded():
    """Return the output of an eager call with residual and ReLU, and what wants its gradient."""
    x, residual = (torch.randn(4, 3, 2).double().requires_grad_() for _ in range(2))
    weight, bias = (torch.rand(3).double().requires_grad_() for _ in range(2))
    leaves = x, residual, weight, bias
    y = backnorm.torch.batch_norm(
        x, None, None, weight, bias, True, activation="relu", residual=residual
    )
    return y, leaves


def test_vmap_of_gradients_of_eager_call_matches_separate_calls(close):
    y, leaves = recorded()

    def gradients(dy):
        return torch.autograd.grad(y, leaves, dy, retain_graph=True)

    dys = torch.randn(5, *y.shape).double()
    apart = [gradients(dy) for dy in dys]
    close(vmap(gradients)(dys), tuple(map(torch.stack, zip(*apart, strict=True))))


def test_forward_mode_of_gradients_of_eager_call_matches_gradients_of_tangent(close):
    y, leaves = recorded()
    dy, tangent = torch.randn(4, 3, 2).double(), torch.randn(4, 3, 2).double()
    with forward_ad.dual_level():
        gradients = torch.autograd.grad(
            y, leaves, forward_ad.make_dual(dy, tangent), retain_graph=True
        )
        tangents = [forward_ad.unpack_dual(gradient).tangent for gradient in gradients]
    # Gradients are linear in dy.
    close(tangents, list(torch.autograd.grad(y, leaves, tangent)))
