"""`batch_norm` with the arguments of PyTorch's function, and optionally an activation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from backnorm.activations import Activation
from backnorm.arithmetics import Arithmetic
from backnorm.errors import ArgumentError, BacknormError
from backnorm.options import Options
from backnorm.scalars import check_flag
from backnorm.torch import (
    composed,
    eager,
    engines,
    library,
    lowering,
    masks,
    registry,
    synchronised,
)
from backnorm.torch.activations import add_and_activate
from backnorm.torch.checks import (
    Operands,
    check,
    check_batch,
    check_residual,
    check_statistics,
    not_a_tensor,
    refusal,
)
from backnorm.torch.dispatch import as_plain, by_operators, is_transformed, needs_dispatcher
from backnorm.torch.options import check_numbers, options_of

_Target = TypeVar("_Target")


def unscriptable(target: _Target) -> _Target:
    """Make `torch.jit.script` raise an error for a function or a class of modules, and for modules
    that use it.
    """
    scripted: Any = target
    # TorchScript calls this attribute of each function and module that it compiles.
    scripted.__prepare_scriptable__ = _raise_unscriptable
    return target


def _raise_unscriptable(*_: object) -> NoReturn:
    raise BacknormError(
        "torch.jit.script cannot compile backnorm's modules and functions; script "
        "backnorm.torch.revert(model) and torch.nn.functional.batch_norm instead, or use "
        "torch.compile, torch.export or torch.jit.trace"
    )


@unscriptable
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    activation: str | Activation | None = None,
    residual: Tensor | None = None,
    arithmetic: Arithmetic | None = None,
    reproducible: bool = False,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Normalise each channel over a batch, like `torch.nn.functional.batch_norm`.

    With M elements per channel::

        training:  z = weight * (input - mean) / sqrt(var + eps) + bias
                   running_mean = (1 - momentum) * running_mean + momentum * mean
                   running_var  = (1 - momentum) * running_var  + momentum * var * M / (M - 1)
        else:      z = weight * (input - running_mean) / sqrt(running_var + eps) + bias

        y = activation(z + residual)

    where mean and var are the mean and the biased variance of the batch.

    Parameters
    ----------
    input : Tensor, shape (N, C, ...)
        On the CPU or a CUDA device; float64, float32, float16 or bfloat16. A tensor that is dense
        in some order of its axes (contiguous, channels_last, ...) is read in place; any other is
        copied.
    running_mean, running_var : Tensor, shape (C,), or None
        Updated in place in training, where they are optional; required otherwise. They have input's
        type; for a 16-bit input, float32 is accepted as well.
    weight, bias : Tensor, shape (C,), optional
        Scale and offset, 1 and 0 if absent. The same types are accepted as for the running
        statistics.
    training : bool
        Whether the statistics are those of the batch.
    momentum : float
        Weight of the batch in the running statistics.
    eps : float
        Added to the variance; positive in training, not negative otherwise.
    activation : {"relu", "relu6", "silu", "hardswish"} or Activation, optional
        A ReLU is computed in the same pass, and saves one bit per element for the backward pass.
        ``backnorm.Activation("relu", ceiling)`` is a ReLU with the upper bound `ceiling`, which is
        rounded to input's type. PyTorch's operators compute SiLU and Hardswish in place, and their
        input is computed again for the backward pass, not saved. The activation is a separate step
        if gradients are needed and training is False, in training if `reproducible`, and under
        `torch.func`, forward mode, tracers and `torch.compile` (Inductor then fuses the
        activation).
    residual : Tensor, optional
        Added before the activation, which must be a ReLU; of input's shape and type.
    arithmetic : {"float32", "float64"}, optional
        The type in which elements are computed, here and in the backward pass; second-order
        gradients are computed in float64. None: see `backnorm.arithmetic`.
    reproducible : bool
        Whether, in training, y, statistics and gradients have the same bits in every layout and for
        every order of a channel's elements. Sums are then computed with integers, which takes
        longer, and gradients cannot be differentiated.
    mask : Tensor, shape (N, 1, ...) or (N, ...), optional
        The elements that count in training, in all channels: booleans, or weights of a
        floating-point type, not negative, that say how often an element counts. Any size may be 1.
        mean and var are those of the counted elements, and M is their number or the sum of their
        weights, which must be more than 1. y is computed for all elements, and gradients are those
        of this y: the sums of dy in them are over all elements (`backnorm.weighted` has the
        formulas). An uncounted element that is NaN or infinite has the y NaN and the gradient 0;
        it changes no other result, and in evaluation no gradient. Weights are not accepted if
        `reproducible`. Under `torch.func`, where values cannot be checked, no counted element
        gives NaN.
    lengths : Tensor of integers, shape (N,), optional
        For an input of shape (N, C, T), instead of a mask: the number of elements of each sequence
        that count, beginning with the first.

    Returns
    -------
    Tensor
        y, of input's shape and type, with the same order of axes in memory.

    Raises
    ------
    ArgumentValueError
        For an eps or activation that is not accepted, for an arithmetic that the element type does
        not support, and in training for a batch with one value per channel, or none counted.
    TensorValueError, TensorTypeError
        For tensors of a shape, type or device that is not accepted. Both are RuntimeErrors, like
        PyTorch's errors.
    """
    if has_torch_function_variadic(
        input, running_mean, running_var, weight, bias, residual, mask, lengths
    ):
        tensors = input, running_mean, running_var, weight, bias
        settings: dict[str, Any] = {"training": training, "momentum": momentum, "eps": eps}
        # A tensor subclass may call PyTorch's function instead of this one. PyTorch's function does
        # not have the following arguments, so they are passed only if they are set.
        ours = {"activation": activation, "residual": residual, "arithmetic": arithmetic}
        ours |= {"mask": mask, "lengths": lengths}
        settings |= {name: value for name, value in ours.items() if value is not None}
        if reproducible is not False:
            settings["reproducible"] = reproducible
        result: Tensor = handle_torch_function(
            batch_norm, (*tensors, residual, mask, lengths), *tensors, **settings
        )
        return result
    if not isinstance(input, Tensor):
        raise not_a_tensor("input", input)
    if not (type(training) is bool and type(momentum) is float and type(eps) is float):
        training, momentum, eps = check_numbers(training, momentum, eps)
    reproducible = reproducible is not False and check_flag("reproducible", reproducible)
    operands: tuple[Tensor | None, ...]
    operands = input, residual, weight, bias, running_mean, running_var
    if mask is not None or lengths is not None:
        options = options_of(training, eps, activation, arithmetic, input.dtype)
        processes = synchronised.Processes(None, "", reproducible)
        return with_mask(Operands(*operands), momentum, options, processes, mask, lengths)
    # The key has types, because equal values of other types may not be accepted.
    requested = activation, type(activation), arithmetic, type(arithmetic)
    call: tuple[Any, ...] = ("batch_norm", training, eps, reproducible, *requested)
    key, run = engines.look_up(call, operands, input)
    if run is None:
        options = options_of(training, eps, activation, arithmetic, input.dtype)
        named, in_phases = Operands(*operands), training and reproducible
        way = _way_of(named, in_phases)
        if way is not None and not torch.compiler.is_compiling():
            # Tensors of subclasses that have memory are computed like plain tensors.
            key, named = None, Operands(*map(as_plain, named))
            way = _way_of(named, in_phases)
        if way is not None:
            return way(named, momentum, options)
        run, operands = partial(_first, key, options), named
    try:
        y: Tensor = run(operands, momentum)
        return y
    except ArgumentError as error:
        refused = error
    # The kernels' errors have other names of arguments than PyTorch's function.
    options = options_of(training, eps, activation, arithmetic, input.dtype)
    raise refusal(refused, Operands(*operands), options)


