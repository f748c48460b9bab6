"""`compare` and `backnorm compare-model`: what they measure, decide, refuse and leave unchanged."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import backnorm
import backnorm.torch
from backnorm.cli import app
from backnorm.torch import MeasuredStep, ModelComparison, comparison

BATCH = torch.randn(4, 3, 8, 8)

pytestmark = pytest.mark.usefixtures("one_thread")


def made():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5),
        nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4),
    )  # fmt: skip


def compare(model, batch=BATCH, loss=None, seconds=1e-3, **options):
    return backnorm.torch.compare(model, batch, loss, seconds=seconds, **options)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.8, 0.99, "keep"),
        (0.8, 1.0, "no difference measured"),
        (1.0, 1.2, "no difference measured"),
        (1.01, 1.2, "revert"),
        (None, None, "not timed"),
    ],
)
def test_verdict_follows_interval_of_ratio(low, high, verdict):
    found = ModelComparison((), 2, ratio_p20=low, ratio_p80=high)
    assert found.verdict == verdict
    assert str(found).splitlines()[-1] == f"verdict: {verdict}"


def test_text_of_comparison_shows_steps_share_ratio_and_reasons():
    theirs = MeasuredStep("torch", "contiguous", 0, 0, 1e-6, "", 0.1, 1.0, 2_000_000)
    ours = replace(theirs, variant="backnorm-fused", layers=20, fused=16, seconds=0.08, ratio=0.8)
    wrong = MeasuredStep("backnorm", "contiguous", 20, 0, 2.0, "gradients are 2 off")
    lines = str(
        ModelComparison((theirs, wrong, ours), 2, theirs, ours, 0.25, 0.8, 0.7, 0.9, 50)
    ).splitlines()
    assert lines[1].split() == [
        "contiguous", "PyTorch's", "0", "0", "100.0", "ms", "1.00", "2.0", "MB", "1.0e-06",
    ]  # fmt: skip
    assert lines[2].endswith("2.0e+00  gradients are 2 off")
    assert "16" in lines[3]
    text = "\n".join(lines[4:])
    for part in (
        "0.25 of the fastest",
        "takes 0.800 (0.700 to 0.900; 50 turns, 2 threads)",
        "allocator",
    ):
        assert part in text


def test_compare_measures_all_variants_in_both_layouts():
    found = compare(made())
    layouts = ("contiguous",) * 3 + ("channels_last",) * 3
    assert tuple(step.layout for step in found.steps) == layouts
    assert [step.variant for step in found.steps[:3]] == ["torch", "backnorm", "backnorm-fused"]
    assert [(step.layers, step.fused) for step in found.steps[:3]] == [(0, 0), (2, 0), (2, 1)]
    for step in found.steps:
        assert step.detail == ""
        assert step.error < 0.05
        # The gradients alone.
        parameters = sum(each.nbytes for each in made().parameters())
        assert step.memory > parameters
        assert step.seconds > 0
    assert found.theirs.ratio == 1.0
    assert 0 < found.share < 1
    assert found.ratio_p20 <= found.ratio <= found.ratio_p80
    assert found.turns >= 10


def test_compare_of_flat_batch_measures_one_layout():
    found = compare(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), torch.randn(6, 5))
    assert {step.layout for step in found.steps} == {"contiguous"}


def test_ratio_compares_fastest_layout_of_each(monkeypatch):
    """In each layout alone, backnorm's layers are faster."""
    seconds = {(False, True): 4.0, (False, False): 2.5, (True, True): 3.0, (True, False): 2.0}

    def turn(step):
        weight = step._parameters[0]
        return [seconds[step.layers > 0, weight.is_contiguous()] + step.fused]

    monkeypatch.setattr(comparison, "_turn", turn)
    found = compare(made())
    assert (found.theirs.layout, found.theirs.seconds) == ("channels_last", 2.5)
    assert (found.ours.variant, found.ours.layout) == ("backnorm", "channels_last")
    assert (found.ratio, found.verdict) == (0.8, "keep")
    assert [step.ratio for step in found.steps] == [1.0, 0.75, 1.0, 1.0, 0.8, 1.2]
    # A layout that slows PyTorch's step is no gain.
    seconds[True, False] = 2.6
    assert compare(made()).verdict == "revert"


