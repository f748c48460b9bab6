"""A gradient is written over dy where nobody else holds that, and nowhere else.

That of x is, or where there is a residual, that of the residual.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import backnorm.torch
from backnorm.torch import ownership
from backnorm.torch.tensors import Tensors

LAYERS = {
    "alone": nn.Identity,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "silu": nn.SiLU,
    "hardswish": nn.Hardswish,
}
TYPES = (torch.float64, torch.float32, torch.bfloat16)


class Spy(torch.autograd.Function):
    """A function that is nothing, and notes where its gradient lies."""

    @staticmethod
    def forward(ctx, x, places):
        ctx.places = places
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.places.append(dy.data_ptr())
        return dy, None


def layer(activation, channels=6, dtype=torch.float64, training=True):
    """Return a layer of ours with an activation, fused, and one of PyTorch's."""
    made = []
    for _ in range(2):
        torch.manual_seed(1)
        norm = nn.BatchNorm2d(channels)
        nn.init.uniform_(norm.weight)
        nn.init.uniform_(norm.bias)
        model = nn.Sequential(norm, LAYERS[activation]())
        made.append(model.to(dtype).train(training))
    backnorm.torch.convert(made[0], fuse=True)
    return made


def places(model, x, use):
    """Return where dx and dy lay, and dx; `use` makes gradients of what the model gives."""
    found = []
    x = x.detach().clone().requires_grad_()
    y = Spy.apply(model(Spy.apply(x, found)), found)
    use(y)
    dy, dx = found
    return dx, dy, x.grad


def squared(y):
    (y * y).sum().backward()


@pytest.fixture(params=[torch.contiguous_format, torch.channels_last], ids=["NCHW", "NHWC"])
def x(request):
    return torch.randn(5, 6, 9, 7, dtype=torch.float64).to(memory_format=request.param)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen"])
@pytest.mark.parametrize("activation", LAYERS)
def test_a_gradient_of_nobody_is_overwritten(activation, training, dtype, x):
    x = x.to(dtype)
    ours, theirs = layer(activation, dtype=dtype, training=training)
    dx, dy, found = places(ours, x, squared)
    # Of given statistics the activation is a step of its own, which has the gradient before.
    is_one = training or activation == "alone"
    assert dx == dy or not is_one
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ownership, "_alone", lambda: (None, None))
        dx, dy, expected = places(ours, x, squared)
    assert dx != dy or not is_one
    assert torch.equal(found, expected)
    if dtype is torch.float64:
        torch.testing.assert_close(found, places(theirs, x, squared)[2])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
# One that is read and written in vectors, and a large one, which is streamed.
@pytest.mark.parametrize("shape", [(5, 6, 9, 7), (4, 24, 128, 128)], ids=str)
def test_the_gradient_of_a_residual_is_written_over_dy(shape, dtype, x):
    lies = {"memory_format": torch.preserve_format if x.is_contiguous() else torch.channels_last}
    torch.manual_seed(2)
    given = [torch.randn(shape, dtype=dtype).to(**lies) for _ in range(3)]
    layer = backnorm.torch.BatchNormReLU2d(shape[1], dtype=dtype)
    nn.init.uniform_(layer.weight)

    def gradients():
        layer.zero_grad()
        one, other = (each.clone().requires_grad_() for each in given[:2])
        found = []
        y = layer(Spy.apply(one, found), Spy.apply(other, found))
        (Spy.apply(y, found) * given[2]).sum().backward()
        dy, *others = found
        where = [place == dy for place in others]
        return where, [each.grad for each in (one, other, *layer.parameters())]

    where, found = gradients()
    assert sorted(where) == [False, True]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ownership, "_alone", lambda: (None, None))
        where, expected = gradients()
    assert not any(where)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("fuse", [True, False])
