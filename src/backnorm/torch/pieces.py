"""Gradients of parameters by pieces of a batch that are of one size, wherever the batch is cut.

What an operator adds up over a batch (the gradient of a convolution's weight, say) is rounded in an
order that depends on the batch, and sums of those on how the batch was cut. So no operator sees
more than a piece: modules run on `micro_batch` samples at a time, each time with a view of their
parameters of its own, and a piece's gradients are kept as they are, beside the parameter. A hook
then adds up those of all pieces of all processes at once (`exact_sums`).
"""

from __future__ import annotations

import enum
import inspect
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from backnorm.errors import ArgumentTypeError, ArgumentValueError, described
from backnorm.scalars import check_flag, check_integer
from backnorm.torch.report import is_batch_norm

__all__ = ["ReproducibleGradients"]

# Each element by itself, by operations that give the same bits wherever it lies.
_EXACT = (nn.Identity, nn.ReLU, nn.Flatten, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)

# What is the same for all samples, if it is no tensor.
_SHARED = (
    str, bytes, numbers.Number, enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip

# Operators may add up in another order where memory is aligned otherwise (MKL's products do).
_ALIGNED = 64


class ReproducibleGradients:
    """Let a module's gradients have the same bits however its batch is cut over processes.

    ::

        gradients = backnorm.torch.ReproducibleGradients(model, micro_batch=8)
        model = DistributedDataParallel(model)
        model.register_comm_hook(gradients, backnorm.torch.reproducible_hook)

    From then on the modules within `module` run on `micro_batch` samples at a time: the largest
    that contain no batch normalisation, which has the whole batch. Gradients of each piece are kept
    until `reproducible_hook` adds up those of all processes, in sums that no order changes. So 1
    process with 32 samples and 4 with 8 each take the same step, bit for bit; after backward passes
    in `no_sync`, too.

    Parameters
    ----------
    module : torch.nn.Module
        After `backnorm.torch.convert`, and before it is wrapped. Its parameters, buffers,
        `state_dict` and hooks stay what they are.
    micro_batch : int
        Samples in a piece, along axis 0 of every tensor that a module is called with and returns;
        every process's batch must be a multiple. Until the hook is called, the gradients of
        all pieces of a process are kept beside each other: pieces times the size of the parameters.
    process_group : torch.distributed.ProcessGroup, optional
        As `DistributedDataParallel` has it; all processes without it.
    average : bool
        Whether sums are divided by the number of processes, as `DistributedDataParallel` does it
        by itself, for losses that are means over a process's samples. That is exact for powers of
        two. For other numbers, and parts that are not equal, use False, and divide each loss by the
        number of samples of all processes.
    exclude : iterable of torch.nn.Module
        Modules within that run on the whole batch. Gradients of their parameters are added up as
        they come.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If an argument is not as above, or a module has batches along another axis
        (``batch_first=False``) or sparse gradients. In a call: if a batch is not a multiple of
        `micro_batch`; if what a module takes or returns beside tensors may be different for each
        sample: an array, a dataclass or another object, a list with an element a sample, the number
        of samples, or, of what it returns, any number. In the hook: if a gradient came from outside
        of the pieces.

    Notes
    -----
    What it takes from PyTorch: that an operator gives the same bits for the same piece. It does on
    one kind of processor, with one version of PyTorch and one number of threads
    (`torch.set_num_threads`), and on GPUs with `torch.use_deterministic_algorithms(True)`. What is
    called between modules, as functions, must compute each sample by itself.

    Gradients reach ``.grad`` with the hook; `torch.autograd.grad` finds zeros. It is also a context
    manager, which ends with `remove`.
    """

    def __init__(
        self,
        module: nn.Module,
        micro_batch: int,
        *,
        process_group: Any = None,
        average: bool = True,
        exclude: Iterable[nn.Module] = (),
    ) -> None:
        if not isinstance(module, nn.Module) or isinstance(module, DistributedDataParallel):
            raise ArgumentTypeError(
                "module", "is no model", came=described(module),
                accepted="a torch.nn.Module, before it is wrapped",
            )  # fmt: skip
        size = check_integer("micro_batch", micro_batch, accepted="an integer of at least 1")
        if size < 1:
            raise ArgumentValueError(
                "micro_batch", "must have a sample", came=size, accepted="an integer of at least 1"
            )
        self.average = check_flag("average", average)
        self.process_group = process_group
        self._kept: _Kept = {}
        excluded = _modules("exclude", exclude)
        names = {each: name for name, each in module.named_modules()}
        apart = [each for each in module.modules() if each in excluded or is_batch_norm(each)]
        taken = {p for each in apart for p in each.parameters()}
        self._names = {p: name for name, p in module.named_parameters() if p not in taken}
        # No compiler sees that gradients are kept. Importing PyTorch's takes long, so not before.
        _InPieces.__call__ = torch.compiler.disable(_InPieces.run)  # type: ignore[method-assign]
        found = list(_largest_without(module, set(apart)))
        for each in found:
            _check_modules(each, names)
        self._calls = [_InPieces(each, names[each], size, self._kept) for each in found]

    def __enter__(self) -> ReproducibleGradients:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Give all modules their own forward back."""
        for call in self._calls:
            call.remove()
        self._calls = []
        self.discard()

    def discard(self) -> None:
        """Forget gradients that were kept.

        For a step that is given up: where what was computed in `no_sync` is thrown away, or a
        backward pass has raised.
        """
        self._kept.clear()

    def _take(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> list[list[Tensor]]:
        """Return what was kept of each parameter, and keep it no longer.

        `gradients` are what came from outside of the pieces; what should not have is an error.
        """
        outside = [
            (p, gradient.count_nonzero())
            for p, gradient in zip(parameters, gradients, strict=True)
            if p in self._names
        ]
        # One look, for devices that work while we go on.
        if outside and bool(torch.stack([count for _, count in outside]).any()):
            names = [repr(self._names[p]) for p, count in outside if count]
            self.discard()
            raise ArgumentValueError(
                "module",
                f"has gradients that are not of pieces, of {', '.join(names)}",
                hint="a parameter must be used in the forward of its own module, or of one around "
                "it that holds no batch normalisation, and .grad must be cleared before a step; "
                "modules in `exclude` are added up as they come",
            )
        return [self._kept.pop(p, []) for p in parameters]


_Kept = dict[Tensor, list[Tensor]]


class _InPieces:
    """The forward of a module, on pieces; an attribute of it, to be copied and pickled with it."""

    def __init__(self, module: nn.Module, name: str, size: int, kept: _Kept) -> None:
        self.module, self.name, self.size, self.kept = module, name, size, kept
        self.body = _Body(module, vars(module).get("forward"))
        module.forward = self

    def remove(self) -> None:
        if vars(self.module).get("forward") is self:
            del self.module.forward
            if self.body.own is not None:
                self.module.forward = self.body.own

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.run(*arguments, **options)

    def run(self, *arguments: Any, **options: Any) -> Any:
        if not (self.module.training or torch.is_grad_enabled()):
            return self.body(*arguments, **options)
        leaves, structure = tree_flatten((arguments, options))
        batch = self._batch([each for each in leaves if isinstance(each, Tensor)])
        if batch != self.size:
            self._check_shared(arguments, options, batch)
        if not batch:
            return self.body(*arguments, **options)
        count = batch // self.size
        columns = [
            _cut(each, self.size) if isinstance(each, Tensor) else [each] * count for each in leaves
        ]
        own = {f"module.{name}": p for name, p in self.module.named_parameters() if p.requires_grad}
        views = [_Views.apply(p, self.kept, count) for p in own.values()]
        results = []
        for k in range(count):
            given, named = tree_unflatten([column[k] for column in columns], structure)
            each = dict(zip(own, (view[k] for view in views), strict=True))
            results.append(functional_call(self.body, each, given, named))
        return self._together(results)

    def _batch(self, tensors: list[Tensor]) -> int:
        """Return how many samples there are; 0 where there is nothing to cut."""
        samples = {each.shape[0] if each.dim() else None for each in tensors}
        if len(samples) > 1 or None in samples:
            shapes = ", ".join(str(tuple(each.shape)) for each in tensors)
            raise self._error(
                "takes tensors of different numbers of samples", shapes,
                "a batch along axis 0 of all tensors",
            )  # fmt: skip
        batch = samples.pop() if samples else 0
        assert batch is not None
        if batch % self.size:
            raise self._error(
                "takes a batch that cannot be cut into equal pieces", f"{batch} samples",
                f"a multiple of micro_batch, which is {self.size}",
            )  # fmt: skip
        return batch

    def _check_shared(
        self, arguments: tuple[Any, ...], options: dict[str, Any], batch: int
    ) -> None:
        """Refuse an argument that is no tensor and may be different for each sample."""
        for key, value in [*enumerate(arguments), *options.items()]:
            leaves, _ = _flat(value, batch)
            for leaf in leaves:
                if not isinstance(leaf, Tensor) and not _is_shared(leaf, batch):
                    raise self._error(
                        f"takes {self._name(key)}, which may have a value for each sample",
                        described(leaf),
                        "tensors with the samples along axis 0, and what does not depend on them",
                    )  # fmt: skip

    def _name(self, key: int | str) -> str:
        """Return what to call an argument, of which `key` is the position or the name."""
        if isinstance(key, int):
            own = self.body.own
            forward = self.module.__class__.forward.__get__(self.module) if own is None else own
            names = [*inspect.signature(forward).parameters]
            key = names[key] if key < len(names) else f"argument {key}"
        return repr(key)

    def _together(self, results: list[Any]) -> Any:
        flat = [_flat(each, self.size) for each in results]
        (first, structure), rows = flat[0], [leaves for leaves, _ in flat]
        if any(other != structure for _, other in flat):
            raise self._error(
                "returns different structures of results for its pieces", structure,
                "one structure",
            )  # fmt: skip
        whole = []
        for k, leaf in enumerate(first):
            if not isinstance(leaf, Tensor):
                # A number may be counted over the samples, and the same for pieces all the same.
                shared = isinstance(leaf, bool) or not isinstance(leaf, numbers.Number)
                shared = shared and _is_shared(leaf, 0) and all(row[k] == leaf for row in rows)
                if len(rows) > 1 and not shared:
                    raise self._error(
                        "returns a result that may be different for each piece", described(leaf),
                        "tensors with the samples along axis 0, and what does not depend on them",
                    )  # fmt: skip
                whole.append(leaf)
                continue
            if not leaf.dim() or leaf.shape[0] != self.size:
                raise self._error(
                    "returns a tensor that has no axis of samples", f"shape {tuple(leaf.shape)}",
                    f"{self.size} samples along axis 0, as in its input",
                )  # fmt: skip
            column = [row[k] for row in rows]
            for each in column:
                if each.requires_grad:
                    each.register_hook(_aligned)
            whole.append(torch.cat(column))
        return tree_unflatten(whole, structure)

    def _error(self, problem: str, came: Any, accepted: str) -> ArgumentValueError:
        name = f"module {self.name!r}" if self.name else "the module"
        hint = "a module in `exclude` has the whole batch"
        return ArgumentValueError(name, problem, came=came, accepted=accepted, hint=hint)


class _Body(nn.Module):
    """A module's own forward: a call that runs none of its hooks, which a whole batch has once."""

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None) -> None:
        super().__init__()
        self.module = module
        # One of its own, beside that of its class.
        self.own = own

    def forward(self, *arguments: Any, **options: Any) -> Any:
        if self.own is not None:
            return self.own(*arguments, **options)
        return type(self.module).forward(self.module, *arguments, **options)


