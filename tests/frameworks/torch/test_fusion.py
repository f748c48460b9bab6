"""What `convert(model, fuse=True)` fuses, what it leaves alone, and when it steps back."""

from __future__ import annotations

import copy
import io
import pickle
import random

import pytest
import torch
from torch import nn
from torch.nn import functional

import backnorm.torch
from backnorm.torch import convert, fusion, revert
from backnorm.torch import functional as ours


class BasicBlock(nn.Module):
    """The residual block of ResNet-18, with the shortcut made as in torchvision."""

    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    """The residual block of ResNet-50, with functions and methods instead of modules."""

    def __init__(self, channels):
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(channels, channels, size, padding=size // 2, bias=False) for size in (1, 3, 1)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(3))

    def forward(self, x):
        out = x
        for conv, norm in zip(self.convs[:2], self.norms[:2], strict=True):
            out = functional.relu(norm(conv(out)))
        out = self.norms[2](self.convs[2](out))
        return torch.add(x, out).relu()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU()
        self.body = nn.Sequential(BasicBlock(4, 4), BasicBlock(4, 6, 2), Bottleneck(6))
        self.head = nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.ReLU(True))

    def forward(self, x):
        return self.head(self.body(self.relu(self.bn1(self.conv1(x)))))


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of our functions: plain, with ReLU, with addition and ReLU."""
    counts = {"plain": 0, "relu": 0, "add": 0}

    def counting(module, name, key):
        original = getattr(module, name)

        def call(*args, **kwargs):
            counts[key] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    counting(ours, "batch_norm", "plain")
    counting(ours, "batch_norm_relu", "relu")
    counting(ours, "batch_norm_add_relu", "add")

    def during(function):
        counts.update(dict.fromkeys(counts, 0))
        function()
        return tuple(counts.values())

    return during


def passes(net, x, dy):
    x = x.clone().requires_grad_()
    net.zero_grad()
    y = net(x)
    y.backward(dy)
    return y.detach(), x.grad, [p.grad for p in net.parameters()], dict(net.state_dict())


def pair():
    theirs = Net().double()
    return convert(copy.deepcopy(theirs), fuse=True), theirs


def test_a_residual_network(calls, close):
    net, theirs = pair()
    types = [type(module).__name__ for module in theirs.modules()]
    assert [type(m).__name__.replace("BatchNormReLU", "BatchNorm") for m in net.modules()] == types
    assert isinstance(net.body[0], BasicBlock)
    assert repr(net) == repr(theirs)
    assert list(net.state_dict()) == list(theirs.state_dict())
    x, dy = torch.randn(4, 3, 8, 8).double(), torch.randn(4, 6, 4, 4).double()
    for training in (True, False):
        net.train(training)
        theirs.train(training)
        close(passes(net, x, dy), passes(theirs, x, dy), factor=64)
    net.train()
    # The shortcut's normalisation is the only one that no ReLU follows.
    assert calls(lambda: net(x)) == (1, 6, 3)
    revert(net)
    assert {type(m) for m in net.modules()} == {type(m) for m in theirs.modules()}
    assert all("_backnorm_fused" not in module.__dict__ for module in net.modules())
    assert calls(lambda: net(x)) == (0, 0, 0)


@pytest.mark.parametrize("fuse", [True, False])
def test_fusing_again_or_converting_again_changes_nothing(fuse, calls):
    net, _ = pair()
    convert(net, fuse=fuse)
    assert calls(lambda: net(torch.randn(2, 3, 8, 8).double())) == (1, 6, 3)


def test_copies_are_fused(calls, close):
    net, theirs = pair()
    kept = io.BytesIO()
    torch.save(net, kept)
    kept.seek(0)
    x = torch.randn(4, 3, 8, 8).double()
    expected = theirs(x)
    for other in (
        copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(kept, weights_only=False),
    ):  # fmt: skip
        assert calls(lambda other=other: close(other(x), expected, factor=16)) == (1, 6, 3)
        other.body[0].bn1.weight.data.zero_()
        assert net.body[0].bn1.weight.all()
        assert type(revert(other).body[0]) is BasicBlock


def test_a_part_of_a_fused_sequence_is_a_sequence(calls):
    head = convert(nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2), nn.ReLU()), fuse=True)
    x = torch.randn(3, 2, 4)
    assert calls(lambda: head(x)) == (0, 1, 0)
    assert calls(lambda: head[:2](x)) == (1, 0, 0)
    head.append(nn.Softmax(1))
    assert torch.equal(head(x).sum(1), torch.softmax(head[:3](x), 1).sum(1))
    head[2] = nn.Tanh()
    assert torch.equal(head(x), torch.softmax(torch.tanh(head[1](head[0](x))), 1))


class Forward(nn.Module):
    """A block with one normalisation and a forward to be given."""

    def __init__(self, forward):
        super().__init__()
        self.bn, self.relu, self.act = nn.BatchNorm1d(3), nn.ReLU(), nn.GELU()
        self.relu6, self.short = nn.ReLU6(inplace=True), nn.Hardtanh(0, 0.75)
        self.odd, self.both = nn.Hardtanh(0, 0.1), nn.Hardtanh()
        self.other = nn.BatchNorm1d(3)
        self._forward = forward

    def forward(self, x):
        return type(self).steps(self, x)


def block(steps):
    cls = type("Block", (Forward,), {"steps": staticmethod(steps), "forward": steps})
    return cls(None)


FUSED = {
    "module": lambda self, x: self.relu(self.bn(x)),
    "function": lambda self, x: functional.relu(self.bn(x)),
    "in place": lambda self, x: functional.relu(self.bn(x), inplace=True),
    "torch": lambda self, x: torch.relu(self.bn(x)),
    "method": lambda self, x: self.bn(x).relu(),
    "method in place": lambda self, x: self.bn(x).relu_(),
    "add": lambda self, x: torch.relu(self.bn(x) + x),
    "add to": lambda self, x: torch.relu(x + self.bn(x)),
    "torch.add": lambda self, x: torch.relu(torch.add(self.bn(x), x)),
    "method add": lambda self, x: torch.relu(self.bn(x).add(x)),
    "method add in place": lambda self, x: torch.relu(self.bn(x).add_(x)),
    "two": lambda self, x: torch.relu(self.bn(x) + self.other(2 * x)),
    "module with a ceiling": lambda self, x: self.short(self.bn(x)),
    "ReLU6": lambda self, x: self.relu6(self.bn(x)),
    "relu6": lambda self, x: functional.relu6(self.bn(x)),
    "relu6 in place": lambda self, x: functional.relu6(self.bn(x), inplace=True),
    "hardtanh": lambda self, x: functional.hardtanh(self.bn(x), 0, 0.5),
    "hardtanh in place": lambda self, x: functional.hardtanh_(self.bn(x), max_val=0.5, min_val=0),
    "add with a ceiling": lambda self, x: self.short(self.bn(x) + x),
    "dropout": lambda self, x: functional.dropout(self.relu(self.bn(x)), 0.0, self.training),
    "mode": lambda self, x: self.relu(self.bn(x)) if self.training else self.bn(x).relu() + 1,
}
NOT_FUSED = {
    "used twice": lambda self, x: (lambda y: torch.relu(y) + y)(self.bn(x)),
    "other activation": lambda self, x: self.act(self.bn(x)),
    "ceiling that types round": lambda self, x: self.odd(self.bn(x)),
    "two bounds": lambda self, x: self.both(self.bn(x)),
    "bound below": lambda self, x: functional.hardtanh(self.bn(x), 0.25, 6.0),
    # Its gradient is 1 where y is 0 or 6.
    "clamp": lambda self, x: self.bn(x).clamp(0, 6),
    "scaled": lambda self, x: torch.relu(torch.add(self.bn(x), x, alpha=2)),
    "constant": lambda self, x: torch.relu(self.bn(x) + 1),
    "added to itself": lambda self, x: (lambda y: torch.relu(y + y))(self.bn(x)),
    "residual changed": lambda self, x: (
        lambda h: (lambda y: (h.mul_(2), torch.relu(y))[1])(self.bn(x) + h)
    )(x * 1),
    "added to x": lambda self, x: torch.relu((x * 1).add_(self.bn(x))),
    "module twice": lambda self, x: (lambda y: (self.bn(y + 3), torch.relu(y))[1])(self.bn(x)),
}


def compare(steps, close, *, times=1):
    theirs = block(steps).double()
    mine = convert(copy.deepcopy(theirs), fuse=True)
    for training in (True, False):
        for net in (mine, theirs):
            net.train(training)
        for _ in range(times):
            x, dy = torch.randn(4, 3).double(), torch.randn(4, 3).double()
            close(passes(mine, x, dy), passes(theirs, x, dy))
    return mine


@pytest.mark.parametrize("name", FUSED)
def test_fused(name, close, calls):
    net = compare(FUSED[name], close)
    assert fusion.is_fused(net)
    net.train()
    counted = calls(lambda: net(torch.randn(4, 3).double()))
    assert counted[1] + counted[2] == 1
    assert counted[0] == (1 if name == "two" else 0)


@pytest.mark.parametrize("name", NOT_FUSED)
def test_not_fused(name, close):
    assert not fusion.is_fused(compare(NOT_FUSED[name], close))


def noisy(self, x):
    y = self.relu(self.bn(x))
    return y + 1 if random.random() < 0.5 else y


def counting(self, x):
    self.count = getattr(self, "count", 0) + 1
    return self.relu(self.bn(x))


def sized(self, x):
    return self.relu(self.bn(x)) if x.shape[0] > 3 else self.bn(x)


def drawing(self, x):
    return self.relu(self.bn(x)) + torch.rand(1).double()


def without_gradients(self, x):
    with torch.no_grad():
        y = self.relu(self.bn(x))
    return y + x


def checkpointed(self, x):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda x: self.relu(self.bn(x)), x, use_reentrant=False)


UNTRACEABLE = {
    "Python's random numbers": (noisy, "random numbers"),
    "state": (counting, "sets self.count"),
    "branch on a shape": (sized, "symbolically traced"),
    "a tensor of no input": (drawing, "makes a tensor"),
    "no_grad": (without_gradients, "mode"),
    "checkpoint": (checkpointed, "control flow"),
}


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_a_forward_that_is_no_graph_is_left_alone_and_named(name):
    steps, reason = UNTRACEABLE[name]
    net = nn.Sequential(block(steps)).double()
    with pytest.warns(backnorm.torch.FusionWarning, match=f"0 .*{reason}"):
        convert(net, fuse=True)
    assert not fusion.is_fused(net[0])
    assert type(net[0].bn) is backnorm.torch.BatchNorm1d
    assert "_backnorm_fused" not in net[0].__dict__
    net(torch.randn(4, 3).double())


def flagged(self, x):
    y = self.relu(self.bn(x))
    return y * self.factor if self.enlarged else y


def with_attributes():
    net = block(flagged)
    net.factor, net.enlarged = 3.0, False
    return net


def test_a_changed_attribute_is_respected(calls, close):
    net = convert(with_attributes(), fuse=True)
    x = torch.randn(4, 3)
    assert calls(lambda: net(x)) == (0, 1, 0)
    plain = net(x)
    net.enlarged = True
    assert calls(lambda: close(net(x), 3 * plain)) == (1, 0, 0)
    net.enlarged = False
    assert calls(lambda: net(x)) == (0, 1, 0)


def test_an_attribute_that_may_change_unseen_is_no_ground_for_a_graph():
    net = block(lambda self, x: self.relu(self.bn(x)) * self.config["factor"])
    net.config = {"factor": 2.0}
    with pytest.warns(backnorm.torch.FusionWarning, match=r"looks at self\.config"):
        convert(net, fuse=True)


def test_hooks_see_what_they_saw(calls):
    net, _ = pair()
    x, seen = torch.randn(4, 3, 8, 8).double(), []
    handle = net.body[0].bn1.register_forward_hook(lambda m, i, y: seen.append(bool((y < 0).any())))
    assert calls(lambda: net(x)) == (2, 5, 3)
    assert seen == [True]
    handle.remove()
    assert calls(lambda: net(x)) == (1, 6, 3)
    net.body[0].relu.register_forward_pre_hook(lambda m, i: seen.append(None))
    assert calls(lambda: net(x)) == (3, 5, 2)
    assert seen == [True, None, None]
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, y: None)
    try:
        assert calls(lambda: net(x)) == (10, 0, 0)
    finally:
        handle.remove()


def test_a_replaced_layer_is_called(calls, close):
    net = convert(block(FUSED["module"]), fuse=True)
    x = torch.randn(4, 3)
    net.relu = nn.Tanh()
    assert calls(lambda: close(net(x), torch.tanh(net.bn(x)))) == (2, 0, 0)
    net.bn = nn.Identity()
    close(net(x), torch.tanh(x))


def test_a_residual_of_another_shape_or_type_is_added_as_it_was(close):
    def steps(self, x):
        return torch.relu(self.bn(x) + x[:1])

    compare(steps, close)

    def widened(self, x):
        return torch.relu(self.bn(x) + x.double())

    theirs = block(widened)
    mine = convert(copy.deepcopy(theirs), fuse=True)
    x = torch.randn(4, 3)
    assert mine(x).dtype == theirs(x).dtype == torch.float64
    close(mine(x), theirs(x), factor=1e9)


def test_inputs_changed_in_place_are_changed(close):
    def steps(self, x):
        x += self.relu(self.bn(x))
        return x * 2

    theirs = block(steps).double()
    mine = convert(copy.deepcopy(theirs), fuse=True)
    assert fusion.is_fused(mine)
    x = torch.randn(4, 3).double()
    copies = x.clone(), x.clone()
    close(mine(copies[0]), theirs(copies[1]))
    close(*copies)
    assert not torch.equal(copies[0], x)


class Optional(nn.Module):
    """Arguments with a default, and a tensor or a list of tensors."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(3)

    def forward(self, x, residual=None, *, scale=1.0):
        if isinstance(x, list):
            x = torch.cat(x)
        y = self.bn(x)
        if residual is not None:
            y = y + residual
        return torch.relu(y) * scale