def test_compare_leaves_model_batch_and_random_numbers_unchanged():
    model, batch = made(), BATCH.clone()
    model[1].eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    kept, classes = copy.deepcopy(model.state_dict()), [type(each) for each in model.modules()]
    before = torch.get_rng_state()
    compare(model, batch)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(batch, BATCH)
    assert [type(each) for each in model.modules()] == classes
    assert [each.training for each in model] == [True, False, True, True, True, True]
    assert model[3].p == 0.5
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[name])
        assert value.dim() < 4 or value.is_contiguous()
    assert [each.grad is None for each in model.parameters()] == [False] + [True] * 7
    assert model[0].weight.grad.eq(1).all()


def test_compare_of_converted_model_has_pytorch_layers_first():
    model = backnorm.torch.convert(made(), fuse=True)
    found = compare(model)
    assert [(step.layers, step.fused) for step in found.steps[:3]] == [(0, 0), (2, 0), (2, 1)]
    assert type(model[1]) is backnorm.torch.BatchNorm2d


class Named(nn.Module):
    """A model with several inputs, whose output is a dictionary or a tuple."""

    def __init__(self, output):
        super().__init__()
        self.layers, self.output = made(), output

    def forward(self, image, factor):
        y = self.layers(image) * factor
        return self.output(y)


@pytest.mark.covering(1)
@pytest.mark.parametrize("output", [lambda y: {"out": y, "size": 3}, lambda y: (y, [y[:1]])])
@pytest.mark.parametrize(
    "batch", [(BATCH, torch.rand(1)), [BATCH, 2.0], {"factor": 2.0, "image": BATCH}]
)
def test_compare_accepts_nested_inputs_and_outputs(output, batch):
    assert compare(Named(output), batch).ratio > 0


def test_loss_gets_output_in_type_of_model():
    target, types = torch.randn(4, 4, 4, 4), set()

    def loss(output):
        types.add(output.dtype)
        return nn.functional.mse_loss(output, target)

    found = compare(made(), loss=loss)
    assert types == {torch.float32}
    assert all(step.error < 0.05 for step in found.steps)


