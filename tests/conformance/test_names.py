"""Kernels with one mistake, unlike the rows of the catalogue, have one finding that names it."""

from __future__ import annotations

import numpy as np
import pytest

from backnorm.conformance.formula import BACKWARD
from backnorm.conformance.verify._events import Outcome
from backnorm.conformance.verify.cases import Selection, recipes
from backnorm.conformance.verify.draws import drawn
from backnorm.conformance.verify.findings import findings
from backnorm.conformance.verify.job import Job
from backnorm.conformance.verify.operations import nonlinear, operation_of, varied
from backnorm.conformance.verify.run import Results
from tests.support.dtypes import BFLOAT16, rounded

from .wrong_kernels import Kernel

SELECTION = Selection(dtypes=("float32",), layouts=("NCX",), only=("diagnostic-*",))
COLUMNS = (slice(None), None)


class Steps:
    """The right gradients in steps, by channel, which a mistake changes one by one."""

    def __init__(self, x, dy, mean, variance, gamma, epsilon, training):
        self.x, self.dy = x, dy
        self.mean, self.variance, self.gamma = mean, variance, gamma
        self.epsilon, self.training, self.count = epsilon, training, x.shape[1]

    def change_inputs(self):
        pass

    def inverse(self):
        return 1 / np.sqrt(self.variance + self.epsilon)

    def sums_of_dx(self, sums):
        return sums

    def sums_of_parameters(self, sums):
        return sums

    def results(self):
        self.change_inputs()
        s, c = self.inverse(), self.x - self.mean[COLUMNS]
        terms = self.dy, self.dy * c
        first, second = (each.sum(1) / self.count for each in self.sums_of_dx(terms))
        dx = self.dy - (first[COLUMNS] + c * (s * s * second)[COLUMNS]) * self.training
        sum_dy, sum_dy_xmu = (each.sum(1) for each in self.sums_of_parameters(terms))
        return (self.gamma * s)[COLUMNS] * dx, s * sum_dy_xmu, sum_dy


def _inputs(**change):
    """Return the steps in which these inputs are other ones."""

    def change_inputs(self):
        for name, function in change.items():
            setattr(self, name, function(self))

    return type("Changed", (Steps,), {"change_inputs": change_inputs})


def _steps(**functions):
    return type("Changed", (Steps,), functions)


def _results(change):
    """Return the steps whose results are changed."""
    return type("Changed", (Steps,), {"results": lambda self: change(self, *Steps.results(self))})


def _is_positive(self):
    return self.gamma[COLUMNS] * (self.x - self.mean[COLUMNS]) > 0


def _per_image(self, dx, dgamma, dbeta):
    """Return the dx of instance normalisation."""
    parts = range(0, self.count, 39)
    x, dy = ([each[:, k : k + 39] for k in parts] for each in (self.x, self.dy))
    rest = self.mean, self.variance, self.gamma, self.epsilon, self.training
    each = [Steps(*pair, *rest).results()[0] for pair in zip(x, dy, strict=True)]
    return np.concatenate(each, 1), dgamma, dbeta


