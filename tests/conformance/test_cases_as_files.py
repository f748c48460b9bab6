"""Exported cases: deterministic, judged by files, and read by C++."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter

import numpy as np
import pytest
from typer.testing import CliRunner

import backnorm
from backnorm.cli.app import app
from backnorm.conformance.battery import cases
from backnorm.conformance.formula import WRONG
from backnorm.conformance.verify.cases import Selection, selected
from backnorm.conformance.verify.export import export
from backnorm.conformance.verify.files import judge
from backnorm.conformance.verify.findings import findings
from backnorm.conformance.verify.job import Job
from backnorm.conformance.verify.operations import OPERATIONS, RefusedError
from backnorm.conformance.verify.run import verify
from backnorm.conformance.verify.subjects import subject_of
from backnorm.dialects import registry
from backnorm.errors import ArgumentValueError
from tests.support.pages import ROOT

from .wrong_kernels import DgammaWithGamma

# The file formats of arrays.
ARRAYS = "raw", "npy", "npz", "safetensors"

SELECTION = Selection(
    dtypes=("float32", "bfloat16"), layouts=("NCX",), only=("realistic-*", "diagnostic-*")
)

READER = r"""
#include <cstdio>
#include "backnorm_cases.hpp"
int main(int, char **argv) {
  int judged = 0, wrong = 0;
  for (const auto &c : backnorm::cases(argv[1])) {
    for (const char *output : {"dx", "dgamma", "dbeta"}) {
      std::vector<char> got = c.get(output).bytes;
      judged += 1;
      if (!c.within(output, got.data(), backnorm::exact)) {
        wrong += 1;
        std::puts(c.why().c_str());
      }
      std::size_t width = got.size() / c.size(output);
      for (std::size_t i = 0; i < width; ++i) got[i] = 0x11;
      if (c.within(output, got.data(), backnorm::serial)) { wrong += 1; std::puts(output); }
    }
  }
  std::printf("%d judged, %d wrong\n", judged, wrong);
  return wrong != 0 || judged == 0;
}
"""


@pytest.fixture(name="app")
def command():
    """Return the command that `cli` and `refused` run."""
    return app


def files_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_export_is_deterministic(tmp_path):
    selection = Selection(dtypes=("float32",), layouts=("NXC",), only=("realistic-*",))
    for name in ("one", "two"):
        assert export(tmp_path / name, selection)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


def test_manifest_lists_wrong_kernels_that_case_rejects(tmp_path):
    selection = Selection(dtypes=("float32",), layouts=("NCX",), only=("no-gamma*", "realistic*"))
    export(tmp_path, selection)
    cases = json.loads((tmp_path / "manifest.json").read_text())["cases"]
    catches = {case["name"].partition("-float32")[0]: set(case["catches"]) for case in cases}
    needs_gamma = {
        "no-gamma", "gamma-absolute", "gamma-twice", "dgamma-gamma", "dbeta-gamma",
        "dgamma-over-gamma", "factor-gamma-twice", "factor-no-gamma", "gamma-of-channel-0",
        "gamma-of-channel-before", "gamma-of-neighbour", "mean-dy-gamma-twice", "mean-dy-no-gamma",
        "projection-gamma-twice", "projection-no-gamma",
    }  # fmt: skip
    assert catches["realistic"] - catches["no-gamma"] == needs_gamma
    assert "dbeta-s" in catches["no-gamma"]
    # Accurate enough for serial sums.
    assert "float32-sums" not in catches["realistic"]


def test_cases_show_prints_inputs_bounds_and_rejected_kernels():
    done = CliRunner().invoke(app, ["cases", "show", "constant-channels-float32-float32-NCX"])
    assert done.exit_code == 0, done.output
    lines = {line.split()[0]: line.split()[1:] for line in done.output.splitlines() if line.strip()}
    assert lines["variance"] == ["float32", "5", "0", "0", "0", "0"]
    assert lines["exact"] == ["0.5"] * 3
    # dgamma has no terms here, so every rung has the bound of one rounding.
    assert lines["serial"][1] == "0.5"
    assert float(lines["serial"][2]) > 1
    assert f"of {len(WRONG)} wrong kernels: " in done.output


def test_cases_show_unknown_case_is_bad_usage():
    done = CliRunner().invoke(app, ["cases", "show", "nothing"])
    assert done.exit_code == 2


@pytest.mark.parametrize("form", ARRAYS)
def test_export_succeeds_in_each_format_with_exact_raw_results(form, tmp_path):
    number, _ = export(tmp_path / "cases", SELECTION, form=form)
    if form == "raw":
        # The rounded results lie beside the inputs under the names of outputs.
        results = judge(tmp_path / "cases", tmp_path / "cases")
        assert {v.status for v in results.verdicts} == {"exact"}
        assert len(results.verdicts) == 3 * number


def test_judge_of_wrong_results_identifies_the_mistake(tmp_path):
    export(tmp_path / "cases", SELECTION)
    kernel, arrays = DgammaWithGamma(), {}
    for case in selected(SELECTION):
        outputs = kernel(*case.data.backward_inputs, training=case.training, **case.data.options)
        for name, array in zip(("dx", "dgamma", "dbeta"), outputs, strict=True):
            stored = array.view(np.uint16) if array.dtype.itemsize == 2 else array
            arrays[f"{case.name}/{name}"] = stored
    np.savez(tmp_path / "results.npz", **arrays)
    results = judge(tmp_path / "cases", tmp_path / "results.npz")
    assert [finding.id for finding in findings(results)] == ["dgamma-gamma"]


def test_judge_counts_missing_and_unsupported_results(tmp_path):
    export(tmp_path / "cases", SELECTION)
    names = [case.name for case in selected(SELECTION)]
    place = tmp_path / "results" / names[0]
    place.mkdir(parents=True)
    (place / "unsupported.txt").write_text("no frozen statistics")
    results = judge(tmp_path / "cases", tmp_path / "results")
    by_case = {v.case: (v.status, v.text) for v in results.verdicts}
    assert by_case[names[0]] == ("refused", "no frozen statistics")
    status, text = by_case[names[1]]
    assert status == "not_written"
    assert text.startswith("no dbeta (missing or None); expected an array of shape (13,), ")
    found = findings(results)
    assert [finding.outputs for finding in found] == [("dx",), ("dgamma",), ("dbeta",)]
    number = f"{len(names) - 1} cases"
    assert found[0].says.startswith(f"no dx (missing or None) in {number}: {names[1]}, {names[2]}")
    assert {finding.reproduce for finding in found} == {""}


def test_judge_reports_missing_output_as_finding(tmp_path):
    selection = Selection(dtypes=("float32",), only=("diagnostic-float32-float32-NCX",))
    export(tmp_path, selection)
    (tmp_path / "diagnostic-float32-float32-NCX" / "dgamma.bin").unlink()
    done = CliRunner().invoke(app, ["judge", str(tmp_path), str(tmp_path)])
    assert done.exit_code == 1
    assert "no dgamma (missing or None) in 1 case" in " ".join(done.output.split())
    assert "backnorm verify" not in done.output


@pytest.mark.parametrize("name", ["nowhere", "results.npz", "results"])
def test_judge_path_without_a_result_is_bad_usage(name, tmp_path):
    export(tmp_path / "cases", Selection(dtypes=("float32",), only=("realistic-*",)))
    np.savez(tmp_path / "results.npz", **{"realistic/dx": np.zeros(1)})
    (tmp_path / "results").mkdir()
    done = CliRunner().invoke(app, ["judge", str(tmp_path / "cases"), str(tmp_path / name)])
    assert done.exit_code == 2
    assert done.stderr.startswith("backnorm: error: RESULTS: ")
    assert done.stderr.count("\n") == 1


def read(folder, entry):
    data = np.fromfile(folder / entry["file"], np.dtype(entry["dtype"]).newbyteorder("<"))
    return data.reshape(entry["shape"])


def results_of(folder, call):
    """Return what `call` makes of each case in files, by CASE/OUTPUT.

    `call` takes the inputs by name and the entry `call` of the manifest, and returns the outputs.
    """
    found = {}
    for case in json.loads((folder / "manifest.json").read_text())["cases"]:
        inputs = {name: read(folder, entry) for name, entry in case["inputs"].items()}
        outputs = call(inputs, case["call"])
        for name in case["outputs"]:
            array = np.ascontiguousarray(outputs[name])
            stored = array.view(np.uint16) if str(array.dtype) == "bfloat16" else array
            found[f"{case['name']}/{name}"] = stored
    return found


FORWARD = Selection(
    dtypes=("float32", "bfloat16"), only=("realistic-*", "no-gamma-*", "diagnostic-*"),
    operation="forward",
)  # fmt: skip


@pytest.mark.parametrize("form", ARRAYS)
def test_forward_cases_have_exact_raw_results(form, tmp_path):
    number, refused = export(tmp_path, FORWARD, form=form)
    assert not refused
    if form == "raw":
        results = judge(tmp_path, tmp_path)
        assert {v.status for v in results.verdicts} == {"exact"}
        assert len(results.verdicts) == 3 * number


def test_judge_of_wrong_forward_results_identifies_the_mistake(tmp_path):
    def unbiased(inputs, call):
        options = {"epsilon": float.fromhex(call["epsilon"]), "data_format": call["data_format"]}
        y, mean, variance = backnorm.batch_norm_forward(**inputs, **options)
        count = inputs["x"].size // mean.size
        return {"y": y, "mean": mean, "variance": variance * np.float32(count / (count - 1))}

    export(tmp_path / "cases", FORWARD)
    np.savez(tmp_path / "results.npz", **results_of(tmp_path / "cases", unbiased))
    found = judge(tmp_path / "cases", tmp_path / "results.npz")
    assert {v.output for v in found.verdicts if v.status == "wrong"} == {"variance"}
    (finding,) = findings(found)
    assert "M - 1" in finding.says


DIALECTS = [
    (dialect, op, found.schema.operation)
    for dialect in registry.DIALECTS
    for op, found in registry.operators(dialect).items()
    if found.schema.operation in OPERATIONS
]


@pytest.mark.parametrize(("dialect", "op", "operation"), DIALECTS)
def test_operator_of_each_dialect_passes_on_its_exported_cases(dialect, op, operation, tmp_path):
    schema = registry.operator(dialect, op).schema
    types = {spec.name: spec.type for spec in schema.attributes}

    def call(inputs, described):
        assert (described["dialect"], described["op"]) == (dialect, op)
        attributes = {}
        for name, each in described["attributes"].items():
            assert each["type"] == types[name]
            is_float = each["type"] in ("f32", "f64")
            attributes[name] = float.fromhex(each["value"]) if is_float else each["value"]
            if each["type"] == "f32":
                assert attributes[name] == np.float32(attributes[name])
        order = [t.name for t in schema.inputs if t.name in inputs]
        assert list(inputs) == order
        return registry.operator(dialect, op).invoke(inputs, attributes)

    # The cases of the operator's arguments; `test_verify_dialects.py` judges it on many.
    dtypes, only = ("float32", "bfloat16"), ("realistic-*", "frozen-float32-*")
    selection = Selection(dtypes=dtypes, only=only, operation=operation)
    export(tmp_path / "cases", selection, dialect=dialect, op=op)
    np.savez(tmp_path / "results.npz", **results_of(tmp_path / "cases", call))
    found = judge(tmp_path / "cases", tmp_path / "results.npz")
    assert {v.status for v in found.verdicts} <= {"exact", "float64", "float32", "not_run"}
    assert {v.text for v in found.verdicts if v.status == "not_run"} <= {
        "the operator has no such output"
    }
    # The rounded results lie beside the inputs under the operator's names of outputs.
    found = judge(tmp_path / "cases", tmp_path / "cases")
    assert {v.status for v in found.verdicts} <= {"exact", "not_run"}


def test_exported_reserve_of_an_operator_is_an_empty_array_of_bytes(tmp_path):
    selection = Selection(dtypes=("float32",), layouts=("NCX",), shapes=((2, 3, 5),))
    export(tmp_path, selection, dialect="aten", op="cudnn_batch_norm_backward")
    (case,) = json.loads((tmp_path / "manifest.json").read_text("utf-8"))["cases"]
    reserve = case["inputs"]["reserveSpace"]
    assert (reserve["shape"], reserve["dtype"]) == ([0], "uint8")


def test_judge_of_wrong_results_of_dialect_identifies_the_mistake(tmp_path):
    def negated(inputs, call):
        attributes = {"epsilon": float.fromhex(call["attributes"]["epsilon"]["value"])}
        attributes["data_format"] = call["attributes"]["data_format"]["value"]
        results = registry.operator("onednn_graph", "BatchNormTrainingBackward").invoke(
            inputs, attributes
        )
        return results | {"diff_gamma": -results["diff_gamma"]}

    selection = Selection(dtypes=("float32",), only=("realistic-*", "diagnostic-*"))
    export(tmp_path / "cases", selection, dialect="onednn_graph")
    np.savez(tmp_path / "results.npz", **results_of(tmp_path / "cases", negated))
    found = judge(tmp_path / "cases", tmp_path / "results.npz")
    assert {v.output for v in found.verdicts if v.status == "wrong"} == {"dgamma"}
    (finding,) = findings(found)
    assert finding.outputs == ("dgamma",)


def test_export_of_shapes_and_judge_find_cases_of_shapes(tmp_path):
    selection = Selection(dtypes=("float32",), layouts=("NXC",), shapes=((2, 3, 5), (7, 4)))
    assert export(tmp_path, selection) == (2, Counter())
    results = judge(tmp_path, tmp_path)
    assert {v.case for v in results.verdicts} == {
        "shape-2x3x5-float32-float32-NXC", "shape-7x4-float32-float32-NXC",
    }  # fmt: skip
    assert {v.status for v in results.verdicts} == {"exact"}


def test_verify_page_exports_cases_of_operators(cli, tmp_path, monkeypatch):
    page = (ROOT / "docs/how-to/verify.md").read_text(encoding="utf-8")
    lines = page.splitlines()
    monkeypatch.chdir(tmp_path)
    commands = [at for at, line in enumerate(lines) if "backnorm cases export golden" in line]
    assert len(commands) == 2
    for at in commands:
        result = cli(*lines[at].removeprefix("$ backnorm ").split())
        assert result.exit_code == 0, result.output
        printed = result.stdout.splitlines()
        assert printed == lines[at + 1 : at + 1 + len(printed)]
        folder = lines[at].split()[4]
        assert cli("judge", folder, folder).exit_code == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--op", "batch_norm_grad"], "--op: must be used with --dialect; got batch_norm_grad"),
        (["--dialect", "cudnn", "--layouts", "NXC"],
         "--dialect: the operator refuses all cases; got the operator has no layout NXC"),
        (["--dialect", "cudnn", "--operation", "forward"],
         "dialect: has no forward pass in training; got cudnn"),
        (["--dialect", "ngraph", "--op", "BatchNormTraining"],
         "op: must be a backward pass; got BatchNormTraining"),
        (["--shape", "3"], "--shape: must be a shape; got '3'"),
    ],
)  # fmt: skip
def test_export_with_unusable_options_is_refused(refused, options, says, tmp_path):
    folder = tmp_path / "cases"
    assert says in refused("cases", "export", folder, "--only", "realistic-*", *options)
    assert not folder.exists()


def damage(change):
    """Return a function that changes the manifest in a folder of cases."""

    def write(folder):
        path = folder / "cases" / "manifest.json"
        manifest = json.loads(path.read_text())
        path.write_text(json.dumps(change(manifest) or manifest))

    return write


def manifest_of(text):
    return lambda folder: (folder / "cases" / "manifest.json").write_text(text)


def file_of(name, data):
    def write(folder):
        path = folder / "results" / name
        if data is None:
            path.mkdir()
        else:
            path.write_bytes(data)

    return write


ONE_CASE = "realistic-float32-float32-NCX"
MUST_BE = "must be a manifest that cases export wrote"


@pytest.fixture(scope="module")
def one_case(tmp_path_factory):
    """Return a folder with one exported case."""
    folder = tmp_path_factory.mktemp("cases")
    export(folder, Selection(dtypes=("float32",), only=(ONE_CASE,)))
    return folder


@pytest.mark.parametrize(
    ("write", "results", "message"),
    [
        (manifest_of(""), "", "is not acceptable JSON: Expecting value"),
        (manifest_of("[" * 100_000), "", "is not acceptable JSON: maximum recursion depth"),
        (manifest_of("[]"), "", "has the wrong JSON type; got a list"),
        (damage(lambda m: m.pop("cases") and None), "", MUST_BE),
        (damage(lambda m: m.update(cases={})), "", "has no result of any case"),
        (damage(lambda m: m["cases"][0].pop("inputs") and None), "", MUST_BE),
        (damage(lambda m: m["cases"][0].update(name=[])), "", MUST_BE),
        (damage(lambda m: m.pop("made_by") and None), "", MUST_BE),
        (damage(lambda m: m["made_by"].update(seed=-1)), "", "seed: must not be negative; got -1"),
        (damage(lambda m: m["made_by"].update(seed="0")), "", "seed: has the wrong JSON type"),
        (damage(lambda m: m["made_by"].update(tier="deep")), "", "tier: unknown; got 'deep'"),
        (damage(lambda m: m["made_by"].update(tier=[])), "", "tier: unknown; got []"),
        (
            damage(lambda m: m["cases"][0]["inputs"]["x"].update(dtype="float128")),
            "",
            "dtype: unknown; got 'float128'",
        ),
        (file_of(f"{ONE_CASE}/dx.npy", b"garbage"), "", "dx.npy: cannot be read: "),
        (file_of("r.npz", b"PK\x03\x04junk"), "r.npz", "is not a .npz file"),
        (file_of("r.npz", b""), "r.npz", "is not a .npz file"),
        (file_of("r.safetensors", b""), "r.safetensors", "cannot be read: "),
        (file_of("r.safetensors", b"\xff" * 16), "r.safetensors", "cannot be read: "),
        (file_of("r.txt", b"1 2 3"), "r.txt", "unknown kind of tensor file"),
        (file_of("r.npz", None), "r.npz", "has no result of any case"),
    ],
)
def test_judge_of_damaged_files_is_bad_usage(write, results, message, one_case, tmp_path):
    shutil.copytree(one_case, tmp_path / "cases")
    (tmp_path / "results" / ONE_CASE).mkdir(parents=True)
    write(tmp_path)
    done = CliRunner().invoke(
        app, ["judge", str(tmp_path / "cases"), str(tmp_path / "results" / results)]
    )
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("backnorm: error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_judge_does_not_unpickle_results(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    export(tmp_path / "cases", Selection(dtypes=("float32",), only=(ONE_CASE,)))
    (tmp_path / "results" / ONE_CASE).mkdir(parents=True)
    path = tmp_path / "results" / ONE_CASE / "dx.npy"
    np.save(path, np.array([Bomb()], object), allow_pickle=True)
    with pytest.raises(ArgumentValueError, match="cannot be read: Object arrays cannot be loaded"):
        judge(tmp_path / "cases", tmp_path / "results")


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_cpp_header_reads_and_judges_cases(compiler, tmp_path):
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    export(tmp_path / "cases", SELECTION)
    source = tmp_path / "reader.cpp"
    source.write_text(READER)
    program = tmp_path / "reader"
    subprocess.run(
        [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-I", str(tmp_path / "cases"),
         str(source), "-o", str(program)],
        check=True,
    )  # fmt: skip
    done = subprocess.run(
        [str(program), str(tmp_path / "cases")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "0 wrong" in done.stdout


SUBJECT = r"""
#include <stddef.h>
#include "backnorm_subject.h"
int backward(const void *x_, const void *dy_, const void *mean_, const void *variance_,
             const void *gamma_, void *dx_, void *dgamma_, void *dbeta_, const int64_t *shape,
             int rank, int axis, double epsilon, int training, int dtype) {
  if (dtype != BACKNORM_FLOAT32 || axis != 1 || rank < 2) return 1;
  const float *x = x_, *dy = dy_, *mean = mean_, *variance = variance_, *gamma = gamma_;
  float *dx = dx_, *dgamma = dgamma_, *dbeta = dbeta_;
  int64_t n = shape[0], c = shape[1], s = 1;
  for (int k = 2; k < rank; ++k) s *= shape[k];
  for (int64_t j = 0; j < c; ++j) {
    double sum = 0, slope = 0, m = mean[j], v = variance[j] + epsilon, r = 1.0;
    for (int k = 0; k < 60; ++k) r = 0.5 * (r + v / r); /* a root without libm */
    double inverse = 1 / r, g = gamma ? gamma[j] : 1.0, count = (double)(n * s);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t k = 0; k < s; ++k) {
        size_t at = (size_t)((i * c + j) * s + k);
        sum += dy[at];
        slope += dy[at] * (x[at] - m);
      }
    dgamma[j] = (float)(inverse * slope);
    dbeta[j] = (float)sum;
    for (int64_t i = 0; i < n; ++i)
      for (int64_t k = 0; k < s; ++k) {
        size_t at = (size_t)((i * c + j) * s + k);
        double d = dy[at];
        if (training) d -= sum / count + (x[at] - m) * inverse * inverse * slope / count;
        dx[at] = (float)(g * inverse * d);
      }
  }
  return 0;
}
"""


FORWARD_SUBJECT = r"""
#include "backnorm_subject.h"
backnorm_forward forward;
int forward(const void *x_, const void *gamma_, const void *beta_, void *y_, void *mean_,
            void *variance_, const int64_t *shape, int rank, int axis, double epsilon, int dtype) {
  if (dtype != BACKNORM_FLOAT32 || axis != 1 || rank < 2) return 1;
  const float *x = x_, *gamma = gamma_, *beta = beta_;
  float *y = y_, *mean = mean_, *variance = variance_;
  int64_t n = shape[0], c = shape[1], s = 1;
  for (int k = 2; k < rank; ++k) s *= shape[k];
  for (int64_t j = 0; j < c; ++j) {
    double m = 0, v = 0, r = 1.0, count = (double)(n * s);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t k = 0; k < s; ++k) m += x[(i * c + j) * s + k] / count;
    for (int64_t i = 0; i < n; ++i)
      for (int64_t k = 0; k < s; ++k) {
        double d = x[(i * c + j) * s + k] - m;
        v += d * d / DIVISOR;
      }
    for (int k = 0; k < 60; ++k) r = 0.5 * (r + (v + epsilon) / r); /* a root without libm */
    for (int64_t i = 0; i < n; ++i)
      for (int64_t k = 0; k < s; ++k) {
        int64_t at = (i * c + j) * s + k;
        y[at] = (float)((x[at] - m) / r * (gamma ? gamma[j] : 1) + (beta ? beta[j] : 0));
      }
    mean[j] = (float)m;
    variance[j] = (float)v;
  }
  return 0;
}
"""


@pytest.mark.parametrize(("divisor", "ids"), [("count", []), ("(count - 1)", ["bessel"])])
def test_verify_judges_c_function_of_forward_pass(divisor, ids, tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    export(tmp_path, Selection(dtypes=("float32",), only=("none",)))
    (tmp_path / "mine.c").write_text(FORWARD_SUBJECT.replace("DIVISOR", divisor))
    library = tmp_path / "libmine.so"
    subprocess.run(
        ["gcc", "-O2", "-shared", "-fPIC", "-I", str(tmp_path), str(tmp_path / "mine.c"),
         "-o", str(library)],
        check=True,
    )  # fmt: skip
    only = "diagnostic-*", "realistic-*"
    selection = Selection(dtypes=("float32",), only=only, operation="forward")
    results = verify(Job(f"{library}:forward", selection))
    assert [each.id for each in findings(results)] == ids
    assert sum(v.is_judged for v in results.verdicts) == 6


def test_verify_reports_c_function_that_writes_out_of_bounds(tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    (tmp_path / "mine.c").write_text(
        "int backward(void *x, void *dy, void *m, void *v, void *g, float *dx, float *dgamma) {\n"
        "  dgamma[-1] = 1;\n  return 0;\n}\n"
    )
    library = tmp_path / "libmine.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", str(tmp_path / "mine.c"), "-o", str(library)], check=True
    )
    selection = Selection(dtypes=("float32",), only=("diagnostic-float32-float32-NCX",))
    [finding] = findings(verify(Job(f"{library}:backward", selection)))
    assert (finding.id, finding.says.endswith("wrote outside of dgamma")) == ("wrote_outside", True)


def test_verify_judges_c_function_and_counts_refused_cases(tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    export(tmp_path, Selection(dtypes=("float32",), only=("none",)))
    (tmp_path / "mine.c").write_text(SUBJECT)
    library = tmp_path / "libmine.so"
    subprocess.run(
        ["gcc", "-O2", "-shared", "-fPIC", "-I", str(tmp_path), str(tmp_path / "mine.c"),
         "-o", str(library)],
        check=True,
    )  # fmt: skip
    selection = Selection(dtypes=("float32",), only=("diagnostic-*", "realistic-*"))
    results = verify(Job(f"{library}:backward", selection))
    assert findings(results) == []
    statuses = {(v.layout, v.status) for v in results.verdicts}
    assert {layout for layout, status in statuses if status == "refused"} == {"NXC"}
    narrow = next(c for c in cases() if c.name == "realistic-bfloat16-bfloat16-NCX")
    with pytest.raises(RefusedError, match="16-bit statistics"):
        subject_of(f"{library}:backward")(narrow.inputs, narrow, {})
    assert any(layout == "NCX" and status != "refused" for layout, status in statuses)
