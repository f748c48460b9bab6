"""Masks and weights of elements; `test_synchronised` tests them over several processes."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import backnorm
import backnorm.torch
from backnorm import reference
from backnorm.conformance.judge import check_backward, check_forward
from backnorm.torch import batch_norm
from tests.support.dtypes import ELEMENT_TYPES, rounded, statistics_types

CHANNELS, EPSILON = 3, 1e-5
KINDS = pytest.mark.parametrize("kind", ["boolean", "weights"])

pytestmark = [
    # Dynamo makes an object of a function of autograd; PyTorch imports forward-mode rules by a
    # deprecated function.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]


def mask_for(shape, kind, seed=3):
    """Return a mask of the shape (N, ...), of which about a third counts nothing."""
    rng = np.random.default_rng(seed)
    counts = torch.from_numpy(rng.random((shape[0], *shape[2:])) < 0.7)
    if kind == "boolean":
        return counts
    return counts * torch.from_numpy(rng.random(counts.shape) * 3).float()


def data(shape=(5, CHANNELS, 7), dtype=torch.float32, seed=0):
    """Return x, dy, weight and bias."""
    rng = np.random.default_rng(seed)
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    x, dy = (torch.from_numpy(rng.normal(size=shape) * k + k).to(dtype) for k in (3, 1))
    return (
        x,
        dy,
        torch.linspace(-1.5, 2, shape[1]).to(wide),
        torch.linspace(1, -1, shape[1]).to(wide),
    )


def step(function, x, dy, *parameters):
    """Return y and the gradients of x and the parameters."""
    leaves = [each.detach().requires_grad_() for each in (x, *parameters)]
    y = function(*leaves)
    y.backward(dy)
    return [y.detach(), *(each.grad for each in leaves)]


def same(found, expected, tolerance=0.0):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def in_layout(x, layout):
    if layout == "channels last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    return torch.stack((x, x), -1)[..., 0] if layout == "strided" else x


@KINDS
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "strided"])
@pytest.mark.parametrize(
    "space", [(), (7,), (4, 5), (2, 3, 4)], ids=lambda space: f"rank {len(space) + 2}"
)
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.covering(2)
def test_batch_norm_with_mask_is_within_budget_of_weighted_formula(dtype, space, layout, kind):
    shape = 9, CHANNELS, *space
    tensors = data(shape, getattr(torch, dtype.name))
    mask = mask_for(shape, kind)
    running = [torch.zeros_like(tensors[2]), torch.ones_like(tensors[2])]
    x, dy = (in_layout(each, layout) for each in tensors[:2])

    def call(x, weight, bias):
        return batch_norm(x, *running, weight, bias, True, 1.0, mask=mask, arithmetic="float64")

    y, *gradients = (each.double().numpy() for each in step(call, x, dy, *tensors[2:]))
    wide = statistics_types(dtype)[-1]
    x, dy = (each.double().numpy().astype(dtype) for each in tensors[:2])
    gamma, beta = (each.numpy() for each in tensors[2:])
    weights = mask.double().numpy()[:, None]
    exact = reference.forward(x, gamma, beta, epsilon=EPSILON, weights=weights)
    statistics = [rounded(each.hi, wide) for each in (exact.mean, exact.variance)]
    options = {"epsilon": EPSILON, "arithmetic": "float64", "weights": weights}
    forward = y.astype(dtype), running[0].numpy(), statistics[1]
    grades = check_forward(x, gamma, beta, forward, **options)
    results = [each.astype(kind) for each, kind in zip(gradients, (dtype, wide, wide), strict=True)]
    grades |= check_backward(x, dy, *statistics, gamma, results, **options)
    assert all(grade.at_least("float64") for grade in grades.values()), grades
    total = np.broadcast_to(weights, (shape[0], 1, *space)).sum()
    unbiased = exact.variance.hi * total / (total - 1)
    np.testing.assert_allclose(running[1].numpy(), unbiased, rtol=2 * np.finfo(wide).eps)


@KINDS
def test_variance_with_mask_of_elements_far_from_zero_loses_no_digits(kind):
    x, *_ = data((9, CHANNELS, 50), torch.float64)
    x, mask = x + 1e10, mask_for(x.shape, kind).double()
    running = torch.zeros(2, CHANNELS, dtype=x.dtype)
    batch_norm(x, *running, None, None, True, 1.0, mask=mask)
    exact = reference.forward(x.numpy(), epsilon=EPSILON, weights=mask.numpy()[:, None])
    total = float(mask.sum())
    torch.testing.assert_close(
        running[1] * ((total - 1) / total), torch.from_numpy(exact.variance.hi), rtol=1e-15, atol=0
    )


@pytest.mark.parametrize("reproducible", [False, True])
def test_boolean_mask_has_bits_of_compacted_batch(reproducible):
    x, dy, *parameters = data((6, 4, 50))
    mask = mask_for(x.shape, "boolean")
    dy = torch.where(mask[:, None], dy, 0.0)
    found, expected = [], []
    for results, batch, gradient, options in (
        (found, x, dy, {"mask": mask}),
        (expected, *(each.movedim(1, -1)[mask] for each in (x, dy)), {}),
    ):
        running = torch.zeros(4), torch.ones(4)

        def call(x, *parameters, running=running, options=options):
            options = options | {"reproducible": reproducible}
            return batch_norm(x, *running, *parameters, True, **options)

        y, dx, *others = step(call, batch, gradient, *parameters)
        if results is found:
            assert not dx.movedim(1, -1)[~mask].any()
            y, dx = (each.movedim(1, -1)[mask] for each in (y, dx))
        results += [y, dx, *running]
        parts = others if reproducible else []
        results += parts
    same(found, expected)


@KINDS
def test_batch_norm_with_mask_has_derivatives_of_every_mode_and_order(kind):
    *operands, weight, bias = data((4, 2, 5), torch.float64)
    x, residual = (each.requires_grad_() for each in operands)
    mask = mask_for(x.shape, kind).unsqueeze(1)

    def function(x, weight, bias, residual, activation="relu"):
        options = {"mask": mask, "residual": residual, "activation": activation}
        return batch_norm(x, None, None, weight, bias, True, **options)

    inputs = x, weight.requires_grad_(), bias.requires_grad_(), residual
    batched = {"check_batched_grad": True}
    assert gradcheck(function, inputs, check_forward_ad=True, **batched)
    smooth = partial(function, residual=None, activation="silu")
    assert gradgradcheck(smooth, inputs[:3], check_fwd_over_rev=True, **batched)


@KINDS
def test_batch_norm_under_vmap_and_func_has_results_of_single_calls(kind):
    masks = torch.stack([mask_for((5, CHANNELS, 7), kind, seed) for seed in range(4)])
    batches = torch.stack([data(seed=seed)[0] for seed in range(4)])
    _, dy, *parameters = data()

    def call(x, mask, *running):
        return batch_norm(x, *running, *parameters, True, mask=mask)

    running = torch.zeros(2, 4, CHANNELS), torch.ones(2, 4, CHANNELS)
    found = torch.vmap(call)(batches, masks, *(each[0] for each in running))
    singles = zip(batches, masks, *(each[1] for each in running), strict=True)
    same([found], [torch.stack([call(*each) for each in singles])], 1e-6)
    same(*zip(*running, strict=True), 1e-6)
    gradients = torch.vmap(torch.func.grad(lambda *each: (call(*each, None, None) * dy).sum()))(
        batches, masks
    )
    for gradient, x, mask in zip(gradients, batches, masks, strict=True):
        same([gradient], [step(lambda x, mask=mask: call(x, mask, None, None), x, dy)[1]], 1e-5)
    with torch.no_grad():
        nothing = torch.zeros_like(masks[0])
        assert torch.func.vmap(lambda x: call(x, nothing, None, None))(batches).isnan().all()


class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layer = backnorm.torch.BatchNorm1d(CHANNELS, **options)

    def forward(self, x, mask):
        return self.layer(x, mask=mask)


def exported(model, example):
    names = {0: torch.export.Dim("samples", min=2)}
    return torch.export.export(model, example, dynamic_shapes={"x": names, "mask": names}).module()


TOOLS = {
    "aot_eager": lambda model, _: torch.compile(model, backend="aot_eager", fullgraph=True),
    "checkpoint": lambda model, _: partial(checkpoint, model, use_reentrant=False),
    "export": exported,
    "torch.fx": lambda model, _: torch.fx.symbolic_trace(model),
    "trace": partial(torch.jit.trace, check_trace=False),
}


# Dynamo and the tracer of TorchScript warn of what is constant in their programs.
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*deprecated")
@KINDS
@pytest.mark.parametrize("tool", TOOLS)
def test_model_with_mask_in_tool_has_results_of_eager_model(tool, kind):
    x, dy, *_ = data((8, CHANNELS, 7))
    mask, results = mask_for(x.shape, kind), []
    x = torch.where(mask[:, None] != 0, x, float("nan"))
    dy = torch.where(mask[:, None] != 0, dy, 0.0)
    for prepare in (lambda model, _: model, TOOLS[tool]):
        model = Model(activation="silu")
        prepared = prepare(model, (x[:4], mask[:4]))
        # A tracer has run the model.
        model.layer.reset_running_stats()
        leaf = x.clone().requires_grad_()
        y = prepared(leaf, mask)
        y.backward(dy)
        # A checkpoint calls the layer twice, like PyTorch's.
        buffers = [] if tool == "checkpoint" else model.buffers()
        results.append([y.detach(), leaf.grad, model.layer.weight.grad, *buffers])
    same(*results)


@KINDS
@pytest.mark.parametrize("training", [True, False])
def test_gradients_with_nan_or_infinity_under_mask_are_those_of_other_padding(training, kind):
    x, dy, *parameters = data()
    mask = mask_for(x.shape, kind)
    counts = (mask != 0)[:, None]
    dy = torch.where(counts, dy, 0.0)
    residual = torch.ones_like(x)

    def call(x, *parameters):
        running, options = (torch.zeros(CHANNELS), torch.ones(CHANNELS)), {"activation": "relu"}
        options |= {"mask": mask, "residual": residual}
        return batch_norm(x, *running, *parameters, training, **options)

    expected = step(call, torch.where(counts, x, 0.5), dy, *parameters)
    for padding in (float("nan"), -float("inf")):
        y, *found = step(call, torch.where(counts, x, padding), dy, *parameters)
        same(found, expected[1:])
        same([y], [torch.where(counts, expected[0], float("nan"))])


def test_lengths_are_the_mask_of_the_first_elements():
    x, dy, *_ = data()
    lengths = torch.tensor([7, 0, 3, 1, 5])
    mask = torch.arange(7) < lengths[:, None]
    layers = [backnorm.torch.BatchNorm1d(CHANNELS) for _ in range(2)]
    for each in (lengths, lengths.int()):
        found = step(lambda x, each=each: layers[0](x, lengths=each), x, dy)
        same(found, step(lambda x: layers[1](x, mask=mask), x, dy))
    same(layers[0].buffers(), layers[1].buffers())
    # Longer than the largest number of the type of the lengths.
    long = torch.randn(2, CHANNELS, 300)
    y = batch_norm(long, None, None, training=True, lengths=torch.tensor([3, 9]).to(torch.uint8))
    same([y], [batch_norm(long, None, None, training=True, lengths=torch.tensor([3, 9]))])


def test_masks_of_every_accepted_shape_have_same_results():
    x, dy, *_ = data((4, CHANNELS, 3, 2))
    samples = torch.tensor([True, False, True, True])
    expected = step(
        lambda x: batch_norm(x, None, None, training=True, mask=samples.view(4, 1, 1, 1)), x, dy
    )
    whole = samples[:, None, None].expand(4, 3, 2)
    for mask in (whole, whole[:, None], samples[:, None, None], whole[:, None].double()):
        found = step(
            lambda x, mask=mask: batch_norm(x, None, None, training=True, mask=mask), x, dy
        )
        same(found, expected, 1e-6)
    assert batch_norm(x[:0], None, None, training=True, mask=whole[:0]).shape == (0, CHANNELS, 3, 2)


REFUSED = {
    "none counted": ({"mask": torch.zeros(4, 5, dtype=torch.bool)}, "got 0 counted elements"),
    "one counted": ({"mask": torch.eye(20)[0].view(4, 5).bool()}, "got 1 counted elements"),
    "too little weight": ({"mask": torch.full((4, 5), 0.04)}, "got 0.8 counted elements"),
    "a negative weight": ({"mask": torch.ones(4, 5) - 2 * torch.eye(5)[:4]}, "no negative weight"),
    "NaN": ({"mask": torch.full((4, 5), float("nan"))}, "no NaN"),
    "infinite weights": ({"mask": torch.full((4, 5), float("inf"))}, "sum is less than"),
    "too much weight": ({"mask": torch.full((4, 5), 1e30)}, "sum is less than"),
    "booleans as lengths": ({"lengths": torch.ones(4, dtype=torch.bool)}, "integers from 0 to T"),
    "channels": ({"mask": torch.ones(4, CHANNELS, 5)}, "shape .4, 1, 5. or .4, 5."),
    "another size": ({"mask": torch.ones(4, 6)}, "shape .4, 1, 5. or .4, 5."),
    "integers": ({"mask": torch.ones(4, 5, dtype=torch.int64)}, "call mask.bool"),
    "a list": ({"mask": [True] * 4}, "must be a tensor; got list"),
    "a gradient": ({"mask": torch.ones(4, 5, requires_grad=True)}, "pass mask.detach"),
    "both": ({"mask": torch.ones(4, 5), "lengths": torch.ones(4)}, "pass one of the two"),
    "too long": ({"lengths": torch.tensor([1, 2, 6, 3])}, "integers from 0 to T"),
    "lengths of another batch": ({"lengths": torch.tensor([1, 2])}, "integers from 0 to T"),
    "weights, reproducible": (
        {"mask": torch.ones(4, 5), "reproducible": True}, "without reproducible=True",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_mask_or_lengths_raise_error_that_names_it(case):
    options, message = REFUSED[case]
    with pytest.raises(backnorm.ArgumentError, match=message) as caught:
        batch_norm(data((4, CHANNELS, 5))[0], None, None, training=True, **options)
    assert caught.value.argument in ("mask", "lengths")


@KINDS
def test_results_with_mask_have_same_bits_for_any_number_of_threads(kind):
    x, dy, *parameters = data((16, 4, 2000))
    mask, results = mask_for(x.shape, kind), []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        call = partial(batch_norm, running_mean=None, running_var=None, training=True, mask=mask)
        results.append(
            step(lambda x, w, b, call=call: call(x, weight=w, bias=b), x, dy, *parameters)
        )
    torch.set_num_threads(before)
    same(results[0], results[1])
    same(results[0], results[2])