class _Views(Function):
    """A parameter, once for each piece; what comes back for the pieces is kept, and not added."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, kept: _Kept, count: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.parameter, ctx.kept = parameter, kept
        return tuple(parameter.detach() for _ in range(count))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        found = [each for each in gradients if each is not None]
        ctx.kept.setdefault(ctx.parameter, []).extend(found)
        # Of the parameter's shape, in no memory of its own.
        return ctx.parameter.new_zeros(()).expand_as(ctx.parameter), None, None


def _modules(argument: str, value: Any) -> frozenset[nn.Module]:
    accepted = "an iterable of modules"
    if isinstance(value, nn.Module) or not isinstance(value, Iterable):
        raise ArgumentTypeError(
            argument, "must be modules", came=described(value), accepted=accepted
        )
    found = frozenset(value)
    for each in found:
        if not isinstance(each, nn.Module):
            raise ArgumentTypeError(
                argument, "must be modules", came=described(each), accepted=accepted
            )
    return found


def _flat(value: Any, samples: int) -> tuple[list[Any], Any]:
    """Return the leaves of a value and its structure.

    A list or tuple without tensors that has as many elements as there are samples is one leaf.
    """

    def is_leaf(each: Any) -> bool:
        if type(each) not in (list, tuple) or len(each) != samples:
            return False
        return not any(isinstance(leaf, Tensor) for leaf in tree_flatten(each)[0])

    return tree_flatten(value, is_leaf=is_leaf if samples else None)


def _is_shared(leaf: Any, samples: int) -> bool:
    """Return whether a leaf that is no tensor does not depend on the samples, as far as it shows.

    A number that is the number of samples does.
    """
    is_number = isinstance(leaf, numbers.Number) and not isinstance(leaf, bool)
    return leaf is None or (isinstance(leaf, _SHARED) and not (is_number and leaf == samples))


def _cut(batch: Tensor, size: int) -> list[Tensor]:
    return [_aligned(each) for each in batch.split(size)]


def _aligned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.data_ptr() % _ALIGNED else tensor


def _largest_without(module: nn.Module, apart: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the largest modules in which there is none of `apart`, but for those that need not."""
    if module in apart:
        return
    inner = set(module.modules())
    called = type(module).forward is not nn.Module.forward
    if not called or inner & apart:
        for child in module.children():
            yield from _largest_without(child, apart)
    elif not all(isinstance(each, _EXACT) for each in inner if not list(each.children())):
        yield module


def _check_modules(module: nn.Module, names: dict[nn.Module, str]) -> None:
    """Refuse modules whose batch is along another axis, and those with sparse gradients."""
    for each in module.modules():
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse:
            raise ArgumentValueError(
                "module", f"has sparse gradients, of 'weight' in {names[each]!r}",
                came="sparse=True", accepted="sparse=False",
            )  # fmt: skip
        if getattr(each, "batch_first", True) is False:
            raise ArgumentValueError(
                "module", f"has a batch along axis 1 in {names[each]!r}",
                came="batch_first=False", accepted="batch_first=True",
                hint="a module in `exclude` has the whole batch",
            )  # fmt: skip
