"""`backnorm verify --budget` draws cases, and finds and shrinks those that fail."""

from __future__ import annotations

import json
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from backnorm.cli.app import app
from backnorm.conformance.ladder import RUNGS
from backnorm.conformance.verify.cases import Selection, recipes, variants_to_draw
from backnorm.conformance.verify.draws import (
    TimeIsOverError,
    described,
    drawn,
    search,
    storage_of,
)
from backnorm.conformance.verify.findings import findings
from backnorm.conformance.verify.job import Job
from backnorm.conformance.verify.run import verify
from backnorm.errors import ArgumentValueError

from .draws import verified_with

SUBJECTS = Path(__file__).parent / "budget_subjects.py"
# The draws alone, without the cases of the tier.
DRAWS = Selection(dtypes=("float32",), only=("no-case-of-the-tier",), seed=5)


def searched(fails, tmp_path, selection=DRAWS, seed=0, seconds=20.0, most=1000):
    """Return the recipe that a search finds, and the names of all that it tried: up to `most`."""
    tried = {}

    def failing(recipe):
        if len(tried) == most:
            raise TimeIsOverError
        return tried.setdefault(recipe.name, bool(fails(recipe)))

    found = search(
        failing,
        variants_to_draw(selection),
        selection.operation,
        deadline=time.monotonic() + seconds,
        seed=seed,
        folder=tmp_path,
    )
    return found, list(tried)


def channels(recipe):
    return recipe.shape[1 if recipe.variant.data_format == "NCX" else -1]


@pytest.mark.parametrize(
    ("fails", "smallest"),
    [
        (lambda each: channels(each) > 100, "drawn-1x101-float32-float32-NCX"),
        (
            lambda each: channels(each) == 24 and each.training and not each.scaled,
            "drawn-1x24-nogamma-float32-float32-NCX",
        ),
        (lambda each: each.count == 4099, "drawn-4099x1-float32-float32-NCX"),
        (lambda each: each.count > 70000, "drawn-70001x1-float32-float32-NCX"),
        (
            lambda each: len(each.shape) == 6 and each.variant.data_format == "NXC",
            "drawn-1x1x1x1x1x1-float32-float32-NXC",
        ),
        (
            lambda each: storage_of(each.name).get("dy") == "strided" and not each.training,
            "drawn-1x1-frozen-dy.strided-float32-float32-NCX",
        ),
        (lambda each: "eps1e-12-" in each.name, "drawn-1x1-eps1e-12-float32-float32-NCX"),
    ],
)
def test_search_shrinks_to_smallest_case(fails, smallest, tmp_path):
    found, _ = searched(fails, tmp_path)
    assert found is not None
    assert found.name == smallest


def test_search_with_same_seed_draws_same_recipes(tmp_path):
    selection = Selection(tier="full")

    def of_seed(seed):
        return searched(lambda each: each.count > 30000, tmp_path, selection, seed)[1]

    assert of_seed(1) == of_seed(1)
    assert of_seed(1) != of_seed(2)


def test_search_draws_usual_thresholds_and_every_option(tmp_path):
    _, names = searched(lambda each: False, tmp_path, Selection(tier="full"), most=400)
    every = [drawn(name) for name in names]
    assert {len(each.shape) for each in every} == {2, 3, 4, 5, 6}
    assert max(channels(each) for each in every) > 1024
    assert {1, 7, 8, 31, 33, 64, 1023, 1025} <= {channels(each) for each in every}
    assert max(each.count for each in every) > 65536
    assert {str(each.variant.statistics) for each in every} == {"float32", "float16", "bfloat16"}
    words = {word for name in names for word in name.split("-")[2:-3]}
    assert {"frozen", "nogamma", "gamma0", "foreign", "eps0", "eps0.25", "far", "sparse"} <= words
    assert {"dy.fortran", "x.permuted", "inputs.strided", "x.readonly", "dy.misaligned"} <= words


