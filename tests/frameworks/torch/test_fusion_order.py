"""`convert(model, fuse=True)` keeps the order of what can be seen: running statistics, inputs.

Every block is run beside its own unfused original, for several batches in training and evaluation.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

import backnorm.torch
from backnorm.torch import convert, fusion


class Reader(nn.Module):
    """Adds the running mean of a layer that is not its child."""

    def __init__(self, layer):
        super().__init__()
        self.layers = [layer]

    def forward(self, x):
        return x + self.layers[0].running_mean


class Block(nn.Module):
    """Two layers, a branch beside them, and a forward to be given."""

    def __init__(self):
        super().__init__()
        self.bn, self.other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        self.relu, self.linear = nn.ReLU(), nn.Linear(3, 3)
        # It does not end in normalisation, which could be fused with the addition in its own place.
        self.branch = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())
        self.opened = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def block(steps):
    net = type("Made", (Block,), {"forward": steps})()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.normal_()
    return net.double()


def batches(net, inputs=1):
    """Train, evaluate and train again; return what comes out, gradients and the final state."""
    torch.manual_seed(1)
    seen = []
    for training in (True, True, False, True):
        net.train(training)
        x, dy = torch.randn(4, 3).double().requires_grad_(), torch.randn(4, 3).double()
        arguments = (x, net.bn.running_mean[:])[:inputs]
        y = net(*arguments)
        wanted = [each for each in (x, *net.parameters()) if each.requires_grad]
        gradients = torch.autograd.grad(y, wanted, dy, allow_unused=True)
        seen.append((y.detach(), *gradients))
    return seen, dict(net.state_dict())


def residual(self, x):
    y = self.bn(x)
    return self.relu(y + self.branch(x * 1))


def behind(self, x):
    """A residual that is computed after the normalisation, from other values."""
    h = x * 1
    y = self.bn(self.linear(x))
    return self.relu(y + self.branch(h))


def in_a_sequence(self, x):
    """The normalisation ends a sequence, and its residual is computed after it."""
    h = x * 1
    y = self.opened(x)
    return self.relu(y + self.branch(h))


def last_in_a_sequence(self, x):
    """A sequence ends in normalisation, whose residual is normalised, too."""
    return self.relu(self.bn(x) + self.opened(x))


def shares_buffers(net):
    net.branch[1].running_mean = net.bn.running_mean


def shares_memory(net):
    # No longer one tensor, but still one memory.
    net.branch[0].bias = nn.Parameter(net.bn.running_mean[:], requires_grad=False)


def holds_the_layer(net):
    net.branch = nn.Sequential(nn.Tanh(), net.bn, nn.Tanh())


def holds_a_reader(net):
    net.branch = nn.Sequential(nn.Tanh(), Reader(net.bn))


class Scaled(nn.Linear):
    """A layer of PyTorch's with a forward of its own."""

    def forward(self, x):
        return super().forward(x) * self.layers[0].running_mean


def holds_a_subclass(net):
    torch.manual_seed(2)
    net.branch = Scaled(3, 3).double()
    net.branch.layers = [net.bn]


def reads_the_buffer(self, x):
    y = self.bn(self.linear(x))
    return self.relu(y + (x + self.bn.running_mean))


def reads_a_view(self, x):
    view = self.bn.running_mean.view(1, -1)
    y = self.bn(self.linear(x))
    return self.relu(y + (x + view))


def reads_the_counter(self, x):
    y = self.bn(self.linear(x))
    return self.relu(y + x * self.bn.num_batches_tracked)


def reads_the_state(self, x):
    y = self.bn(self.linear(x))
    return self.relu(y + (x + self.state_dict(keep_vars=True)["bn.running_mean"]))


def reads_for_the_result(self, x):
    y = self.bn(x)
    mean = self.bn.running_mean * 1
    return self.relu(y) + mean


def changes_the_buffer(self, x):
    y = self.bn(self.linear(x))
    return self.relu(y + x * self.bn.num_batches_tracked.mul_(2))


def uses_it_twice(self, x):
    y = self.bn(self.linear(x))
    return self.relu(y + self.linear(self.bn(x * 2)))


def changes_the_residual(self, x):
    h = x * 3
    view = h.view(2, 6)
    y = self.bn(self.linear(x))
    z = y + h
    view.mul_(2)
    return self.relu(z) + h


