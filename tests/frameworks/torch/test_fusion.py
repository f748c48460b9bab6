"""`convert(model, fuse=...)`: which pairs are fused, what stays, and what separates a pair."""

from __future__ import annotations

import copy
import io
import pickle
import re

import pytest
import torch
from torch import nn

import backnorm.torch
from backnorm.torch import convert, revert
from backnorm.torch.modules import FusedActivation

ACTIVATIONS = {
    "relu": lambda: nn.ReLU(inplace=True),
    "relu6": nn.ReLU6,
    "hardtanh": lambda: nn.Hardtanh(0, 0.75),
    "silu": nn.SiLU,
    "hardswish": nn.Hardswish,
}


def sequence(act="silu"):
    return nn.Sequential(
        nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), ACTIVATIONS[act](), nn.Conv1d(4, 3, 1)
    ).double()


def fused(model, **options):
    return convert(copy.deepcopy(model), fuse=True, **options)


def are_fused(model):
    layers = (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return [getattr(layer, "activation", None) is not None for layer in layers]


def batch():
    return torch.randn(6, 3, 5).double()


def passes(model):
    """Train twice and evaluate; return values, gradients and the state."""
    torch.manual_seed(1)
    results = []
    for training in (True, True, False):
        model.train(training)
        x = batch().requires_grad_()
        y = model(x)
        inputs = [x, *model.parameters()]
        results.append((y.detach(), *torch.autograd.grad(y, inputs, torch.randn(y.shape).double())))
    return results, dict(model.state_dict())


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_fused_sequence_computes_same_values_and_is_reverted(act, close):
    theirs = sequence(act)
    mine = fused(theirs)
    modules, x = list(mine), batch()
    assert isinstance(mine[2], nn.Identity)
    assert ("ceiling=0.75" in repr(mine)) is (act == "hardtanh")
    # The layer's result is the activation's; neither model moves its statistics in evaluation.
    close(mine.eval()[:2](x), theirs.eval()[:3](x), factor=16)
    close(passes(mine), passes(theirs), factor=16)
    convert(mine, fuse=True, arithmetic="float64")
    convert(mine)
    assert are_fused(mine) == [True]
    assert revert(mine) is mine
    assert [*map(id, mine)] == [*map(id, modules)]
    assert [vars(module).keys() for module in mine] == [vars(module).keys() for module in theirs]
    assert repr(mine) == repr(theirs)
    assert list(mine.state_dict()) == list(theirs.state_dict())
    close(passes(mine), passes(theirs), factor=16)


def test_copy_of_fused_model_is_fused_and_independent(close):
    theirs = sequence()
    mine, stream = fused(theirs), io.BytesIO()
    torch.save(mine, stream)
    stream.seek(0)
    for duplicate in (
        copy.deepcopy(mine),
        pickle.loads(pickle.dumps(mine)),
        torch.load(stream, weights_only=False),
    ):
        assert are_fused(duplicate) == [True]
        assert duplicate[2].fused_layer is duplicate[1]
        close(passes(duplicate), passes(copy.deepcopy(theirs)), factor=16)
        revert(duplicate)
        assert are_fused(mine) == [True]


class Doubling(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


class Backwards(nn.Sequential):
    def __iter__(self):
        return reversed(tuple(self._modules.values()))


class Silu(nn.SiLU):
    def forward(self, x):
        return 2 * super().forward(x)


def _hooked(module):
    module.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))


def _wrapped(module):
    forward = module.forward
    module.forward = lambda x: 3 * forward(x) + 1