class Paired(nn.Module):
    """A model whose ReLU can be fused with the layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x):
        return self.relu(self.bn(self.conv(x)))


class Shared(Paired):
    """A model that also uses the input of its ReLU, so a fusion of the two is wrong."""

    def forward(self, x):
        y = self.bn(self.conv(x))
        return self.relu(y) + 2 * y


def test_compare_refuses_wrong_pair():
    with pytest.raises(backnorm.ArgumentValueError, match=r"^fuse: has the pair .* other results"):
        compare(Shared(), fuse=[("bn", "relu")])


def test_compare_fuses_right_pair():
    found = compare(Paired(), fuse=[("bn", "relu")])
    assert [(step.detail, step.fused) for step in found.steps] == 2 * [("", 0), ("", 0), ("", 1)]


class Disagreeing(nn.Module):
    """A model that computes something else with layers of backnorm."""

    def __init__(self, factor):
        super().__init__()
        self.conv, self.bn, self.factor = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), factor

    def forward(self, x):
        y = self.bn(self.conv(x))
        return y * self.factor if isinstance(self.bn, backnorm.torch.BatchNorm2d) else y


@pytest.mark.parametrize("factor", [3.0, float("nan")])
def test_compare_does_not_time_steps_with_wrong_gradients(factor):
    found = compare(Disagreeing(factor))
    assert found.verdict == "not timed"
    assert [step.seconds for step in found.steps] == [None] * 6
    for step in found.steps:
        assert ("gradients are" in step.detail) == (step.variant != "torch")
    assert "gradients are" in str(found)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"model": 3}, TypeError, "model: must be a torch.nn.Module"),
        ({"model": made().eval()}, ValueError, "model: must be in training mode.*model.train()"),
        ({"model": nn.Linear(8, 8)}, ValueError, "model: has no batch normalisation"),
        ({"model": made().to("meta")}, ValueError, "model: must be on the CPU.*device meta"),
        ({"model": nn.Sequential(nn.LazyConv2d(3, 3), nn.BatchNorm2d(3))}, ValueError,
         "model: has lazy layers.*call it on a batch"),
        ({"model": backnorm.torch.BatchNormReLU2d(3)}, ValueError, "model: has layers with an act"),
        ({"model": nn.Sequential(made(), nn.Linear(7, 1))}, ValueError,
         "model: fails in a training step on batch in float64.*RuntimeError: mat1"),
        ({"batch": BATCH.to("meta")}, ValueError, "batch: must be on the CPU.*device meta"),
        ({"batch": {"x": "an image"}}, TypeError, "batch: must be a tensor"),
        ({"loss": 1.0}, TypeError, "loss: must map"),
        ({"loss": lambda y: y}, TypeError, "loss: must return a scalar tensor"),
        ({"loss": lambda y: y.sum().item()}, TypeError, "loss: must return a scalar tensor"),
        ({"model": Named(lambda y: {"size": 3}), "batch": (BATCH, 1.0)}, ValueError,
         "loss: must be given, because the output of model has no tensor"),
        ({"fuse": [("1", "3")]}, ValueError, "fuse: has the pair.*Dropout is not an activation"),
        ({"seconds": 0.0}, ValueError, "seconds: must be positive"),
    ],
)  # fmt: skip
def test_compare_with_bad_argument_raises_error_that_names_it(change, error, says):
    arguments = {"model": made(), **change}
    with pytest.raises(error, match=says) as raised:
        compare(**arguments)
    assert isinstance(raised.value, backnorm.BacknormError)


SOURCE = """
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    return model, torch.randn(4, 3, 8, 8), lambda y: y.square().mean()

def evaluated():
    return nn.BatchNorm2d(3).eval(), torch.randn(4, 3, 8, 8)

def raises():
    raise RuntimeError("no data")

def alone():
    return nn.BatchNorm2d(3)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def test_command_prints_json_with_verdict(file):
    done = subprocess.run(
        [sys.executable, "-m", "backnorm", "compare-model", f"{file}:make", "--json",
         "--seconds", "0.01"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert len(found["steps"]) == 6
    assert found["verdict"] in ("keep", "revert", "no difference measured")


@pytest.fixture
def main(monkeypatch, capsys):
    """Call the command in this process; return (status, stdout, stderr)."""
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["backnorm", "compare-model", *arguments])
        with pytest.raises(SystemExit) as end:
            app.main()
        return (end.value.code or 0, *capsys.readouterr())

    return call


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("evaluated", "model: must be in training mode"),
        ("raises", "RuntimeError: no data (mine.py:13)"),
        ("alone", "expected (model, batch) or (model, batch, loss)"),
        ("absent", "has no absent"),
    ],
)
def test_command_with_bad_function_exits_with_2_and_one_line(main, file, function, says):
    status, out, err = main(f"{file}:{function}")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("backnorm: error: ")
    assert says in err


@pytest.mark.parametrize(("detail", "status"), [("", 0), ("gradients are 2 off", 1)])
def test_command_with_wrong_gradients_exits_with_1(main, file, monkeypatch, detail, status):
    step = MeasuredStep("backnorm", "contiguous", 1, 0, 2.0, detail)
    monkeypatch.setattr(backnorm.torch, "compare", lambda *_, seconds: ModelComparison((step,), 2))
    assert main(f"{file}:make") == (status, f"{ModelComparison((step,), 2)}\n", "")