OF_A_GLOBAL = []


@torch.fx.wrap
def from_a_global(x):
    return x + OF_A_GLOBAL[-1].running_mean


def calls_a_wrapped_function(self, x):
    OF_A_GLOBAL[:] = [self.bn]
    y = self.bn(self.linear(x))
    return self.relu(y + from_a_global(x))


UNFUSED = {
    "buffer": (reads_the_buffer,),
    "view": (reads_a_view,),
    "counter": (reads_the_counter,),
    "state": (reads_the_state,),
    "written": (changes_the_buffer,),
    "twice": (uses_it_twice,),
    "function": (calls_a_wrapped_function,),
    "shared buffer": (behind, shares_buffers),
    "shared memory": (behind, shares_memory),
    "in a sequence": (behind, holds_the_layer),
    "reader": (behind, holds_a_reader),
    "subclass": (behind, holds_a_subclass),
    "residual changed": (changes_the_residual,),
}
FUSED = {
    "residual": residual,
    "behind": behind,
    "result": reads_for_the_result,
    "in a sequence": in_a_sequence,
    "last in a sequence": last_in_a_sequence,
}


def compared(steps, close, change=None, after=None, inputs=1):
    """Compare a block with its conversion; `after` changes both once one is converted."""
    torch.manual_seed(0)
    theirs = block(steps)
    mine = copy.deepcopy(theirs)
    for net in (theirs, mine):
        if change is not None:
            change(net)
    convert(mine, fuse=True)
    for net in (theirs, mine):
        if after is not None:
            after(net)
    close(batches(mine, inputs), batches(theirs, inputs), factor=4)
    return mine


@pytest.mark.parametrize("name", UNFUSED)
def test_what_may_read_the_statistics_reads_those_of_its_place(name, close):
    steps, *change = UNFUSED[name]
    assert not fusion.is_fused(compared(steps, close, *change))


@pytest.mark.parametrize("name", FUSED)
def test_what_reads_nothing_is_fused(name, close):
    assert fusion.is_fused(compared(FUSED[name], close))


def of_the_branch(net):
    return net.branch[1]


def of_the_sequence(net):
    return net.branch


def of_the_relu(net):
    return net.relu


@pytest.mark.parametrize("place", [of_the_branch, of_the_sequence, of_the_relu])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("steps", [behind, reads_for_the_result])
def test_hooks_that_come_later_see_the_statistics_of_their_place(place, kind, steps, close):
    seen = {}

    def hooked(net):
        values = seen.setdefault(net, [])

        def hook(module, *_):
            values.append((module.training, net.bn.running_mean.clone()))

        getattr(place(net), kind)(hook)

    assert fusion.is_fused(compared(steps, close, after=hooked))
    mine, theirs = seen.values()
    assert len(mine) == (0 if steps is not behind and place is not of_the_relu else 4)
    close([mean for _, mean in mine], [mean for _, mean in theirs], factor=4)


def test_global_hooks_see_the_statistics_of_their_place(close):
    torch.manual_seed(0)
    theirs = block(behind)
    mine = convert(copy.deepcopy(theirs), fuse=True)
    x, seen = torch.randn(4, 3).double(), {}
    for net in (mine, theirs):
        values = seen.setdefault(net, [])
        handle = nn.modules.module.register_module_forward_hook(
            lambda *_, net=net, values=values: values.append(net.bn.running_mean.clone())
        )
        try:
            net(x)
        finally:
            handle.remove()
    assert len(seen[mine]) == len(seen[theirs]) == 8
    close(seen[mine], seen[theirs])


class Doubling(nn.Sequential):
    """A sequence that does more than to call its children."""

    def forward(self, x):
        return super().forward(x) * 2


class Reversed(nn.Sequential):
    """One that calls them in another order."""

    def __iter__(self):
        return reversed(tuple(self._modules.values()))


def doubles_afterwards(net):
    net.opened.register_forward_hook(lambda module, inputs, y: y * 2)


def doubles_inside(net):
    net.opened[0].register_forward_hook(lambda module, inputs, y: y * 2)


def is_longer(net):
    net.opened.append(nn.Tanh())


def is_another(net):
    net.opened[0] = nn.Tanh()


def has_a_forward(net):
    net.opened.forward = nn.Tanh().forward


def doubles(net):
    net.opened = Doubling(*net.opened)


