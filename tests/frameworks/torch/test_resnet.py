"""torchvision's residual blocks: fused by `convert`, with the same results, and reverted."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from torch import nn

import backnorm
from backnorm.torch import batch_norm, convert, revert
from benchmarks.models import libraries

libraries.torchvision()

from torchvision.models import resnet  # noqa: E402
from torchvision.ops import FrozenBatchNorm2d  # noqa: E402

from backnorm.torch import resnet as ours  # noqa: E402

FORMATS = [torch.contiguous_format, torch.channels_last]


def _reduction(block, planes):
    """Return a block with a stride, whose `downsample` has a layer of its own."""
    channels = planes * block.expansion
    reduction = nn.Sequential(nn.Conv2d(8, channels, 1, 2, bias=False), nn.BatchNorm2d(channels))
    return block(8, planes, 2, reduction)


BLOCKS = {
    "basic": lambda: resnet.BasicBlock(8, 8),
    "bottleneck": lambda: resnet.Bottleneck(8, 2),
    "basic with a stride": lambda: _reduction(resnet.BasicBlock, 4),
    "bottleneck with a stride": lambda: _reduction(resnet.Bottleneck, 3),
    "in two places": lambda: nn.Sequential(*2 * [resnet.Bottleneck(8, 2)]),
}


def made(kind, dtype=torch.float64):
    """Return a block with parameters that are not trivial."""
    block = BLOCKS[kind]()
    for layer in block.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.weight.data.uniform_(0.5, 1.5)
            layer.bias.data.normal_()
    return block.to(dtype)


def fused(block, **options):
    return convert(copy.deepcopy(block), fuse=True, **options)


def batch(dtype=torch.float64, memory_format=torch.contiguous_format):
    return torch.randn(4, 8, 6, 5, dtype=dtype).contiguous(memory_format=memory_format)


def passes(block, memory_format=torch.contiguous_format):
    """Train twice and evaluate; return values, gradients and the state."""
    torch.manual_seed(2)
    results = []
    for training in (True, True, False):
        block.train(training)
        x = batch(memory_format=memory_format).requires_grad_()
        y = block(x)
        dy = torch.randn(y.shape).double()
        results.append((y.detach(), *torch.autograd.grad(y, [x, *block.parameters()], dy)))
    block.train()
    return results, dict(block.state_dict())


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("kind", BLOCKS)
def test_fused_block_matches_torchvision_and_revert_restores_it(kind, memory_format, close):
    theirs = made(kind)
    mine = fused(theirs)
    expected = passes(copy.deepcopy(theirs), memory_format)
    for duplicate in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        assert [type(m) for m in duplicate.modules()] == [type(m) for m in mine.modules()]
        found = passes(duplicate, memory_format)
        close(found, expected, factor=16)
        assert [y.stride() for y, *_ in found[0]] == [y.stride() for y, *_ in expected[0]]
    assert revert(mine) is mine
    assert [type(m) for m in mine.modules()] == [type(m) for m in theirs.modules()]
    x = batch(memory_format=memory_format)
    assert torch.equal(mine(x), theirs(x))


def normalised(layer, x, **options):
    """Return what the layer's function returns; the layer itself is not called."""
    tensors = layer.running_mean, layer.running_var, layer.weight, layer.bias
    tensors = [tensor.clone() for tensor in tensors]
    return batch_norm(x, *tensors, layer.training, activation="relu", **options)


@torch.no_grad()
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("memory_format", FORMATS)
def test_layers_of_fused_blocks_have_bits_of_fused_function(memory_format, training):
    x = batch(torch.float32, memory_format)
    basic = fused(made("basic", torch.float32)).train(training)
    bottleneck = fused(made("bottleneck", torch.float32)).train(training)
    out = basic.conv2(normalised(basic.bn1, basic.conv1(x)))
    expected = [normalised(basic.bn2, out, residual=x)]
    out = bottleneck.conv2(normalised(bottleneck.bn1, bottleneck.conv1(x)))
    out = bottleneck.conv3(normalised(bottleneck.bn2, out))
    expected.append(normalised(bottleneck.bn3, out, residual=x))
    for block, y in zip((basic, bottleneck), expected, strict=True):
        unfused = convert(revert(copy.deepcopy(block)))
        assert torch.equal(block(x), y)
        # A block that is not fused rounds once more.
        assert not torch.equal(unfused(x), y)


def test_report_names_operations_of_layers_in_blocks():
    model, lines = nn.Sequential(made("basic"), made("bottleneck with a stride")), []
    convert(model, fuse=True, report=lambda report: lines.append(str(report).split(", ")[1]))
    activated, added = "fused with a ReLU", "fused with an addition and a ReLU"
    alone = "not fused: no activation that can be fused follows it"
    assert lines == [activated, added, activated, activated, added, alone]


