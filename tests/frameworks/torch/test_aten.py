"""The ATen dialect against PyTorch's operator, and PyTorch's operator run by ours."""

from __future__ import annotations

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import backnorm
from backnorm.dialects import aten
from backnorm.torch.aten import use_for_aten

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
    """Return the arguments in float64, and the inverse deviation as it is."""
    return [v.double() if isinstance(v, torch.Tensor) else v for v in values]


def close(actual, expected, dtype):
    digits = {2: 2e-2, 4: 3e-5, 8: 1e-12}[dtype.itemsize]
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(actual.double(), expected, rtol=digits, atol=digits * scale)


# The dialect


def cases(shape, types):
    """Yield the arguments in training and frozen, with and without weight, in every layout."""
    for train in (True, False):
        for weighted in (True, False):
            for last in (False, True) if len(shape) == 4 else (False,):
                yield arguments(shape, *TYPES[types], train=train, weighted=weighted, last=last)


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_dialect_against_pytorch_in_float64(shape, types):
    for given in cases(shape, types):
        ours = aten.native_batch_norm_backward(*map_arrays(given), output_mask=ALL)
        exact = NATIVE(*wide(given), output_mask=ALL)
        own = NATIVE(*given, output_mask=ALL)
        for actual, expected, theirs in zip(map(tensor, ours), exact, own, strict=True):
            assert actual.dtype is theirs.dtype
            assert actual.shape == theirs.shape
            close(actual, expected, actual.dtype)


def map_arrays(given):
    return [array(v) if isinstance(v, torch.Tensor) else v for v in given]


def tensor(values):
    if values.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


@pytest.mark.parametrize(
    "name",
    ["native_batch_norm_backward", "batch_norm_backward_reduce", "batch_norm_backward_elemt"],
)
def test_argument_lists_are_pytorchs(name):
    schema = getattr(torch.ops.aten, name).default._schema
    ours = inspect.signature(getattr(aten, name)).parameters.values()
    theirs = [argument.name for argument in schema.arguments]
    assert [given.name for given in ours if given.kind is not given.KEYWORD_ONLY] == theirs
    # Ours alone, and by keyword alone.
    assert [given.name for given in ours if given.kind is given.KEYWORD_ONLY] == ["arithmetic"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_two_phases_give_pytorchs_gradient(dtype):
    given = arguments((6, 3, 8), dtype)
    dy, x, weight, _, _, mean, invstd = map_arrays(given[:7])
    reduced = aten.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, True, True)
    part = aten.batch_norm_backward_elemt(
        dy, x, mean, invstd, weight, *reduced[:2], np.array([48], np.int32)
    )
    exact = NATIVE(*wide(given), output_mask=ALL)
    for actual, expected in zip((part, *reduced[2:]), exact, strict=True):
        close(tensor(actual), expected, dtype)


# PyTorch's operator, run by ours


def bits(tensors):
    return [None if t is None else array(t.contiguous()).tobytes() for t in tensors]


def ours_bits(given, mask=ALL):
    results = aten.native_batch_norm_backward(*map_arrays(given), output_mask=mask)
    return [None if a is None else np.ascontiguousarray(a).tobytes() for a in results]


@pytest.fixture(autouse=True, scope="module")
def _pytorch_is_itself_again():
    """What the tests leave behind is PyTorch's own operator."""
    given = arguments((16, 8, 40, 40))
    own = bits(NATIVE(*given, ALL))
    yield
    assert bits(NATIVE(*given, ALL)) == own != ours_bits(given)


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_operator_gives_our_bits(shape, types):
    for given in cases(shape, types):
        own = NATIVE(*given, ALL)
        with use_for_aten():
            results = NATIVE(*given, ALL)
        assert bits(results) == ours_bits(given)
        for result, theirs in zip(results, own, strict=True):
            assert result.dtype is theirs.dtype
            assert result.stride() == theirs.stride()


@pytest.mark.parametrize("mask", [[a, b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)])
def test_the_output_mask(mask):
    mask = [bool(flag) for flag in mask]
    given = arguments((4, 3, 5))
    with use_for_aten():
        results = NATIVE(*given, mask)
    assert [result is not None for result in results] == mask
    assert bits(results) == ours_bits(given, mask)


