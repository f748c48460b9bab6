"""The ATen dialect against PyTorch's operators."""

from __future__ import annotations

import inspect

import ml_dtypes
import numpy as np
import pytest
import torch

from backnorm.dialects import aten

NATIVE = torch.ops.aten.native_batch_norm_backward
EPS = 1e-5
TYPES = {
    "float64": (torch.float64, torch.float64),
    "float32": (torch.float32, torch.float32),
    "float16": (torch.float16, torch.float16),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float16 and float32": (torch.float16, torch.float32),
    "bfloat16 and float32": (torch.bfloat16, torch.float32),
}
SHAPES = [(7, 3), (4, 3, 5), (4, 3, 5, 6), (3, 2, 4, 2, 5), (2, 3, 1, 1), (8, 4, 20, 20)]
ALL = [True, True, True]


def array(tensor):
    if tensor is None:
        return None
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def arguments(shape, data=torch.float32, channel=None, *, train=True, weighted=True, last=False):
    """Return the arguments of the operator, those of an autograd call."""
    channel = channel or data
    generator = torch.Generator().manual_seed(sum(shape) + train)

    def normal(*size):
        return torch.randn(*size, generator=generator)

    x = (normal(*shape) * 3 + 1).to(data)
    if last:
        x = x.to(memory_format=torch.channels_last)
    dy, c = normal(*shape).to(data), shape[1]
    weight = normal(c).to(channel) if weighted else None
    running = normal(c).to(channel), (normal(c).abs() + 0.5).to(channel)
    # Beside a 16-bit x without weight only the running statistics say the type.
    _, *saved = torch.native_batch_norm(
        x, weight, weight, running[0].clone(), running[1].clone(), train, 0.1, EPS
    )
    return [dy, x, weight, *running, *saved, train, EPS]


def wide(values):
    """Return copies of the arguments in float64; operators may write to them."""
    return [v.to(torch.float64, copy=True) if isinstance(v, torch.Tensor) else v for v in values]


def close(actual, expected, dtype):
    digits = {2: 2e-2, 4: 3e-5, 8: 1e-12}[dtype.itemsize]
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(actual.double(), expected, rtol=digits, atol=digits * scale)


def cases(shape, types):
    """Yield the arguments in training and frozen, with and without weight, in every layout."""
    for train in (True, False):
        for weighted in (True, False):
            for last in (False, True) if len(shape) == 4 else (False,):
                yield arguments(shape, *TYPES[types], train=train, weighted=weighted, last=last)


@pytest.mark.covering(1)
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_aten_backward_matches_float64_of_pytorch(shape, types):
    for operands in cases(shape, types):
        ours = aten.native_batch_norm_backward(*map_arrays(operands), output_mask=ALL)
        exact = NATIVE(*wide(operands), output_mask=ALL)
        own = NATIVE(*operands, output_mask=ALL)
        for actual, expected, theirs in zip(map(tensor, ours), exact, own, strict=True):
            assert actual.dtype is theirs.dtype
            assert actual.shape == theirs.shape
            close(actual, expected, actual.dtype)


def map_arrays(operands):
    return [array(v) if isinstance(v, torch.Tensor) else v for v in operands]


def tensor(values):
    if values.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


# PyTorch's overloads that have another name here.
OVERLOADS = {"_native_batch_norm_legit_no_stats": ("_native_batch_norm_legit", "no_stats")}


def schema_of(name):
    packet, overload = OVERLOADS.get(name, (name, "default"))
    return getattr(getattr(torch.ops.aten, packet), overload)._schema


@pytest.mark.parametrize("name", aten.__all__)
def test_aten_signatures_match_pytorch_schemas(name):
    schema = schema_of(name)
    ours = inspect.signature(getattr(aten, name)).parameters.values()
    theirs = [argument.name for argument in schema.arguments]
    assert [
        operands.name for operands in ours if operands.kind is not operands.KEYWORD_ONLY
    ] == theirs
    # Ours alone, and by keyword alone.
    assert [operands.name for operands in ours if operands.kind is operands.KEYWORD_ONLY] == [
        "arithmetic"
    ]


FORWARDS = [
    name for name in aten.__all__ if getattr(aten, name).operator.schema.operation == "forward"
]


