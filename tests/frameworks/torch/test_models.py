"""Models of timm and torchvision, converted: losses, gradients and statistics stay what they were.

A few run always; the smallest model of each family that has batch normalisation in the sweep. It
prints a table, a line a model.

All is computed in float64, and what may differ is roundings. How far a model makes those grow is
measured on itself: it runs again with its images moved by a rounding. Each of our layers may change
results by some times that.
"""

from __future__ import annotations

import copy

import pytest
import torch

from backnorm.torch import convert, revert

from .model_families import FEW, QUICK, TIMM, TORCHVISION, made

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDING = torch.finfo(torch.float64).eps
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def tensors_in(value):
    """Return the tensors of what a model returns, in a fixed order."""
    leaves = torch.utils._pytree.tree_leaves(value)
    return [each for each in leaves if isinstance(each, torch.Tensor)]


def weights_like(tensors):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in tensors]


def results(net, state, inputs, call=None):
    """Train on a batch, then evaluate: loss, outputs, gradients, running statistics, by name."""
    net.load_state_dict(state)
    inputs = [each.clone().requires_grad_() for each in inputs]
    found = {}
    for training in (True, False):
        net.train(training)
        # For dropout.
        torch.manual_seed(7)
        outputs = tensors_in((net if call is None else call)(*inputs))
        assert outputs
        loss = sum((y * dy).sum() for y, dy in zip(outputs, weights_like(outputs), strict=True))
        wanted = {f"input {k}": each for k, each in enumerate(inputs)} | dict(
            net.named_parameters()
        )
        wanted = {name: each for name, each in wanted.items() if each.requires_grad}
        gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        mode = "training" if training else "evaluation"
        found[f"{mode}: loss"] = loss.detach()
        found |= {f"{mode}: output {k}": y.detach() for k, y in enumerate(outputs)}
        found |= {
            f"{mode}: gradient of {name}": gradient
            for name, gradient in zip(wanted, gradients, strict=True)
            if gradient is not None
        }
        found |= {f"{mode}: {name}": each.clone() for name, each in net.named_buffers()}
    return found


def deviation(ours, theirs):
    """Return the largest difference, relative to the largest element of its tensor, and whose."""
    assert ours.keys() == theirs.keys()
    worst = 0.0, ""
    # Of a gradient that is 0 but for roundings only the size beside the others tells.
    largest = max(float(each.abs().max()) for name, each in theirs.items() if "gradient" in name)
    for name, expected in theirs.items():
        found = ours[name]
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        if not expected.numel():
            continue
        if not expected.is_floating_point():
            assert torch.equal(found, expected), name
            continue
        assert bool(found.isfinite().all()), name
        scale = float(expected.abs().max())
        if "gradient" in name:
            scale = max(scale, 1e-6 * largest)
        difference = float((found - expected).abs().max()) / (scale or 1.0)
        worst = max(worst, (difference, name))
    return worst


def compare(library, name, size, capsys, layout="contiguous", backend=None):
    """Compare a model with what `convert` makes of it; print a line of the table."""
    net, inputs = made(library, name, size)
    if layout == "channels_last":
        net = net.to(memory_format=torch.channels_last)
        inputs = [each.contiguous(memory_format=torch.channels_last) for each in inputs]
    # With the versions that it carries.
    state = copy.deepcopy(net.state_dict())
    types = [type(module) for module in net.modules()]
    theirs = results(net, state, inputs)
    moved = [each * (1 + ROUNDING * torch.randn_like(each).sign()) for each in inputs]
    growth = max(deviation(results(net, state, moved), theirs)[0], ROUNDING)
    for fuse in (False, True):
        reports = []
        convert(net, fuse=fuse, report=reports.append)
        call = None
        if backend is not None:
            torch._dynamo.reset()
            call = torch.compile(net, backend=backend)
        found, where = deviation(results(net, state, inputs, call), theirs)
        converted = [each for each in reports if each.after.startswith("backnorm.")]
        fused = sum(each.fused for each in reports)
        allowed = 16 * growth * (1 + len(converted))
        with capsys.disabled():
            options = " ".join(
                [layout, *([backend] if backend else []), *(["fuse"] if fuse else [])]
            )
            print(
                f"\n{library:11} {name:32} {options:18} layers {len(reports):3} "
                f"converted {len(converted):3} fused {fused:3} difference {found:.1e} "
                f"of {allowed:.1e} {'equal' if found <= allowed else 'DIFFERENT: ' + where}",
                end="",
            )
        assert converted
        # What is allowed tells a wrong gradient from a right one.
        assert allowed < 1e-4
        assert found <= allowed, where
    assert [type(module) for module in revert(net).modules()] == types


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize(
    ("library", "name", "size"),
    [QUICK[0], *(pytest.param(*model, marks=pytest.mark.long) for model in QUICK[1:])],
)
def test_quick_model_after_conversion_matches_pytorch(library, name, size, layout, capsys):
    compare(library, name, size, capsys, layout)


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize(("library", "name", "size"), [*TORCHVISION, *TIMM])
def test_model_of_each_family_after_conversion_matches_pytorch(library, name, size, layout, capsys):
    if layout == "channels_last" and len(size) == 5:
        pytest.skip("of videos there is channels_last_3d, which modules have no function for")
    compare(library, name, size, capsys, layout)


# Inductor uses what PyTorch deprecates.
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script", "ignore:`torch._prims_common.check` is deprecated"
)
@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("library", "name", "size", "backend"),
    # Inductor takes minutes for a model.
    [(*model, "aot_eager") for model in [*TORCHVISION, *TIMM]]
    + [(*model, "inductor") for model in FEW],
)
def test_compiled_model_after_conversion_matches_pytorch(library, name, size, backend, capsys):
    compare(library, name, size, capsys, backend=backend)