def model(train, dtype=torch.float32, **options):
    torch.manual_seed(1)
    # No parameter has a gradient that is all but 0: no bias before the normalisation, and no other
    # normalisation behind it.
    normal = nn.BatchNorm2d(8, **options)
    layers = nn.Conv2d(3, 8, 3, bias=False), normal, nn.ReLU(), nn.Conv2d(8, 8, 1)
    return nn.Sequential(*layers).to(dtype).train(train)


def gradients(network, x, dy):
    """Return the gradients of input and parameters, none of a constant."""
    network.zero_grad()
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    network(x).backward(dy)
    return [x.grad, *(p.grad.clone() for p in network.parameters() if p.grad is not None)]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("train", [True, False])
def test_autograd_calls_it(train, last):
    torch.manual_seed(0)
    network = model(train)
    x, dy = torch.randn(8, 3, 18, 18), torch.randn(8, 8, 16, 16)
    if last:
        x = x.to(memory_format=torch.channels_last)
    seen = []

    def watch(module, grad_input, grad_output):
        seen.append(grad_input[0].clone())

    handle = network[1].register_full_backward_hook(watch)
    theirs = gradients(network, x, dy)
    with use_for_aten():
        ours = gradients(network, x, dy)
    handle.remove()
    exact = gradients(model(train).double(), x.double(), dy.double())
    for one, other, known in zip(ours, theirs, exact, strict=True):
        assert one.stride() == other.stride()
        close(one, known, torch.float32)
    assert not torch.equal(*seen)


def test_parameters_that_need_no_gradient():
    network = model(True)
    network[1].weight.requires_grad_(False)
    network[3].bias.requires_grad_(False)
    x, dy = torch.randn(4, 3, 8, 8), torch.randn(4, 8, 6, 6)
    theirs = gradients(network, x, dy)
    with use_for_aten():
        ours = gradients(network, x, dy)
    assert len(ours) == len(theirs) == 4
    for one, other in zip(ours, theirs, strict=True):
        close(one, other.double(), torch.float32)
    plain = model(True, affine=False)
    with use_for_aten():
        assert len(gradients(plain, x, dy)) == 4