def _hooked(module):
    module.register_forward_hook(lambda module, inputs, y: y + 0.5)


def _wrapped(module):
    forward = module.forward
    module.forward = lambda x: 2 * forward(x)


class Doubled(nn.BatchNorm2d):
    def forward(self, input):
        return 2 * super().forward(input)


def _put(name, module):
    return lambda block: setattr(block, name, module().double())


OBSTACLES = {
    "relu hooks": (lambda block: _hooked(block.relu), "activation of its block has hooks"),
    "relu forward": (lambda block: _wrapped(block.relu), "activation .* has a forward of its own"),
    "relu GELU": (_put("relu", nn.GELU), "activation of its block is a GELU"),
    "bn1 hooks": (lambda block: _hooked(block.bn1), "bn1 of its block has hooks"),
    "bn2 forward": (lambda block: _wrapped(block.bn2), "bn2 of .* has a forward of its own"),
    "bn3 class": (_put("bn3", lambda: Doubled(8)), "bn3 of its block is a Doubled"),
    "bn1 frozen": (_put("bn1", lambda: FrozenBatchNorm2d(2)), "bn1 .* is a FrozenBatchNorm2d"),
    "bn2 activation": (
        _put("bn2", lambda: backnorm.torch.BatchNorm2d(2, activation="silu")),
        "bn2 of its block computes a SiLU",
    ),
    "block forward": (_wrapped, "its block has a forward of its own"),
}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("case", OBSTACLES)
def test_block_that_cannot_be_fused_matches_torchvision_and_reports_reason(case, before, close):
    change, reason = OBSTACLES[case]
    theirs, x, reports = made("bottleneck"), batch(), []
    mine = copy.deepcopy(theirs)
    if not before:
        convert(mine, fuse=True)
    for block in (theirs, mine):
        change(block)
    if before:
        convert(mine, fuse=True)
    close(mine(x), theirs(x), factor=16)
    convert(mine, fuse=True, report=reports.append)
    assert any(re.search(reason, report.reason) for report in reports)
    own = ["bn2"] if case == "bn2 activation" else []
    assert [report.name for report in reports if report.fused] == own


@pytest.mark.parametrize("cls", [resnet.Bottleneck, nn.ReLU])
def test_fused_block_with_patched_forward_of_class_matches_torchvision(cls, monkeypatch, close):
    theirs, x = made("bottleneck"), batch()
    mine, forward = fused(theirs), cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, x: 0.5 * forward(self, x))
    close(mine(x), theirs(x), factor=16)


class Single(nn.Module):
    def forward(self, x):
        return x.float()


@pytest.mark.parametrize("downsample", [nn.AdaptiveAvgPool2d(1), Single()], ids=["shape", "type"])
def test_fused_block_with_identity_of_other_shape_or_type_matches_torchvision(downsample, close):
    theirs = resnet.BasicBlock(8, 8, downsample=downsample).double()
    close(passes(fused(theirs)), passes(theirs), factor=16)


def test_convert_keeps_class_of_subclassed_block_and_without_fuse():
    class Other(resnet.BasicBlock):
        pass

    assert type(fused(Other(8, 8))) is Other
    assert type(convert(resnet.BasicBlock(8, 8))) is resnet.BasicBlock
    assert type(fused(resnet.BasicBlock(8, 8))) is ours.BasicBlock


def test_convert_with_sync_fuses_block_and_matches_torchvision(close):
    theirs, reports = made("bottleneck"), []
    mine = fused(theirs, sync=True, report=reports.append)
    assert all(report.fused for report in reports)
    assert type(mine.bn3) is backnorm.torch.SyncBatchNorm
    close(passes(mine), passes(theirs), factor=16)


@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
def test_fx_graph_of_fused_block_has_nodes_of_torchvision(kind, close):
    theirs, x = made(kind), batch()
    mine = fused(theirs)
    found, expected = torch.fx.symbolic_trace(mine), torch.fx.symbolic_trace(theirs)
    nodes = [
        [(node.op, node.target, str(node.args)) for node in traced.graph.nodes]
        for traced in (found, expected)
    ]
    assert nodes[0] == nodes[1]
    close(found(x), expected(x), factor=16)


def test_compiled_fused_block_matches_torchvision(close):
    theirs, x = made("basic"), batch()
    mine, dy = fused(theirs), torch.randn(x.shape).double()
    torch._dynamo.reset()
    mine.compile(backend="aot_eager", fullgraph=True)
    results = []
    for block in (mine, theirs):
        y = block(x)
        results.append((y.detach(), torch.autograd.grad(y, [*block.parameters()], dy)))
    close(*results, factor=16)
