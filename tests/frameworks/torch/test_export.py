"""Exported programs: `torch.export`, packages of AOTInductor, `torch.jit.trace` and `script`."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
import subprocess
import sys

import pytest
import torch

import backnorm.torch

from .conftest import PAIRS, Block

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated"),
    # Of AOTInductor.
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated"),
]

BATCH = torch.export.Dim("batch", min=2, max=64)


class Branching(Block):
    def __init__(self):
        super().__init__()
        self.act = torch.nn.Hardtanh(0.0, 1.25)

    def forward(self, x):
        out = self.act(self.bn1(self.conv(x)))
        if self.training:
            out = out * 2
        out = torch.relu(self.bn2(out) + x)
        return self.bn3(out)


def reloaded(model):
    kept = io.BytesIO()
    torch.save(model, kept)
    kept.seek(0)
    return torch.load(kept, weights_only=False)


WAYS = {
    "as it is": lambda model: model,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "saved and loaded": reloaded,
    "in the other mode": lambda model: model.train(not model.training),
    "frozen": lambda model: model.requires_grad_(False),
}


def models(fuse, training, way="as it is"):
    """Return a converted model that has not run, and the same of PyTorch's layers."""
    theirs = Branching().double().train(training)
    # Not what they begin with.
    for buffer in theirs.buffers():
        buffer.copy_(torch.rand(buffer.shape).add(0.5) if buffer.dim() else buffer)
    options = {"fuse": PAIRS, "example": images()} if fuse else {}
    ours = backnorm.torch.convert(copy.deepcopy(theirs), **options)
    ours = WAYS[way](ours)
    return ours, theirs.train(ours.training)


def images(size=4):
    return torch.randn(size, 3, 5, 5).double()


def exported(model, strict):
    program = torch.export.export(model, (images(),), strict=strict, dynamic_shapes=({0: BATCH},))
    kept = io.BytesIO()
    torch.export.save(program, kept)
    kept.seek(0)
    return torch.export.load(kept)


def compare(program, theirs, close):
    """Compare values, gradients and statistics, in batches of other sizes."""
    module = program.module()
    for size in (2, 9):
        x, dy = images(size), images(size)
        results = []
        for call in (module, theirs):
            leaf = x.clone().requires_grad_()
            y = call(leaf)
            results.append((y, torch.autograd.grad(y, leaf, dy)))
        close(*results, factor=16)
    # A program may leave out buffers that it does not use, as counters where it does not train.
    expected, moved = dict(theirs.named_buffers()), dict(module.named_buffers())
    assert all(name in moved or name.endswith("num_batches_tracked") for name in expected)
    close(moved, {name: expected[name] for name in moved})


@pytest.mark.covering(1)
@pytest.mark.parametrize(("strict", "gradient"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fuse", [True, False])
def test_exported_model_matches_pytorch_before_first_call(strict, gradient, training, fuse, close):
    ours, theirs = models(fuse, training)
    # What is exported without gradients has them all the same, as with PyTorch's layers.
    with torch.set_grad_enabled(gradient):
        program = exported(ours, strict)
    compare(program, theirs, close)
    names = [str(node.target) for node in program.graph.nodes]
    assert names.count("aten.relu.default") == names.count("aten.hardtanh.default") == 1
    if training:
        assert sum(name.startswith("backnorm.batch_norm") for name in names) == 3
    else:
        assert names.count("aten.batch_norm.default") == 3
        assert not any(name.startswith("backnorm") for name in names)


@pytest.mark.parametrize("strict", [True, False])
def test_export_of_evaluation_with_arithmetic_has_operator(strict, close):
    ours, theirs = models(False, False)
    backnorm.torch.convert(ours, arithmetic="float64")
    program = exported(ours, strict)
    compare(program, theirs, close)
    names = [str(node.target) for node in program.graph.nodes]
    assert names.count("backnorm.batch_norm_inference.default") == 3


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_export_and_trace_of_mixed_types_match_layer(close):
    ours = backnorm.torch.BatchNorm1d(3, dtype=torch.bfloat16).eval()
    ours.running_mean, ours.running_var = ours.running_mean.float(), ours.running_var.float()
    x = torch.randn(4, 3).bfloat16()
    close(torch.export.export(ours, (x,)).module()(x), ours(x))
    close(torch.jit.trace(ours, x)(x), ours(x))


@pytest.mark.covering(0)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "as it is"])
def test_exported_model_after_copy_or_change_matches_pytorch(way, close):
    for strict, training in ((True, True), (False, False)):
        ours, theirs = models(True, training, way)
        compare(exported(ours, strict), theirs, close)


