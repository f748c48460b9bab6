"""`convert` and `revert`: what changes in a model, what does not, and that both are undone."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch.nn.utils import parametrize

import backnorm.torch
from backnorm.torch import convert, revert
from backnorm.torch import functional as ours

THEIRS = torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d
OURS = backnorm.torch.BatchNorm1d, backnorm.torch.BatchNorm2d, backnorm.torch.BatchNorm3d
COUNTERPARTS = {
    **dict(zip(THEIRS, OURS, strict=True)),
    torch.nn.LazyBatchNorm1d: backnorm.torch.LazyBatchNorm1d,
    torch.nn.SyncBatchNorm: backnorm.torch.SyncBatchNorm,
}


class OtherSync(torch.nn.SyncBatchNorm):
    """A layer of several processes that may do something else."""


class Other(torch.nn.BatchNorm2d):
    """A subclass with a mind of its own."""

    def forward(self, input):
        return super().forward(input) + 1


def model():
    shared = torch.nn.BatchNorm1d(3)
    return torch.nn.ModuleDict(
        {
            "one": torch.nn.Sequential(torch.nn.Conv1d(3, 3, 1), torch.nn.BatchNorm1d(3)),
            "two": torch.nn.BatchNorm2d(3, affine=False),
            "three": torch.nn.BatchNorm3d(3, momentum=None, track_running_stats=False),
            "shared": shared,
            "again": torch.nn.Sequential(shared),
            "other": Other(3),
            "sync": torch.nn.SyncBatchNorm(3),
            "lazy": torch.nn.LazyBatchNorm1d(),
            "group": torch.nn.GroupNorm(1, 3),
        }
    )


def types_of(net):
    return {name: type(module) for name, module in net.named_modules()}


@pytest.mark.parametrize("fuse", [False, True])
def test_classes_change_and_nothing_else(fuse):
    net = model()
    before = {name: (id(module), dict(module.__dict__)) for name, module in net.named_modules()}
    types = types_of(net)
    assert convert(net, fuse=fuse) is net
    for name, module in net.named_modules():
        expected = COUNTERPARTS.get(types[name], types[name])
        assert type(module) is expected
        # What a layer of several processes is called in errors.
        kept = {key: value for key, value in module.__dict__.items() if key != "name"}
        assert before[name] == (id(module), kept)
    assert revert(net) is net
    assert types_of(net) == types
    assert {n: (id(m), m.__dict__) for n, m in net.named_modules()} == before


@pytest.mark.parametrize("theirs", THEIRS)
def test_a_model_that_is_one_layer(theirs):
    module = theirs(3)
    weight = module.weight
    assert convert(module) is module
    assert type(module) in OURS
    assert module.weight is weight
    assert convert(module) is module
    assert type(revert(module)) is theirs


def test_optimizers_hooks_and_modes_stay(close):
    nets = [torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    seen = []
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    nets[0][1].register_forward_hook(lambda module, inputs, output: seen.append(type(module)))
    nets[0][1].eval()
    nets[1][1].eval()
    convert(nets[0])
    assert not nets[0][1].training
    x, dy = torch.randn(4, 3), torch.randn(4, 3)
    for net, optimizer in zip(nets, optimizers, strict=True):
        for training in (False, True):
            net.train(training)
            optimizer.zero_grad()
            net(x).backward(dy)
            optimizer.step()
    assert seen == [backnorm.torch.BatchNorm1d] * 2
    close(nets[0].state_dict(), nets[1].state_dict())


class Double(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("copied", [False, True])
def test_parametrized_layers(copied, close):
    module = torch.nn.BatchNorm1d(3)
    parametrize.register_parametrization(module, "weight", Double())
    theirs = copy.deepcopy(module)
    ours = convert(copy.deepcopy(module) if copied else module)
    assert isinstance(ours, backnorm.torch.BatchNorm1d)
    assert not isinstance(theirs, backnorm.torch.BatchNorm1d)
    x = torch.randn(4, 3)
    close(ours(x), theirs(x))
    assert not isinstance(revert(ours), backnorm.torch.BatchNorm1d)
    assert parametrize.is_parametrized(ours, "weight")
    close(ours(x), theirs(x))
    convert(ours)
    parametrize.remove_parametrizations(ours, "weight")
    assert type(ours) is backnorm.torch.BatchNorm1d


LAZY = {
    torch.nn.LazyBatchNorm1d: (4, 3, 5),
    torch.nn.LazyBatchNorm2d: (4, 3, 2, 5),
    torch.nn.LazyBatchNorm3d: (4, 3, 2, 5, 2),
}


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("lazy", LAZY)
def test_lazy_layers(lazy, fuse, close):
    """Converted before the first batch, which ours computes, and after it; and back each time."""
    theirs, mine = (
        torch.nn.Sequential(lazy(momentum=0.3), torch.nn.ReLU()).double() for _ in range(2)
    )
    assert type(revert(convert(mine, fuse=fuse))[0]) is lazy
    convert(mine, fuse=fuse)
    assert type(mine[0]) is getattr(backnorm.torch, lazy.__name__)
    for k in range(3):
        x, dy = torch.randn(2, *LAZY[lazy]).double()
        results = []
        for net in (mine, theirs):
            y = net(x)
            results.append((y, *torch.autograd.grad(y, list(net.parameters()), dy)))
        close(*results)
        close(mine.state_dict(), theirs.state_dict())
        assert type(mine[0]).__name__ == lazy.__name__.removeprefix("Lazy")
        assert type(mine[0]).__module__ == "backnorm.torch.modules"
        if k == 1:
            revert(mine)
            assert [type(each) for each in mine] == [type(each) for each in theirs]
            convert(mine, fuse=fuse)
    assert (mine[0].activation is not None) is fuse


def test_a_lazy_layers_first_batch_is_ours(monkeypatch):
    calls = []
    original = ours.batch_norm
    monkeypatch.setattr(ours, "batch_norm", lambda *a, **k: calls.append(1) or original(*a, **k))
    convert(torch.nn.Sequential(torch.nn.LazyBatchNorm1d()))(torch.randn(4, 3))
    assert calls == [1]


def reports_of(net, **options):
    found = []
    convert(net, report=found.append, **options)
    return found


class Steps(torch.nn.Module):
    """Layers of every fate."""

    def __init__(self):
        super().__init__()
        a, b, c, d, e = (torch.nn.BatchNorm1d(3) for _ in "abcde")
        self.steps = torch.nn.Sequential(
            a, torch.nn.ReLU(), b, torch.nn.GELU(), c, Other1d(3), d, torch.nn.SiLU()
        )
        self.alone = e

    def forward(self, x):
        return torch.relu(self.alone(self.steps(x)))


class Other1d(torch.nn.BatchNorm1d):
    """A subclass with a mind of its own."""

    def forward(self, input):
        return super().forward(input) + 1


def test_report_says_what_became_of_each_layer_and_why():
    net = Steps()
    net.steps[6].register_forward_hook(lambda *_: None)
    found = reports_of(net, fuse=True)
    assert [each.name for each in found] == [*(f"steps.{k}" for k in (0, 2, 4, 5, 6)), "alone"]
    assert [each.fused for each in found] == [True, *[False] * 5]
    words = (
        "a ReLU", "no activation that can be fused", "no activation that can be fused",
        "may do something else", "hooks", r"not in a torch\.nn\.Sequential",
    )  # fmt: skip
    for report, text in zip(found, words, strict=True):
        assert re.search(text, report.reason)
    assert str(found[0]) == (
        "steps.0: torch.nn.BatchNorm1d -> backnorm.torch.BatchNorm1d, fused with a ReLU"
    )
    assert "left as it is: its class" in str(found[3])
    again = reports_of(net, fuse=True)
    assert [(each.name, each.fused, each.reason) for each in again] == [
        (each.name, each.fused, each.reason) for each in found
    ]
    assert str(again[0]) == "steps.0: backnorm.torch.BatchNorm1d, fused with a ReLU"
    # What is fused stays so, and is reported so.
    assert [each.fused for each in reports_of(net)] == [True, *[False] * 5]
    assert not any(each.fused or each.reason for each in reports_of(Steps())[:3])


def test_a_model_with_nothing_to_convert_is_named():
    with pytest.warns(backnorm.torch.ConversionWarning, match="no batch normalisation$"):
        convert(torch.nn.Sequential(torch.nn.Linear(3, 3)))
    found = []
    with pytest.warns(backnorm.torch.ConversionWarning, match=r"1: .*OtherSync, left .* processes"):
        convert(torch.nn.Sequential(Other(3), OtherSync(3)), report=found.append)
    assert [each.name for each in found] == ["0", "1"]
    # One that is converted already is not warned of.
    convert(convert(torch.nn.BatchNorm1d(3)))
    convert(torch.nn.Sequential(backnorm.torch.BatchNormReLU1d(3)))


@pytest.mark.parametrize("call", [convert, revert])
def test_what_is_no_model(call):
    with pytest.raises(backnorm.ArgumentError, match=r"^model: must be a torch.nn.Module; got \[Batch"):
        call([torch.nn.BatchNorm1d(3)])


def test_options_of_another_type():
    net = torch.nn.BatchNorm1d(3)
    with pytest.raises(TypeError, match=r"^report: must be callable, or None; got True of type"):
        convert(net, report=True)
    with pytest.raises(TypeError, match=r"^fuse: .*got 'yes'"):
        convert(net, fuse="yes")
    with pytest.raises(TypeError, match=r"^fuse: .*got 1 of"):
        convert(net, fuse=1)
    # Nothing was done.
    assert type(net) is torch.nn.BatchNorm1d


def test_other_converters_know_our_layers():
    net = convert(torch.nn.Sequential(torch.nn.BatchNorm2d(3)))
    assert type(torch.nn.SyncBatchNorm.convert_sync_batchnorm(net)[0]) is torch.nn.SyncBatchNorm
    conv, norm = torch.nn.Conv2d(2, 3, 1).eval(), convert(torch.nn.BatchNorm2d(3)).eval()
    norm.running_mean.normal_()
    x = torch.randn(4, 2, 3, 3)
    fused = torch.nn.utils.fuse_conv_bn_eval(conv, norm)
    torch.testing.assert_close(fused(x), norm(conv(x)))


def test_torch_fx_takes_our_layers_as_it_takes_pytorchs():
    def net():
        return torch.nn.Sequential(torch.nn.Conv1d(3, 3, 1), torch.nn.BatchNorm1d(3))

    graphs = [torch.fx.symbolic_trace(one).graph for one in (net(), convert(net()))]
    first, second = ([(node.op, node.target) for node in graph.nodes] for graph in graphs)
    assert first == second
    fused = torch.fx.symbolic_trace(torch.nn.Sequential(backnorm.torch.BatchNormReLU1d(3)))
    assert [node.op for node in fused.graph.nodes] == ["placeholder", "call_module", "output"]


def test_training_equals_pytorchs(close):
    """A small network, trained for some steps in float64: losses and weights are the same."""

    def network():
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 6, 3, bias=False), torch.nn.BatchNorm2d(6), torch.nn.ReLU(),
            torch.nn.Conv2d(6, 6, 3, bias=False), torch.nn.BatchNorm2d(6), torch.nn.ReLU(),
            torch.nn.Flatten(), torch.nn.Linear(24, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(),
            torch.nn.Linear(8, 4),
        ).double()  # fmt: skip

    torch.manual_seed(1)
    batches = [(torch.randn(16, 1, 6, 6).double(), torch.randint(4, (16,))) for _ in range(12)]

    def trained(net):
        optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), []
        for x, labels in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses, net.eval()(batches[0][0]).detach(), dict(net.state_dict())

    expected = trained(network())
    assert expected[0][-1] < expected[0][0]
    for fuse in (False, True):
        close(trained(convert(network(), fuse=fuse)), expected, factor=1e4)
    last = convert(network().to(memory_format=torch.channels_last), fuse=True)
    close(trained(last), expected, factor=1e4)
