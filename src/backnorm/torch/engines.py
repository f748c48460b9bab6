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

from types import ModuleType
from typing import NamedTuple

from torch import Tensor

from backnorm.activations import Activation
from backnorm.executable import compute
from backnorm.options import Options
from backnorm.torch import cpu
from backnorm.torch.activations import activate, derivative
from backnorm.torch.checks import Operands, TensorValueError
from backnorm.torch.memory import check_memory


class Saved(NamedTuple):
    """The tensors that a forward pass saves for its backward pass.

    `mask` is saved for a ReLU, `bias` for any other activation.
    """

    x: Tensor
    weight: Tensor | None
    mean: Tensor
    variance: Tensor
    mask: Tensor | None = None
    bias: Tensor | None = None


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


def forward(
    operands: Operands, momentum: float, options: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return y, the mean and the biased variance of the batch, and the mask (None without a ReLU).

    Mean and variance are float32 if x has 16 bits; otherwise they have x's type. The mask says
    which elements of y are positive and below the ceiling. It has one bit per element, in the
    memory order of x, and `mask_size(x.numel())` bytes.

    Running statistics are updated in place, with the unbiased variance, unless the batch is empty.
    As in PyTorch, autograd does not detect the update. Therefore, if an inference pass needs
    running statistics for gradients, backnorm's autograd function saves copies of them.
    """
    options, following = _separate(options)
    arrays = engine_of(operands.input).TENSORS
    y, *others = compute("forward", operands, options, arrays=arrays, momentum=momentum)
    return y if following is None else activate(y, following, in_place=True), *others


def inference(operands: Operands, options: Options) -> Tensor:
    """Return y for given statistics."""
    x, residual, weight, bias, mean, variance = operands
    options, following = _separate(options)
    y: Tensor
    in_order = x, residual, mean, variance, weight, bias
    (y,) = compute("inference", in_order, options, arrays=engine_of(x).TENSORS)
    return y if following is None else activate(y, following, in_place=True)


def backward(
    saved: Saved, dy: Tensor, options: Options, has_residual: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, weight, bias and residual.

    The gradients of weight and bias have weight's type.
    """
    x, weight, mean, variance, mask, bias = saved
    arrays, out = engine_of(x).TENSORS, None
    options, following = _separate(options)
    if following is not None:
        # PyTorch's operator would read the address 0 if dy has no memory.
        check_memory(dy, "dy")
        operands = x, None, mean, variance, weight, bias
        (z,) = compute("inference", operands, options, arrays=arrays)
        dy = derivative(dy, z, following, overwrite=True)
        # dx overwrites this new tensor, if it has the layout of z, which is that of results.
        out = dy if dy.stride() == z.stride() else None
    if has_residual:
        options = options._replace(residual=True)
    dx, dweight, dbias, dresidual = compute(
        "backward", (x, dy, mask, mean, variance, weight), options, out, arrays=arrays
    )
    return dx, dweight, dbias, dresidual


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
