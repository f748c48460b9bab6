"""Gradients computed in micro-batches of one size, however the batch is split over processes.

An operator that sums over the batch (the gradient of a convolution's weight, for example) adds in
an order that depends on the batch size, so the sum depends on how the batch was split. Here every
operator gets one micro-batch at a time: modules run on `micro_batch` samples with new views of
their parameters, and the gradients of the micro-batches are kept separately. A communication hook
then adds up the gradients of all micro-batches of all processes (`exact_sums`).
"""

from __future__ import annotations

import enum
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from backnorm.errors import ArgumentTypeError, ArgumentValueError, described
from backnorm.scalars import check_flag, check_integer
from backnorm.torch.conversion import is_batch_norm

# Modules whose gradients have the same bits for any batch, because they compute each element on its
# own, or select elements.
_EXACT = (nn.Identity, nn.ReLU, nn.Flatten, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)

# An argument or result of one of these types is not divided into micro-batches, because it is the
# same for all samples.
_SHARED = (
    type(None), str, bytes, bool, enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip

# The alignment of micro-batches in bytes. The order in which operators add may depend on the
# alignment of their operands (as in MKL's matrix products).
_ALIGNMENT = 64


_HINT = "modules in `exclude` run on the whole batch"


class ReproducibleGradients:
    """Make a module's gradients the same, bit for bit, however its batch is split over processes.

    ::

        gradients = backnorm.torch.ReproducibleGradients(model, micro_batch=8)
        model = DistributedDataParallel(model)
        model.register_comm_hook(gradients, backnorm.torch.reproducible_hook)

    The first line of this example changes how `module` runs: the largest modules within it that
    contain no batch normalisation run on `micro_batch` samples at a time. Batch normalisation runs
    on all samples of the process at once. The gradients of each micro-batch are kept until
    `reproducible_hook` adds up the gradients of all processes; the order of the terms does not
    change these sums. So 1 process with 32 samples and 4 processes with 8 each take the same step,
    bit for bit. The steps are also the same after several backward passes in `no_sync`, if every
    run makes these passes in the same order: autograd adds up the gradients of batch normalisation
    in the order of the passes.

    Parameters
    ----------
    module : torch.nn.Module
        The model, after `backnorm.torch.convert` and before it is wrapped. Its parameters, buffers,
        `state_dict` and hooks do not change.
    micro_batch : int
        Samples in a micro-batch, along axis 0 of every tensor that a module takes and returns. The
        batch size of each process must be a multiple of `micro_batch`. Until the hook is called, a
        process keeps the gradients of all its micro-batches; for k micro-batches they take k times
        the memory of the parameters.
    process_group : torch.distributed.ProcessGroup, optional
        The group of `DistributedDataParallel`; by default all processes.
    average : bool
        Whether sums are divided by the number of processes, as `DistributedDataParallel` does by
        default. This is correct for losses that are means over the samples of a process. The
        division is exact if the number of processes is a power of two. For other numbers, and for
        batches of different sizes, use False, and divide each loss by the number of samples of all
        processes.
    exclude : iterable of torch.nn.Module
        Modules within `module` that run on the whole batch. The gradients of their parameters are
        added up over processes only.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If an argument is not as above, or a module has batches along another axis
        (``batch_first=False``) or sparse gradients. In a call: if the batch size is not a multiple
        of `micro_batch`; or if a module takes or returns something that may differ between samples
        and is not a tensor: an array, a dataclass or another object, a list with an
        element for each sample, the number of samples, or any returned number. In the hook: if a
        gradient was not computed in micro-batches. In the call after a step: if the hook did not
        run.

    Notes
    -----
    The class assumes that an operator of PyTorch gives the same bits for the same micro-batch. That
    holds for the same kind of processor, version of PyTorch and number of threads
    (`torch.set_num_threads`), and on GPUs with `torch.use_deterministic_algorithms(True)`.
    Functions called between modules must compute each sample independently of the others.

    The gradients are written to ``.grad`` by the hook `reproducible_hook`. `torch.autograd.grad`
    does not call this hook, so it returns zeros instead of the gradients. Call `remove` before
    `torch.export`. An instance is also a context manager that calls `remove` on exit.
    """

    def __init__(
        self,
        module: nn.Module,
        micro_batch: int,
        *,
        process_group: dist.ProcessGroup | None = None,
        average: bool = True,
        exclude: Iterable[nn.Module] = (),
    ) -> None:
        if not isinstance(module, nn.Module) or isinstance(module, DistributedDataParallel):
            raise ArgumentTypeError(
                "module", "must be a torch.nn.Module, before it is wrapped", came=described(module)
            )
        size = check_integer("micro_batch", micro_batch, accepted="an integer of at least 1")
        if size < 1:
            raise ArgumentValueError("micro_batch", "must be at least 1", came=size)
        excluded = tuple(exclude) if isinstance(exclude, Iterable) else (None,)
        if not all(isinstance(each, nn.Module) for each in excluded):
            raise ArgumentTypeError(
                "exclude", "must be an iterable of modules", came=described(exclude)
            )
        self.process_group = process_group
        self.average = check_flag("average", average)
        self._gradients: _Gradients = {}
        names = {each: name for name, each in module.named_modules()}
        whole = {each for each in names if each in excluded or is_batch_norm(each)}
        others = {p for each in whole for p in each.parameters()}
        self._names = {p: name for name, p in module.named_parameters() if p not in others}
        # A module with several parents is found once for each parent. `dict.fromkeys` removes the
        # duplicates.
        found = dict.fromkeys(_largest_without(module, whole))
        self._forwards = [
            _MicroBatchForward(each, names[each], size, self._gradients) for each in found
        ]
        for forward in self._forwards:
            forward.module.forward = forward

    def __enter__(self) -> ReproducibleGradients:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Restore the original `forward` of all modules."""
        for forward in self._forwards:
            forward.remove()
        self._forwards = []
        self.discard()

    def discard(self) -> None:
        """Discard the gradients that were kept.

        Call this method when a step is abandoned: when gradients computed in `no_sync` are not
        used, or a backward pass has raised.
        """
        self._gradients.clear()

    def _pop(self, parameters: Sequence[Tensor], summed: Sequence[Tensor]) -> list[list[Tensor]]:
        """Remove and return the gradients that were kept for each parameter.

        `summed` are the gradients that autograd added up. The gradients of micro-batches are kept
        in `_gradients`, and autograd gets zeros in their place. So if a gradient in `summed` is not
        zero, its parameter was used outside of micro-batches. That is an error, except for
        parameters of excluded modules.
        """
        pairs = [pair for pair in zip(parameters, summed, strict=True) if pair[0] in self._names]
        counts = {p: gradient.count_nonzero() for p, gradient in pairs}
        # The counts are stacked, so that one synchronisation with the device checks the gradients
        # of all parameters.
        if counts and bool(torch.stack([*counts.values()]).any()):
            self.discard()
            names = ", ".join(repr(self._names[p]) for p, count in counts.items() if count)
            raise ArgumentValueError(
                "module",
                f"received a gradient that was not computed in micro-batches, of {names}",
                hint="use a parameter only in the forward of its own module, or of a module that "
                "contains it and no batch normalisation; clear .grad before a step; "
                "modules in `exclude` run on the whole batch",
            )
        return [self._gradients.pop(p, []) for p in parameters]


_Gradients = dict[Tensor, list[Tensor]]


class _MicroBatchForward:
    """An object that replaces a module's `forward`, and runs the original `forward` on one
    micro-batch after another.

    `copy.deepcopy` of the module also copies this object. If the module's attribute `forward` were
    a function, `copy.deepcopy` would not copy the function, and the copy of the module would call
    the original module.
    """

    def __init__(self, module: nn.Module, name: str, size: int, gradients: _Gradients) -> None:
        for inner, each in module.named_modules(prefix=name):
            is_sparse = isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse
            if is_sparse or getattr(each, "batch_first", True) is False:
                raise ArgumentValueError(
                    "module", "must have dense gradients and batches along axis 0",
                    came=f"{each} in {inner!r}", accepted="sparse=False and batch_first=True",
                    hint=_HINT,
                )  # fmt: skip
        self.module, self.name, self.size, self.gradients = module, name, size, gradients
        self.original = _OriginalForward(module, vars(module).get("forward"))
        # Whether micro-batches are copied. If a module changes its input in place, micro-batches
        # must be copies: they are otherwise views that `Tensor.split` returned, and PyTorch raises
        # an error when such a view is changed in place.
        self.copies = any(getattr(each, "inplace", False) for each in module.modules())
        # For each parameter, the value of its version counter in the last call. A step of an
        # optimizer increases the counters.
        self.versions: dict[Tensor, int] = {}

    def remove(self) -> None:
        if vars(self.module).get("forward") is self:
            del self.module.forward
            if self.original.attribute is not None:
                self.module.forward = self.original.attribute

    # If this function were compiled, no gradients would be stored in ``.grad``.
    @torch.compiler.disable
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        trained = {name: p for name, p in self.original.named_parameters() if p.requires_grad}
        # Parameters are views if a module that contains this one runs in micro-batches.
        is_inner = not all(p.is_leaf for p in trained.values())
        if is_inner or not (self.module.training or torch.is_grad_enabled()):
            return self.original(*arguments, **options)
        self._check_consumed(trained.values())
        batch = self._batch_size(tree_leaves((arguments, options)))
        leaves, structure = _flatten((*arguments, options), batch)
        columns = [self._split(leaf, batch) for leaf in leaves]
        if not batch:
            return self.original(*arguments, **options)
        count = batch // self.size
        views = [_Views.apply(p, self.gradients, count) for p in trained.values()]
        results = []
        for k in range(count):
            parameters = dict(zip(trained, (view[k] for view in views), strict=True))
            *operands, named = tree_unflatten([column[k] for column in columns], structure)
            results.append(functional_call(self.original, parameters, tuple(operands), named))
        return self._concatenated(results)

    def _check_consumed(self, parameters: Iterable[Tensor]) -> None:
        """Raise if parameters have changed since gradients were kept for them: then an optimizer's
        step has come before `reproducible_hook` has run.

        If `reproducible_hook` does not run, the kept gradients are not added up, and ``.grad``
        stays zero. Without this check, training would go on with these zeros and raise no error.
        """
        for p in parameters:
            if self.gradients.get(p) and self.versions.get(p, p._version) != p._version:
                raise ArgumentValueError(
                    "module",
                    "has gradients of an earlier step that reproducible_hook did not add up",
                    hint="wrap the module in DistributedDataParallel, also in one process; call "
                    "register_comm_hook(gradients, backnorm.torch.reproducible_hook); after an "
                    "abandoned step call gradients.discard()",
                )
            self.versions[p] = p._version

    def _batch_size(self, leaves: list[Any]) -> int | None:
        """Return the number of samples; None if there are no tensors or no samples."""
        shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
        sizes = {shape[:1] for shape in shapes}
        if len(sizes) > 1 or any(not size or size[0] % self.size for size in sizes):
            raise self._error("be called with a multiple of", f"shapes {shapes}")
        return shapes[0][0] or None if shapes else None

    def _split(self, leaf: Any, batch: int | None) -> list[Any]:
        """Return the values of an argument, one for each micro-batch."""
        if isinstance(leaf, Tensor):
            parts = leaf.split(self.size)
            return [each.clone() if self.copies else _aligned(each) for each in parts]
        is_number = isinstance(leaf, numbers.Number)
        if isinstance(leaf, _SHARED) or (is_number and leaf != batch):
            return [leaf] * ((batch or 0) // self.size)
        raise self._error("be called with a multiple of", described(leaf))

    def _concatenated(self, results: list[Any]) -> Any:
        """Return the result for the batch, from the results of the micro-batches."""
        rows, structures = zip(*(_flatten(result, self.size) for result in results), strict=True)
        if structures.count(structures[0]) < len(structures):
            raise self._error("return", "different structures for different micro-batches")
        whole = []
        for column in zip(*rows, strict=True):
            first = column[0]
            if all(isinstance(leaf, Tensor) and leaf.shape[:1] == (self.size,) for leaf in column):
                for leaf in column:
                    if leaf.requires_grad:
                        leaf.register_hook(_aligned)
                whole.append(torch.cat(column))
            elif isinstance(first, _SHARED) and all(leaf == first for leaf in column):
                whole.append(first)
            else:
                raise self._error("return", described(first))
        return tree_unflatten(whole, structures[0])

    def _error(self, verb: str, came: str) -> ArgumentValueError:
        problem = (
            f"must {verb} micro_batch={self.size} samples along axis 0 of all tensors, and no "
            "other values that may depend on the samples"
        )
        name = f"module {self.name!r}" if self.name else "module"
        return ArgumentValueError(name, problem, came=came, hint=_HINT)


class _OriginalForward(nn.Module):
    """A module's forward without the module's hooks; the hooks run once, for the whole batch."""

    def __init__(self, module: nn.Module, attribute: Callable[..., Any] | None) -> None:
        super().__init__()
        self.module = module
        # The function `forward` in the `__dict__` of `module`, or None. This function overrides the
        # method `forward` of the module's class.
        self.attribute = attribute

    def forward(self, *arguments: Any, **options: Any) -> Any:
        forward = self.attribute or type(self.module).forward.__get__(self.module)
        return forward(*arguments, **options)


class _Views(Function):
    """Views of a parameter, one for each micro-batch; their gradients are kept separately."""

    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, gradients: _Gradients, count: int
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.parameter, ctx.gradients = parameter, gradients
        return tuple(parameter.detach() for _ in range(count))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        found = [each for each in gradients if each is not None]
        ctx.gradients.setdefault(ctx.parameter, []).extend(found)
        # The gradients of the micro-batches are kept in `ctx.gradients`, so autograd gets a
        # gradient of zeros. These zeros are one number, expanded to the parameter's shape, so they
        # take almost no memory.
        return ctx.parameter.new_zeros(()).expand_as(ctx.parameter), None, None


def _flatten(value: Any, samples: int | None) -> tuple[list[Any], Any]:
    """Return the leaves of a nested value, and the structure of the value.

    A list or tuple is one leaf if it has an element for each sample, and contains no tensor.
    """

    def is_leaf(node: Any) -> bool:
        is_sequence = type(node) in (list, tuple) and len(node) == samples
        return is_sequence and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(node))

    return tree_flatten(value, is_leaf=is_leaf)


def _aligned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


def _largest_without(module: nn.Module, whole: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the largest modules that contain no module of `whole`.

    A module is left out if all its innermost modules have a class in `_EXACT`.
    """
    if module in whole:
        return
    inner = set(module.modules())
    is_called = type(module).forward is not nn.Module.forward
    if not is_called or inner & whole:
        for child in module.children():
            yield from _largest_without(child, whole)
    elif not all(isinstance(each, _EXACT) for each in inner if not [*each.children()]):
        yield module
