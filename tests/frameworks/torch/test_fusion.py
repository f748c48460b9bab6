"""`convert(model, fuse=...)`: which pairs are fused, what stays, what is proved and refused."""

from __future__ import annotations

import copy
import io
import pickle
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import backnorm.torch
from backnorm.torch import convert, revert

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
    assert type(mine[2]) is nn.Identity
    assert ("ceiling=0.75" in repr(mine)) is (act == "hardtanh")
    # The layer's result is the activation's; neither model moves its statistics in evaluation.
    close(mine.eval()[:2](x), theirs.eval()[:3](x), factor=16)
    close(passes(mine), passes(theirs), factor=16)
    convert(mine, fuse=True, arithmetic="float64")
    convert(mine)
    assert are_fused(mine) == [True]
    assert list(mine.state_dict()) == list(theirs.state_dict())
    assert revert(mine) is mine
    assert [type(module) for module in mine] == [type(module) for module in theirs]
    assert (mine[0], mine[1], mine[3]) == (modules[0], modules[1], modules[3])
    assert [vars(module).keys() for module in mine] == [vars(module).keys() for module in theirs]
    assert repr(mine) == repr(theirs)
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
        assert duplicate[1].fused.identity is duplicate[2]
        close(passes(duplicate), passes(copy.deepcopy(theirs)), factor=16)
        assert repr(revert(duplicate)) == repr(theirs)
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


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


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
    "a parametrized layer": (
        lambda m: parametrize.register_parametrization(m[1], "weight", Double()),
        "^it is parametrized",
    ),
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
    assert not any(type(module) is nn.Identity for module in mine)
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


def test_state_of_fused_model_is_loaded_into_unfused_model(close):
    theirs = sequence()
    mine = fused(theirs)
    passes(mine)
    theirs.load_state_dict(mine.state_dict())
    mine.load_state_dict(theirs.state_dict())
    close(passes(mine), passes(theirs), factor=16)


@pytest.mark.parametrize("training", [True, False])
def test_revert_restores_activation_in_mode_of_model(training):
    mine = fused(sequence()).train(not training)
    assert revert(mine.train(training))[2].training is training


def test_revert_of_part_without_identity_raises_and_changes_nothing():
    mine = fused(sequence())
    before = repr(mine)
    with pytest.raises(
        ValueError, match=r"^model: has the layer '1', but not the Identity .* SiLU"
    ):
        revert(mine[:2])
    revert(mine[2:])
    assert repr(mine) == before


def test_hook_of_fused_layer_gets_activated_values_and_normalised_ones_after_revert():
    mine, seen = fused(sequence("relu")), []
    mine[1].register_forward_hook(lambda module, inputs, output: seen.append(output.min().item()))
    mine(batch())
    revert(mine)(batch())
    assert seen[0] == 0
    assert seen[1] < 0


# PyTorch's compiler reads this attribute of an input.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("place", [1, 2])
def test_layer_or_identity_compiled_alone_matches_pytorch(place, close):
    theirs = sequence()
    mine = fused(theirs)
    mine[place].compile(backend="aot_eager")
    torch._dynamo.reset()
    close(passes(mine), passes(theirs), factor=16)


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
    mine, reports, example = copy.deepcopy(theirs), [], batch()
    kept = example.clone()
    generator = torch.get_rng_state()
    convert(mine, fuse=[["0.norm", "0.act"]], report=reports.append, example=example, sync=True)
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(example, kept)
    assert all(each.grad is None for each in mine.parameters())
    assert [report.fused for report in reports] == [True, False]
    assert reports[1].reason == "no pair names it"
    close(mine.state_dict(), theirs.state_dict())
    close(passes(mine), passes(theirs), factor=16)
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
    "fused": ([("norm", "act"), ("own", "shared")], "it already computes a ReLU"),
    "three names": ([("norm", "act", "conv")], "must be a boolean or pairs of names"),
    "a number": ([("norm", 3)], "must be a boolean or pairs of names"),
    "a string": (["norm"], "must be a boolean or pairs of names"),
}