def test_search_stops_at_deadline(tmp_path):
    started = time.monotonic()
    found, names = searched(lambda each: time.sleep(0.05), tmp_path, seconds=1.0)
    assert found is None
    assert len(names) > 1
    assert time.monotonic() - started < 5.0


def test_search_without_hypothesis_raises_error_that_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ArgumentValueError, match=r"pip install hypothesis"):
        searched(lambda each: False, tmp_path)


def test_drawn_name_makes_same_recipe_again():
    name = "drawn-7x3x5-frozen-gamma0-foreign-eps1e-12-far-tiny-dy.fortran-bfloat16-float32-NXC"
    recipe = drawn(name)
    assert recipe.name == name
    assert recipe.shape == (7, 5, 3)
    data = recipe.case(3).data
    assert recipe.case(3).training is False
    assert data.epsilon == 1e-12
    assert (data.gamma[::2] == 0).all()
    assert np.abs(data.dy.astype(float)).max() < 1e-5
    assert storage_of(name) == {"dy": "fortran"}
    assert described(recipe) == (
        "x of 7x5x3, bfloat16 with parameters of float32 NXC, frozen statistics, gamma 0 in every "
        "second channel, statistics of another batch, epsilon 1e-12, the mean of x 30 times its "
        "deviation, dy times 1e-6, dy in Fortran order"
    )


@pytest.mark.parametrize(
    "name",
    ["drawn-7x3-float32-float32", "drawn-7x3-purple-float32-float32-NCX",
     "drawn-7-float32-float32-NCX", "drawn-7x0-float32-float32-NCX",
     "drawn-7x3-int8-float32-NCX"],
)  # fmt: skip
def test_selection_of_impossible_drawn_name_raises_error(name):
    with pytest.raises(ArgumentValueError, match="names no drawn case"):
        list(recipes(Selection(only=(name,))))


def test_epsilon_of_0_has_finite_results():
    case = drawn("drawn-1x3-eps0-float32-float32-NCX").case()
    assert (case.data.variance > 0).all()


def test_worker_stores_inputs_as_the_name_says():
    facts = {
        "": "C=True F=False writeable=True strides=(35, 7, 1) misaligned=False",
        "-dy.fortran": "C=False F=True writeable=True strides=(1, 2, 10) misaligned=False",
        "-dy.permuted": "C=False F=False writeable=True strides=(35, 1, 5) misaligned=False",
        "-dy.strided": "C=False F=False writeable=True strides=(70, 14, 2) misaligned=False",
        "-inputs.readonly": "C=True F=False writeable=False strides=(35, 7, 1) misaligned=False",
        "-dy.misaligned": "C=True F=False writeable=True strides=(35, 7, 1) misaligned=True",
    }
    names = {f"drawn-2x5x7{storage}-float32-float32-NCX": facts[storage] for storage in facts}
    results = verify(Job(f"{SUBJECTS}:records", Selection(only=tuple(names))))
    found = {verdict.case: verdict.text for verdict in results.verdicts}
    assert found.keys() == names.keys()
    for name, text in names.items():
        assert text in found[name], name


_DBETA = "dbeta is 1.01 times what it should be in every channel"


