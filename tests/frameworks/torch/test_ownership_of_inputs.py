"""dx is written over x where nobody else holds that, and dy is no place for it.

It is none where somebody else holds it, or where the gradient of a residual is written over it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import backnorm.torch
from backnorm.torch import ownership

from .test_ownership import TYPES, Spy, layer, squared

LAYOUTS = [torch.contiguous_format, torch.channels_last]


class Made(torch.autograd.Function):
    """A function that makes x, with `make`, and notes where it lies, and dx."""

    @staticmethod
    def forward(ctx, leaf, places, make):
        ctx.places = places
        x = make(leaf)
        places.append(x.data_ptr())
        return x

    @staticmethod
    def backward(ctx, dx):
        ctx.places.append(dx.data_ptr())
        return dx, None, None


def added(channels=6, dtype=torch.float64, training=True):
    """Return a layer of ours with a residual and a ReLU, and one of PyTorch's."""
    torch.manual_seed(1)
    ours = backnorm.torch.BatchNormReLU2d(channels, dtype=dtype).train(training)
    nn.init.uniform_(ours.weight)
    nn.init.uniform_(ours.bias)
    theirs = nn.BatchNorm2d(channels, dtype=dtype).train(training)
    theirs.load_state_dict(ours.state_dict())
    return ours, lambda x, residual: torch.relu(theirs(x) + residual)


def gradients(model, given, make=torch.clone, use=squared, keep=None):
    """Return whether dx lay where x did, and the gradients of x and of the residual.

    `make` makes x of a leaf; what `keep` returns of x is there until the gradients are.
    """
    places = []
    leaf, residual = (each.clone().requires_grad_() for each in given)
    x = Made.apply(leaf, places, make)
    kept = keep and keep(x)
    y = model(x, residual)
    del x
    use(y)
    del kept
    before, after = places
    return before == after, [leaf.grad, residual.grad]


@pytest.fixture(params=LAYOUTS, ids=["NCHW", "NHWC"])
def given(request):
    torch.manual_seed(3)
    made = torch.randn(2, 5, 6, 9, 7, dtype=torch.float64)
    return [each.to(memory_format=request.param) for each in made]


def check(model, given, overwritten, **how):
    """Check whether x is overwritten, and that this changes no gradient."""
    where, found = gradients(model, given, **how)
    assert where == overwritten
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ownership, "_alone", lambda: (None, None))
        where, expected = gradients(model, given, **how)
    assert not where
    assert all(map(torch.equal, found, expected))
    return found


# One that is read and written in vectors, and a large one, which is streamed.
@pytest.mark.parametrize("shape", [(5, 6, 9, 7), (4, 24, 128, 128)], ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["NCHW", "NHWC"])
def test_with_a_residual(shape, dtype, training, layout):
    torch.manual_seed(2)
    given = [torch.randn(shape, dtype=dtype).to(memory_format=layout) for _ in range(2)]
    ours, theirs = added(shape[1], dtype, training)
    # Of given statistics the addition is a step of its own: dx is written over its gradient.
    found = check(ours, given, overwritten=training)
    if dtype is torch.float64:
        torch.testing.assert_close(found, gradients(theirs, given)[1])


def test_where_somebody_else_holds_dy(given):
    """An addition hands one gradient to both."""

    def plus(norm):
        def model(x, residual):
            # What is made first is differentiated last.
            other = residual * 2
            return norm(x) + other

        return model

    ours, theirs = map(plus, layer("alone"))
    found = check(ours, given, overwritten=True)
    torch.testing.assert_close(found, gradients(theirs, given)[1])


def test_where_a_residual_holds_what_is_alone(given):
    """The next block's residual is what the last one returned."""
    blocks = [added()[0], added()[0]]

    def model(x, residual):
        y = blocks[0](x, residual)
        return blocks[1](y * 2, y)

    check(model, given, overwritten=True)


KEEPING = {
    "itself": lambda x: x,
    "a view": lambda x: x[:2],
    "an array": lambda x: x.detach().numpy(),
    "DLPack": lambda x: x.detach().__dlpack__(),
    "a hook": lambda x: x.register_hook(lambda dx, x=x: None),
    "its storage": lambda x: x.untyped_storage(),
}


@pytest.mark.parametrize("how", KEEPING)
def test_where_somebody_else_holds_x(how, given):
    ours, theirs = added()
    found = check(ours, given, overwritten=False, keep=KEEPING[how])
    torch.testing.assert_close(found, gradients(theirs, given)[1])


def test_x_that_another_node_saved(given):
    def times(norm):
        def model(x, residual):
            # What is made first is differentiated last.
            square = x * x
            return norm(x, residual) + square

        return model

    ours, theirs = map(times, added())
    found = check(ours, given, overwritten=False)
    torch.testing.assert_close(found, gradients(theirs, given)[1])


def test_x_that_its_own_function_saved(given):
    """Its derivative is made of it, after ours."""
    ours, theirs = added()
    found = []
    for model in (ours, theirs):
        leaf, residual = (each.clone().requires_grad_() for each in given)
        squared(model(leaf.exp(), residual))
        found.append((leaf.grad, residual.grad))
    torch.testing.assert_close(*found)


