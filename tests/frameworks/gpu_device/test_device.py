"""Properties that need a GPU: streams, graphs, tuning, no waiting, size, agreement with the CPU.

`make gpu-check` runs this.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import backnorm.torch
from backnorm.executable import compute, forget
from backnorm.gpu.kernels import backward, forward
from backnorm.gpu.kernels.tuning import CONFIGURATIONS
from backnorm.options import Options
from backnorm.torch import engines, gpu
from backnorm.torch.checks import Operands
from backnorm.torch.options import options_of

CUDA = torch.device("cuda")

# Measured in the interpreter: none of 11 million float32 elements, in float64 arithmetic.
UNEQUAL = 1e-6


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(11)


def step(x, dy, weight, bias):
    """Return what a training step computes."""
    options = options_of(True, 1e-5, None, None, x.dtype)
    operands = Operands(x, None, weight, bias)
    y, mean, variance, _ = engines.forward(operands, options)(operands, 0.0)
    operands = x, dy, None, mean, variance, weight
    *gradients, _ = engines.backward(operands, options, False)(operands, None)
    return y, mean, variance, *gradients


def tensors(shape, dtype=torch.float32, *, channels_last=False):
    x, dy = (torch.randn(shape, device=CUDA).to(dtype) for _ in range(2))
    if channels_last:
        x, dy = (value.movedim(1, -1).contiguous().movedim(-1, 1) for value in (x, dy))
    return x, dy, torch.rand(shape[1], device=CUDA) + 0.5, torch.randn(shape[1], device=CUDA)


SHAPES = [(8, 16, 8, 8), (64, 64, 28, 28), (256, 256, 7, 7), (32, 128, 35, 35)]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_training_step_repeated_or_in_cuda_graph_has_the_same_bits(shape, channels_last):
    operands = tensors(shape, channels_last=channels_last)
    first = step(*operands)
    for one, other in zip(first, step(*operands), strict=True):
        assert torch.equal(one, other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(*operands)
    # Other values in the same memory, to be sure that it is the replay that computes.
    operands[0].mul_(-2.0)
    expected = step(*operands)
    for result in captured:
        result.fill_(float("nan"))
    graph.replay()
    for one, other in zip(captured, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_training_step_does_not_synchronise(shape):
    operands = tensors(shape)
    step(*operands)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(*operands)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_training_step_in_other_streams_has_the_same_bits(shape):
    operands = tensors(shape)
    expected = step(*operands)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for round_of in range(20):
        with torch.cuda.stream(streams[round_of % 4]):
            results.append(step(*operands))
    torch.cuda.synchronize()
    for result in results:
        for one, other in zip(result, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [(64, 64, 56, 56), (256, 512, 7, 7)], ids=str)
def test_training_step_matches_cpu_within_one_ulp(shape, channels_last):
    x, dy, weight, bias = tensors(shape, channels_last=channels_last)
    ours = step(x, dy, weight, bias)
    x, dy, weight, bias = (value.cpu() for value in (x, dy, weight, bias))
    theirs = step(x, dy, weight, bias)
    unequal = elements = 0
    for one, other in zip(ours, theirs, strict=True):
        a, b = (value.contiguous().view(torch.int32).long() for value in (one.cpu(), other))
        assert (a - b).abs().max() <= 1
        unequal += int((a != b).sum())
        elements += a.numel()
    print(f"{shape}: {unequal} of {elements} elements are not the CPU's")
    assert unequal <= UNEQUAL * elements


@pytest.mark.parametrize("shape", [(65538, 64, 513), (3, 2, 400_000_000)], ids=str)
def test_training_step_of_more_than_2_31_elements_matches_pytorch_per_channel(shape):
    x, dy, weight, bias = tensors(shape, torch.bfloat16)
    assert x.numel() > 2**31
    y, mean, variance, dx, dweight, dbias = step(x, dy, weight, bias)
    # A channel at a time PyTorch can do.
    for channel in range(0, shape[1], max(1, shape[1] // 4)):
        one = x[:, channel].float().flatten()
        back = dy[:, channel].float().flatten()
        exact_mean = one.double().mean()
        torch.testing.assert_close(mean[channel].double(), exact_mean, rtol=1e-5, atol=1e-6)
        centred = one - exact_mean.float()
        s = (variance[channel] + 1e-5).rsqrt()
        torch.testing.assert_close(
            y[-1, channel].float(),
            centred[-shape[2] :] * s * weight[channel] + bias[channel],
            rtol=1e-2,
            atol=1e-2,
        )
        sum_dy, product = back.double().sum(), (back.double() * centred).sum()
        torch.testing.assert_close(dbias[channel].double(), sum_dy, rtol=1e-4, atol=1e-2)
        torch.testing.assert_close(dweight[channel].double(), product * s, rtol=1e-4, atol=1e-2)
        count = one.numel()
        expected = (
            weight[channel] * s
            * (back - sum_dy / count - centred * s * s * product / count)
        )[-shape[2] :].float()  # fmt: skip
        torch.testing.assert_close(dx[-1, channel].float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("channels_last", [False, True])
def test_converted_model_trains_to_state_of_pytorch(channels_last):
    theirs = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.BatchNorm2d(8)
    ).to(CUDA)
    if channels_last:
        theirs = theirs.to(memory_format=torch.channels_last)
    import copy

    ours = backnorm.torch.convert(copy.deepcopy(theirs), fuse=True)
    for _ in range(5):
        x, target = torch.randn(16, 3, 20, 20, device=CUDA), torch.randn(16, 8, 16, 16, device=CUDA)
        for model in (ours, theirs):
            model.zero_grad()
            nn.functional.mse_loss(model(x), target).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
    for one, other in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


# Importing Inductor uses a function of PyTorch that PyTorch deprecates.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_compiled_layer_matches_eager_layer():
    layer = backnorm.torch.BatchNorm2d(8).to(CUDA)
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(8, 8, 12, 12, device=CUDA)
    torch.testing.assert_close(compiled(x), layer(x))


TUNED = [
    *(forward.forward_sums, forward.forward_apply),
    *(backward.backward_sums, backward.backward_apply),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [(64, 64, 56, 56), (256, 256, 7, 7), (32, 128, 35, 35)], ids=str)
def test_training_step_in_every_configuration_has_the_same_bits(
    shape, channels_last, dtype, monkeypatch
):
    operands = tensors(shape, dtype, channels_last=channels_last)
    statistics = torch.float64 if dtype is torch.float64 else torch.float32
    operands = *operands[:2], *(each.to(statistics) for each in operands[2:])
    results = []
    for configurations in (CONFIGURATIONS, *([each] for each in CONFIGURATIONS)):
        for kernel in TUNED:
            monkeypatch.setattr(kernel, "configs", configurations)
            monkeypatch.setattr(kernel, "cache", {})
        forget()
        results.append(step(*operands))
    for other in results[1:]:
        for one, another in zip(results[0], other, strict=True):
            assert torch.equal(one, another)
    forget()


def test_tuning_restores_what_a_kernel_overwrites(monkeypatch):
    x, dy, weight, _ = tensors((64, 64, 56, 56))
    statistics = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)

    def backward_over(out):
        operands = x, out, None, *statistics, weight
        options = Options(1e-5, arithmetic="float64")
        return compute("backward", operands, options, out, arrays=gpu.TENSORS)[0]

    for kernel in TUNED:
        monkeypatch.setattr(kernel, "cache", {})
    forget()
    first, second = backward_over(dy.clone()), backward_over(dy.clone())
    assert torch.equal(first, second)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU only")
def test_training_step_on_second_gpu_has_the_same_bits():
    x, dy, weight, bias = tensors((8, 16, 8, 8))
    expected = step(x, dy, weight, bias)
    elsewhere = step(*(value.to("cuda:1") for value in (x, dy, weight, bias)))
    for one, other in zip(elsewhere, expected, strict=True):
        assert one.device.index == 1
        assert torch.equal(one.cpu(), other.cpu())