def in_another_process(code, *arguments):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


LOAD = """
import sys, torch
if sys.argv[1] == "imported":
    import backnorm.torch
x, y = torch.load(sys.argv[3])
if sys.argv[2].endswith("package.pt2"):
    call = torch._inductor.aoti_load_package(sys.argv[2])
elif sys.argv[2].endswith("trace.pt"):
    call = torch.jit.load(sys.argv[2])
else:
    call = torch.export.load(sys.argv[2]).module()
torch.testing.assert_close(call(x), y, rtol=1e-12, atol=1e-12)
"""


def check_in_another_process(path, theirs, tmp_path, message=None):
    """Run a program with backnorm and without; without it `message` is what PyTorch says."""
    x = images(7)
    torch.save((x, theirs(x).detach()), tmp_path / "expected.pt")
    done = in_another_process(LOAD, "imported", path, tmp_path / "expected.pt")
    assert done.returncode == 0, done.stderr
    done = in_another_process(LOAD, "", path, tmp_path / "expected.pt")
    assert done.returncode == (0 if message is None else 1), done.stderr
    assert message is None or message in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("arithmetic", [None, "float64"])
def test_exported_program_runs_in_another_process(arithmetic, tmp_path):
    ours, theirs = models(True, False)
    backnorm.torch.convert(ours, arithmetic=arithmetic)
    program = torch.export.export(ours, (images(),), dynamic_shapes=({0: BATCH},))
    torch.export.save(program, tmp_path / "program.pt2")
    message = None if arithmetic is None else "Please import the custom op"
    check_in_another_process(tmp_path / "program.pt2", theirs, tmp_path, message)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_trace_runs_in_another_process(tmp_path):
    ours, theirs = models(True, False)
    torch.jit.save(torch.jit.trace(ours, images()), tmp_path / "trace.pt")
    check_in_another_process(tmp_path / "trace.pt", theirs, tmp_path)


class WithStatistics(torch.nn.Module):
    """Returns the running statistics, too: a package does not show what it has."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        y = self.model(x)
        return y, self.model.bn1.running_mean.clone(), self.model.bn3.running_var.clone()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor wants a C++ compiler")
@pytest.mark.parametrize("training", [True, False])
def test_aotinductor_package_matches_pytorch(training, tmp_path, close):
    ours, theirs = models(True, training)
    path = str(tmp_path / "package.pt2")
    ours = WithStatistics(ours) if training else ours
    with torch.no_grad():
        program = torch.export.export(ours, (images(),), dynamic_shapes=({0: BATCH},))
        torch._inductor.aoti_compile_and_package(program, package_path=path)
        call = torch._inductor.aoti_load_package(path)
        expected = WithStatistics(theirs) if training else theirs
        for size in (2, 9):
            x = images(size)
            close(call(x), expected(x), factor=16)
        if not training:
            check_in_another_process(path, theirs, tmp_path)


@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("gradient", [True, False])
def test_torch_jit_trace_matches_pytorch(training, fuse, gradient, close):
    ours, theirs = models(fuse, training)
    with torch.set_grad_enabled(gradient):
        # PyTorch traces again to check, without gradients.
        traced = torch.jit.trace(ours, images(), check_trace=True)
    theirs.load_state_dict(ours.state_dict())
    kept = io.BytesIO()
    torch.jit.save(traced, kept)
    kept.seek(0)
    for call in (traced, torch.jit.load(kept)):
        reference = copy.deepcopy(theirs)
        x, dy = images(7).requires_grad_(), images(7)
        results = [(y := each(x), torch.autograd.grad(y, x, dy)) for each in (call, reference)]
        close(*results, factor=16)
        close(list(call.state_dict().values()), list(reference.state_dict().values()))


@pytest.mark.parametrize(
    "name",
    ["batch_norm", "BatchNorm2d", "BatchNormReLU2d", "SyncBatchNorm", "LazyBatchNorm2d"],
)  # fmt: skip
def test_torch_jit_script_of_function_or_module_raises(name):
    subject = getattr(backnorm.torch, name)
    if isinstance(subject, type):
        module = subject() if "Lazy" in name else subject(3)
        subjects = module, torch.nn.Sequential(module)
    else:

        def caller(x: torch.Tensor):
            return subject(x, None, None)

        subjects = subject, caller
    for each in subjects:
        with pytest.raises(backnorm.BacknormError, match=r"cannot compile .*revert\(model\)"):
            torch.jit.script(each)