class Batches(list):
    """Not what a forward was told that it gets, for all that is known of it."""


def test_arguments_that_the_graph_does_not_know(calls, close):
    theirs = Optional()
    mine = convert(copy.deepcopy(theirs), fuse=True)
    x, residual = torch.randn(4, 3), torch.randn(4, 3)
    for arguments, keywords, counted in (
        ((x,), {}, (0, 1, 0)),
        ((x, residual), {}, (1, 0, 0)),
        ((x,), {"residual": residual, "scale": 2.0}, (1, 0, 0)),
        (([x, residual],), {}, (0, 1, 0)),
        ((Batches([x, residual]),), {}, (1, 0, 0)),
        (([x], residual), {}, (1, 0, 0)),
        ((), {"x": x}, (1, 0, 0)),
    ):
        expected = theirs(*arguments, **keywords)

        def call(arguments=arguments, keywords=keywords, expected=expected):
            close(mine(*arguments, **keywords), expected)

        assert calls(call) == counted


class DenseLayer(nn.Module):
    """The layer of torchvision's DenseNet: of a tensor, or of a list of all before it."""

    def __init__(self, inputs, growth):
        super().__init__()
        self.norm1, self.relu1 = nn.BatchNorm2d(inputs), nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inputs, growth, 1, bias=False)
        self.norm2, self.relu2 = nn.BatchNorm2d(growth), nn.ReLU(inplace=True)
        self.drop_rate = 0.0

    def bottleneck(self, inputs):
        return self.conv1(self.relu1(self.norm1(torch.cat(inputs, 1))))

    def forward(self, input):
        features = [input] if isinstance(input, torch.Tensor) else input
        found = self.relu2(self.norm2(self.bottleneck(features)))
        if self.drop_rate > 0:
            found = functional.dropout(found, self.drop_rate, self.training)
        return found