def is_reversed(net):
    net.opened = Reversed(*net.opened)


OF_A_SEQUENCE = (
    doubles_afterwards, doubles_inside, is_longer, is_another, has_a_forward, doubles, is_reversed,
)  # fmt: skip


OF_MEMORY = (shares_buffers, holds_the_layer, holds_a_reader)


@pytest.mark.parametrize(
    ("steps", "change", "compiled"),
    [
        *itertools.product((behind,), OF_MEMORY, (False, True)),
        # A compiler knows tensors, not their memory.
        (behind, shares_memory, False),
        *itertools.product((in_a_sequence,), OF_A_SEQUENCE, (False, True)),
    ],
)
def test_changes_after_the_conversion_are_noticed(steps, change, compiled, close):
    def changed(net):
        change(net)
        if compiled:
            net.compile(backend="eager")

    torch._dynamo.reset()
    assert fusion.is_fused(compared(steps, close, after=changed))


@pytest.mark.parametrize("change", OF_A_SEQUENCE)
def test_a_sequence_that_does_more_is_called(change, close):
    net = compared(in_a_sequence, close, change)
    # Where its children are called by it alone, they may be what they are.
    assert fusion.is_fused(net) == (change in (doubles_inside, is_another))


def test_a_fused_sequence_is_opened_as_others_are(close):
    def steps(self, x):
        return self.relu(self.opened(x) + x)

    def change(net):
        net.opened = nn.Sequential(
            nn.BatchNorm1d(3), nn.ReLU(), nn.Sequential(*net.opened)
        ).double()

    net = compared(steps, close, change)
    assert fusion.is_fused(net)
    assert fusion.is_fused(net.opened)
    assert len(net._backnorm_fused[0].trace.opened) == 2
    # In a copy children may be fused before what holds them.
    again = copy.deepcopy(net)
    assert len(again._backnorm_fused[0].trace.opened) == 2
    close(batches(again), batches(copy.deepcopy(net)))


def test_an_input_that_is_the_running_mean_is_read_in_its_place(close):
    def steps(self, x, statistics):
        y = self.bn(self.linear(x))
        return self.relu(y + (x + statistics))

    assert fusion.is_fused(compared(steps, close, inputs=2))


def test_an_input_that_is_changed_after_the_normalisation(close):
    def steps(self, x):
        y = self.bn(x)
        x.mul_(2)
        return torch.relu(y)

    torch.manual_seed(0)
    theirs = block(steps)
    mine = convert(copy.deepcopy(theirs), fuse=True)
    assert fusion.is_fused(mine)
    x = torch.randn(4, 3).double()
    with torch.no_grad():
        close(mine(x.clone()), theirs(x.clone()))


def changes_its_input(self, x):
    h = self.linear(x)
    view = h.view(2, 6)
    y = self.bn(h)
    # Neither h nor the second operand of the addition is named here.
    z = self.other(view.mul_(2).view(4, 3))
    return self.relu(y + torch.tanh(z))


def test_an_input_that_is_changed_before_the_residual_is_there(close):
    torch.manual_seed(0)
    theirs = block(changes_its_input)
    mine = convert(copy.deepcopy(theirs), fuse=True)
    assert not fusion.is_fused(mine)
    x = torch.randn(4, 3).double()
    with torch.no_grad():
        close(mine(x), theirs(x))


def reads_a_number(self, x):
    return self.relu(self.bn(x)) * self.bn._buffers["num_batches_tracked"].item()


KEPT = []


def keeps_a_value(self, x):
    y = self.bn(x)
    KEPT.append(y)
    return self.relu(y)


def keeps_it_in_a_child(self, x):
    y = self.bn(x)
    self.relu.last = y
    return functional.relu(y)


UNTRACEABLE = {
    "number": (reads_a_number, "reads the values of a tensor"),
    "list": (keeps_a_value, "keeps"),
    "child": (keeps_it_in_a_child, "keeps"),
}


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_what_a_graph_would_read_or_keep_once_is_no_graph(name, close):
    steps, reason = UNTRACEABLE[name]
    torch.manual_seed(0)
    theirs = block(steps)
    mine = copy.deepcopy(theirs)
    with pytest.warns(backnorm.torch.FusionWarning, match=reason):
        convert(mine, fuse=True)
    assert not fusion.is_fused(mine)
    KEPT.clear()
    close(batches(mine), batches(theirs))