@pytest.mark.parametrize("name", aten.__all__)
def test_aten_inputs_are_required_where_pytorch_takes_no_none(name):
    schema = getattr(aten, name).operator.schema
    # PyTorch's declarations let these be None, and its kernels need them in training.
    needed = {"save_mean", "save_var", "save_invstd", "save_var_transform"}
    required = {tensor.name for tensor in schema.inputs if tensor.required} - needed
    assert required == {
        argument.name
        for argument in schema_of(name).arguments
        if str(argument.type) == "Tensor" and argument.name in schema.words.values()
    }


@pytest.mark.parametrize("name", FORWARDS)
def test_aten_forward_also_returns_what_pytorch_updates_in_place(name):
    theirs = schema_of(name)
    written = [each.name for each in theirs.arguments if each.is_write]
    if name in ("native_batch_norm", "cudnn_batch_norm"):
        # Their declarations do not say so.
        written = ["running_mean", "running_var"]
    assert len(getattr(aten, name).operator.schema.outputs) == len(theirs.returns) + len(written)


def decomposed(name):
    """Return PyTorch's decomposition of an operator whose kernels are for a GPU."""
    return torch._decomp.decomposition_table[getattr(torch.ops.aten, name).default]


RESERVE = torch.empty(0, dtype=torch.uint8)


def by_index(dy, x, weight, *others):
    call = torch.ops.aten._batch_norm_impl_index_backward
    return call(0, x, dy, weight, *others, ALL, RESERVE)


def our_index(dy, x, weight, *others):
    return aten._batch_norm_impl_index_backward(0, x, dy, weight, *others, ALL, RESERVE.numpy())


def of_library(function, *reserve):
    """Return a gradient in the order of native_batch_norm_backward."""

    def call(dy, x, weight, running_mean, running_var, mean, inverse, train, eps):
        assert train
        statistics = running_mean, running_var, mean, inverse
        return function(x, dy, weight, *statistics, eps, *reserve)

    return call


