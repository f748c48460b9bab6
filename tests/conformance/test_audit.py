"""Wrong kernels that the tolerance of a test accepts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from backnorm.cli.app import app
from backnorm.conformance.audit import audit
from backnorm.conformance.audit import data as audit_data
from backnorm.conformance.audit.policies import POLICIES, policy_of
from backnorm.conformance.audit.tolerances import Comparison, from_function, from_text
from backnorm.conformance.data import LayerData
from backnorm.errors import ArgumentValueError
from tests.support.dtypes import FLOAT32
from tests.support.pages import ROOT

SHAPE = (16, 8, 14, 14)


def of_data(test, data="randn", loss="none"):
    return audit(test, audit_data.runs(data, SHAPE, loss, 1e-5, FLOAT32))


def of_policy(name, dtype="float32", element=FLOAT32):
    policy = replace(policy_of(name), shapes=[SHAPE])
    return audit(policy.test(dtype), policy.runs(element))


def names(mistakes):
    return {mistake.name for mistake in mistakes}


def comparison(actual, expected, output="dx"):
    expected = np.asarray(expected)
    one = np.ones(1)
    data = LayerData(expected.reshape(-1, 1), expected, one, one, one, one, 1e-5, "NCX")
    return Comparison(output, np.asarray(actual), expected, data)


def run(*options):
    return CliRunner().invoke(app, ["tolerance", *options])


def test_audit_of_loose_tolerance_misses_more_kernels():
    tight, loose = (of_data(from_text(f"rtol={t},atol={t}")) for t in (1e-5, 1e-2))
    assert names(loose.missed) > names(tight.missed)
    assert "gamma-absolute" in names(loose.invisible)


def test_audit_with_cube_loss_of_layer_catches_at_least_21_kernels():
    found = of_data(from_text("rtol=1e-5,atol=1e-5"), data="layer", loss="cube")
    assert len(found.caught) >= 21
    assert not {"no-mean-dy", "no-gamma", "epsilon-left-out"} & names(found.missed)


def test_audit_with_sum_loss_counts_serial_sums_as_false_alarm():
    found = of_data(policy_of("pytorch").test("float32"), loss="sum")
    assert found.false_alarms["serial sums"] == found.runs


def test_audit_of_correlation_does_not_catch_missing_gamma():
    assert "no-gamma" not in names(of_policy("tt-metal").caught)


def test_audit_of_derived_tolerance_catches_more_without_false_alarms():
    fixed, derived = of_policy("hipdnn"), of_policy("hipdnn-derived")
    assert names(derived.caught) > names(fixed.caught)
    assert not any(derived.false_alarms.values())


def test_audit_of_pytorch_policy_in_bfloat16_has_no_false_alarms():
    found = of_policy("pytorch", "bfloat16", np.dtype("bfloat16"))
    assert found.caught
    assert not any(found.false_alarms.values())


def test_audit_of_flaggems_policy_misses_the_kernel_for_which_its_data_were_scaled():
    # dy is 1 and the mean is that of x, so that dx and dgamma are 0 with any inverse deviation.
    missed = names(of_policy("flaggems").missed)
    assert {"inverse-as-variance", "no-projection", "dx-sign", "dgamma-zero"} <= missed


def test_audit_of_kernelbench_policy_cannot_show_parameters_and_misses_running_statistics():
    found = of_policy("kernelbench")
    assert {"gamma-left-out", "beta-left-out"} <= names(found.invisible)
    assert {"running-not-updated", "momentum-swapped"} <= names(found.missed)
    assert {"second-moment", "mean-left-out", "no-root"} <= names(found.caught)
    assert not any(found.false_alarms.values())


def test_audit_of_backendbench_policy_misses_sums_in_float16():
    assert "float16-sums" in names(of_policy("backendbench").missed)


@pytest.mark.parametrize("name", POLICIES)
def test_policy_accepts_right_result_and_rejects_its_negative(name):
    policy = replace(policy_of(name), shapes=[(4, 3, 5)], loss="none")
    run = next(policy.runs(FLOAT32))
    for output, right in run.right.items():
        is_ignored = policy.compared is not None and output not in policy.compared
        of = [Comparison(output, a, right, run.data) for a in (right, -right)]
        assert [policy.test("float32")(each) for each in of] == [True, is_ignored]


@pytest.mark.parametrize(
    ("text", "error", "passes"),
    [
        ("rtol=1e-2", 0.009, True),
        ("rtol=1e-2", 0.011, False),
        ("atol=0.03", 0.009, True),
        ("atol/M=0.004", 0.009, True),
        ("atol/M=0.003", 0.009, False),
        ("rtol=0.003,atol/M=0.003", 0.009, True),
        ("atol=0.01,share=0.5", 0.009, True),
        ("atol=0.01,share=0.51", 0.009, False),
        ("ulp=2", 2.0**-23, True),
        ("ulp=2", 2.0**-21, False),
        ("rms=0.01", 0.012, True),
        ("rms=0.01", 0.018, False),
        ("l2=0.01", 0.009, True),
        ("l2=0.01", 0.011, False),
        ("cosine=0.999", 0.5, True),
        ("pcc=0.999", 0.5, True),
    ],
)
def test_tolerance_of_each_measure_judges_scaled_array(text, error, passes):
    expected = np.float32([1.0, -1.25, 1.5, -1.0])
    actual = (expected * (1 + error)).astype(np.float32)
    assert from_text(text)(comparison(actual, expected)) == passes


@pytest.mark.parametrize("text", ["pcc=0.99", "cosine=0.99"])
def test_tolerance_of_correlation_rejects_other_signs(text):
    assert not from_text(text)(comparison([1.0, 2.0, -4.0], [1.0, -2.0, 4.0]))


def test_tolerance_in_ulp_uses_type_of_array():
    expected = np.ones(3, np.dtype("bfloat16"))
    assert from_text("ulp=1")(comparison(expected + expected.dtype.type(2.0**-7), expected))


def test_from_function_treats_assertion_error_as_rejection():
    test = from_function(np.testing.assert_array_equal)
    assert test(comparison([1.0, 2.0], [1.0, 2.0]))
    assert not test(comparison([1.0, 2.0], [1.0, 3.0]))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("colour=1", "unknown measure"),
        ("rtol", "tolerance"),
        ("ulp=nan", "finite number of at least 0; got 'ulp=nan'"),
        ("rtol=1e-2,atol=-1e-2", "finite number of at least 0"),
        ("l2=inf", "finite number of at least 0"),
        ("ulp=1,ulp=2", "unknown measure; got ulp, ulp"),
        ("atol=1,atol=2", "unknown measure; got atol, atol"),
        ("share=0.5", "unknown measure; got share"),
        ("atol=1,share=99", "got 'atol=1,share=99'; .*; a share is in"),
        ("atol=1,share=0", "a share is in"),
        ("atol=1,pcc=0.9", "unknown measure; got atol, pcc"),
    ],
)
def test_from_text_rejects_unknown_measure_or_unusable_value(text, match):
    with pytest.raises(ArgumentValueError, match=match):
        from_text(text)


@pytest.mark.parametrize("shape", ["a,b", "3", "4,0", "", "9999999999,9999999999"])
def test_command_bad_shape_is_bad_usage(shape):
    done = run("--audit", "atol=1", "--shape", shape)
    assert done.exit_code == 2
    assert "--shape" in done.output


def test_command_unknown_policy_lists_the_names():
    done = run("--policy", "nobody")
    assert done.exit_code == 2
    assert all(name in " ".join(done.output.split()) for name in POLICIES)


@pytest.mark.parametrize(
    "options",
    [
        ("--audit", "atol=1", "--policy", "numpy"),
        ("--policy", "hipdnn-derived", "--dtype", "float16"),
        ("--audit", "atol=1", "--data", "nothing"),
        ("--audit", "atol=1", "--data", "nothing.npz"),
        ("--policy", "kernelbench", "--data", "nothing.npz"),
        ("--compare", "nothing.py:function"),
        ("--compare", "no_such_module:function"),
        ("--audit", "atol=1", "--dtype", "int8"),
    ],
)
def test_command_bad_option_is_bad_usage(options):
    done = run(*options)
    assert done.exit_code == 2, done.output


def test_command_own_function_and_own_data_are_audited(tmp_path):
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, 4, 3, 5, 5), dtype=np.float32)
    np.savez(tmp_path / "mine.npz", x=x, dy=dy, gamma=np.float32([1.0, -2.0, 0.5]))
    (tmp_path / "mine.py").write_text("def shapes(a, e):\n    return a.shape == e.shape\n")
    done = run("--compare", f"{tmp_path}/mine.py:shapes", "--data", f"{tmp_path}/mine.npz")
    assert done.exit_code == 0, done.output
    assert "  0 of " in done.output
    assert "|gamma|" in done.output


def test_command_with_own_data_uses_its_type(tmp_path):
    data = dict.fromkeys(("x", "dy"), np.random.default_rng(0).standard_normal((4, 3, 5)))
    np.savez(tmp_path / "mine.npz", **data)
    done = run("--policy", "pytorch", "--data", f"{tmp_path}/mine.npz")
    assert "rtol=1e-7,atol=1e-7" in done.output


@pytest.mark.parametrize(
    ("options", "unused"),
    [
        (("--shape", "2,3"), "--shape"),
        (("--data", "randn"), "--data"),
        (("--loss", "sum"), "--loss"),
        (("--audit", "atol=1", "--elements", "5"), "--elements"),
        (("--audit", "atol=1", "--data", "mine.npz", "--loss", "sum"), "--loss"),
        (("--audit", "atol=1", "--data", "mine.npz", "--shape", "4,3,5"), "--shape"),
        (("--policy", "pytorch", "--data", "mine.npz", "--dtype", "float32"), "--dtype"),
        (("--policy", "kernelbench", "--loss", "cube"), "--loss"),
    ],
)
def test_command_with_option_without_effect_is_bad_usage(options, unused):
    done = run(*options)
    assert done.exit_code == 2
    assert f"{unused}: has no effect" in done.output


def test_command_data_without_dy_is_bad_usage(tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.ones((2, 3), np.float32))
    done = run("--audit", "atol=1", "--data", f"{tmp_path}/mine.npz")
    assert done.exit_code == 2
    assert "dy" in done.output


def saved(path, **arrays):
    np.savez(path, **{"x": np.ones((2, 3), "f"), "dy": np.ones((2, 3), "f")} | arrays)


def cut(path):
    saved(path)
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_bytes(b""), "is not a .npz file"),
        (cut, "is not a .npz file"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: saved(path, dy=np.array([["a"] * 3] * 2)), "--data: must have a float array"),
        (lambda path: saved(path, mean=np.ones(3, complex)), "--data: must have a float array"),
        (lambda path: saved(path, dy=np.full((2, 3), np.nan)), "--data: must have finite arrays"),
        (lambda path: saved(path, variance=-np.ones(3)), "--data: must have finite arrays"),
        (lambda path: saved(path, gamma=np.array([{}] * 3)), "Object arrays cannot be loaded"),
    ],
)
def test_command_unusable_data_is_bad_usage(write, message, tmp_path):
    path = tmp_path / "mine[x].npz"
    write(path)
    done = run("--audit", "atol=1", "--data", str(path))
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("backnorm: error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_command_prints_bounds_untruncated_in_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = run("--elements", "1000000", "--dtype", "float64")
    assert max(map(len, done.output.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in done.output
    assert "0.5 ulp + 7.96e+03 u T" in done.output
    assert all(rung in done.output for rung in ("pairwise", "blocked", "serial"))


def test_command_counts_imprecise_kernels_apart_from_wrong_formulas():
    done = run("--audit", "rtol=1e-2,atol=1e-2", "--data", "layer", "--shape", "8,3,5,5")
    formulas, imprecise = done.output.split(" imprecise kernels caught. These pass:")
    assert " wrong formulas caught. These pass:" in formulas
    assert "(count-less-one)" in formulas
    assert "(truncated)" not in formulas
    assert "(truncated)" in imprecise
    assert "(count-less-one)" not in imprecise


def test_command_with_policy_prints_its_source_and_what_it_forgives():
    done = run("--policy", "flaggems")
    assert done.exit_code == 0, done.output
    policy = POLICIES["flaggems"]
    assert f"{policy.source}\n  {policy.forgives}\n" in done.output
    assert "rtol=1.3e-6,atol/M=1e-4 on scaled, loss sum" in done.output
    assert "x of 16,3 and 32,32,32, 3 seeds" in done.output


def test_command_with_policy_of_layer_has_no_imprecise_kernels():
    done = run("--policy", "kernelbench", "--shape", "4,3,5")
    assert done.exit_code == 0, done.output
    assert "y is not multiplied by gamma (gamma-left-out)" in done.output
    assert "imprecise" not in done.output
    assert "loss" not in done.output


def test_page_names_every_policy():
    page = (ROOT / "docs" / "how-to" / "verify.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in POLICIES)


@pytest.mark.parametrize("source", ["def f(a) return", "1 / 0", "def f(a):\n    return True"])
def test_command_with_unusable_function_is_bad_usage(source, tmp_path):
    (tmp_path / "mine.py").write_text(source)
    done = run("--compare", f"{tmp_path}/mine.py:f")
    assert done.exit_code == 2
    assert "--compare: cannot be imported, or does not take two arrays; got" in done.stderr