@pytest.mark.parametrize("case", REFUSED_PAIRS)
def test_named_pair_that_cannot_be_fused_raises_and_changes_nothing(case):
    model = Block()
    model.shared = model.again = nn.ReLU()
    model.own = backnorm.torch.BatchNormReLU1d(4)
    model.twice, model.hooked = nn.ModuleList([nn.BatchNorm1d(4)] * 2), nn.BatchNorm1d(4)
    _hooked(model.hooked)
    before = repr(model)
    pairs, reason = REFUSED_PAIRS[case]
    with pytest.raises(backnorm.ArgumentError, match=f"^fuse: .*{reason}"):
        convert(model, fuse=pairs, example=torch.randn(6, 3, 5))
    assert repr(model) == before


def test_named_pair_without_example_raises_and_changes_nothing():
    model = Block()
    before = repr(model)
    message = (
        r"^example: must be given with named pairs: convert\(model, fuse=\[...\], example=batch\) "
        "runs the model before and after, in float64 and in training, and refuses the pairs that "
        "change a result"
    )
    with pytest.raises(backnorm.ArgumentValueError, match=message):
        convert(model, fuse=[("norm", "act")])
    assert repr(model) == before


class Calls(nn.Module):
    """Calls a layer and an activation as `step` does."""

    def __init__(self, step):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3), nn.ReLU()
        self.other, self.drop, self.step = nn.BatchNorm1d(3), nn.Dropout(0.5), step

    def forward(self, x):
        return self.step(self, self.conv(x))


WRONG_STEPS = {
    "addition": lambda m, x: m.act(m.norm(x) + x),
    "in place": lambda m, x: m.act(m.norm(x).add_(x)),
    "through data": lambda m, x: (y := m.norm(x), y.data.sub_(1), m.act(y))[-1],
    "another use": lambda m, x: m.act(y := m.norm(x)) + 2 * y,
    "detached use": lambda m, x: (m.act(y := m.norm(x)), y.detach()),
    "signs": lambda m, x: (m.act(y := m.norm(x)), y < 0),
    "not called": lambda m, x: m.norm(x),
    "called twice": lambda m, x: m.act(m.other(m.act(m.norm(x))) + x),
    "another layer": lambda m, x: m.act(m.other(m.norm(x))),
    "only statistics": lambda m, x: (m.act(m.norm(x)), m.other(m.norm(x)))[0],
}
RIGHT_STEPS = {
    "plain": lambda m, x: m.act(m.norm(x)),
    "with dropout": lambda m, x: m.act(m.norm(m.drop(x))),
    "called by two": lambda m, x: {"out": [m.act(m.norm(x)), m.act(m.norm(2 * x))], "size": 3},
    "checkpoint": lambda m, x: torch.utils.checkpoint.checkpoint(
        lambda x: m.act(m.norm(x)), x, use_reentrant=False
    ),
}
VALUES = {
    "new": lambda layer: None,
    "zero": lambda layer: nn.init.zeros_(layer.weight),
    "positive": lambda layer: nn.init.constant_(layer.bias, 50.0),
    "no bias": lambda layer: setattr(layer, "bias", None),
}


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("step", WRONG_STEPS)
def test_pair_that_changes_a_result_is_refused_by_name(step, values):
    model = Calls(WRONG_STEPS[step])
    VALUES[values](model.norm)
    before = repr(model)
    message = r"^fuse: has the pair \('norm', 'act'\), which .*then has other results"
    with pytest.raises(backnorm.ArgumentValueError, match=message):
        convert(model, fuse=[("norm", "act")], example=torch.randn(6, 3, 5))
    assert repr(model) == before


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("step", RIGHT_STEPS)
def test_pair_that_changes_no_result_is_fused(step, values):
    model = Calls(RIGHT_STEPS[step])
    VALUES[values](model.norm)
    for change in ({"arithmetic": "float32"}, {"fuse": [("norm", "act")]}):
        convert(model.eval(), **change, example=torch.randn(6, 3, 5))
    assert (model.norm.activation.name, type(model.act)) == ("relu", nn.Identity)
    assert model.norm.arithmetic == "float32"
    assert not model.norm.training