@pytest.mark.parametrize("inputs", [1, 3])
def test_a_forward_of_a_list_of_tensors(inputs, calls, close):
    theirs = DenseLayer(2 * inputs, 4).double()
    mine = convert(copy.deepcopy(theirs), fuse=True)
    parts, dy = torch.randn(inputs, 4, 2, 5, 5).double(), torch.randn(4, 4, 5, 5).double()

    def step(net):
        given = [part.clone().requires_grad_() for part in parts]
        net.zero_grad()
        y = net(given)
        y.backward(dy)
        gradients = [each.grad for each in (*given, *net.parameters())]
        return y.detach(), gradients, dict(net.state_dict())

    found = []
    for training in (True, False):
        for net in (mine, theirs):
            net.train(training)
        assert calls(lambda: found.append(step(mine))) == (0, 2, 0)
        close(found[-1], step(theirs))
    if inputs == 1:
        assert calls(lambda: found.append(mine(parts[0]))) == (0, 2, 0)
        close(found[-1], theirs(parts[0]))
    # What the graph depends on may change, as that of tensors.
    mine.drop_rate = 0.5
    assert calls(lambda: step(mine)) == (2, 0, 0)


def with_another_list(self, inputs):
    if isinstance(inputs, torch.Tensor):
        inputs = [inputs, inputs + 1]
    # Its tensors are those of the first.
    more = inputs + inputs
    residual = inputs[1]
    y = self.bn(inputs[0])
    more[3].mul_(2)
    return torch.relu(y + residual)


