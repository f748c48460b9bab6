"""The forward and backward passes on the memory of tensors, on any device, without autograd.

Every function takes tensors of strided layout on one device. If `x` is dense in some order of its
axes, kernels read it in place; otherwise they read a dense copy of it. Other tensors of x's shape
are also read in place if their strides equal those of `x` or of its copy, whichever is read.
Tensors with other strides are copied. Results are new tensors with the strides of
`torch.empty_like(x)`: the strides of `x`, if `x` is dense.

`options.arithmetic` must not be None. If there is a residual, it is added before the activation,
and the activation must be a ReLU. Kernels compute a ReLU in the same pass. Any other activation is
computed by PyTorch's operator, which overwrites the normalised values that a kernel has written.
Its backward pass computes these values again from x, so that they need not be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from operator import itemgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from backnorm.activations import Activation
from backnorm.executable import CALLS, NO_FACTS, compute, planned, settings
from backnorm.interfaces import Results
from backnorm.options import Options
from backnorm.signature import Operation
from backnorm.torch import cpu
from backnorm.torch.activations import activate, derivative
from backnorm.torch.arrays import TensorOperands, Tensors
from backnorm.torch.checks import TensorValueError
from backnorm.torch.dispatch import is_watched
from backnorm.torch.memory import check_memory


def engine_of(x: Tensor) -> ModuleType:
    """Return the module that computes on the device of x."""
    if x.is_cpu:
        return cpu
    try:
        # The module is imported only for a GPU, because it needs Triton.
        from backnorm.torch import gpu
    except ModuleNotFoundError as error:
        raise TensorValueError(
            "input",
            f"is on a device whose kernels need a package that is not installed ({error})",
            came=f"device {x.device}",
            hint="pip install triton",
        ) from error
    return gpu


def run(
    operation: Operation, operands: TensorOperands, options: Options, out: Tensor | None = None
) -> Results:
    """Return the results of an operation of `signature` on the device of x, its first operand."""
    return compute(operation, operands, options, out, arrays=_arrays_of(operands))


def _planned(
    operation: Operation, operands: TensorOperands, options: Options
) -> Callable[..., Results]:
    return planned(operation, operands, options, _arrays_of(operands)).plain


def _arrays_of(operands: TensorOperands) -> Tensors[Any]:
    x = operands[0]
    assert x is not None
    arrays: Tensors[Any] = engine_of(x).TENSORS
    return arrays


def look_up(
    call: tuple[Hashable, ...], operands: TensorOperands, first: Tensor
) -> tuple[Hashable, Any]:
    """Return the key of a call, and what was kept for it in the call cache.

    Both are None if the call is watched (`is_watched(first)`), or if it is not on tensors in
    memory. A key has `call`, and all facts about the operands but the values of their elements. So
    if something was kept for a key, all checks of an earlier call with this key have passed.
    """
    if is_watched(first):
        return None, None
    try:
        facts = cpu.TENSORS.facts(operands)
        key = (call, settings(), torch.is_grad_enabled(), *facts)
        return key, CALLS.get(key)
    except NO_FACTS:
        return None, None


def keep(key: Hashable | None, run: Callable[..., Any], tensors: TensorOperands) -> None:
    """Keep the function that computes a call, if it has a key and its tensors are plain."""
    if key is not None and all(type(tensor) in Tensors.classes for tensor in tensors):
        CALLS.keep(key, run)


# `forward` and `backward` take the tensors of a call, and return the function that computes it, and
# later calls on tensors with the same facts.


def forward(
    operands: TensorOperands, options: Options
) -> Callable[[TensorOperands, float], Results]:
    """Return a function of operands (`checks.Operands`) and momentum.

    It returns y; in training also the mean and the biased variance of the batch, and the mask (None
    without a ReLU).

    Mean and variance are float32 if x has 16 bits; otherwise they have x's type. The mask says
    which elements of y are positive and below the ceiling. It has one bit per element, in the
    memory order of x, and `mask_size(x.numel())` bytes.

    In training, running statistics are updated in place, with the unbiased variance, unless the
    batch is empty. As in PyTorch, autograd does not detect the update. Therefore, if an inference
    pass needs running statistics for gradients, backnorm's autograd function saves copies of them.
    """
    options, following = _separate(options)
    run: Callable[[TensorOperands, float], Results]
    if options.training:
        train = _planned("forward", operands, options)
        run = lambda operands, momentum: train(operands, None, {"momentum": momentum})  # noqa: E731
    else:
        infer = _planned("inference", _of_inference(operands), options)
        run = lambda operands, _: infer(_of_inference(operands))  # noqa: E731
    if following is None:
        return run

    def followed(operands: TensorOperands, momentum: float) -> Results:
        results = run(operands, momentum)
        activate(results[0], following, in_place=True)
        return results

    return followed


#: Maps the operands of `Operands` to those of the signature of inference.
_of_inference = itemgetter(0, 1, 4, 5, 2, 3)


def backward(
    operands: TensorOperands, options: Options, has_residual: bool
) -> Callable[[TensorOperands, Tensor | None], tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Return a function of operands and bias. It returns the gradients of x, weight, bias and
    residual.

    The operands are those of the signature: x, dy, mask, mean, variance and weight. The bias is
    read for an activation other than a ReLU. The gradients of weight and bias have weight's type.
    """
    options, following = _separate(options)
    if has_residual:
        options = options._replace(residual=True)
    if following is not None:
        return partial(_through, following, options)
    compute = _planned("backward", operands, options)
    return lambda operands, bias: compute(operands)


def _through(
    following: Activation, options: Options, operands: TensorOperands, bias: Tensor | None
) -> Any:
    """Return what `backward` says, through an activation that PyTorch's operator computes."""
    x, dy, mask, mean, variance, weight = operands
    assert dy is not None
    # PyTorch's operator would read the address 0 if dy has no memory.
    check_memory(dy, "dy")
    (z,) = run("inference", (x, None, mean, variance, weight, bias), options)
    dz = derivative(dy, z, following, overwrite=True)
    # dx overwrites this new tensor, if it has the layout of z, which is that of results.
    out = dz if dz.stride() == z.stride() else None
    return run("backward", (x, dz, mask, mean, variance, weight), options, out)


def _separate(options: Options) -> tuple[Options, Activation | None]:
    """Return the options of the kernel, and the activation that PyTorch's operator computes."""
    activation = options.activation
    if activation is None or activation.name == "relu":
        return options, None
    return options._replace(activation=None), activation


def double_backward(
    x: Tensor,
    dy: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    ddx: Tensor | None,
    ddweight: Tensor | None,
    ddbias: Tensor | None,
    eps: float,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a loss with respect to x, dy and weight. ddx, ddweight and ddbias are
    the gradients of this loss with respect to dx, dweight and dbias, which are the results of
    `backward`.
    """
    operands = x, dy, ddx, mean, variance, weight, ddweight, ddbias
    engine = engine_of(x)
    options = Options(eps, training=training)
    _, read = engine.TENSORS.checked("double_backward", operands, options)
    gradients: tuple[Tensor, Tensor, Tensor]
    gradients = engine.double_backward(read[:3], read[3:], eps, training)
    return gradients
