"""Kernels that are wrong only on one path: for some values, shapes, options or calls."""

from __future__ import annotations

import re
import textwrap

import numpy as np
import pytest

from backnorm.conformance.verify._events import Outcome
from backnorm.conformance.verify.cases import Selection, recipes
from backnorm.conformance.verify.conditions import Facts, condition
from backnorm.conformance.verify.findings import findings
from backnorm.conformance.verify.job import Job
from backnorm.conformance.verify.run import Results, verify

from .wrong_kernels import Kernel

_RIGHT = Kernel()


class _Path(Kernel):
    """A kernel whose steps are wrong if `where` holds for a call."""

    def __init__(self, where, **steps):
        self._where, self._steps = where, steps

    def __call__(self, x, dy, mean, variance, gamma, **options):
        axis = 1 if options["data_format"] == "NCX" else x.ndim - 1
        space = [n for k, n in enumerate(x.shape) if k not in (0, axis)]
        sizes = {"N": x.shape[0], "C": x.shape[axis], "M": x.size // x.shape[axis], "space": space}
        if not self._where(sizes, x=x, mean=mean, gamma=gamma, **options):
            return _RIGHT(x, dy, mean, variance, gamma, **options)
        wrong = type("Wrong", (Kernel,), self._steps)()
        return wrong(x, dy, mean, variance, gamma, **options)


def _without(places):
    """Return sums that lack the elements of a channel at some places."""

    def sums(self, x, dy, c, mean):
        kept = np.delete(np.arange(dy.shape[1]), places(dy.shape[1]))
        d = dy[:, kept].astype(np.longdouble)
        return d.sum(1, keepdims=True), (d * c[:, kept]).sum(1, keepdims=True)

    return sums


def _frozen_without_s(self, x, dy, c, m, g, s, mean_dy, slope):
    return g * dy


def _frozen_with_clipped_dy(self, x, dy, c, m, g, s, mean_dy, slope):
    largest = float(np.finfo(np.float32).max)
    return g * s * np.clip(dy, -largest, largest)


def _no_mean_dy(self, sum_dy, sum_dy_xmu, s, count):
    return 0 * sum_dy, s * s * sum_dy_xmu / count


def _epsilon_of_half(self, variance, epsilon, elements):
    return 1 / np.sqrt(variance + np.longdouble(min(epsilon, 0.5)))


def _epsilon_of_1e_5(self, variance, epsilon, elements):
    return 1 / np.sqrt(variance + np.longdouble(1e-5))


def _over_gamma(self, s, sum_dy_xmu, g):
    return g * s * sum_dy_xmu / g


def _half(self, sum_dy, s):
    return 0.5 * sum_dy


def _swallowed(self, x, dy, c, mean):
    d = np.nan_to_num(dy).astype(np.longdouble)
    return d.sum(1, keepdims=True), (d * c).sum(1, keepdims=True)


_always = lambda sizes, **call: True  # noqa: E731
#: The kernels, and what the first finding says.
PATHS = {
    "more than 256 images": (
        _Path(
            lambda sizes, **call: sizes["N"] > 256,
            sums=_without(lambda m: slice(-(m // 257), None)),
        ),
        r"where N = 257, and in no other: .*the sums lack the last image",
    ),
    "an odd number of channels beyond 16": (
        _Path(
            lambda sizes, **call: sizes["C"] > 16 and sizes["C"] % 2,
            dbeta=lambda self, sum_dy, s: np.roll(sum_dy, 1, axis=0),
        ),
        r"dbeta is wrong in \d+ cases where C >= 17 and C is odd, and in no other",
    ),
    "rank 6": (
        _Path(
            lambda sizes, x, **call: x.ndim == 6,
            count=lambda self, elements, axes: elements // axes[-1],
        ),
        r"where rank = 6, and in no other: \d+ is used for M",
    ),
    "one channel": (
        _Path(lambda sizes, **call: sizes["C"] == 1, coefficients=_no_mean_dy),
        r"dx is wrong in \d+ cases where C = 1, and in no other: dx lacks the term sum\(dy\)/M",
    ),
    "constant statistics without gamma": (
        _Path(lambda sizes, gamma, **call: gamma is None, frozen_dx=_frozen_without_s),
        r"where gamma is absent and the statistics are constants, and in no other: "
        "dx is not multiplied by s",
    ),
    "a large epsilon": (
        _Path(_always, inverse_deviation=_epsilon_of_half),
        r"where epsilon = 1, and in no other: epsilon is 0\.5, not 1, which was passed",
    ),
    "a gamma of 0": (
        _Path(_always, dgamma=_over_gamma),
        r"dgamma is nan in zero-gamma, where the exact value is",
    ),
    "variances beyond 1e6": (
        _Path(
            _always,
            statistics=lambda self, mean, variance, x: (mean, np.minimum(variance, 1e6)),
        ),
        r"d\w+ .*variances-of-all-sizes",
    ),
    "NaN in dy": (
        _Path(_always, sums=_swallowed),
        r"where dy has a NaN, and in no other: d\w+ is \S+, where the exact value is nan",
    ),
    "infinities in dy": (
        _Path(_always, frozen_dx=_frozen_with_clipped_dy),
        r"dx is \S+ in infinities, where the exact value is inf",
    ),
    "parameters of 16 bits": (
        _Path(lambda sizes, mean, **call: mean.itemsize == 2, dbeta=_half),
        r"where the parameters have 16 bits, and in no other: dbeta is 0\.5 times",
    ),
}  # fmt: skip


def _found(kernel, *dtypes):
    """Return the findings of a kernel in the default tier, by default in float32."""
    job = Job("kernel", Selection(dtypes=dtypes or ("float32",)))
    results = Results(job, recipes={recipe.name: recipe for recipe in recipes(job.selection)})
    for recipe in results.recipes.values():
        case = recipe.case()
        with np.errstate(all="ignore"):
            outputs = kernel(*case.operands, **case.options)
        named = dict(zip(("dx", "dgamma", "dbeta"), outputs, strict=True))
        results.add(Outcome(recipe.name, outputs=named), case)
    return findings(results)


def _compensated(terms):
    total, lost = np.zeros((2, len(terms)))
    for column in np.asarray(terms, np.float64).T:
        term = column - lost
        larger = total + term
        total, lost = larger, (larger - total) - term
    return total[:, None]


def _compensated_sums(self, x, dy, c, mean):
    return _compensated(dy), _compensated(dy * c)


# The sum of infinity and others is NaN if it is compensated.
@pytest.mark.parametrize("steps", [{}, {"sums": _compensated_sums}], ids=["plain", "compensated"])
def test_right_kernel_has_no_finding(steps):
    assert _found(_Path(_always, **steps)) == []


@pytest.mark.parametrize("name", PATHS)
def test_wrong_path_has_one_finding_that_says_where(name):
    kernel, says = PATHS[name]
    found = _found(kernel, "bfloat16" if "16 bits" in name else "float32")
    assert len(found) == 1 or "1e6" in name, [each.says for each in found]
    assert re.search(says, found[0].says), found[0].says


def test_joined_findings_of_two_conditions_name_the_mistake_alone():
    kernel = _Path(lambda sizes, gamma, **call: gamma is None, inverse_deviation=_epsilon_of_1e_5)
    found = _found(kernel, "float32", "bfloat16")
    for each in found:
        told = re.search(r"in (\d+) cases? where", each.says)
        assert told is None or int(told[1]) == len(each.cases), each.says
    # In bfloat16, some cases cannot tell the mistake "epsilon-left-out" from another one.
    assert [each.id for each in found] == ["epsilon-left-out", "epsilon-other"]


def _facts(**facts):
    usual = {"purpose": "p", "gamma": True, "training": True, "dtype": "float32"}
    usual |= {
        "is_narrow": False,
        "has_nan": False,
        "layout": "NCX",
        "N": 4,
        "C": 8,
        "M": 64,
        "W": 4,
        "pixels": 16,
    }
    return Facts(**usual | {"rank": 4, "epsilon": 1e-5, "variance": 1.0, "dy": 1.0} | facts)


@pytest.mark.parametrize(
    ("failing", "passing", "says"),
    [
        ([{"C": 3}, {"C": 5}], [{"C": 8}], "C <= 5"),
        ([{"C": 17}, {"C": 33}], [{"C": 15}, {"C": 32}], "C >= 17 and C is odd"),
        ([{"C": 32}, {"C": 64}], [{"C": 8}, {"C": 72}], "16 divides C"),
        ([{"layout": "NXC", "C": 9}], [{"C": 9}, {"layout": "NXC"}], "C = 9 and the layout is NXC"),
        ([{"gamma": False}], [{}], "gamma is absent"),
        ([{"purpose": "q"}], [{}], "the data are q"),
        ([{}], [{}], None),
        ([{}], [], None),
    ],
)
def test_condition_returns_simplest_words_that_separate(failing, passing, says):
    found = condition([_facts(**each) for each in failing], [_facts(**each) for each in passing])
    assert found is None if says is None else set(found.split(" and ")) == set(says.split(" and "))


_STATES = {
    "overwritten": """
        new = _right(x, dy, mean, variance, gamma, **options)
        found = _KEPT.setdefault(x.shape, tuple(map(np.empty_like, new)))
        for own, each in zip(found, new):
            own[...] = each
        return found
    """,
    "stale": """
        key = gamma.ctypes.data, x.ctypes.data, float(x.flat[0]), float(dy.flat[0])
        gamma = _KEPT.setdefault(key, gamma.copy())
        return _right(x, dy, mean, variance, gamma, **options)
    """,
    "not_repeatable": """
        scratch = _KEPT.setdefault(mean.shape, np.empty(mean.shape))
        dx, dgamma, dbeta = _right(x, dy, mean, variance, gamma, **options)
        scratch[...] = dbeta
        time.sleep(0.1)
        return dx, dgamma, scratch.astype(mean.dtype)
    """,
    "changed_input": """
        _KEPT[dy.ctypes.data] = _KEPT.get(dy.ctypes.data, 0) + 1
        found = _right(x, dy, mean, variance, gamma, **options)
        if _KEPT[dy.ctypes.data] == 3:
            dy[...] = 0
        return found
    """,
}  # fmt: skip


@pytest.mark.parametrize("status", _STATES)
def test_kernel_that_keeps_state_between_calls_has_its_status(status, tmp_path):
    code = "import time\nimport numpy as np\nfrom tests.conformance.wrong_kernels import Kernel\n"
    code += "_right, _KEPT = Kernel(), {}\n\n"
    code += "def kernel(x, dy, mean, variance, gamma, **options):\n"
    code += textwrap.indent(textwrap.dedent(_STATES[status]), "    ")
    (tmp_path / "stateful.py").write_text(code)
    job = Job(f"{tmp_path}/stateful.py:kernel", Selection(only=("realistic-float32-float32-NCX",)))
    assert status in {verdict.status for verdict in verify(job).verdicts}
