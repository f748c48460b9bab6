"""`backnorm verify` judges modules of PyTorch: both passes, running statistics, parameters."""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import backnorm.conformance.pytest as bn
from backnorm.cli.app import app
from backnorm.conformance.ladder import RUNGS
from backnorm.conformance.layers import layer_ladder, layer_recipe, layer_recipes
from backnorm.conformance.verify.cases import Selection
from backnorm.conformance.verify.findings import findings
from backnorm.conformance.verify.job import Job
from backnorm.conformance.verify.options import Options
from backnorm.conformance.verify.run import verify
from backnorm.conformance.verify.subjects import subject_of
from backnorm.errors import ArgumentValueError
from tests.support.required import require

from .draws import verified_with
from .in_process import verified

FILE = Path(__file__).with_name("layer_subjects.py")
LAYER = Selection(dtypes=("float32",), only=("diagnostic-*",), operation="layer")
RIGHT = ["Right", "OtherOptions", "instance", "RightFunction"]
# What the first finding says of each wrong module.
WRONG = {
    "WithoutGamma": "y is not multiplied by gamma",
    "WithoutParameters": "y is not multiplied by gamma and y lacks beta",
    "WithoutBeta": "y lacks beta",
    "LargerEpsilon": "epsilon is 0.0001, not 1e-05, which was passed",
    "BiasedRunning": "the running variance averages variances that are divided by M, not by M - 1",
    "KeepsRunning": "the running statistics are not updated",
    "SwappedMomentum": "momentum and 1 - momentum are swapped in the running statistics",
    "BatchInEvaluation": "evaluation has the statistics of the batch",
    "RunningInTraining": "the running statistics are used instead of those of the batch",
    "LacksProjection": "dx lacks the term along x - mean",
    "LacksProjectionFunction": "dx lacks the term along x - mean",
}
# KernelBench/level1/33_BatchNorm.py, the only task of level 1 with batch normalisation, but with a
# smaller x; and a solution of it.
KERNEL_BENCH = """\
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, num_features: int):
        super().__init__()
        self.bn = nn.BatchNorm2d(num_features=num_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(x)

class ModelNew(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(
            x, self.bn.running_mean, self.bn.running_var, {gamma}, self.bn.bias,
            self.training, self.bn.momentum, self.bn.eps,
        )

batch_size, features, dim1, dim2 = 4, 16, 8, 8

def get_inputs():
    return [torch.rand(batch_size, features, dim1, dim2)]

def get_init_inputs():
    return [features]
"""


def kernel_bench_passes(task):
    """Whether y is right by the check of KernelBench, src/kernelbench/eval.py: five trials of fresh
    modules, and in float32 a tolerance of 1e-4.
    """
    import torch

    known = runpy.run_path(task)
    modules = []
    for name in ("Model", "ModelNew"):
        torch.manual_seed(42)
        modules.append(known[name](*known["get_init_inputs"]()))
    passes = []
    with torch.no_grad():
        for trial in range(5):
            torch.manual_seed(trial)
            inputs = known["get_inputs"]()
            y, y_new = (module(*inputs) for module in modules)
            passes.append(torch.allclose(y, y_new, atol=1e-4, rtol=1e-4))
    return all(passes)


pytestmark = pytest.mark.peer


@pytest.fixture(autouse=True)
def _torch(monkeypatch):
    require(find_spec("torch"), "torch")
    import torch

    # The cases are small: a second thread would only wait, in this process and in workers.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def found_in(subject, selection=LAYER, *, run=verified, **options):
    results = run(Job(subject, selection, **options))
    return results, findings(results)


