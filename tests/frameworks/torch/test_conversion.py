"""`convert` and `revert`: what changes in a model, what does not, and what reports say."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import backnorm.torch
from backnorm.torch import convert, functional, revert

NAMES = "BatchNorm1d", "BatchNorm2d", "BatchNorm3d"
CLASSES = {
    getattr(nn, name): getattr(backnorm.torch, name)
    for name in (*NAMES, "LazyBatchNorm1d", "SyncBatchNorm")
}


class OtherSync(nn.SyncBatchNorm):
    """A layer of several processes that may do something else."""


class Other(nn.BatchNorm1d):
    """A subclass with a forward of its own."""

    def forward(self, input):
        return super().forward(input) + 1


def model():
    shared = nn.BatchNorm1d(3)
    return nn.ModuleDict(
        {
            "one": nn.Sequential(nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3)),
            "two": nn.BatchNorm2d(3, affine=False),
            "three": nn.BatchNorm3d(3, momentum=None, track_running_stats=False),
            "shared": shared,
            "again": nn.Sequential(shared),
            "other": Other(3),
            "sync": nn.SyncBatchNorm(3),
            "lazy": nn.LazyBatchNorm1d(),
            "group": nn.GroupNorm(1, 3),
        }
    )


def contents(net):
    """Return the identity, the class and the attributes of each module, by name."""
    # The name of a synchronised layer is for errors.
    attributes = {
        name: {key: value for key, value in vars(module).items() if key != "name"}
        for name, module in net.named_modules()
    }
    return {n: (id(m), type(m), attributes[n]) for n, m in net.named_modules()}


@pytest.mark.parametrize("fuse", [False, True])
def test_conversion_changes_classes_alone_and_is_reverted(fuse):
    net = model()
    before = contents(net)
    assert convert(net, fuse=fuse) is net
    assert contents(net) == {
        name: (identity, CLASSES.get(cls, cls), attributes)
        for name, (identity, cls, attributes) in before.items()
    }
    assert revert(net) is net
    assert contents(net) == before


def test_convert_and_revert_keep_user_attribute():
    layer = nn.BatchNorm1d(3)
    layer.name = "first"
    assert revert(convert(layer)).name == "first"


@pytest.mark.parametrize("name", NAMES)
def test_layer_that_is_the_model_is_converted_and_reverted(name):
    module = getattr(nn, name)(3)
    for _ in range(2):
        assert convert(module) is module
        assert type(module) is getattr(backnorm.torch, name)
    assert type(revert(module)) is getattr(nn, name)


def trained(change, channels_last=False):
    """Train a small network that is changed after its optimizer was made, and evaluate it."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Flatten(), nn.Linear(24, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4),
    ).double()  # fmt: skip
    if channels_last:
        net = net.to(memory_format=torch.channels_last)
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), []
    net[4].eval()
    change(net)
    assert not net[4].training
    for _ in range(6):
        x, labels = torch.randn(16, 1, 6, 6).double(), torch.randint(4, (16,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net.train()(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, net.eval()(x).detach(), dict(net.state_dict())


@pytest.mark.usefixtures("one_thread")
def test_training_of_converted_model_matches_pytorch(close):
    expected = trained(lambda net: net)
    for fuse in (False, True):
        close(trained(lambda net, fuse=fuse: convert(net, fuse=fuse)), expected, factor=1e4)
    last = trained(lambda net: convert(net, fuse=True), channels_last=True)
    close(last, expected, factor=1e4)


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("copied", [False, True])
def test_parametrized_layer_keeps_parametrization(copied, close):
    module = nn.BatchNorm1d(3)
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


@pytest.mark.parametrize("removed", [False, True])
def test_synchronised_parametrized_layer_is_reverted(removed):
    layer = nn.BatchNorm1d(3)
    parametrize.register_parametrization(layer, "weight", Double())
    assert isinstance(convert(layer, sync=True), backnorm.torch.SyncBatchNorm)
    if removed:
        parametrize.remove_parametrizations(layer, "weight")
    assert isinstance(revert(layer), nn.BatchNorm1d)
    assert (type(layer) is nn.BatchNorm1d) is removed
    assert parametrize.is_parametrized(layer) is not removed
    assert layer(torch.randn(4, 3)).shape == (4, 3)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_lazy_layer_is_converted_before_and_after_first_batch(name, fuse, close, monkeypatch):
    calls, original, lazy = [], functional.batch_norm, getattr(nn, f"Lazy{name}")
    monkeypatch.setattr(
        functional, "batch_norm", lambda *a, **k: calls.append(1) or original(*a, **k)
    )
    theirs, mine = (nn.Sequential(lazy(momentum=0.3), nn.ReLU()).double() for _ in range(2))
    assert type(revert(convert(mine, fuse=fuse))[0]) is lazy
    (report,) = reports_of(mine, fuse=fuse)
    assert ("fused after its first batch" in report.reason) is fuse
    assert type(mine[0]) is getattr(backnorm.torch, lazy.__name__)
    for k in range(3):
        x, dy = torch.randn(2, 4, 3, *(5, 2, 2)[: int(name[-2])]).double()
        results = []
        for net in (mine, theirs):
            y = net(x)
            results.append((y, *torch.autograd.grad(y, list(net.parameters()), dy)))
        close(*results)
        close(mine.state_dict(), theirs.state_dict())
        assert type(mine[0]) is getattr(backnorm.torch, name)
        if k == 0:
            assert calls == [1]
        if k == 1:
            revert(mine)
            assert [type(module) for module in mine] == [type(module) for module in theirs]
            convert(mine, fuse=fuse)
    assert (mine[0].activation is not None) is fuse


def reports_of(net, **options):
    reports = []
    convert(net, report=reports.append, **options)
    return reports


class Steps(nn.Module):
    """Layers with every outcome of a conversion."""

    def __init__(self):
        super().__init__()
        a, b, c, d, e = (nn.BatchNorm1d(3) for _ in "abcde")
        self.steps = nn.Sequential(a, nn.ReLU(), b, nn.GELU(), c, Other(3), d, nn.SiLU())
        self.alone = e


def test_report_names_outcome_and_reason_of_each_layer():
    net = Steps()
    net.steps[6].register_forward_hook(lambda *_: None)
    reports = reports_of(net, fuse=True)
    assert [report.name for report in reports] == [
        *(f"steps.{k}" for k in (0, 2, 4, 5, 6)), "alone"
    ]  # fmt: skip
    assert [report.fused for report in reports] == [True, *[False] * 5]
    reasons = (
        "a ReLU", "no activation that can be fused", "no activation that can be fused",
        "may do something else", "hooks", r"no plain torch\.nn\.Sequential has .*; name the pair",
    )  # fmt: skip
    for report, reason in zip(reports, reasons, strict=True):
        assert re.search(reason, report.reason)
    assert str(reports[0]) == (
        "steps.0: torch.nn.BatchNorm1d -> backnorm.torch.BatchNorm1d, fused with a ReLU"
    )
    assert "left as it is: its class" in str(reports[3])
    again = reports_of(net, fuse=True)
    assert [(r.fused, r.reason) for r in again] == [(r.fused, r.reason) for r in reports]
    assert str(again[0]) == "steps.0: backnorm.torch.BatchNorm1d, fused with a ReLU"
    # A fused layer stays fused, and is reported so.
    assert [report.fused for report in reports_of(net)] == [True, *[False] * 5]
    assert not any(report.fused or report.reason for report in reports_of(Steps())[:3])
    (own,) = reports_of(backnorm.torch.BatchNormReLU1d(3))
    assert str(own) == (
        "the model itself: backnorm.torch.BatchNormReLU1d, fused with a ReLU of its own"
    )


@pytest.mark.parametrize("fuse", [False, True])
def test_report_of_a_parametrized_layer_names_the_class_without_parametrizations(fuse):
    net = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU())
    parametrize.register_parametrization(net[0], "weight", Double())
    (report,) = reports_of(net, fuse=fuse)
    outcome = ", not fused: it is parametrized" if fuse else ""
    assert str(report) == f"0: torch.nn.BatchNorm1d -> backnorm.torch.BatchNorm1d{outcome}"


def test_model_without_convertible_layer_warns():
    with pytest.warns(backnorm.torch.ConversionWarning, match="no module of the model"):
        convert(nn.Sequential(nn.Linear(3, 3)))
    reports = []
    text = r"1: .*OtherSync, left .* not PyTorch's own"
    with pytest.warns(backnorm.torch.ConversionWarning, match=text):
        convert(nn.Sequential(Other(3), OtherSync(3)), report=reports.append)
    assert [report.name for report in reports] == ["0", "1"]
    # The suite turns other warnings into errors.
    convert(convert(nn.BatchNorm1d(3)))


@pytest.mark.parametrize("call", [convert, revert])
def test_argument_that_is_not_a_module_raises(call):
    with pytest.raises(TypeError, match=r"^model: must be a torch\.nn\.Module; got \[Batch"):
        call([nn.BatchNorm1d(3)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"report": True}, "report: must be callable, or None; got True of type bool"),
        ({"fuse": "yes"}, "fuse: must be a boolean or pairs of names; got 'yes' of"),
        ({"fuse": 1}, "fuse: must be a boolean or pairs of names; got 1 of"),
        ({"reproducible": 1}, "reproducible: must be a boolean; got 1 of"),
        ({"process_group": 1}, "process_group: must be None without sync=True; got 1 of"),
    ],
)
def test_option_of_another_type_raises_and_changes_nothing(options, message):
    net = nn.BatchNorm1d(3)
    with pytest.raises(backnorm.ArgumentError, match=f"^{message}"):
        convert(net, **options)
    assert type(net) is nn.BatchNorm1d