LEFT = {
    "a forward of its own": (lambda m: Doubling(*m), "no plain torch.nn.Sequential has"),
    "another order": (lambda m: Backwards(*list(m)[2:0:-1]), "no plain torch.nn.Sequential has"),
    "a module between": (lambda m: m.insert(2, nn.Tanh()), "no activation"),
    "another activation": (lambda m: m.__setitem__(2, nn.GELU()), "no activation"),
    "a negative bound": (lambda m: m.__setitem__(2, nn.Hardtanh()), "no activation"),
    "a subclass": (lambda m: m.__setitem__(2, Silu()), "no activation"),
    "hooks of the layer": (lambda m: _hooked(m[1]), "^it has hooks"),
    "hooks of the activation": (lambda m: _hooked(m[2]), "the activation after it has hooks"),
    "a wrapped layer": (lambda m: _wrapped(m[1]), "^it has a forward of its own"),
    "a wrapped activation": (lambda m: _wrapped(m[2]), "activation .* has a forward of its own"),
    "a shared layer": (lambda m: m.append(m[1]), "^it is in 2 places"),
    "a shared activation": (lambda m: m.append(m[2]), "the activation .* is in 2 places"),
}


@pytest.mark.parametrize("case", LEFT)
def test_pair_with_obstacle_is_not_fused_and_reason_is_reported(case, close):
    change, reason = LEFT[case]
    theirs = sequence()
    if case.startswith("a shared"):
        theirs = theirs[:3]
        theirs[0] = nn.Conv1d(3, 4, 1).double()
    changed = change(theirs)
    theirs = changed if isinstance(changed, nn.Sequential) else theirs
    reports = []
    mine = fused(theirs, report=reports.append)
    assert [report.fused for report in reports] == [False]
    assert re.search(reason, reports[0].reason)
    x = torch.randn(6, 4 if case == "another order" else 3, 5).double()
    close(mine(x), theirs(x), factor=16)


def test_activation_class_with_replaced_forward_is_not_fused(monkeypatch, close):
    monkeypatch.setattr(nn.SiLU, "forward", lambda self, x: 0.5 * x)
    theirs = sequence()
    mine = fused(theirs)
    assert are_fused(mine) == [False]
    close(passes(mine), passes(theirs), factor=16)


def test_subclass_of_sequence_without_forward_is_fused():
    class Renamed(nn.Sequential):
        """As torchvision's Conv2dNormActivation."""

    assert are_fused(fused(Renamed(*sequence()))) == [True]


SEEN = []
HOOKS = "forward", "forward_pre", "full_backward", "full_backward_pre"


def _listen(module, hook="forward"):
    getattr(module, f"register_{hook}_hook")(lambda module, *values: SEEN.append(values))


