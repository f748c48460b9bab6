"""Layers of timm and torchvision: converted, with the same results, and reverted."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import backnorm.torch
from backnorm.torch import convert, revert
from benchmarks.models import libraries

libraries.torchvision()
libraries.timm()

from timm import layers  # noqa: E402
from torchvision.ops import FrozenBatchNorm2d  # noqa: E402

from backnorm.torch import timm, torchvision  # noqa: E402

OURS = {
    layers.BatchNormAct2d: timm.BatchNormAct2d,
    layers.FrozenBatchNormAct2d: timm.FrozenBatchNormAct2d,
    FrozenBatchNorm2d: torchvision.FrozenBatchNorm2d,
}
ACTIVATED = {
    "relu": {},
    "relu6": {"act_layer": nn.ReLU6},
    "silu": {"act_layer": nn.SiLU},
    "gelu": {"act_layer": nn.GELU, "inplace": False},
    "hardswish": {"act_layer": "hard_swish"},
    "none": {"apply_act": False},
    "drop": {"drop_layer": lambda: nn.Dropout(0.5)},
    "drop_block": {"drop_layer": lambda: layers.DropBlock2d(0.3, 3)},
    "cumulative": {"momentum": None},
    "untracked": {"track_running_stats": False},
    "not affine": {"affine": False},
}


def filled(layer):
    """Fill the statistics and parameters of a layer with random values."""
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        if tensor.is_floating_point():
            tensor.data.uniform_(0.5, 1.5) if "var" in name else tensor.data.normal_()
    return layer.double()


def passes(net):
    """Train twice and evaluate; return values, gradients and the state."""
    torch.manual_seed(3)
    results = []
    for training in (True, True, False):
        net.train(training)
        x = torch.randn(4, 3, 5, 6).double().requires_grad_()
        inputs = [x, *net.parameters()]
        torch.manual_seed(4)
        y = net(x)
        dy = torch.randn(y.shape).double()
        results.append((y.detach(), *torch.autograd.grad(y, inputs, dy)))
    net.train()
    return results, dict(net.state_dict())


@pytest.mark.covering(1)
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("kind", ACTIVATED)
def test_timm_layer_with_activation_is_converted_and_reverted(kind, fuse, close):
    torch.manual_seed(0)
    theirs = filled(layers.BatchNormAct2d(3, **ACTIVATED[kind]))
    mine, reports = copy.deepcopy(theirs), []
    before = dict(mine.__dict__)
    assert convert(mine, fuse=fuse, report=reports.append) is mine
    assert mine.__dict__ == {**before, **({"fuse_activation": True} if fuse else {})}
    assert isinstance(mine, layers.BatchNormAct2d)
    assert repr(mine) == f"backnorm.torch.{theirs!r}"
    can_be_fused = kind not in ("gelu", "none", "drop", "drop_block")
    assert [report.fused for report in reports] == [fuse and can_be_fused]
    assert bool(reports[0].reason) is fuse
    expected = passes(theirs)
    for duplicate in (copy.deepcopy(mine), pickled(mine) if "drop" not in kind else mine):
        assert type(duplicate) is timm.BatchNormAct2d
        close(passes(duplicate), expected, factor=4)
    assert type(revert(mine)) is layers.BatchNormAct2d
    assert mine.__dict__ == before


def pickled(module):
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("layer", [FrozenBatchNorm2d, layers.FrozenBatchNormAct2d])
def test_frozen_layer_is_converted_and_reverted(layer, close):
    torch.manual_seed(0)
    theirs = filled(layer(3))
    mine = pickled(convert(copy.deepcopy(theirs)))
    assert type(mine) is OURS[layer]
    assert repr(mine) == f"backnorm.torch.{theirs!r}"
    close(passes(mine), passes(theirs), factor=4)
    # The weight is a buffer, which may need a gradient.
    for net in (mine, theirs):
        net.weight.requires_grad_()
    x, dy = torch.randn(2, 4, 3, 5, 6).double()
    close(*(torch.autograd.grad(net(x), net.weight, dy) for net in (mine, theirs)), factor=4)
    state = {**theirs.state_dict(), "num_batches_tracked": torch.tensor(3)}
    mine.load_state_dict(state)
    assert type(revert(mine)) is layer


@pytest.mark.parametrize("layer", [FrozenBatchNorm2d, layers.FrozenBatchNormAct2d])
@pytest.mark.parametrize(
    "batch",
    [
        torch.randn(4, 3, 2, 2, dtype=torch.float16), torch.randn(4, 3, 2, 2).double(),
        torch.ones(4, 3, 2, 2, dtype=torch.int32), torch.randn(3, 2, 2), torch.randn(4, 1, 2, 2),
    ],
    ids=["float16", "float64", "int32", "no batch", "one channel"],
)  # fmt: skip
def test_frozen_layer_promotes_and_broadcasts_as_original_layer(layer, batch, close):
    torch.manual_seed(0)
    theirs = filled(layer(3)).float()
    mine = convert(copy.deepcopy(theirs))
    close(mine(batch), theirs(batch), factor=4)


@pytest.mark.parametrize("fuse", [False, True])
def test_convert_keeps_other_layers_of_timm(fuse):
    split = layers.SplitBatchNorm2d(3, num_splits=2)
    net, reports = nn.Sequential(nn.BatchNorm2d(3), layers.SyncBatchNormAct(3), split), []
    convert(net, fuse=fuse, report=reports.append)
    types = [type(module) for module in net]
    assert types == [backnorm.torch.BatchNorm2d, layers.SyncBatchNormAct, layers.SplitBatchNorm2d]
    assert [report.name for report in reports] == ["0", "1", "2", "2.aux_bn.0"]
    assert "not PyTorch's own" in reports[1].reason
    # Its children are layers of PyTorch.
    assert type(split.aux_bn[0]) is backnorm.torch.BatchNorm2d


@pytest.mark.parametrize("fuse", [False, True])
def test_conversions_of_timm_accept_converted_layers(fuse, close):
    torch.manual_seed(0)
    theirs = nn.Sequential(filled(layers.BatchNormAct2d(3)), filled(nn.BatchNorm2d(3))).eval()
    mine = convert(copy.deepcopy(theirs), fuse=fuse)
    x = torch.randn(4, 3, 5, 6).double()
    frozen = [layers.freeze_batch_norm_2d(copy.deepcopy(net)).double() for net in (mine, theirs)]
    sync = [layers.convert_sync_batchnorm(copy.deepcopy(net)) for net in (mine, theirs)]
    for ours, expected in (frozen, sync):
        assert [type(module) for module in ours] == [type(module) for module in expected]
    close(frozen[0](x), frozen[1](x), factor=4)
    thawed = layers.unfreeze_batch_norm_2d(convert(frozen[0])).double().eval()
    close(thawed(x), theirs(x), factor=4)


@pytest.mark.parametrize("fuse", [False, True])
def test_synchronisation_by_pytorch_that_would_drop_activation_raises(fuse):
    model = nn.Sequential(convert(layers.BatchNormAct2d(3), fuse=fuse))
    with pytest.raises(backnorm.BacknormError, match=r"^num_features: .*without its ReLU; "):
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
    plain = nn.Sequential(convert(layers.BatchNormAct2d(3, apply_act=False), fuse=fuse))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(plain)
    assert (type(model[0]), model[0].num_features) == (nn.SyncBatchNorm, 3)


OBSTACLES = {
    "hooks": lambda act: act.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,)),
    "a forward of its own": lambda act: setattr(act, "forward", lambda x: x + 1),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_altered_activation_is_called(obstacle, close):
    theirs = layers.BatchNormAct2d(3, inplace=False).double()
    mine, reports, x = convert(copy.deepcopy(theirs), fuse=True), [], torch.randn(4, 3, 5, 6)
    for net in (mine, theirs):
        OBSTACLES[obstacle](net.act)
    close(mine(x.double()), theirs(x.double()))
    convert(mine, fuse=True, report=reports.append)
    assert reports[0].reason == f"its activation has {obstacle}"


@pytest.mark.covering(0)
@pytest.mark.parametrize("layer", OURS)
@pytest.mark.parametrize("fuse", [False, True])
def test_compiled_layer_matches_library_layer(layer, fuse, close):
    theirs = filled(layer(3))
    mine = convert(copy.deepcopy(theirs), fuse=fuse)
    expected = passes(theirs)
    mine.compile(backend="aot_eager", fullgraph=True)
    torch._dynamo.reset()
    close(passes(mine), expected, factor=4)


def test_input_of_another_rank_raises_as_timm():
    mine = convert(layers.BatchNormAct2d(3))
    with pytest.raises(AssertionError, match="expected 4D input"):
        mine(torch.randn(4, 3))


@pytest.mark.long
def test_conversion_of_other_models_imports_neither_library():
    code = """
import sys, torch, backnorm.torch
backnorm.torch.revert(backnorm.torch.convert(torch.nn.BatchNorm2d(3), fuse=True))
print(sorted({name.split('.')[0] for name in sys.modules} & {'timm', 'torchvision'}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("change", [convert, revert])
def test_convert_and_revert_reject_scripted_model(change):
    scripted = torch.jit.script(torch.nn.BatchNorm2d(3))
    with pytest.raises(TypeError, match=r"^model: must not be compiled by torch\.jit.*; pass the"):
        change(scripted)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("cls", OURS)
def test_torch_jit_script_of_layer_raises(cls):
    with pytest.raises(backnorm.BacknormError, match=r"cannot compile .*revert\(model\)"):
        torch.jit.script(convert(cls(3)))
