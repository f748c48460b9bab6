"""The modules, and the tools that work on modules."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import backnorm
import backnorm.torch

from .operand_kinds import quietly

PAIRS = [
    (backnorm.torch.BatchNorm1d, torch.nn.BatchNorm1d, (4, 3)),
    (backnorm.torch.BatchNorm1d, torch.nn.BatchNorm1d, (4, 3, 5)),
    (backnorm.torch.BatchNorm2d, torch.nn.BatchNorm2d, (4, 3, 5, 2)),
    (backnorm.torch.BatchNorm3d, torch.nn.BatchNorm3d, (4, 3, 2, 3, 2)),
]
SETTINGS = [
    {}, {"momentum": None}, {"momentum": 0.3, "eps": 1e-2}, {"affine": False}, {"bias": False},
    {"track_running_stats": False}, {"affine": False, "track_running_stats": False},
]  # fmt: skip


def passes(module, shape, *, seed=0, dtype=torch.float64):
    """Train for two batches, then normalise one; return everything that came of it."""
    generator = torch.Generator().manual_seed(seed)
    results = []
    for training in (True, True, False):
        module.train(training)
        x, dy = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        x.requires_grad_()
        y = module(x)
        wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
        results.append((y.detach(), torch.autograd.grad(y, wanted, dy)))
    return results, dict(module.state_dict())


@pytest.mark.parametrize(("ours", "theirs", "shape"), PAIRS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_layer_matches_pytorch_layer(ours, theirs, shape, settings, close):
    modules = [cls(3, **settings).double() for cls in (ours, theirs)]
    assert isinstance(modules[0], theirs)
    assert repr(modules[0]) == f"backnorm.torch.{modules[1]!r}"
    close(*(passes(module, shape) for module in modules))


@pytest.mark.parametrize(("ours", "theirs", "shape"), PAIRS)
def test_state_dict_loads_in_both_directions(ours, theirs, shape, close):
    for first, second in ((ours, theirs), (theirs, ours)):
        one, other = first(3).double(), second(3).double()
        passes(one, shape)
        state = one.state_dict()
        other.load_state_dict(state)
        assert list(state) == list(other.state_dict())
        assert state._metadata == other.state_dict()._metadata
        close(passes(one, shape, seed=1), passes(other, shape, seed=1))


def copies_of(module):
    kept = io.BytesIO()
    torch.save(module, kept)
    kept.seek(0)
    return {
        "deepcopy": copy.deepcopy(module),
        "pickle": pickle.loads(pickle.dumps(module)),
        "torch.save": torch.load(kept, weights_only=False),
    }


@pytest.mark.parametrize(("ours", "theirs", "shape"), PAIRS[1:])
def test_copies_of_layer_keep_class_and_results(ours, theirs, shape, close):
    module = ours(3).double()
    passes(module, shape)
    for name, other in copies_of(module).items():
        assert type(other) is ours, name
        assert other.weight is not module.weight
    expected = passes(module, shape, seed=1)
    for other in copies_of(ours(3).double()).values():
        passes(other, shape)
        close(passes(other, shape, seed=1), expected)


RANKS = {
    "BatchNorm1d": ([(4,), (4, 3, 5, 2)], "2 axes (N, C) or 3 axes (N, C, L)"),
    "BatchNorm2d": ([(4,), (4, 3, 5), (4, 3, 2, 2, 2)], "4 axes (N, C, H, W)"),
    "BatchNormReLU2d": ([(4, 3, 5)], "4 axes (N, C, H, W)"),
    "BatchNorm3d": ([(4, 3), (4, 3, 5, 2)], "5 axes (N, C, D, H, W)"),
    "SyncBatchNorm": ([(4,)], "2 axes or more (N, C, ...)"),
}


@pytest.mark.parametrize("name", RANKS)
def test_layer_with_input_of_other_rank_raises(name):
    shapes, accepted = RANKS[name]
    for shape in shapes:
        with pytest.raises(backnorm.ArgumentError) as raised:
            getattr(backnorm.torch, name)(3)(torch.randn(shape))
        assert isinstance(raised.value, ValueError)
        assert str(raised.value) == (
            "input: must have as many axes as the layer accepts; "
            f"got shape {shape}; expected {accepted}"
        )


@quietly
def test_layer_with_nested_input_raises():
    nested = torch.nested.nested_tensor([torch.randn(3, 2), torch.randn(3, 4)])
    with pytest.raises(backnorm.ArgumentError, match=r"^input: unsupported layout; got a nested"):
        backnorm.torch.BatchNorm2d(3)(nested)


def test_module_and_tensor_hooks_run_in_order():
    module, seen = backnorm.torch.BatchNorm1d(3), []
    module.register_forward_pre_hook(lambda module, inputs: seen.append("before"))
    module.register_forward_hook(lambda module, inputs, output: seen.append("after"))
    module.register_full_backward_pre_hook(lambda module, dy: seen.append("back"))
    module.register_full_backward_hook(lambda module, dx, dy: seen.append("through"))
    module.weight.register_hook(lambda gradient: gradient * 0)
    x = torch.randn(4, 3, requires_grad=True)
    y = module(x)
    y.register_hook(lambda gradient: seen.append("output"))
    y.backward(torch.randn(4, 3))
    assert seen == ["before", "after", "output", "back", "through"] or seen == [
        "before", "after", "back", "output", "through",
    ]  # fmt: skip
    assert not module.weight.grad.any()
    assert x.grad.any()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_matches_pytorch_layer(reentrant, close):
    results = []
    for norm in (backnorm.torch.BatchNorm1d, torch.nn.BatchNorm1d):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(3, 5), norm(5), torch.nn.ReLU()).double()
        x = torch.randn(4, 3).double().requires_grad_()
        checkpoint(net, x, use_reentrant=reentrant).backward(torch.randn(4, 5).double())
        results.append((x.grad, [p.grad for p in net.parameters()], dict(net.state_dict())))
    close(*results)


def test_backward_raises_after_input_was_changed():
    x = torch.randn(4, 3, requires_grad=True)
    hidden = x * 1
    y = backnorm.torch.BatchNorm1d(3)(hidden)
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(torch.randn(4, 3))


def test_output_changed_in_place_gives_right_gradient(close):
    x, dy = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    module = backnorm.torch.BatchNorm1d(3)
    for change, equal in (
        (torch.Tensor.relu_, torch.relu), (lambda y: y.mul_(2), lambda y: y * 2),
    ):  # fmt: skip
        close(
            torch.autograd.grad(change(module(x)), x, dy),
            torch.autograd.grad(equal(module(x)), x, dy),
        )


def test_data_parallel_on_cpu_equals_module():
    module = backnorm.torch.BatchNorm1d(3)
    replica = module._replicate_for_data_parallel()
    assert type(replica) is backnorm.torch.BatchNorm1d
    x = torch.randn(4, 3)
    assert torch.equal(torch.nn.DataParallel(module)(x), module(x))


def test_update_bn_matches_pytorch_layer(close):
    results = []
    data = [torch.randn(8, 3) for _ in range(3)]
    for norm in (backnorm.torch.BatchNorm1d, torch.nn.BatchNorm1d):
        net = torch.nn.Sequential(norm(3), torch.nn.Identity())
        torch.optim.swa_utils.update_bn(data, net)
        results.append(net.state_dict())
    close(*results)


class Normalised(torch.utils.data.Dataset):
    """A data set whose workers normalise, in processes forked after the kernels have run."""

    def __len__(self):
        return 4

    def __getitem__(self, place):
        x = torch.full((64, 3, 20, 20), float(place)) + torch.arange(20.0)
        return backnorm.torch.batch_norm(x, None, None, training=True)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_batch_norm_in_forked_data_loader_workers_equals_parent():
    data = Normalised()
    expected = [data[place] for place in range(4)]
    loader = torch.utils.data.DataLoader(
        data, batch_size=None, num_workers=2, timeout=60, multiprocessing_context="fork"
    )
    assert all(map(torch.equal, loader, expected))


OWN_ACTIVATIONS = {
    "relu": (backnorm.torch.BatchNormReLU2d, {}, torch.relu),
    "ceiling": (
        backnorm.torch.BatchNormReLU2d, {"ceiling": 0.75},
        lambda z: functional.hardtanh(z, 0.0, 0.75),
    ),
    "relu6": (backnorm.torch.BatchNorm2d, {"activation": "relu6"}, functional.relu6),
    "silu": (backnorm.torch.BatchNorm2d, {"activation": "silu"}, functional.silu),
    "synchronised": (backnorm.torch.SyncBatchNorm, {"activation": "relu"}, torch.relu),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_ACTIVATIONS)
@pytest.mark.parametrize("residual", [True, False])
def test_layer_with_own_activation_matches_its_steps(residual, name, close):
    cls, options, activation = OWN_ACTIVATIONS[name]
    module = cls(3, **options).double()
    plain = torch.nn.BatchNorm2d(3).double()
    x, side, dy = (torch.randn(4, 3, 5, 5).double() for _ in range(3))
    if residual and name == "silu":
        with pytest.raises(backnorm.ArgumentError, match=r"^residual: "):
            module(x, side)
        return
    assert ("ceiling=0.75" in repr(module)) is (name == "ceiling")
    for training in (True, False):
        module.train(training)
        plain.train(training)
        leaf = x.clone().requires_grad_()
        y = module(leaf, side) if residual else module(leaf)
        expected = activation(plain(leaf) + side if residual else plain(leaf))
        close(y, expected, factor=16)
        gradients = (torch.autograd.grad(z, leaf, dy) for z in (y, expected))
        close(*gradients, factor=16)
    close(module.state_dict(), plain.state_dict())
    for duplicate in copies_of(module).values():
        close(duplicate(x), module(x))


def test_lazy_layer_with_own_activation_keeps_it(close):
    layer = backnorm.torch.LazyBatchNorm1d(activation="relu")
    x = torch.randn(4, 3)
    close(layer(x), torch.relu(torch.nn.BatchNorm1d(3)(x)))
    assert type(layer) is backnorm.torch.BatchNorm1d
    assert layer.activation.name == "relu"


def test_unknown_own_activation_raises():
    with pytest.raises(backnorm.ArgumentError, match=r"^activation: .*'gelu'"):
        backnorm.torch.BatchNorm2d(3, activation="gelu")