@pytest.mark.parametrize(
    ("subject", "seed", "draws", "is_right_case", "says"),
    [
        (
            "wrong_without_gamma", 9, 50,
            lambda each: channels(each) == 24 and each.training and not each.scaled, _DBETA,
        ),
        (
            "crashes_for_read_only_dy", 13, 26,
            lambda each: storage_of(each.name).get("dy") == "readonly",
            "the subject ends its process: the process ended by SIGABRT",
        ),
        pytest.param(
            "wrong_for_fortran_dy", 10, 200,
            lambda each: storage_of(each.name) == {"dy": "fortran"}, _DBETA,
            marks=pytest.mark.long,
        ),
        pytest.param(
            "wrong_for_4099_elements", 23, 200, lambda each: each.count == 4099, _DBETA,
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_budget_finds_what_fails_with_command_that_repeats_it(
    subject, seed, draws, is_right_case, says
):
    job = Job(f"{SUBJECTS}:{subject}", replace(DRAWS, seed=seed))
    (found,) = findings(verified_with(job, draws))
    recipe = drawn(found.first)
    assert is_right_case(recipe)
    assert np.prod(recipe.shape) < 5000
    assert found.says == f"{says}, in the smallest drawn case: {described(recipe)}"
    assert found.cases == {found.first}
    (again,) = findings(verify(job_of(found.reproduce)))
    assert again.says == found.says


def job_of(command):
    """Return the job of a command that repeats one case."""
    words = shlex.split(command)
    only, seed = words[words.index("--only") + 1], int(words[words.index("--seed") + 1])
    assert "--budget" not in words
    return Job(words[2], Selection(only=(only,), seed=seed))


@pytest.mark.long
def test_budget_finds_call_that_does_not_return():
    job = Job(f"{SUBJECTS}:hangs_for_many_channels", DRAWS, timeout=0.5, budget=2.0)
    (found,) = findings(verify(job))
    assert found.says.startswith("the subject does not return: no result in 0.5 s, in the small")


def test_budget_ends_in_time_for_slow_subject():
    job = Job(f"{SUBJECTS}:is_slow", DRAWS, budget=1.0)
    started = time.monotonic()
    results = verify(job)
    assert time.monotonic() - started < 1.0 + 3.0 + 5.0
    assert findings(results) == []


def test_budget_of_right_subject_has_no_finding():
    results = verified_with(
        Job("backnorm", replace(DRAWS, dtypes=("float32", "bfloat16"))), draws=40
    )
    assert findings(results) == []
    assert {v.status for v in results.verdicts} <= {*RUNGS, "proves_nothing", "not_run"}
    assert {v.dtype for v in results.verdicts} == {"float32", "bfloat16"}


def test_budget_of_forward_pass_draws_its_cases():
    results = verified_with(Job("backnorm", replace(DRAWS, operation="forward")), draws=30)
    assert findings(results) == []
    assert {v.output for v in results.verdicts} >= {"y", "mean", "variance"}


def test_search_of_forward_pass_draws_no_epsilon_0(tmp_path):
    selection = replace(DRAWS, operation="forward")
    found, tried = searched(lambda each: "-eps0-" in each.name, tmp_path, selection, most=200)
    assert found is None
    assert any("-eps" in name for name in tried)


def test_budget_does_not_report_again_what_the_tier_shows(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import backnorm\n"
        "def backward(*operands, **options):\n"
        "    dx, dgamma, dbeta = backnorm.batch_norm_backward(*operands, **options)\n"
        "    return dx, dgamma, -dbeta\n"
    )
    selection = replace(DRAWS, only=("diagnostic-*",))
    (found,) = findings(verified_with(Job(f"{tmp_path / 'mine.py'}:backward", selection), draws=10))
    assert not any(case.startswith("drawn-") for case in found.cases)


def test_budget_draws_no_skipped_case():
    selection = replace(DRAWS, skip=("drawn-*.*", "drawn-*-NXC"))
    results = verified_with(Job("backnorm", selection), draws=30)
    cases = {verdict.case for verdict in results.verdicts}
    assert cases
    assert not any("-dy." in case or case.endswith("NXC") for case in cases)


def test_verify_with_random_seed_prints_seed_that_repeats_run(tmp_path):
    report = tmp_path / "report.json"
    command = ["verify", f"{SUBJECTS}:wrong_for_24_channels", "--seed", "random", "--only"]
    command += ["drawn-1x24-float32-float32-NCX", "--json", str(report)]
    done = CliRunner().invoke(app, command)
    seed = json.loads(report.read_text())["seed"]
    assert f", seed {seed})" in done.output
    assert f" --seed {seed} --only drawn-1x24-" in done.output
    assert CliRunner().invoke(app, [*command[:2], "--seed", "-1"]).exit_code == 2
