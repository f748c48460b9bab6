"""The decorator for tests of pytest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import backnorm
from backnorm.conformance import pytest as bn
from backnorm.conformance.battery import Recipe
from backnorm.conformance.verify.cases import Selection, selected
from backnorm.dialects import tensorflow
from backnorm.errors import ArgumentValueError
from tests.support.pages import ROOT

from . import right_subjects

WRONG_FILE = Path(__file__).parent / "wrong_subjects.py"
# Of backnorm, and of the tests, whose wrong kernels the subjects import.
SOURCES = f"{Path(backnorm.__file__).parents[1]}{os.pathsep}{ROOT}"


@bn.cases(dtypes=["float32"], only=["diagnostic-*", "realistic-*"])
def test_check_of_backnorm_passes(case):
    case.check(backnorm.batch_norm_backward)


[ONE] = (
    each.values[0]
    for each in bn.cases(dtypes=["float32"], only=["diagnostic-float32-float32-NCX"]).args[1]
)


def changed(change):
    def backward(*inputs, **options):
        return change(*backnorm.batch_norm_backward(*inputs, **options))

    return backward


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda dx, dgamma, dbeta: None, "no dx (missing or None); expected an array of shape (7"),
        (lambda dx, dgamma, dbeta: (dx, None, dbeta), "no dgamma (missing or None); expected"),
        (lambda dx, dgamma, dbeta: (dx, dgamma, dbeta, dx), "returned 4 outputs; expected dx, dg"),
        (lambda dx, dgamma, dbeta: (dx[:2], dgamma, dbeta), "dx has a wrong type or shape; got"),
        (
            lambda dx, dgamma, dbeta: (dx, dgamma, dbeta.astype("f8")),
            "; got float64 of shape (13,)",
        ),
        (lambda dx, dgamma, dbeta: (dx, dgamma, "text"), "object of type str; expected an array"),
    ],
)
def test_check_of_invalid_outputs_raises_assertion_error(change, text):
    with pytest.raises(AssertionError) as raised:
        ONE.check(changed(change))
    assert text in str(raised.value)


@pytest.mark.parametrize("only", ["diagnostic-*", "realistic-*", "no-gamma-*"])
def test_check_of_right_results_below_rung_names_no_mistake(only):
    for each in bn.cases(dtypes=["float32"], only=[only], at_least="exact").args[1]:
        with pytest.raises(AssertionError) as raised:
            each.values[0].check(right_subjects.serial)
        lines = str(raised.value).splitlines()[1:]
        assert all(re.match(r"d(x|gamma|beta)\[[\d, ]+\]: [a-z0-9]+; got ", line) for line in lines)


def test_check_of_wrong_element_on_one_element_per_channel_names_no_formula():
    def backward(*operands, **options):
        dx, dgamma, dbeta = right_subjects.float64(*operands, **options)
        dx.flat[0] += np.float32(0.01)
        return dx, dgamma, dbeta

    for each in bn.cases(dtypes=["float32"], only=["one-element-*-NCX"]).args[1]:
        with pytest.raises(AssertionError) as raised:
            each.values[0].check(backward)
        assert str(raised.value).splitlines()[1] == "dx is wrong in channel 0; the rest is right"


def test_check_skips_not_implemented_error_and_raises_others():
    def refuses(*inputs, **options):
        raise NotImplementedError("no float32")

    with pytest.raises(pytest.skip.Exception, match="NotImplementedError: no float32"):
        ONE.check(refuses)
    with pytest.raises(KeyError):
        ONE.check(lambda *inputs, **options: {}["dx"])
    with pytest.raises(TypeError):
        ONE.check(lambda x, dy, epsilon: (dy, dy, dy))


def test_check_of_subject_that_writes_to_dy_raises_assertion_error():
    def writes(x, dy, *inputs, **options):
        outputs = backnorm.batch_norm_backward(x, dy, *inputs, **options)
        dy[...] = np.float32(0)
        return outputs

    with pytest.raises(AssertionError, match="the subject writes to dy"):
        ONE.check(writes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtypes": ["float33"]}, "dtypes: unknown; got 'float33'; expected float32, bfloat16, "),
        ({"layouts": ["NCHW"]}, "layouts: unknown; got 'NCHW'; expected NCX, NXC"),
        ({"at_least": "perfect"}, "at_least: unknown; got 'perfect'; expected exact, float64"),
        ({"tier": "huge"}, "tier: unknown; got 'huge'; expected smoke, full"),
        ({"operation": "both"}, "operation: unknown; got 'both'; expected backward, forward"),
        ({"only": ["nothing"]}, "only: no case is selected"),
    ],
)
def test_cases_with_unknown_name_raises_value_error(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        bn.cases(**options)


@pytest.mark.parametrize("argument", ["dtypes", "layouts", "only", "skip"])
def test_cases_with_string_for_list_raises_type_error(argument):
    with pytest.raises(TypeError, match=rf"^{argument}: must be a list; got 'NCX'"):
        bn.cases(**{argument: "NCX"})


def test_cases_decorator_reports_name_of_mistake(tmp_path):
    (tmp_path / "test_mine.py").write_text(
        "import importlib.util\n"
        "import backnorm.conformance.pytest as bn\n"
        f"spec = importlib.util.spec_from_file_location('wrong', {str(WRONG_FILE)!r})\n"
        "wrong = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(wrong)\n"
        "@bn.cases(dtypes=['float32'], only=['diagnostic-float32-float32-NCX'])\n"
        "def test_mine(case):\n"
        "    case.check(wrong.DgammaWithGamma)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": SOURCES, "PATH": "/usr/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "dgamma is multiplied by gamma" in done.stdout
    # The source of `check` is not shown.
    assert "conformance/pytest.py" not in done.stdout, done.stdout


@pytest.mark.parametrize("tier", ["smoke", "full"])
def test_cases_draw_no_data_until_a_test_asks_for_them(tier, monkeypatch):
    drawn = []
    case = Recipe.case
    monkeypatch.setattr(Recipe, "case", lambda r, seed: drawn.append(r.name) or case(r, seed))
    mark = bn.cases(tier=tier)
    assert drawn == []
    by_name = {case.name: case for case in selected(Selection())}
    # Tests may run in any order.
    for param in [*mark.args[1][:3], *mark.args[1][9:60:-4]]:
        (checked,) = param.values
        assert (checked.name, checked.case.name) == (param.id, param.id)
        assert drawn[-1] == param.id
        np.testing.assert_array_equal(checked.case.data.x, by_name[param.id].data.x)


@bn.cases(operation="forward", dtypes=["float32"], only=["diagnostic-*", "no-gamma-*"])
def test_check_of_backnorm_forward_passes(case):
    case.check(backnorm.batch_norm_forward)


@bn.cases(operation="forward", dtypes=["float32"], only=["realistic-*"])
def test_check_of_operator_of_forward_passes(case):
    case.check(tensorflow.FusedBatchNormV3, dialect="tensorflow", op="FusedBatchNormV3")


@bn.cases(dtypes=["float32"], only=["diagnostic-float32-float32-NCX"])
def test_check_with_operator_of_no_dialect_raises_error(case):
    with pytest.raises(ArgumentValueError, match="--op: must be used with --dialect"):
        case.check(backnorm.batch_norm_backward, op="native_batch_norm_backward")


def test_check_of_wrong_forward_names_the_mistake():
    def unbiased(x, gamma, beta, **options):
        y, mean, variance = backnorm.batch_norm_forward(x, gamma, beta, **options)
        count = x.size // mean.size
        return y, mean, variance * np.float32(count / (count - 1))

    only = ["diagnostic-float32-float32-NCX"]
    (each,) = bn.cases(operation="forward", dtypes=["float32"], only=only).args[1]
    with pytest.raises(AssertionError, match="M - 1") as raised:
        each.values[0].check(unbiased)
    assert re.search(r"\nvariance\[\d+\]: wrong; got ", str(raised.value))