def test_a_leaf(given):
    ours, theirs = added()
    found = []
    for model in (ours, theirs):
        leaf, residual = (each.clone().requires_grad_() for each in given)
        squared(model(leaf, residual))
        assert torch.equal(leaf, given[0])
        found.append((leaf.grad, residual.grad))
    torch.testing.assert_close(*found)


def test_a_graph_that_is_kept(given):
    ours, _ = added()
    places = []
    leaf, residual = (each.clone().requires_grad_() for each in given)
    loss = ours(Made.apply(leaf, places, torch.clone), residual).square().sum()
    first, second, last = (
        torch.autograd.grad(loss, (leaf, residual), retain_graph=retain)
        for retain in (True, True, False)
    )
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, last))
    assert places[0] not in places[1:3]
    assert places[3] == places[0]


def test_a_graph_that_is_differentiated_again(given):
    found = []
    for model in added():
        leaf, residual = (each.clone().requires_grad_() for each in given)
        y = model(leaf.clone(), residual)
        gradient = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)[0]
        gradient.square().sum().backward()
        found.append((gradient, leaf.grad))
    torch.testing.assert_close(*found)


def test_a_second_pass_is_refused_as_by_pytorch(given):
    ours, _ = added()
    y = ours(given[0].clone().requires_grad_().clone(), given[1])
    squared(y)
    with pytest.raises(RuntimeError, match="second time"):
        squared(y)


def test_a_hook_behind_the_backward_pass_finds_nothing_saved(given):
    ours, _ = added()
    y = ours(given[0].clone().requires_grad_().clone(), given[1].clone().requires_grad_())
    node, found = y.grad_fn, []

    def look(*_):
        with pytest.raises(RuntimeError, match="freed"):
            node.saved_tensors  # noqa: B018
        found.append(True)

    node.register_hook(look)
    squared(y)
    assert found == [True]


@pytest.mark.parametrize("how", ["identity", "kept", "elsewhere"])
def test_hooks_of_saved_tensors(how, given):
    ours, theirs = added()
    kept = []

    def pack(tensor):
        kept.append((tensor, tensor.detach().clone()))
        return tensor

    hooks = {
        "identity": torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        "kept": torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        "elsewhere": torch.autograd.graph.save_on_cpu(),
    }
    with hooks[how]:
        _, found = gradients(ours, given)
    for tensor, before in kept:
        assert torch.equal(tensor, before)
    torch.testing.assert_close(found, gradients(theirs, given)[1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant, given):
    found = []
    for model in added():

        def run(leaf, residual, model=model):
            return model(leaf * 2, residual)

        leaf, residual = (each.clone().requires_grad_() for each in given)
        squared(checkpoint(run, leaf, residual, use_reentrant=reentrant))
        found.append((leaf.grad, residual.grad))
    torch.testing.assert_close(*found)


def aligned(array):
    """Return a copy that lies as memory of PyTorch does."""
    room = np.zeros(array.size + 8)
    start = -room.ctypes.data % 64 // 8
    found = room[start : start + array.size].reshape(array.shape)
    found[...] = array
    return found


FOREIGN = {
    "an array": lambda x: torch.from_numpy(aligned(x.numpy())),
    "DLPack": lambda x: torch.from_dlpack(aligned(x.numpy())),
    "a buffer": lambda x: torch.frombuffer(
        aligned(x.numpy()).data.cast("B"), dtype=x.dtype
    ).reshape(x.shape),
    "other processes": lambda x: x.clone().share_memory_(),
}


@pytest.mark.parametrize("how", FOREIGN)
def test_memory_of_others(how):
    torch.manual_seed(3)
    given = list(torch.randn(2, 5, 6, 9, 7, dtype=torch.float64))
    ours, theirs = added()

    def make(leaf):
        x = FOREIGN[how](leaf.detach())
        assert x.data_ptr() % 64 == 0
        return x

    found = check(ours, given, overwritten=False, make=make)
    torch.testing.assert_close(found, gradients(theirs, given)[1])


LYING = {
    "gaps": lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
    "another order": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "an offset": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
    "one for all": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("how", LYING)
def test_x_that_lies_in_another_way(how, given):
    ours, theirs = added()
    # In one function, so that no view of x is left.
    found = check(ours, given, overwritten=False, make=lambda leaf: LYING[how](leaf.detach()))
    torch.testing.assert_close(found, gradients(theirs, given, make=lambda x: LYING[how](x))[1])


def test_where_nothing_is_known_of_x(given, monkeypatch):
    of_dy, _ = ownership._alone()
    monkeypatch.setattr(ownership, "_alone", lambda: (of_dy, None))
    ours, _ = added()
    where, _ = gradients(ours, given)
    assert not where


def test_the_result_is_a_tensor_like_any_other(given):
    """No view, no part of a graph, whose memory can be resized and added to."""
    ours, _ = added()
    seen = []

    class Last(Spy):
        @staticmethod
        def backward(ctx, dx):
            seen.append((dx._is_view(), dx.requires_grad, dx.grad_fn, dx._version))
            dx.untyped_storage().resize_(dx.nbytes + 64)
            dx.add_(1)
            return dx, None

    leaf, residual = (each.clone().requires_grad_() for each in given)
    squared(ours(Last.apply(leaf, []), residual))
    assert seen == [(False, False, None, 0)]
    _, (expected, _) = gradients(ours, given)
    torch.testing.assert_close(leaf.grad, expected + 1)