def test_error_of_several_pairs_names_wrong_ones_alone():
    model = nn.ModuleDict({name: Calls(RIGHT_STEPS["plain"]) for name in "ab"})
    model["c"] = Calls(WRONG_STEPS["addition"])
    net = nn.Sequential(*model.values())
    pairs = [(f"{k}.norm", f"{k}.act") for k in range(3)]
    with pytest.raises(
        backnorm.ArgumentValueError, match=r"has the pair \('2.norm', '2.act'\), wh"
    ):
        convert(net, fuse=pairs, example=torch.randn(6, 3, 5))
    net[1].step = WRONG_STEPS["another use"]
    with pytest.raises(backnorm.ArgumentValueError, match=r"the pairs \[\('1.norm', .*\('2.norm'"):
        convert(net, fuse=pairs, example=torch.randn(6, 3, 5))


@pytest.mark.parametrize(
    ("example", "says"),
    [
        (torch.randn(6, 4, 5), "RuntimeError: .*channels"),
        ((torch.randn(6, 3, 5), 1), "TypeError: .*positional arguments"),
        ({"x": "an image"}, "TypeError: "),
        (torch.randn(1, 3, 1), "ArgumentValueError: input: Expected more than 1 value per channel"),
    ],
)
def test_example_on_which_model_cannot_train_raises(example, says):
    message = rf"^example: must be a batch on which the model can train in float64; got {says}"
    with pytest.raises(backnorm.ArgumentValueError, match=message):
        convert(Calls(RIGHT_STEPS["plain"]), fuse=[("norm", "act")], example=example)


def test_output_without_gradient_raises_because_it_proves_nothing():
    model = Calls(lambda m, x: {"logits": m.act(m.norm(x)).detach()})
    with pytest.raises(backnorm.ArgumentValueError, match=r"^example: .* has no tensor with a gra"):
        convert(model, fuse=[("norm", "act")], example=torch.randn(6, 3, 5))


@pytest.mark.parametrize("form", [lambda x: (x,), lambda x: [x], lambda x: {"x": x}])
def test_example_may_be_arguments_of_model(form):
    model = Calls(RIGHT_STEPS["plain"])
    convert(model, fuse=[("norm", "act")], example=form(torch.randn(6, 3, 5)))
    assert type(model.act) is nn.Identity


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
    torch.fx.symbolic_trace(mine)
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
def test_layer_with_activation_has_attributes_of_batch_norm(name):
    layer = LAYERS[name]()
    assert hasattr(layer, "num_features")
    assert (layer.num_features, layer.eps, layer.affine) == (4, 1e-5, True)
    assert not hasattr(layer, "qconfig")
    with pytest.raises(AttributeError, match="qconfig"):
        layer.qconfig  # noqa: B018
    assert "num_features" in dir(layer)
    layer.qconfig = None
    assert hasattr(layer, "qconfig")


@pytest.mark.parametrize("name", [*LAYERS][:3])
def test_synchronisation_by_pytorch_that_would_drop_activation_raises(name):
    layer = LAYERS[name]()
    model = nn.Sequential(layer)
    with pytest.raises(backnorm.BacknormError, match=r"^num_features: convert_sync_b.* would"):
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert model[0] is layer


def test_layer_without_activation_is_rebuilt_by_other_tools():
    layers = backnorm.torch.BatchNorm2d(4), backnorm.torch.SyncBatchNorm(4)
    assert [layer.num_features for layer in layers] == [4, 4]
    assert all("num_features" in dir(layer) for layer in layers)
    synchronised = convert(sequence(), sync=True)
    for model in (convert(sequence()), synchronised, revert(convert(sequence(), fuse=True))):
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


class CallsOneByOne(nn.Module):
    """Calls the modules of its sequence, with an addition before the activation."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3), nn.ReLU())

    def forward(self, x):
        return self.body[2](self.body[1](self.body[0](x)) + x)


def test_example_refuses_neighbours_that_are_called_one_by_one():
    model = CallsOneByOne()
    with pytest.raises(ValueError, match=r"^fuse: has the pair \('body.1', 'body.2'\)"):
        convert(model, fuse=True, example=torch.randn(4, 3, 5))
    assert type(model.body[1]) is nn.BatchNorm1d
    model = convert(sequence(), fuse=True, example=batch())
    assert are_fused(model) == [True]
