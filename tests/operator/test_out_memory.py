"""`out=` is checked by its memory, not by what its class says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import backnorm
from backnorm.conformance.data import realistic_data
from backnorm.dialects import cudnn, onednn_graph
from backnorm.executable import forget
from tests.support.dtypes import FLOAT32

SHAPE = (4, 6, 8)
SIZE = 4 * 6 * 8


def lying(shape):
    """Return a subclass of NumPy's arrays that says it has this shape, in all that has names."""
    claimed = np.empty(shape, np.float32)

    class Liar(np.ndarray):
        shape = property(lambda self: claimed.shape)
        strides = property(lambda self: claimed.strides)
        size = property(lambda self: claimed.size)
        nbytes = property(lambda self: claimed.nbytes)
        ndim = property(lambda self: claimed.ndim)
        flags = property(lambda self: claimed.flags)
        dtype = property(lambda self: claimed.dtype)
        T = property(lambda self: claimed.T)
        base = property(lambda self: None)
        __array_interface__ = property(lambda self: claimed.__array_interface__)
        reshape = ravel = transpose = view = copy = astype = lambda self, *_, **__: self
        squeeze = flatten = swapaxes = __getitem__ = lambda self, *_, **__: self
        __setitem__ = fill = lambda self, *_, **__: None

        def __len__(self):
            return len(claimed)

        def __array__(self, *_, **__):
            return claimed

        def __array_function__(self, function, *_):
            return False if function in (np.may_share_memory, np.shares_memory) else claimed

        def __array_ufunc__(self, *_, **__):
            return claimed

    return Liar


def takes_out(data):
    """Return functions of `out` by name, each with the index of that result."""
    x, dy, mean, variance, gamma = data.backward_inputs
    sums = backnorm.reduce(x, dy, mean)
    beta, epsilon = data.beta, data.options["epsilon"]

    def through_onednn(out):
        operands = x, dy, mean, variance, gamma
        return onednn_graph.BatchNormTrainingBackward(
            *operands, epsilon=epsilon, data_format="NCX", diff_src=out
        )[0]

    def through_cudnn(out, alpha=1.0):
        kept = (1, x.shape[1], 1)
        inverse = (1 / np.sqrt(variance + epsilon)).astype(np.float32)
        return cudnn.BatchNormalizationBackward(
            "SPATIAL", alpha, 0.0, 1.0, 0.0, x, dy, out, gamma.reshape(kept), epsilon=epsilon,
            savedMean=mean.reshape(kept), savedInvVariance=inverse.reshape(kept),
        )[0]  # fmt: skip

    common = {"epsilon": epsilon}
    return {
        "backward": lambda out: (
            backnorm.batch_norm_backward(x, dy, mean, variance, gamma, **common, out=out).dx
        ),
        "frozen": lambda out: (
            backnorm.batch_norm_backward(
                x, dy, mean, variance, gamma, **common, training=False, out=out
            ).dx
        ),
        "forward": lambda out: backnorm.batch_norm_forward(x, gamma, beta, **common, out=out).y,
        "inference": lambda out: backnorm.batch_norm_inference(
            x, mean, variance, gamma, beta, **common, out=out
        ),
        "apply": lambda out: backnorm.apply(
            x, dy, mean, variance, gamma, **common, sums=sums, out=out
        ),
        "onednn_graph": through_onednn,
        "cudnn": through_cudnn,
        "cudnn, weighted": lambda out: through_cudnn(out, 0.5),
    }


FUNCTIONS = list(takes_out(realistic_data((2, 3, 4), FLOAT32, rng=np.random.default_rng(0))))


@pytest.fixture
def data(rng):
    return realistic_data(SHAPE, FLOAT32, rng=rng)


@pytest.mark.parametrize("warm", [False, True], ids=["first", "repeated"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_out_smaller_than_declared_shape_is_rejected_without_write(name, warm, data):
    call = takes_out(data)[name]
    forget()
    if warm:
        call(np.empty(SHAPE, np.float32))
    # Half of the memory is the array's.
    memory = np.full(SIZE, 7.0, np.float32)
    small = memory[: SIZE // 2].reshape(2, 6, 8).view(lying(SHAPE))
    with pytest.raises(ValueError, match="must have the shape"):
        call(small)
    np.testing.assert_array_equal(memory, 7.0)


@pytest.mark.parametrize("warm", [False, True], ids=["first", "repeated"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_out_with_false_declared_shape_receives_result_in_its_memory(name, warm, data):
    call = takes_out(data)[name]
    expected = call(np.empty(SHAPE, np.float32)).copy()
    forget()
    if warm:
        call(np.empty(SHAPE, np.float32))
    memory = np.full((*SHAPE[:-1], 2 * SHAPE[-1]), np.nan, np.float32)
    half = memory[..., ::2]
    found = call(half.view(lying((1, 2, 3))))
    assert name.startswith("cudnn") or type(found).__name__ == "Liar"
    np.testing.assert_array_equal(half, expected)
    assert np.isnan(memory[..., 1::2]).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_out_rejects_object_that_only_declares_ndarray_class(name, data):
    class Pretender:
        __class__ = np.ndarray
        shape, dtype = SHAPE, np.dtype(np.float32)
        flags = np.empty(SHAPE, np.float32).flags

    call = takes_out(data)[name]
    call(np.empty(SHAPE, np.float32))
    with pytest.raises(TypeError, match=r"Pretender"):
        call(Pretender())


def test_operand_that_only_declares_ndarray_class_is_rejected(data):
    class Pretender:
        __class__ = np.ndarray
        shape, dtype = data.x.shape, data.x.dtype
        flags = data.x.flags

    _, *others = data.backward_inputs
    backnorm.batch_norm_backward(*data.backward_inputs, **data.options)
    with pytest.raises(TypeError, match="x: unsupported element type"):
        backnorm.batch_norm_backward(Pretender(), *others, **data.options)


def shares(array):
    """Whether two elements share a byte, by counting."""
    offsets = np.zeros((), np.int64)
    for size, stride in zip(array.shape, array.strides, strict=True):
        offsets = offsets[..., None] + np.arange(size) * stride
    touched = (offsets.reshape(-1)[:, None] + np.arange(array.itemsize)).reshape(-1)
    return len(np.unique(touched)) < touched.size


SIZES = [(3, 4, 2), (2, 3, 3), (4, 1, 3)]
STRIDES = [4, 8, 12, 16, 20, 24, 36, 48, -4, -16, 6, 0]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_out_is_rejected_only_if_its_elements_share_memory(sizes):
    rng = np.random.default_rng(3)
    data = realistic_data(sizes, FLOAT32, rng=rng)
    call = takes_out(data)["backward"]
    expected, refusals = call(np.empty(sizes, np.float32)), 0
    for strides in itertools.product(STRIDES, repeat=3):
        memory = np.full(400, np.nan, np.float32)
        out = np.lib.stride_tricks.as_strided(memory[150:], sizes, strides)
        if shares(out):
            refusals += 1
            with pytest.raises(ValueError, match="has elements that share memory"):
                call(out)
            assert np.isnan(memory).all()
        else:
            assert call(out) is out
            np.testing.assert_array_equal(out, expected)
    assert 100 < refusals < len(STRIDES) ** 3 - 100
