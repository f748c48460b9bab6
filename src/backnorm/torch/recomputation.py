"""Running statistics recomputed over a data set: the mean and variance of all inputs of a layer.

A hook of each layer adds up the inputs as reproducible sums (`backnorm.reproducible_sums`), whose
bins are integers. So neither the order of the batches nor the process in which a batch was computed
has an effect. A data set may have more elements than one array of bins holds (2^31). Therefore each
digit is split into a lower and an upper half of 32 binary digits. `added` and `Exchange` see the
upper halves as further channels.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import DataParallel, Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from backnorm.errors import ArgumentValueError, described
from backnorm.options import Options
from backnorm.reproducible_sums import SPECIAL, added, tops_of, with_tops, zeros
from backnorm.torch.checks import Operands, check, not_a_tensor
from backnorm.torch.engines import engine_of
from backnorm.torch.exchange import Exchange, group_of
from backnorm.torch.masks import mask_of
from backnorm.weighted import reduce_counted

# The bits of the sums do not depend on the setting `backnorm.arithmetic`.
_OPTIONS = Options(arithmetic="float64", reproducible=True)

# The units of all bins are multiples of 1 / _UNITS.
_UNITS = 1 << 1056


def recompute_statistics(
    model: Module,
    loader: Iterable[Any],
    forward: Callable[[Any], object] | None = None,
    *,
    process_group: Any = None,
) -> None:
    """Set the running statistics of a model's layers to those of all their inputs over a data set.

    For a channel whose elements in all batches of all processes are x_1, ..., x_M::

        running_mean = sum(x_i) / M
        running_var = sum((x_i - running_mean)**2) / (M - 1)

    All layers of batch normalisation that have running statistics are recomputed, PyTorch's and
    backnorm's, also those in evaluation mode. Sums are reproducible
    (`backnorm.ReproducibleMoments`), so the bits of the statistics do not depend on the order of
    the batches, or on which process has which batch. Mean and variance are rounded once to float64,
    and then to the type of the running statistics.

    Parameters
    ----------
    model : torch.nn.Module
        The model, or a part of it whose layers are recomputed. It may be wrapped in
        `DistributedDataParallel` or compiled by `torch.compile`, but runs without the wrapper and
        without compilation.
    loader : iterable
        The batches of this process, of any sizes that the layers accept in training: more than one
        element per channel, or an empty batch. ``tqdm(loader)`` shows progress. With several
        processes, their numbers of batches may differ and may be 0, unless the model exchanges
        data in its forward, as `SyncBatchNorm` does.
    forward : callable, optional
        Called with each batch; it must call the model, and must not call its train(). None: the
        model is called with the batch, or with its first element if it is a list or tuple, as a
        tensor on the device of the model's first buffer.
    process_group : torch.distributed.ProcessGroup, optional
        The processes whose batches are added up. None: all, if `torch.distributed` is initialised.

    Raises
    ------
    ArgumentValueError
        If `model` has no layer of batch normalisation with running statistics, or no layer is
        called in any process, such as with an empty loader.
    TensorTypeError
        If a batch is not a tensor, and there is no `forward`.
    SynchronisationError
        If another process ends, or its model has other layers.

    Warns
    -----
    UserWarning
        For layers that are not called in any process. Their statistics do not change.

    Notes
    -----
    All modules of `model` run in evaluation mode and without gradients, but layers of batch
    normalisation normalise by the statistics of each batch, as in training. So the inputs of a
    layer behind another one depend on which samples are in a batch together. This is as in
    PyTorch's `torch.optim.swa_utils.update_bn` and fvcore's `update_bn_stats`, but these average
    the statistics of the batches: their variance lacks the variance between the means of the
    batches, and small batches count as much as large ones. PyTorch's function runs the model in
    training mode, in which dropout changes inputs at random.

    running_var is the unbiased variance of the whole population, because PyTorch's layers average
    unbiased variances. `num_batches_tracked` does not change.

    Modes and hooks are as before when the function returns or raises an exception. If it raises an
    exception, statistics are as before, too.

    Elements that a boolean mask of backnorm's layers does not count do not count here. Weights are
    an error, because sums with weights are not reproducible.

    If an element of a channel is NaN or infinite, or of a magnitude whose square is 2^991 or more,
    the channel's statistics become NaN.
    """
    populations = [
        _Population(name, layer)
        for name, layer in (model.named_modules() if isinstance(model, Module) else ())
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None
    ]
    if not populations:
        raise ArgumentValueError("model", "must have running statistics", came=described(model))
    # A layer in training that does not track statistics uses those of its batch, and changes no
    # buffer. Compiled code would ignore the hooks.
    with ExitStack() as stack, torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
            module.training = False
        for population in populations:
            layer = population.layer
            stack.callback(setattr, layer, "track_running_stats", layer.track_running_stats)
            layer.track_running_stats = False
            stack.enter_context(layer.register_forward_pre_hook(population.add, with_kwargs=True))
        for batch in loader:
            forward(batch) if forward else _call(model, batch)
    group = group_of(process_group)
    for population in populations if group is not None else ():
        population.add_up(group)
    reached = [population for population in populations if population.count]
    if not reached:
        raise ArgumentValueError("loader", "must have a batch for which the model calls its layers")
    for population in reached:
        mean, variance = population.statistics()
        population.layer.running_mean.copy_(mean)
        population.layer.running_var.copy_(variance)
    names = [population.name for population in populations if not population.count]
    if names:
        warnings.warn(f"not recomputed, because they were not called: {names}", stacklevel=2)


def _call(model: Module, batch: Any) -> None:
    input = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(input, Tensor):
        raise not_a_tensor("loader", input)
    # The forward of a wrapper would exchange buffers, or divide the batch.
    inner = model.module if isinstance(model, DataParallel | DistributedDataParallel) else model
    inner(input.to(next(model.buffers()).device))


class _Population:
    """The sums of all inputs of a layer.

    `bins` has columns for the lower halves of digits, one for each channel, and then as many for
    the upper halves.
    """

    def __init__(self, name: str, layer: Any) -> None:
        self.name, self.layer, self.count = name, layer, 0
        mean = layer.running_mean
        self.bins = torch.from_numpy(zeros(mean.element_size(), 2 * len(mean))).to(mean.device)

    def add(self, layer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Add the input of a call: the hook of the layer."""
        # Here, because `forward` may have called eval() of the model.
        layer.training = True
        bound = inspect.signature(layer.forward).bind(*arguments, **keywords).arguments
        input = next(iter(bound.values()))
        # An input whose type fits the running statistics has as many digits as `self.bins`.
        check(Operands(input, None, None, None, layer.running_mean, layer.running_var), _OPTIONS)
        mask = mask_of(input, bound.get("mask"), bound.get("lengths"), reproducible=True)
        reduce = engine_of(input).reduce
        bins, count = reduce_counted(input, mask, (1,), _OPTIONS, reduce, torch)
        lower = ((bins + (1 << 31)) & ((1 << 32) - 1)) - (1 << 31)
        halves = torch.cat((lower, (bins - lower) >> 32), 1)
        halves = with_tops(halves, tops_of(bins).repeat(1, 2), torch)
        self.bins, self.count = added(self.bins, halves, torch), self.count + count

    def add_up(self, group: Any) -> None:
        """Add the sums of the other processes."""
        message = torch.cat((self.bins.flatten(), self.bins.new_tensor([self.count])))
        exchange = Exchange(group.group_name, f"recomputed statistics of {self.name!r}", message)
        total = exchange.bins(len(self.bins))
        self.bins, self.count = total[:-1].view_as(self.bins), int(total[-1])

    def statistics(self) -> tuple[Tensor, ...]:
        """Return the mean and the unbiased variance, each rounded once to float64."""
        bins = self.bins.cpu().numpy()
        special = (tops_of(bins) == SPECIAL).any(0)
        # Python's integers have room for all digits. The axes are: the two sums, top bin and
        # digits, halves, channels. Digit k has the unit 2^(32 (top - k)), a multiple of 1 / _UNITS.
        parts = np.where(special, 0, bins).astype(object).reshape(2, len(bins) // 2, 2, -1)
        top, digits = parts[:, 0, 0], parts[:, 1:, 0] + (parts[:, 1:, 1] << 32)
        total, squares = sum(digits[:, k] << 32 * (top - k + 33) for k in range(digits.shape[1]))
        units = self.count * _UNITS
        deviations = np.maximum(squares * units - total * total, 0)
        variance = deviations / (units * max(self.count - 1, 1) * _UNITS)
        found = np.where(special, np.nan, np.append(total / units, variance).astype(float))
        return torch.from_numpy(found).tensor_split(2)