@pytest.mark.parametrize("name", RIGHT)
def test_verify_of_right_module_has_no_finding(name):
    only = "diagnostic-*", "training*", "evaluation*", "sums-of-*"
    selection = Selection(dtypes=("float32", "float64"), only=only, operation="layer")
    # A worker passes on the options by which a module is judged.
    run = verify if name == "OtherOptions" else verified
    results, found = found_in(f"{FILE}:{name}", selection, run=run)
    assert found == []
    assert {v.status for v in results.verdicts} <= {*RUNGS}
    assert {v.dtype for v in results.verdicts} == {"float32", "float64"}


@pytest.mark.parametrize("name", WRONG)
def test_verify_of_wrong_layer_names_its_mistake_in_one_finding(name):
    _, found = found_in(f"{FILE}:{name}")
    assert found[0].says == WRONG[name]
    # A parameter that is not used has no gradient.
    assert {each.id for each in found[1:]} <= {"not_written"}


def test_check_of_wrong_layer_names_its_mistake():
    from tests.conformance.layer_subjects import BatchInEvaluation, OtherOptions

    only = ["diagnostic-evaluation-*"]
    (case,) = bn.cases(operation="layer", dtypes=["float32"], only=only).args[1]
    case.values[0].check(OtherOptions)
    with pytest.raises(AssertionError, match="evaluation has the statistics of the batch"):
        case.values[0].check(BatchInEvaluation)


def test_check_of_function_as_layer_raises_error():
    (case, *_) = bn.cases(operation="layer", only=["diagnostic-*"]).args[1]
    with pytest.raises(ArgumentValueError, match=r"^--operation: does not fit"):
        case.values[0].check(lambda f: f)


def test_verify_of_autograd_function_with_unknown_parameter_is_bad_usage():
    done = CliRunner().invoke(app, ["verify", f"{FILE}:OfGroups"])
    assert done.exit_code == 2
    assert "SUBJECT: OfGroups.forward has an unknown parameter; got groups; exp" in done.output


@pytest.mark.parametrize("name", ["BatchNorm1d", "BatchNorm3d", "SyncBatchNorm", "InstanceNorm2d"])
def test_verify_of_pytorch_module_accepts_batch_normalisation_alone(name):
    _, found = found_in(f"torch.nn:{name}")
    assert bool(found) == name.startswith("Instance")


def test_verify_of_pytorch_module_passes_all_cases_of_all_types():
    results, found = found_in("torch.nn:BatchNorm2d", Selection(operation="layer"))
    assert found == []
    assert {v.status for v in results.verdicts} <= {*RUNGS}
    names = {v.case for v in results.verdicts}
    assert {"training-bfloat16-bfloat16-NCX", "grid-3x1023x2-float32-float32-NCX"} <= names
    # In 16 bits, results of a layer that keeps float32 statistics have no larger bounds.
    own = [v for v in results.verdicts if "-bfloat16-float32-" in v.case and v.output == "y"]
    assert {v.status for v in own} <= {"exact", "float64", "float32"}


@pytest.mark.parametrize(("gamma", "number"), [("self.bn.weight", 0), ("None", 2)])
def test_verify_of_kernel_bench_model_reports_ignored_gamma_that_kernel_bench_passes(
    gamma, number, tmp_path
):
    task = tmp_path / "33_BatchNorm.py"
    task.write_text(KERNEL_BENCH.format(gamma=gamma))
    assert kernel_bench_passes(task)
    _, found = found_in(f"{task}:ModelNew")
    assert len(found) == number
    if number:
        assert found[0].says == "y is not multiplied by gamma"


def test_verify_of_module_without_affine_is_judged_without_gamma(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch.nn import BatchNorm2d\nlayer = BatchNorm2d(3, affine=False)\n"
    )
    results, found = found_in(f"{tmp_path / 'mine.py'}:layer")
    assert found == []
    for parameter in ("gamma", "beta"):
        texts = {v.text for v in results.verdicts if v.output == f"d{parameter}"}
        assert texts == {f"the case has no {parameter}"}