BACKWARDS = {
    "batch_norm_backward": (
        lambda *operands: aten.batch_norm_backward(*operands, ALL, RESERVE.numpy()),
        lambda *operands: torch.ops.aten.batch_norm_backward(*operands, ALL, RESERVE),
    ),
    "_batch_norm_impl_index_backward": (our_index, by_index),
    "cudnn_batch_norm_backward": (
        of_library(aten.cudnn_batch_norm_backward, RESERVE.numpy()),
        of_library(decomposed("cudnn_batch_norm_backward"), RESERVE),
    ),
    "miopen_batch_norm_backward": (
        of_library(aten.miopen_batch_norm_backward),
        of_library(decomposed("miopen_batch_norm_backward")),
    ),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("name", BACKWARDS)
def test_other_backward_matches_float64_of_pytorch(name, types, train):
    if not train and name in ("cudnn_batch_norm_backward", "miopen_batch_norm_backward"):
        return
    ours, theirs = BACKWARDS[name]
    operands = arguments((4, 3, 5), *TYPES[types], train=train)
    found, exact = ours(*map_arrays(operands)), theirs(*wide(operands))
    own = NATIVE(*operands, output_mask=ALL)
    for actual, expected, known in zip(map(tensor, found), exact, own, strict=True):
        assert actual.dtype is known.dtype
        close(actual, expected, actual.dtype)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_gradient_by_index_is_that_of_its_implementation(index):
    operands = map_arrays(arguments((4, 3, 5)))
    dy, x, *others = operands
    expected = aten.native_batch_norm_backward(*operands, output_mask=ALL)
    found = aten._batch_norm_impl_index_backward(index, x, dy, *others, ALL, RESERVE.numpy())
    for actual, known in zip(found, expected, strict=True):
        np.testing.assert_array_equal(actual, known)


def forward_operands(types, *, weighted=True):
    data, channel = TYPES[types]
    _, x, weight, running_mean, running_var, *_ = arguments((4, 3, 5), data, channel)
    affine = (weight, weight * 2) if weighted else (None, None)
    return [x, *affine, running_mean, running_var]


def exact_forward(operands, options):
    """Return all results of PyTorch's functional operator in float64."""
    return torch.ops.aten._native_batch_norm_legit_functional(*wide(operands), *options)


def check(found, exact, known=None):
    for actual, expected in zip(found, exact, strict=True):
        actual = tensor(actual)
        assert actual.shape == expected.shape
        if expected.dtype is torch.uint8:
            assert actual.dtype is torch.uint8
            continue
        close(actual, expected, actual.dtype)
    for actual, own in zip(found, known or (), strict=False):
        if own.numel():
            assert tensor(actual).dtype is own.dtype


@pytest.mark.covering(2)
@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize(
    "name",
    ["native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"],
)
def test_forward_matches_float64_of_pytorch(name, types, training, momentum):
    for weighted in (True, False):
        operands, options = forward_operands(types, weighted=weighted), (training, momentum, EPS)
        arrays = map_arrays(operands)
        kept = [array if array is None else array.copy() for array in arrays]
        found = getattr(aten, name)(*arrays, *options)
        own = torch.ops.aten._native_batch_norm_legit_functional(*operands, *options)
        check(found, exact_forward(operands, options), own)
        for array, before in zip(arrays, kept, strict=True):
            np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize("types", TYPES)
def test_forward_with_update_matches_float64_of_pytorch(types):
    operands = forward_operands(types)
    *found, running_mean, running_var = aten._batch_norm_with_update(
        *map_arrays(operands), 0.1, EPS
    )
    written = wide(operands)
    exact = torch.ops.aten._batch_norm_with_update(*written, 0.1, EPS)
    check([*found, running_mean, running_var], [*exact, *written[3:]])


@pytest.mark.parametrize("types", TYPES)
def test_forward_without_running_statistics_matches_float64_of_pytorch(types):
    operands = forward_operands(types)[:3]
    options = True, 0.1, EPS
    call = torch.ops.aten._native_batch_norm_legit.no_stats
    found = aten._native_batch_norm_legit_no_stats(*map_arrays(operands), *options)
    check(found, call(*wide(operands), *options), call(*operands, *options))
    native = aten.native_batch_norm(*map_arrays(operands), None, None, *options)
    assert native[3:] == (None, None)
    for actual, known in zip(native, found, strict=False):
        np.testing.assert_array_equal(actual, known)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("types", TYPES)
def test_forward_of_cudnn_matches_pytorch_decomposition(types, training):
    operands, options = forward_operands(types), (training, 0.1, EPS)
    found = aten.cudnn_batch_norm(*map_arrays(operands), *options)
    written = wide(operands)
    exact = decomposed("cudnn_batch_norm")(*written, *options)
    check(found[:4], exact)
    check(found[4:], exact_forward(operands, options)[3:])


def test_forward_of_one_element_per_channel_has_finite_running_variance_unlike_pytorch():
    operands = [torch.ones(1, 3), None, None, torch.ones(3), torch.ones(3)]
    found = aten.native_batch_norm(*map_arrays(operands), True, 0.1, EPS)
    assert torch.isnan(exact_forward(operands, (True, 0.1, EPS))[4]).all()
    np.testing.assert_allclose(found[4], np.full(3, 0.9), rtol=1e-7)


def test_forward_of_empty_input_keeps_running_statistics():
    x, mean, variance = np.empty((0, 3), "f"), np.ones(3, "f"), np.full(3, 2, "f")
    found = aten.native_batch_norm(x, None, None, mean, variance, True, 0.1, EPS)
    np.testing.assert_array_equal(found[3], mean)
    np.testing.assert_array_equal(found[4], variance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_aten_reduce_and_elemt_match_gradient_of_pytorch(dtype):
    operands = arguments((6, 3, 8), dtype)
    dy, x, weight, _, _, mean, invstd = map_arrays(operands[:7])
    reduced = aten.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, True, True)
    part = aten.batch_norm_backward_elemt(
        dy, x, mean, invstd, weight, *reduced[:2], np.array([48], np.int32)
    )
    exact = NATIVE(*wide(operands), output_mask=ALL)
    for actual, expected in zip((part, *reduced[2:]), exact, strict=True):
        close(tensor(actual), expected, dtype)
