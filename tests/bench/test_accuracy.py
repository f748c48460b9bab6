"""The benchmark judges results before it times them: right ones pass, wrong ones do not."""

from __future__ import annotations

import numpy as np
import pytest

import backnorm
from backnorm.conformance.formula import BACKWARD, MISTAKES
from backnorm.conformance.judge import GRADIENTS
from benchmarks.accuracy import Examiner, float32_loss, sampled_channels
from benchmarks.cells import Cell
from benchmarks.data import make_data
from tests.mutants.single import SINGLE

DTYPES = ("float64", "float32", "float16", "bfloat16")
SHAPE = (8, 20, 7, 5)


def case(op="backward", layout="NCX", dtype="float32", shape=SHAPE):
    cell = Cell("small", op, shape, layout, dtype)
    return cell, make_data(cell)


def ours(cell, data):
    if cell.op == "backward":
        results = backnorm.batch_norm_backward(*data.backward_inputs, **data.options)._asdict()
    elif cell.op == "forward":
        results = backnorm.batch_norm_forward(
            data.x, data.gamma, data.beta, **data.options
        )._asdict()
    else:
        y = backnorm.batch_norm_inference(
            data.x, data.mean, data.variance, data.gamma, data.beta, **data.options
        )
        results = {"y": y}
    return {name: value.copy() for name, value in results.items()}


def gradients(kernel, data):
    found = kernel(*data.backward_inputs, training=True, **data.options)
    return dict(zip(GRADIENTS, found, strict=True))


@pytest.mark.parametrize("op", ["backward", "forward", "inference"])
@pytest.mark.parametrize("layout", ["NCX", "NXC"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_of_backnorm_results_is_empty(op, layout, dtype):
    cell, data = case(op, layout, dtype)
    results = ours(cell, data)
    examiner = Examiner(cell, data)
    assert examiner.error("backnorm", results) == ""
    assert examiner.error("torch", results) == ""


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_error_of_float32_arithmetic_is_reported_for_backnorm_not_peer(dtype):
    cell, data = case(dtype=dtype)
    examiner = Examiner(cell, data)
    assert examiner.error("torch", gradients(SINGLE, data)) == ""
    if dtype == "float32":
        assert examiner.error("backnorm", gradients(SINGLE, data))


# A mistake in each step of the formula.
WRONG = (
    "no-mean-dy", "no-projection", "projection-s", "count-less-one", "epsilon-constant",
    "statistics-swapped", "no-gamma", "dgamma-no-s", "dbeta-mean", "frozen",
)  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
@pytest.mark.parametrize("contestant", ["backnorm", "torch"])
def test_error_of_a_broken_formula_is_reported(mistake, contestant):
    cell, data = case()
    (row,) = (each for each in MISTAKES if each.name == mistake)
    assert Examiner(cell, data).error(contestant, gradients(BACKWARD.wrong(row), data))


@pytest.mark.parametrize("contestant", ["backnorm", "torch"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
def test_error_of_one_unwritten_element_is_reported(contestant, value):
    cell, data = case()
    results = ours(cell, data)
    results["dx"][-1, -1, -1, -1] = value
    assert Examiner(cell, data).error(contestant, results)


@pytest.mark.parametrize("contestant", ["backnorm", "torch"])
def test_error_of_a_wrong_shape_or_type_is_reported(contestant):
    cell, data = case()
    examiner, results = Examiner(cell, data), ours(cell, data)
    transposed = results | {"dx": results["dx"].swapaxes(2, 3)}
    assert examiner.error(contestant, transposed)
    integers = results | {"dbeta": results["dbeta"].astype(int)}
    assert examiner.error(contestant, integers)


def test_error_of_missing_statistics_is_reported_for_backnorm_not_peer():
    cell, data = case("forward")
    examiner, results = Examiner(cell, data), ours(cell, data)
    only_y = {"y": results["y"]}
    assert examiner.error("torch", only_y) == ""
    assert examiner.error("backnorm", only_y) == "mean is missing"
    del results["y"]
    assert examiner.error("torch", results) == "y is missing"


def test_sampled_channels_include_last_and_if_several_first():
    assert sampled_channels(1, 10) == [0]
    assert sampled_channels(2, 10) == [0, 1]
    many = sampled_channels(1000, 10)
    assert many[0] == 0
    assert many[-1] == 999
    assert len(set(many)) == len(many) == 4
    assert sampled_channels(64, 1 << 30) == [63]


def test_float32_loss_is_small():
    assert float32_loss(1, 1.0) < 2e-6
    assert float32_loss(10**6, 3.0) < 3e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_make_data_is_repeatable_aligned_and_not_constant(dtype):
    cell, data = case("backward", "NXC", dtype, (2, 9, 5))
    again = make_data(cell)
    assert data.x.shape == (2, 5, 9)
    for name in ("x", "dy", "mean", "variance", "gamma", "beta"):
        assert getattr(data, name).tobytes() == getattr(again, name).tobytes()
    for array in (data.x, data.dy, data.out):
        assert array.ctypes.data % 64 == 0
        assert str(array.dtype) == dtype
    assert len(np.unique(data.dy.astype(float))) > 20
    assert data.mean.dtype == (np.float64 if dtype == "float64" else np.float32)


def test_make_data_of_large_arrays_repeats_its_values():
    _, data = case(shape=(3, 4, 400, 300))
    assert np.isfinite(data.x).all()
    assert data.x.reshape(-1)[0] == data.x.reshape(-1)[1_000_003]