def with_more_in_a_list(self, inputs):
    if isinstance(inputs, torch.Tensor):
        inputs = [inputs, inputs + 1]
    y = self.bn(inputs[0])
    inputs += [y]
    inputs[2].mul_(2)
    return torch.relu(y)


@pytest.mark.parametrize("steps", [with_another_list, with_more_in_a_list])
def test_tensors_that_are_changed_through_a_list(steps, close):
    theirs = block(steps).double()
    mine = convert(copy.deepcopy(theirs), fuse=True)
    parts = torch.randn(2, 4, 3).double()
    with torch.no_grad():
        close(mine(list(parts.clone())), theirs(list(parts.clone())))


def test_a_list_that_has_the_running_mean(close):
    """The layer moves it in its place, though its residual comes later."""

    def steps(self, inputs):
        if isinstance(inputs, torch.Tensor):
            inputs = [inputs, inputs]
        y = self.bn(inputs[0])
        return torch.relu(y + self.other(inputs[1] * 2))

    theirs = block(steps).double()
    mine = convert(copy.deepcopy(theirs), fuse=True)
    assert fusion.is_fused(mine)
    x = torch.randn(4, 3).double()
    found = []
    for net in (mine, theirs):
        statistics = net.bn.running_mean.expand(4, 3)
        with torch.no_grad():
            found.append((net([x, statistics]), dict(net.state_dict())))
    close(*found)


def test_autocast(close):
    net, theirs = pair()
    net, theirs, x = net.float(), theirs.float(), torch.randn(4, 3, 8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = [one(x) for one in (net, theirs)]
    assert outputs[0].dtype == outputs[1].dtype
    close(*outputs, factor=2)


def test_torch_fx_sees_the_forward_of_a_fused_module():
    net, theirs = pair()
    graphs = [torch.fx.symbolic_trace(one).graph for one in (net, theirs)]
    first, second = ([(node.op, node.target) for node in graph.nodes] for graph in graphs)
    assert first == second