_Way = Callable[[Operands, float, Options], Tensor]


def _way_of(operands: Operands, in_phases: bool) -> _Way | None:
    """Return the function that computes y, or None if kernels do, directly on the memory of
    tensors. Nothing else chooses between these ways.
    """
    input = operands[0]
    if in_phases:
        return _in_phases
    if needs_dispatcher(*operands):
        return _by_operators
    if not input.is_floating_point() and _is_empty_of_integers(input):
        return _by_pytorch
    return None


def _is_empty_of_integers(input: Tensor) -> bool:
    return not (
        input.is_nested or input.is_complex() or input.layout is not torch.strided or input.numel()
    )


def _in_phases(operands: Operands, momentum: float, options: Options) -> Tensor:
    """Compute y in two phases: the sums of every channel, then y."""
    check_batch(operands.input)
    return synchronised.batch_norm(operands, momentum, options, synchronised.ALONE)


def with_mask(
    operands: Operands,
    momentum: float,
    options: Options,
    processes: synchronised.Processes,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Compute y, in training with the statistics of the counted elements."""
    if not torch.compiler.is_compiling():
        operands = Operands(*map(as_plain, operands))
    check(operands, options)
    mask = masks.mask_of(operands.input, mask, lengths, processes.reproducible)

    def normalised(input: Tensor) -> Tensor:
        own = operands._replace(input=input)
        if not options.training:
            _, residual, weight, bias, mean, variance = own
            return batch_norm(
                input, mean, variance, weight, bias, eps=options.epsilon,
                activation=options.activation, residual=residual, arithmetic=options.arithmetic,
            )  # fmt: skip
        alone = processes.group is None and not processes.reproducible
        if mask is None or not (alone and is_transformed()):
            return synchronised.batch_norm(own, momentum, options, processes, mask)
        if torch.compiler.is_compiling():
            _allow_in_graph()
        settings = mask, options.epsilon
        y, *moments = composed.masked_forward(input, own.weight, own.bias, *settings)
        library.move(own, *moments, momentum=momentum)
        return add_and_activate(y, own.residual, options.activation)

    return masks.over_padding(normalised, operands.input, mask)


def _by_pytorch(operands: Operands, momentum: float, options: Options) -> Tensor:
    """Compute y by PyTorch, which accepts an empty batch of integers, and computes in the type of
    the parameters.
    """
    input, residual, weight, bias, mean, variance = operands
    settings = options.training, momentum, options.epsilon
    y = torch.nn.functional.batch_norm(input, mean, variance, weight, bias, *settings)
    check_residual(residual, y, options.activation)
    return add_and_activate(y, residual, options.activation)


def _first(key: Hashable, options: Options, operands: Operands, momentum: float) -> Tensor:
    """Compute y by kernels, and keep the function that computes it for later calls."""
    run = _by_kernels(operands, options)
    y = run(operands, momentum)
    engines.keep(key, run, operands)
    return y


def _by_kernels(
    operands: Operands, options: Options
) -> Callable[[Sequence[Tensor | None], float], Tensor]:
    """Return the function that computes y by kernels, through autograd if a gradient may be needed,
    for these operands and for others with the same facts.
    """
    input, residual, *_ = operands
    wants_gradient = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in operands[:4]
    )
    name = eager.name_of(options, residual)
    check_statistics(operands, options.training)
    if options.training:
        check_batch(input)
    if not wants_gradient:
        forward = engines.forward(operands, options)
        return lambda operands, momentum: eager.profiled(forward, name)(operands, momentum)[0]
    if options.training:
        forward, train = engines.forward(operands, options), eager.TRAIN[name]
        return lambda operands, momentum: train(*operands, momentum, options, forward)
    plain = options._replace(activation=None)
    normalise = engines.forward(operands._replace(residual=None), plain)

    def freeze(operands: Sequence[Any], momentum: float) -> Tensor:
        input, residual, *others = operands
        y = eager.freeze(input, None, *others, plain, normalise)
        check_residual(residual, input, options.activation)
        return by_operators(add_and_activate, y, residual, options.activation, residual=residual)

    return freeze


def _by_operators(operands: Operands, momentum: float, options: Options) -> Tensor:
    """Compute y by registered operators: transforms, modes, tracers and subclasses see the call."""
    check(operands, options)
    if options.training:
        check_batch(operands.input)
    named = {} if torch.compiler.is_compiling() else operands._asdict()
    return by_operators(_of_operators, operands, momentum, options, **named)


def _of_operators(operands: Operands, momentum: float, options: Options) -> Tensor:
    """Return y, computed by operators of PyTorch and of backnorm."""
    input, residual, weight, bias, running_mean, running_var = operands
    training, eps, arithmetic = options.training, options.epsilon, options.arithmetic
    deployed = not training and arithmetic is None and _is_exporting()
    parameters = running_mean, running_var, weight, bias
    if _is_exporting_to_onnx() or (deployed and _have_one_type(*parameters)):
        # Tools that read an exported program support only PyTorch's operators.
        y = torch.nn.functional.batch_norm(input, *parameters, training, momentum, eps)
    else:
        y = _normalised(operands, momentum, options)
    return add_and_activate(y, residual, options.activation)


def _normalised(operands: Operands, momentum: float, options: Options) -> Tensor:
    """Normalise the input by backnorm's operators, and update the running statistics."""
    input, _, weight, bias, running_mean, running_var = operands
    if torch.compiler.is_compiling():
        lowering.lower()
    registry.register_sharding()
    transformed = is_transformed()
    if transformed and torch.compiler.is_compiling():
        _allow_in_graph()
    settings = options.epsilon, options.arithmetic
    if not options.training:
        assert running_mean is not None
        assert running_var is not None
        infer = library.inference if transformed else library.batch_norm_inference
        y: Tensor = infer(input, weight, bias, running_mean, running_var, *settings)
        return y
    forward = library.forward if transformed else library.batch_norm
    y, mean, variance = forward(input, weight, bias, *settings)
    library.move(operands, mean, variance, momentum=momentum)
    return y


# PyTorch 2.6 does not have `is_exporting`.
_exports = getattr(torch.compiler, "is_exporting", lambda: False)


def _is_exporting() -> bool:
    """Whether `torch.export` or `torch.jit.trace` is recording a program now."""
    return _exports() or torch._C._get_tracing_state() is not None


def _is_exporting_to_onnx() -> bool:
    """Whether `torch.onnx.export` records operators now."""
    # Importing torch.onnx takes long, so it is not imported here. A caller that exports a model to
    # ONNX has already imported torch.onnx.
    onnx = sys.modules.get("torch.onnx")
    return onnx is not None and onnx.is_in_onnx_export()


def _allow_in_graph() -> None:
    """Make Dynamo put three functions of `library` into its graph without tracing them.

    If Dynamo traced into these functions, their derivatives would be lost. `_allow_in_graph` is
    called only when Dynamo traces, because it imports Dynamo, which takes longer than importing
    backnorm.
    """
    torch.compiler.allow_in_graph(
        [library.forward, library.inference, library.move_below_transforms]
    )


# Dynamo calls these functions while it traces, and treats their results as constants.
_is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]
_is_exporting_to_onnx._dynamo_marked_constant = True  # type: ignore[attr-defined]
_allow_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _have_one_type(*parameters: Tensor | None) -> bool:
    """Whether parameters and statistics have the same type, as PyTorch's operator requires."""
    return len({tensor.dtype for tensor in parameters if tensor is not None}) == 1