CHANGES = {
    **{f"{hook} hook": lambda module, hook=hook: _listen(module, hook) for hook in HOOKS},
    "forward": _wrapped,
    "graph": lambda module: torch.fx.symbolic_trace(nn.Sequential(module)),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_observing_change_after_conversion_separates_pair(change, place, close):
    theirs = sequence()
    mine, results = fused(theirs), []
    for model in (mine, theirs):
        CHANGES[change](model[place])
        SEEN.clear()
        results.append((passes(model), list(SEEN)))
    assert are_fused(mine) == [False]
    close(*results, factor=16)
    if change == "graph":
        convert(mine, fuse=True)
        assert are_fused(mine) == [True]
        x = batch()
        close(mine(x), theirs(x), factor=16)


def test_changed_bounds_of_activation_separate_pair(close):
    theirs = sequence("hardtanh")
    mine = fused(theirs)
    for model in (mine, theirs):
        model[2].min_val, model[2].max_val = -0.5, 0.5
    close(passes(mine), passes(theirs), factor=16)
    assert (revert(mine)[2].min_val, type(mine[2])) == (-0.5, nn.Hardtanh)


@pytest.mark.parametrize("part", [slice(0, 2), slice(2, 4)])
def test_reverted_part_keeps_results_of_whole(part, close):
    theirs = sequence()
    mine = fused(theirs)
    revert(mine[part])
    assert isinstance(mine[2], FusedActivation) is (part.start == 0)
    close(passes(mine), passes(theirs), factor=16)
    close(passes(convert(mine, fuse=True)), passes(copy.deepcopy(theirs)), factor=16)


def test_fused_layer_is_not_fused_with_another_activation(close):
    theirs = sequence("relu")
    mine = fused(theirs)
    for model in (mine, theirs):
        model.insert(2, nn.SiLU())
    _listen(mine[3])
    for _ in range(2):
        convert(mine, fuse=True)
        close(passes(mine), passes(theirs), factor=16)
        mine[3]._forward_hooks.clear()
    with pytest.raises(backnorm.ArgumentError, match="fused with another activation"):
        convert(mine, fuse=[("1", "2")])
    assert repr(revert(mine)) == repr(theirs)


def test_replaced_layer_is_fused_by_conversion_after_revert(close):
    theirs = sequence()
    mine = fused(theirs)
    for model in (mine, theirs):
        model[1] = nn.BatchNorm1d(4).double()
    with pytest.raises(ValueError, match="layer '1' that was converted before and is not in the"):
        convert(mine, fuse=True)
    convert(revert(mine), fuse=True)
    assert mine[2].fused_layer is mine[1]
    assert are_fused(mine) == [True]
    close(passes(mine), passes(theirs), factor=16)


@pytest.mark.parametrize("fuse", [False, True, [("0", "1")]], ids=str)
def test_convert_rejects_activation_that_is_fused_in_another_model(fuse, close):
    act = nn.SiLU()
    first, second = (nn.Sequential(nn.BatchNorm1d(3), act).double() for _ in range(2))
    expected = copy.deepcopy(first)
    convert(first, fuse=True)
    before = repr(second)
    with pytest.raises(ValueError, match=r"^model: has the activation '1', which is fused with"):
        convert(second, fuse=fuse)
    assert repr(second) == before
    close(passes(first), passes(expected), factor=16)


# PyTorch's compiler reads this attribute of an input.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("place", [1, 2])
def test_layer_or_activation_compiled_alone_separates_pair(place, close):
    theirs = sequence()
    mine = fused(theirs)
    mine[place].compile(backend="eager")
    assert are_fused(mine) == [False]
    close(passes(mine), passes(theirs), factor=16)


def test_activation_of_layer_in_compiled_code_raises_with_reason():
    class Model(NamedPair):
        @torch.compiler.disable
        def act(self, y):
            return self.relu(y)

        def forward(self, x):
            return self.act(self.norm(x))

    model = convert(Model(), fuse=[("norm", "relu")])
    with pytest.raises(ValueError, match=r"of compiled code; .*both compiled or neither"):
        torch.compile(model, backend="eager")(torch.randn(6, 3, 5))


class Block(nn.Module):
    """A block that calls its layers by name."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.SiLU()
        self.conv2, self.norm2, self.other = nn.Conv1d(4, 3, 1), nn.BatchNorm1d(3), nn.GELU()

    def forward(self, x):
        x = self.act(self.norm(self.conv(x)))
        return self.other(self.norm2(self.conv2(x)))


def test_named_pair_is_fused(close):
    theirs = nn.Sequential(Block()).double()
    mine, reports = copy.deepcopy(theirs), []
    convert(mine, fuse=[("0.norm", "0.act")], report=reports.append)
    assert [report.fused for report in reports] == [True, False]
    assert reports[1].reason == "no pair names it"
    close(passes(mine), passes(theirs), factor=16)
    convert(mine, fuse=[["0.norm", "0.act"]], sync=True)
    convert(mine, fuse=True)
    assert are_fused(mine) == [True, False]
    close(passes(mine), passes(theirs), factor=16)
    assert repr(revert(mine)) == repr(theirs)


REFUSED_PAIRS = {
    "unknown": ([("norm", "relu")], "no module 'relu'"),
    "no layer": ([("conv", "act")], "'conv' is a Conv1d, not a BatchNorm layer"),
    "no activation": ([("norm2", "other")], "GELU is not an activation"),
    "twice": ([("norm", "act"), ("norm2", "act")], "'act' is named twice"),
    "itself": ([("norm", "norm")], "'norm' is named twice"),
    "shared": ([("norm", "shared")], "is in 2 places"),
    "shared layer": ([("twice.0", "act")], "it is in 2 places"),
    "hooks": ([("hooked", "act")], "it has hooks"),
    "three names": ([("norm", "act", "conv")], "must be a boolean or pairs of names"),
    "a number": ([("norm", 3)], "must be a boolean or pairs of names"),
    "a string": (["norm"], "must be a boolean or pairs of names"),
}


@pytest.mark.parametrize("case", REFUSED_PAIRS)
def test_named_pair_that_cannot_be_fused_raises_and_changes_nothing(case):
    model = Block()
    model.shared = model.again = nn.ReLU()
    model.twice, model.hooked = nn.ModuleList([nn.BatchNorm1d(4)] * 2), nn.BatchNorm1d(4)
    _hooked(model.hooked)
    before = repr(model)
    pairs, reason = REFUSED_PAIRS[case]
    with pytest.raises(backnorm.ArgumentError, match=f"^fuse: .*{reason}"):
        convert(model, fuse=pairs)
    assert repr(model) == before


def test_convert_rejects_pair_whose_activation_is_already_fused():
    model = convert(Block(), fuse=[("norm", "act")])
    with pytest.raises(backnorm.ArgumentError, match="fused with another layer"):
        convert(model, fuse=[("norm2", "act")])


def test_layer_with_own_activation_keeps_it(close):
    theirs = sequence()
    mine = copy.deepcopy(theirs)
    mine[1] = backnorm.torch.BatchNorm1d(4, activation="silu").double()
    mine[2], reports = nn.ReLU(), []
    expected = passes(nn.Sequential(*theirs[:3], nn.ReLU(), theirs[3]))
    state = copy.deepcopy(mine)
    convert(mine, fuse=True, report=reports.append)
    assert reports[0].reason == "a SiLU of its own"
    assert type(mine[2]) is nn.ReLU
    with pytest.raises(backnorm.ArgumentError, match="computes a SiLU of its own"):
        convert(mine, fuse=[("1", "2")])
    torch.fx.symbolic_trace(mine)
    _listen(mine[1])
    convert(mine, sync=True)
    assert repr(mine[1]).startswith("backnorm.torch.SyncBatchNorm(4")
    assert repr(revert(mine)) == repr(state)
    close(passes(mine)[0], expected[0], factor=16)


LAYERS = {
    "fused": lambda: fused(sequence())[1],
    "with a ReLU": lambda: backnorm.torch.BatchNormReLU2d(4),
    "with a SiLU": lambda: backnorm.torch.SyncBatchNorm(4, activation="silu"),
    "synchronised": lambda: backnorm.torch.SyncBatchNorm(4),
}


@pytest.mark.parametrize("name", LAYERS)
def test_tool_that_would_drop_activation_of_layer_raises(name):
    layer = LAYERS[name]()
    model = nn.Sequential(layer)
    attribute = "qconfig" if name == "synchronised" else "num_features"
    with pytest.raises(backnorm.BacknormError, match=f"^{attribute}: .*"):
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert model[0] is layer
    # torch.jit.trace reads every attribute that `dir` names.
    assert attribute not in dir(layer)


def test_layer_without_activation_is_rebuilt_by_other_tools():
    layers = backnorm.torch.BatchNorm2d(4), backnorm.torch.SyncBatchNorm(4)
    assert [layer.num_features for layer in layers] == [4, 4]
    assert all("num_features" in dir(layer) for layer in layers)
    for model in (convert(sequence()), revert(convert(sequence(), fuse=True, sync=True))):
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        assert [type(module) for module in model[1:3]] == [nn.SyncBatchNorm, nn.SiLU]


def test_layer_with_relu_is_one_node_of_graph():
    graph = torch.fx.symbolic_trace(nn.Sequential(backnorm.torch.BatchNormReLU1d(3))).graph
    assert [node.op for node in graph.nodes] == ["placeholder", "call_module", "output"]


def test_graph_of_fused_model_has_node_of_each_module(close):
    theirs = sequence()
    mine = fused(theirs)
    graphs = [torch.fx.symbolic_trace(model) for model in (mine, theirs)]
    first, second = ([(node.op, node.target) for node in net.graph.nodes] for net in graphs)
    assert first == second
    close(passes(copy.deepcopy(graphs[0])), passes(copy.deepcopy(graphs[1])), factor=16)


def test_compiled_model_calls_hook_of_separated_layer(close):
    theirs = sequence()
    mine = fused(theirs)
    torch._dynamo.reset()
    compiled, x = torch.compile(mine, backend="eager", fullgraph=True), batch()
    close(compiled(x), theirs(x), factor=16)
    SEEN.clear()
    _listen(mine[1])
    compiled = torch.compile(mine, backend="eager")
    close(compiled(x), theirs(x), factor=16)
    assert (SEEN[0][-1] < -0.3).any()


def test_compiled_layers_with_different_ceilings_match_eager(close):
    torch._dynamo.reset()
    x = torch.randn(6, 3, 5)
    for ceiling in (6.0, 0.5, 0.25):
        layer = backnorm.torch.BatchNormReLU1d(3, ceiling=ceiling)
        close(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))


def test_fused_pair_under_autocast_returns_same_type(close):
    theirs = sequence("relu").float()
    mine, x = fused(theirs), torch.randn(6, 3, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = [model(x) for model in (mine, theirs)]
    assert results[0].dtype == results[1].dtype
    close(*results, factor=2)


class SharedReLU(nn.Module):
    """A block that calls one ReLU twice, as in torchvision's ResNet."""

    def __init__(self, adds_in_place):
        super().__init__()
        self.norm1, self.norm2, self.relu = nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.ReLU()
        self.adds_in_place = adds_in_place

    def forward(self, x):
        y = self.norm2(self.relu(self.norm1(x)))
        if self.adds_in_place:
            y += x
        else:
            y = y + x
        return self.relu(y)


@pytest.mark.parametrize("adds_in_place", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("layer", ["norm1", "norm2"])
def test_named_activation_called_with_another_tensor_raises(layer, training, adds_in_place):
    model = convert(SharedReLU(adds_in_place), fuse=[(layer, "relu")]).train(training)
    x = torch.randn(6, 3, 5)
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with (
            context(),
            pytest.raises(ValueError, match=f"'relu' was called .* output of '{layer}'"),
        ):
            model(x)
    expected = SharedReLU(adds_in_place).train(training)
    torch.testing.assert_close(revert(model)(x), expected(x))


class NamedPair(nn.Module):
    def __init__(self, adds_in_place=False):
        super().__init__()
        self.norm, self.relu = nn.BatchNorm1d(3), nn.ReLU()
        self.adds_in_place = adds_in_place

    def forward(self, x):
        y = self.norm(x)
        if self.adds_in_place:
            y += x
        return self.relu(y)


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [False, True])
def test_named_activation_of_output_changed_in_place_raises(training, context):
    model = convert(NamedPair(adds_in_place=True), fuse=[("norm", "relu")]).train(training)
    x = torch.randn(6, 3, 5)
    with context(), pytest.raises(ValueError, match=r"'relu' was called .* output of 'norm'"):
        model(x)
    expected = NamedPair(adds_in_place=True).train(training)
    with context():
        torch.testing.assert_close(revert(model)(x), expected(x))


def test_named_pair_in_copied_and_hooked_block_is_checked(close):
    model = NamedPair().double()
    block = copy.deepcopy(convert(copy.deepcopy(model), fuse=[("norm", "relu")]))
    block = pickle.loads(pickle.dumps(block))
    block.register_forward_hook(lambda module, inputs, output: output * 2)
    x = batch()
    close(block(x), 2 * model(x))
    with pytest.raises(ValueError, match="'relu' was called"):
        block.relu(x)


class CallsOneByOne(nn.Module):
    """Calls the modules of its sequence, with an addition before the activation."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3), nn.ReLU())

    def forward(self, x):
        return self.body[2](self.body[1](self.body[0](x)) + x)


def test_sequence_whose_modules_are_called_one_by_one_raises():
    model = convert(CallsOneByOne(), fuse=True)
    with pytest.raises(ValueError, match=r"^fuse: .*'body.2' was called with a tensor that is"):
        model(torch.randn(4, 3, 5))


def test_fused_layer_that_was_replaced_raises():
    model = convert(nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()), fuse=True)
    model[0] = nn.BatchNorm1d(3)
    with pytest.raises(ValueError, match=r"^fuse: .*'1' was called with a tensor that is not"):
        model(torch.randn(4, 3, 5))