def test_verify_of_module_with_two_layers_is_bad_usage(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\nlayer = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3))\n"
    )
    done = CliRunner().invoke(app, ["verify", f"{tmp_path / 'mine.py'}:layer"])
    assert done.exit_code == 2
    assert "SUBJECT: must have only one gamma; got 0.weight and 1.weight" in done.output


def test_verify_command_recognises_module_and_repeats_its_finding():
    done = CliRunner().invoke(
        app, ["verify", f"{FILE}:WithoutBeta", "--only", "*training-float32*"]
    )
    assert done.exit_code == 1
    assert "WithoutBeta as layer, float32, 2 cases" in done.output
    assert "--operation layer --only diagnostic-training-float32-float32-NCX" in done.output


def test_verify_of_module_as_backward_is_bad_usage():
    done = CliRunner().invoke(app, ["verify", f"{FILE}:Right", "--operation", "backward"])
    assert done.exit_code == 2
    assert "--operation: does not fit" in done.output


def test_verify_of_module_with_shape_has_this_shape():
    selection = Selection(dtypes=("float32",), operation="layer", shapes=((3, 5, 4),))
    results, found = found_in(f"{FILE}:Right", selection)
    assert found == []
    assert {v.case for v in results.verdicts} == {"shape-3x5x4-float32-float32-NCX"}


@pytest.mark.parametrize(
    ("name", "number"), [(f"{FILE}:WithoutBetaForEvenChannels", 1), ("torch.nn:BatchNorm2d", 0)]
)
def test_verify_of_module_with_budget_reports_drawn_case(name, number):
    require(find_spec("hypothesis"), "hypothesis")
    selection = Selection(dtypes=("float32",), operation="layer", only=("-",), seed=5)
    results = verified_with(Job(name, selection), draws=90 if number else 20)
    assert [each.id for each in findings(results)] == ["beta-left-out"] * number
    cases = {v.case for v in results.verdicts}
    assert cases
    assert not any(case.endswith("NXC") or "-eps" in case for case in cases)


def test_verify_of_module_refuses_more_than_32_times_its_channels():
    shapes = (2, 128, 2), (2, 129, 2)
    selection = Selection(dtypes=("float32",), operation="layer", shapes=shapes)
    results, _ = found_in(f"{FILE}:instance", selection)
    assert {v.case[:11] for v in results.verdicts if v.status == "refused"} == {"shape-2x129"}


def test_verify_of_module_with_tensors_of_another_framework_is_bad_usage():
    with pytest.raises(ArgumentValueError, match=r"^--tensors: must be those of the layer;"):
        subject_of(f"{FILE}:Right", "layer", Options(tensors="jax"))


# --- the ladder -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe",
    [layer_recipe(each) for each in layer_recipes() if "16" not in each.name],
    ids=lambda recipe: recipe.name,
)
def test_layer_ladder_equals_gradients_and_state_of_pytorch_in_float64(recipe):
    import torch

    case = recipe.case()
    layer = torch.nn.BatchNorm3d(case.data.x.shape[1], momentum=case.data.momentum).double()
    layer.train(case.training)
    named = {name: torch.tensor(array.astype(float)) for name, array in case.inputs.items()}
    with torch.no_grad():
        layer.weight.copy_(named["gamma"])
        layer.bias.copy_(named["beta"])
        layer.running_mean.copy_(named["running_mean"])
        layer.running_var.copy_(named["running_variance"])
    x = named["x"][..., None].requires_grad_()
    y = layer(x)
    y.backward(named["dy"][..., None])
    found = {"y": y[..., 0], "dx": x.grad[..., 0]}
    found |= {"dgamma": layer.weight.grad, "dbeta": layer.bias.grad}
    found |= {"running_mean": layer.running_mean, "running_variance": layer.running_var}
    ladder = layer_ladder(case)
    for name, tensor in found.items():
        exact = ladder.value(name).hi
        gap = np.abs(tensor.detach().numpy() - exact).max()
        assert gap <= 1e-11 * np.abs(exact).max(), name