@pytest.mark.long
@pytest.mark.parametrize("train", [True, False])
def test_first_and_second_order_by_differences(train):
    layer = nn.BatchNorm2d(3, track_running_stats=not train).double().train(train)
    generator = torch.Generator().manual_seed(3)
    nn.init.uniform_(layer.weight, 0.5, 1.5, generator=generator)
    x = torch.randn(4, 3, 2, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    with use_for_aten():
        assert torch.autograd.gradcheck(layer, (x,))
        assert torch.autograd.gradgradcheck(layer, (x,))


def test_nesting_and_exceptions():
    given = arguments((16, 8, 40, 40))
    own, ours = bits(NATIVE(*given, ALL)), ours_bits(given)
    assert own != ours
    with use_for_aten():
        with use_for_aten():
            assert bits(NATIVE(*given, ALL)) == ours
        assert bits(NATIVE(*given, ALL)) == ours
        with pytest.raises(ZeroDivisionError), use_for_aten():
            raise ZeroDivisionError
        assert bits(NATIVE(*given, ALL)) == ours
    assert bits(NATIVE(*given, ALL)) == own


def test_as_a_decorator():
    given = arguments((16, 8, 40, 40))

    @use_for_aten()
    def run():
        return bits(NATIVE(*given, ALL))

    assert run() == run() == ours_bits(given)


def test_a_backward_pass_in_another_thread():
    """Entered here, used there."""
    given = arguments((16, 8, 40, 40))
    with use_for_aten(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: bits(NATIVE(*given, ALL))).result() == ours_bits(given)


def test_threads_that_enter_and_leave():
    """No thread disturbs another's results; each sees its own block last as long as it does."""
    given = arguments((4, 8, 9, 9))
    own, ours = bits(NATIVE(*given, ALL)), ours_bits(given)
    network, x, dy = model(True), torch.randn(2, 3, 8, 8), torch.randn(2, 8, 6, 6)
    start = threading.Barrier(8)

    def inside(_):
        start.wait()
        for _ in range(100):
            with use_for_aten():
                assert bits(NATIVE(*given, ALL)) == ours
        return True

    def outside(_):
        start.wait()
        for _ in range(30):
            assert bits(NATIVE(*given, ALL)) in (own, ours)
            torch.autograd.grad(network(x.requires_grad_()), x, dy)
        return True

    with ThreadPoolExecutor(8) as pool:
        runs = [pool.submit(inside if k % 2 else outside, k) for k in range(8)]
        assert all(run.result() for run in runs)


def test_inputs_of_any_strides():
    dy, x, *rest = arguments((4, 3, 6, 5), torch.float64)
    expected = NATIVE(dy, x, *rest, ALL)
    ways = {
        "sliced": torch.stack([x, x], -1)[..., 0],
        "transposed": x.transpose(0, 3).contiguous().transpose(0, 3),
        "expanded": x[:1].expand_as(x),
    }
    with use_for_aten():
        for way, turned in ways.items():
            results = NATIVE(dy, turned, *rest, ALL)
            if way != "expanded":
                for one, other in zip(results, expected, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
            results = NATIVE(turned, x, *rest, ALL)
            known = ours_bits([turned, x, *rest])
            assert bits(results) == known


def test_missing_statistics_are_an_error_and_end_no_process():
    dy, x, weight, mean, variance, saved, invstd, *_ = arguments((4, 3, 5))
    with use_for_aten():
        with pytest.raises(backnorm.ArgumentTypeError, match=r"^save_mean: is a required"):
            NATIVE(dy, x, weight, mean, variance, None, None, True, EPS, ALL)
        with pytest.raises(backnorm.ArgumentTypeError, match=r"^running_mean: is a required"):
            NATIVE(dy, x, weight, None, None, saved, invstd, False, EPS, ALL)
        with pytest.raises(backnorm.ArgumentValueError, match=r"^grad_out: must have the shape"):
            NATIVE(dy[:2], x, weight, mean, variance, saved, invstd, True, EPS, ALL)
        negative = torch.tensor([1.0, -1.0, 1.0])
        with pytest.raises(backnorm.ArgumentValueError, match=r"^running_var: .*channel 1"):
            NATIVE(dy, x, weight, mean, negative, saved, invstd, False, EPS, ALL)


def test_an_error_passes_through_autograd():
    layer = nn.BatchNorm2d(3)
    layer.running_var[1] = -1.0
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    y = layer.eval()(x)
    with use_for_aten(), pytest.raises(backnorm.ArgumentValueError, match=r"^running_var: "):
        y.backward(torch.randn(2, 3, 4, 4))


def test_empty_batches():
    for shape in ((0, 3, 5), (4, 3, 0)):
        given = [
            torch.zeros(shape), torch.zeros(shape), torch.ones(3), None, None, torch.zeros(3),
            torch.ones(3), True, EPS,
        ]  # fmt: skip
        with use_for_aten():
            grad_input, grad_weight, grad_bias = NATIVE(*given, ALL)
        assert grad_input.shape == shape
        assert torch.equal(grad_weight, torch.zeros(3))
        assert torch.equal(grad_bias, torch.zeros(3))


def test_vmap_and_functional_gradients():
    layer = nn.BatchNorm1d(3, affine=False, track_running_stats=False).double()
    x, dy = torch.randn(5, 4, 3, dtype=torch.float64), torch.randn(5, 4, 3, dtype=torch.float64)

    def gradient(x, dy):
        return torch.func.vjp(layer, x)[1](dy)[0]

    expected = torch.stack([gradient(*pair) for pair in zip(x, dy, strict=True)])
    with use_for_aten():
        torch.testing.assert_close(torch.func.vmap(gradient)(x, dy), expected)


def test_fake_tensors_and_dispatch_modes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    given = arguments((4, 3, 5, 6), last=True)
    with use_for_aten(), FakeTensorMode() as mode:
        fake = [mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in given]
        results = NATIVE(*fake, ALL)
    for result, real in zip(results, NATIVE(*given, ALL), strict=True):
        assert result.shape == real.shape
        assert result.dtype is real.dtype


def test_training_goes_the_same_way():
    """A few steps of training end where PyTorch's do, to within rounding."""
    data = torch.randn(4, 8, 3, 10, 10, dtype=torch.float64)
    target = torch.randn(8, 8, 8, 8, dtype=torch.float64)

    def train():
        network = model(True, torch.float64)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for x in data:
            optimizer.zero_grad()
            nn.functional.mse_loss(network(x), target).backward()
            optimizer.step()
        return [p.detach() for p in network.parameters()]

    theirs = train()
    with use_for_aten():
        ours = train()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