def test_residual_blocks_whose_gradients_are_shared(fuse):
    """The gradient of one block's addition is also that of the next one's, or of what is before."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
            self.relu = nn.ReLU()

        def forward(self, x):
            y = self.bn(self.conv(x))
            y += x
            return self.relu(y)

    found = []
    for ours in (True, False):
        torch.manual_seed(4)
        model = nn.Sequential(Block(), Block(), Block()).double()
        x = torch.randn(3, 8, 10, 6, dtype=torch.float64, requires_grad=True)
        if ours:
            backnorm.torch.convert(model, fuse=fuse)
        kept = []
        x.register_hook(kept.append)
        (torch.cos(model(x)) + x.square()).sum().backward()
        found.append((x.grad, *kept, *(p.grad for p in model.parameters())))
    torch.testing.assert_close(*found)


kept = []


def by_a_hook(y):
    y.register_hook(kept.append)
    squared(y)


def by_the_caller(y):
    dy = torch.randn_like(y)
    kept.append(dy)
    y.backward(dy)


def by_a_hook_of_the_node(y):
    y.grad_fn.register_hook(lambda _, dy: kept.extend(dy))
    squared(y)


def by_a_view(y):
    squared(y.flatten())


def by_another_function(y):
    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            dy = dy.clone()
            kept.append(dy)
            return dy

    squared(Keeping.apply(y))


def by_numpy_of_a_tensor(y):
    def look(dy):
        kept.append(torch.from_numpy(dy.numpy()))

    y.register_hook(look)
    squared(y)


@pytest.fixture
def nothing_kept():
    kept.clear()
    yield
    kept.clear()


@pytest.mark.parametrize("activation", LAYERS)
@pytest.mark.parametrize(
    "use",
    [by_a_hook, by_the_caller, by_a_hook_of_the_node, by_a_view, by_another_function,
     by_numpy_of_a_tensor],
)  # fmt: skip
def test_one_that_somebody_holds_is_not(use, activation, x, nothing_kept):
    model, _ = layer(activation)
    x.requires_grad_()
    y = model(x)
    torch.manual_seed(3)
    use(y)
    found, held = x.grad, [each.clone() for each in kept]
    # The same once more, where nothing is overwritten at all.
    kept.clear()
    x.grad = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ownership, "_alone", lambda: (None, None))
        y = model(x)
        torch.manual_seed(3)
        use(y)
    assert torch.equal(found, x.grad)
    assert len(held) == len(kept)
    assert all(map(torch.equal, held, kept))


@pytest.mark.parametrize("activation", ["alone", "relu", "silu"])
def test_retained_gradients(activation, x):
    model, other = layer(activation)
    found = []
    for each in (model, other):
        y = each(x.clone().requires_grad_())
        y.retain_grad()
        squared(y)
        found.append(y.grad)
    torch.testing.assert_close(*found)
    torch.testing.assert_close(found[0], 2 * y.detach())


@pytest.mark.parametrize("activation", LAYERS)
def test_a_gradient_that_is_asked_for_itself(activation, x):
    ours, theirs = layer(activation)
    found = []
    for model in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        found.append((y, *torch.autograd.grad((y * y).sum(), (y, leaf))))
    torch.testing.assert_close(*found)
    torch.testing.assert_close(found[0][1], 2 * found[0][0])


def test_checkpoints(x):
    found = []
    for model in layer("relu"):
        for reentrant in (False, True):
            leaf = x.clone().requires_grad_()
            squared(checkpoint(model, leaf, use_reentrant=reentrant))
            found.append(leaf.grad)
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])


def test_two_layers_that_share_a_gradient(x):
    ours, theirs = layer("relu")
    also, too = layer("silu")
    found = []
    for one, other in ((ours, also), (theirs, too)):
        leaf = x.clone().requires_grad_()
        # The addition hands one gradient to both.
        (torch.cos(one(leaf) + other(leaf))).sum().backward()
        found.append((leaf.grad, *(p.grad for p in (*one.parameters(), *other.parameters()))))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("activation", LAYERS)
def test_the_graph_may_be_used_again(activation, x):
    model, _ = layer(activation)
    leaf = x.clone().requires_grad_()
    loss = (model(leaf) ** 2).sum()
    first, second = (torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


class Laying(torch.autograd.Function):
    """A function that is nothing, and lays its gradient out in another way."""

    @staticmethod
    def forward(ctx, x, laid):
        ctx.places = laid
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        laid = dy.transpose(2, 3).contiguous().transpose(2, 3)
        ctx.places.append(laid.data_ptr())
        return laid, None


@pytest.mark.parametrize("activation", ["alone", "relu", "silu"])
def test_a_gradient_that_lies_in_another_way_is_not_overwritten(activation, x):
    ours, theirs = layer(activation)
    laid = []
    dx, _, found = places(lambda leaf: Laying.apply(ours(leaf), laid), x, squared)
    _, _, expected = places(theirs, x, squared)
    torch.testing.assert_close(found, expected)
    assert laid != [dx]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("activation", LAYERS)
def test_gradients_of_what_was_concatenated(activation, dtype, x, monkeypatch):
    """They are parts of one gradient, which stays what it is; a call of a known layer copies."""
    x = x.to(dtype)
    (ours, _), (others, _) = (layer(activation, dtype=dtype) for _ in range(2))
    kept = []

    def pair(first, second):
        y = torch.cat((first, second), 1)
        y.register_hook(lambda dy: kept.append((dy, dy.clone())))
        (y * y).sum().backward()

    def gradients(combined):
        leaf = x.clone().requires_grad_()
        combined(ours(leaf), others(leaf.detach() + 1))
        return leaf.grad

    expected = gradients(lambda y, _: squared(y))
    gradients(pair)
    with monkeypatch.context() as patched:
        # What is not known is read anew.
        patched.setattr(Tensors, "read", None)
        assert torch.equal(gradients(pair), expected)
    for dy, before in kept:
        assert torch.equal(dy, before)


def test_a_part_of_a_gradient_that_has_lost_its_memory():
    x, whole = torch.randn(5, 6, 4), torch.randn(5, 8, 4)
    dy, y = whole[:, 1:7], backnorm.torch.BatchNorm1d(6)(x.requires_grad_())
    lost = giving(lambda _: (whole.untyped_storage().resize_(64), dy)[1])
    with pytest.raises(backnorm.ArgumentValueError, match=r"dy.*out of bounds"):
        squared(lost(y))


@pytest.mark.parametrize("lay", [torch.Tensor.to_sparse_csr, torch.Tensor.to_mkldnn], ids=str)
@pytest.mark.parametrize("name", ["x", "dy"])
def test_a_tensor_of_another_layout_is_refused(name, lay, recwarn):
    given = {each: torch.randn(5, 6) for each in ("x", "dy")}
    given |= {"mask": None, "mean": torch.zeros(6), "variance": torch.ones(6), "weight": None}
    given[name] = lay(given[name])
    how = {"eps": 1e-5, "training": True, "has_residual": False}
    with pytest.raises(backnorm.ArgumentTypeError, match=f"^{name}"):
        torch.ops.backnorm.batch_norm_backward(**given, **how)


def giving(gradient):
    """Return a function that is nothing, and gives another gradient."""

    class Giving(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            return gradient(dy)

    return Giving.apply


@pytest.mark.parametrize("activation", LAYERS)
def test_a_gradient_without_memory_is_not_overwritten(activation, x):
    model, _ = layer(activation)
    zero = giving(lambda dy: torch._efficientzerotensor(dy.shape, dtype=dy.dtype))
    leaf = x.clone().requires_grad_()
    squared(zero(model(leaf)))
    assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("activation", LAYERS)
def test_memory_of_others_is_not_overwritten(activation):
    model, _ = layer(activation)
    x = torch.randn(5, 6, 9, 7, dtype=torch.float64)
    room = np.zeros(x.numel() + 8)
    # As large arrays lie: not at a cache line.
    start = (16 - room.ctypes.data) % 64 // 8
    given = room[start : start + x.numel()].reshape(x.shape)
    given[...] = np.random.default_rng(0).standard_normal(given.shape)
    before = given.copy()
    leaf = x.requires_grad_()
    squared(giving(lambda dy: torch.from_numpy(given))(model(leaf)))
    np.testing.assert_array_equal(given, before)


def test_an_empty_batch(x):
    for model in layer("relu", training=False):
        leaf = x[:0].clone().requires_grad_()
        squared(model(leaf))
        assert leaf.grad.shape == leaf.shape


def test_where_no_thread_can_be_had_nothing_is_overwritten(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", start)
    assert ownership._alone.__wrapped__() == (None, None)


def test_expanded_inputs(x):
    ours, theirs = layer("relu")
    wide = x[:1].expand(4, -1, -1, -1)
    found = [places(each, wide, squared)[2] for each in (ours, theirs)]
    torch.testing.assert_close(*found)


def test_what_shows_who_holds_a_tensor():
    found = []
    ownership._try(found)
    for k, alone in enumerate(ownership._alone()):
        assert alone is not None
        uses, objects, storages = alone
        assert (uses, storages) == (1, 1)
        assert objects > 1
        assert found[0][k] == alone
        # The first three others hold dy, the rest x.
        others = found[1:4] if k == 0 else found[4:]
        assert len(others) > 2
        assert alone not in [each[k] for each in others]


def test_without_such_counts_nothing_is_overwritten(x, monkeypatch):
    monkeypatch.setattr(ownership, "_has_counts", lambda: False)
    model, _ = layer("relu")
    dx, dy, _ = places(model, x, squared)
    assert dx != dy