#: A kernel, and the sentence of its only finding.
KERNELS = {
    "1 + gamma is used for gamma": _inputs(gamma=lambda k: 1 + k.gamma),
    "the gamma of other channels is used, such as that of channel 0 in channel 8": _inputs(
        gamma=lambda k: k.gamma[np.arange(13) % 8]
    ),
    "the mean of x**2 is used for the variance": _inputs(variance=lambda k: (k.x**2).mean(1)),
    "a variance below 0.25 counts as 0.25": _inputs(
        variance=lambda k: np.maximum(k.variance, 0.25)
    ),
    "another mean and another variance are used than those that were passed": _inputs(
        mean=lambda k: 0.9 * k.mean + 0.1 * k.x.mean(1),
        variance=lambda k: 0.9 * k.variance + 0.1 * k.x.var(1),
    ),
    "x is used for (x - mean)*s, as if x were normalised already": _results(
        lambda k, dx, dgamma, dbeta: (
            (k.gamma * k.inverse())[COLUMNS]
            * (
                k.dy
                - (k.dy.mean(1)[COLUMNS] + k.x * (k.dy * k.x).mean(1)[COLUMNS]) * k.training
            ),
            (k.dy * k.x).sum(1),
            dbeta,
        )
    ),
    "s*dy is used for dy": _inputs(dy=lambda k: k.dy * k.inverse()[COLUMNS]),
    "the x of the next channel is used": _inputs(x=lambda k: np.roll(k.x, -1, 0)),
    "288 is used for M, which is 273": _inputs(count=lambda k: 288),
    "the sums lack the first image, in dgamma and dbeta alone": _steps(
        sums_of_parameters=lambda k, terms: [each[:, 39:] for each in terms]
    ),
    "the sums are over every second element of a channel alone, in dx alone": _steps(
        sums_of_dx=lambda k, terms: [each[:, ::2] for each in terms]
    ),
    "dgamma and dbeta have the values of other channels, such as that of channel 12 in channel 0": (
        _results(lambda k, dx, dgamma, dbeta: (dx, dgamma[::-1], dbeta[::-1]))
    ),
    "dbeta is the sum of dx, not of dy": _results(
        lambda k, dx, dgamma, dbeta: (dx, dgamma, dx.sum(1))
    ),
    "dx has dy added to it": _results(lambda k, dx, dgamma, dbeta: (dx + k.dy, dgamma, dbeta)),
    "the sums in dx are those of each image alone, as in instance normalisation": _results(
        _per_image
    ),
    "s = 1/sqrt(variance + epsilon) has few right bits": _steps(
        inverse=lambda k: rounded(Steps.inverse(k), BFLOAT16).astype(float)
    ),
    "dy counts only where gamma*(x - mean) is positive, as before a ReLU": _inputs(
        dy=lambda k: np.where(_is_positive(k), k.dy, 0)
    ),
    "dx, dgamma and dbeta are not linear in dy: dx is not a sum of multiples of dy, 1 and x - mean "
    "in most channels": _inputs(dy=lambda k: np.tanh(k.dy)),
    "dx is not linear in dy: dx is clipped: many elements have the least or the largest value of a "
    "channel": _results(lambda k, dx, dgamma, dbeta: (np.clip(dx, -1, 1), dgamma, dbeta)),
}  # fmt: skip


def outputs_of(steps, case):
    """Return the results for arrays with channels on axis 1."""
    x, dy, *rest = (a.astype(float) for a in case.operands)
    first = np.moveaxis(x, 1, 0).shape
    rows = [np.moveaxis(each, 1, 0).reshape(len(rest[0]), -1) for each in (x, dy)]
    dx, dgamma, dbeta = steps(*rows, *rest, case.data.epsilon, case.training).results()
    dx = np.moveaxis(dx.reshape(first), 0, 1)
    return {"dx": dx.astype("f"), "dgamma": dgamma.astype("f"), "dbeta": dbeta.astype("f")}


@pytest.mark.parametrize(("says", "steps"), KERNELS.items(), ids=list(KERNELS))
def test_finding_of_kernel_with_one_mistake_names_it(says, steps):
    results = Results(Job("a kernel", SELECTION), recipes={r.name: r for r in recipes(SELECTION)})
    for recipe in list(results.recipes.values()):
        case = recipe.case()
        outputs = outputs_of(steps, case)
        other = nonlinear(outputs, outputs_of(steps, varied(case, "dy")))
        results.add(Outcome(case.name, outputs=outputs, nonlinear=other), case)
    assert [each.says for each in findings(results)] == [says]


def test_finding_of_drawn_case_with_one_wrong_channel_names_channel():
    recipe = drawn("drawn-1x16-nogamma-float32-float32-NCX")
    case = recipe.case()
    gradients = Kernel()(*case.operands, **case.options)
    outputs = dict(zip(("dx", "dgamma", "dbeta"), gradients, strict=True))
    outputs["dbeta"][-1] = outputs["dbeta"][-2]
    results = Results(Job("a kernel", SELECTION), recipes={recipe.name: recipe})
    results.add(Outcome(case.name, outputs=outputs), case)
    (found,) = findings(results)
    assert found.says.startswith("dbeta is wrong in channel 15; the rest is right, in the smallest")


def test_gradients_of_right_kernel_are_linear():
    for recipe in recipes(SELECTION):
        calls = [recipe.case(), varied(recipe.case(), "dy")]
        outputs = [Kernel()(*case.operands, **case.options) for case in calls]
        names = "dx", "dgamma", "dbeta"
        assert nonlinear(*(dict(zip(names, each, strict=True)) for each in outputs)) == {}


def test_mistake_that_changes_few_bits_of_narrow_type_is_named_alone():
    only = ("diagnostic-bfloat16-float32-NCX",)
    (recipe,) = recipes(Selection(dtypes=("bfloat16",), only=only))
    case = recipe.case()
    mistake = next(each for each in BACKWARD.mistakes if each.name == "projection-bessel")
    gradients = BACKWARD.wrong(mistake)(*case.operands, **case.options)
    outputs = dict(zip(("dx", "dgamma", "dbeta"), gradients, strict=True))
    assert operation_of(case).diagnosis(case, outputs).names == ("projection-bessel",)
