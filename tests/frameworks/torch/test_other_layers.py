"""Batch normalisation of timm and torchvision: converted, as it was, and back."""

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
    """Give a layer statistics and parameters of which none is trivial."""
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        if tensor.is_floating_point():
            tensor.data.uniform_(0.5, 1.5) if "var" in name else tensor.data.normal_()
    return layer.double()


def passes(net):
    """Train, train and evaluate: values, gradients, state."""
    torch.manual_seed(3)
    seen = []
    for training in (True, True, False):
        net.train(training)
        x = torch.randn(4, 3, 5, 6).double().requires_grad_()
        wanted = [x, *net.parameters()]
        torch.manual_seed(4)
        y = net(x)
        seen.append((y.detach(), *torch.autograd.grad(y, wanted, torch.randn(y.shape).double())))
    net.train()
    return seen, dict(net.state_dict())


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("kind", ACTIVATED)
def test_timms_layers_with_an_activation(kind, fuse, close):
    torch.manual_seed(0)
    theirs = filled(layers.BatchNormAct2d(3, **ACTIVATED[kind]))
    mine = copy.deepcopy(theirs)
    before = dict(mine.__dict__)
    reports = []
    assert convert(mine, fuse=fuse, report=reports.append) is mine
    assert mine.__dict__ == {**before, **({"fuse_activation": True} if fuse else {})}
    assert isinstance(mine, layers.BatchNormAct2d)
    assert repr(mine) == repr(theirs)
    can_be_one = kind not in ("gelu", "none", "drop", "drop_block")
    assert type(mine) is timm.BatchNormAct2d
    assert [each.fused for each in reports] == [fuse and can_be_one]
    expected = passes(theirs)
    for copied in (copy.deepcopy(mine), pickle_of(mine) if "drop" not in kind else mine):
        assert type(copied) is timm.BatchNormAct2d
        close(passes(copied), expected, factor=4)
    assert type(revert(mine)) is layers.BatchNormAct2d
    assert mine.__dict__ == before


def pickle_of(module):
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("layer", [FrozenBatchNorm2d, layers.FrozenBatchNormAct2d])
def test_frozen_layers(layer, close):
    torch.manual_seed(0)
    theirs = filled(layer(3))
    mine = pickle_of(convert(copy.deepcopy(theirs)))
    assert type(mine) is OURS[layer]
    assert repr(mine) == repr(theirs)
    close(passes(mine), passes(theirs), factor=4)
    # A gradient of what is a buffer.
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
def test_frozen_layers_promote_and_broadcast_as_before(layer, batch, close):
    torch.manual_seed(0)
    theirs = filled(layer(3)).float()
    mine = convert(copy.deepcopy(theirs))
    close(mine(batch), theirs(batch), factor=4)


@pytest.mark.parametrize("fuse", [False, True])
def test_other_layers_of_timm_stay_as_they_are(fuse):
    net = nn.Sequential(layers.SyncBatchNormAct(3), layers.SplitBatchNorm2d(3, num_splits=2))
    with_theirs = nn.Sequential(nn.BatchNorm2d(3), *net)
    reports = []
    convert(with_theirs, fuse=fuse, report=reports.append)
    types = [type(each) for each in with_theirs]
    assert types == [backnorm.torch.BatchNorm2d, layers.SyncBatchNormAct, layers.SplitBatchNorm2d]
    assert [each.name for each in reports] == ["0", "1", "2", "2.aux_bn.0"]
    assert "several processes" in reports[1].reason
    # Its children are PyTorch's own.
    assert type(net[1].aux_bn[0]) is backnorm.torch.BatchNorm2d


@pytest.mark.parametrize("fuse", [False, True])
def test_timms_own_conversions_take_our_layers(fuse, close):
    torch.manual_seed(0)
    theirs = nn.Sequential(filled(layers.BatchNormAct2d(3)), filled(nn.BatchNorm2d(3))).eval()
    mine = convert(copy.deepcopy(theirs), fuse=fuse)
    x = torch.randn(4, 3, 5, 6).double()
    frozen = [layers.freeze_batch_norm_2d(copy.deepcopy(net)).double() for net in (mine, theirs)]
    assert [type(each) for each in frozen[0]] == [type(each) for each in frozen[1]]
    close(frozen[0](x), frozen[1](x), factor=4)
    sync = [layers.convert_sync_batchnorm(copy.deepcopy(net)) for net in (mine, theirs)]
    assert [type(each) for each in sync[0]] == [type(each) for each in sync[1]]
    thawed = layers.unfreeze_batch_norm_2d(convert(frozen[0])).double().eval()
    close(thawed(x), theirs(x), factor=4)


def test_hooks_of_an_activation_see_what_they_saw():
    mine = convert(layers.BatchNormAct2d(3, inplace=False), fuse=True)
    seen = []
    mine.act.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].min().item()))
    mine(torch.randn(4, 3, 5, 6))
    assert len(seen) == 1
    assert seen[0] < 0


@pytest.mark.parametrize("layer", OURS)
@pytest.mark.parametrize("fuse", [False, True])
def test_compiled(layer, fuse, close):
    theirs = filled(layer(3))
    mine = convert(copy.deepcopy(theirs), fuse=fuse)
    expected = passes(theirs)
    mine.compile(backend="aot_eager", fullgraph=True)
    torch._dynamo.reset()
    close(passes(mine), expected, factor=4)


def test_errors_are_timms():
    mine = convert(layers.BatchNormAct2d(3))
    with pytest.raises(AssertionError, match="expected 4D input"):
        mine(torch.randn(4, 3))


def test_neither_library_is_imported_for_a_model_without_their_layers():
    code = """
import sys, torch, backnorm.torch
backnorm.torch.revert(backnorm.torch.convert(torch.nn.BatchNorm2d(3), fuse=True))
print(sorted({name.split('.')[0] for name in sys.modules} & {'timm', 'torchvision'}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("cls", OURS)
def test_torch_jit_script_of_layer_raises(cls):
    with pytest.raises(backnorm.BacknormError, match=r"cannot compile .*revert\(model\)"):
        torch.jit.script(convert(cls(3)))
