"""Layers as subjects: modules of PyTorch, with parameters and running statistics of their own."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from backnorm.conformance.battery import Case
from backnorm.conformance.verify.dialect_calls import Inputs
from backnorm.conformance.verify.operations import RefusedError
from backnorm.conformance.verify.tensors import Tensors
from backnorm.errors import ArgumentValueError
from backnorm.peers.torch_tensors import to_array

__all__ = ["OfModule", "is_module"]

# The last parts of the names of a layer's tensors. All other tensors, such as
# `num_batches_tracked`, are set to 0.
_NAMES = {
    "gamma": ("weight", "gamma", "scale"),
    "beta": ("bias", "beta", "shift"),
    "running_mean": ("running_mean", "moving_mean"),
    "running_variance": ("running_var", "running_variance", "moving_var", "moving_variance"),
}
# The ranks of x that are tried if the file of a layer has no `get_inputs`.
_RANKS = 4, 3, 2, 5
_EPSILON, _MOMENTUM = 1e-5, 0.1


def is_module(found: Any) -> bool:
    """Whether an object is a module of PyTorch, or a class of modules."""
    kind = found if isinstance(found, type) else type(found)
    return any(
        f"{k.__module__}.{k.__name__}" == "torch.nn.modules.module.Module" for k in kind.mro()
    )


class OfModule:
    """A module of PyTorch, or a class of modules.

    A class is called with `get_init_inputs()` of its file, or else with a case's number of
    channels. A module of C channels gets the channels of a case in groups of C, because no channel
    depends on another. Its x has the rank of `get_inputs()[0]`, or else a rank that it takes.

    Parameters
    ----------
    found : torch.nn.Module, or a class of modules
    tensors : Tensors
        The tensors of PyTorch.

    Attributes
    ----------
    options : dict
        The last module's own epsilon and momentum, and whether it has gamma and beta. Attributes
        of a module say so (`eps`, `momentum`, `affine`), and are those of PyTorch if absent.
    """

    def __init__(self, found: Any, tensors: Tensors) -> None:
        self._found, self._tensors = found, tensors
        kind = found if isinstance(found, type) else type(found)
        file: Any = sys.modules.get(kind.__module__)
        if isinstance(found, type) and hasattr(file, "get_init_inputs"):
            self._found = found(*file.get_init_inputs())
        if not isinstance(self._found, type):
            _names(self._found)
        self._rank: int | None = None
        if hasattr(file, "get_inputs"):
            self._rank = file.get_inputs()[0].ndim
        self.options: dict[str, Any] = {}

    def __call__(self, inputs: Inputs, case: Case) -> dict[str, np.ndarray | None]:
        """Run the module forwards and backwards; return y, its gradients, and its statistics."""
        channels = case.data.x.shape[1]
        module = self._found(channels) if isinstance(self._found, type) else self._found
        names, state = _names(module), _state(module)
        width = next((state[name].numel() for name in names.values()), channels)
        if self._rank is None:
            self._rank = _rank_of(module, width)
        self.options = _options(module)
        if not case.training and "running_variance" not in names:
            raise RefusedError("the module has no running statistics")
        module.train(case.training)
        found = []
        for group in np.resize(np.arange(channels), (-(-channels // width), width)):
            parts = inputs
            if width != channels:
                # Axis 1 of x and dy, axis 0 of the others.
                parts = {
                    name: None if a is None else np.take(a, group, int(a.ndim > 1))
                    for name, a in inputs.items()
                }
            found.append(self._results(module, names, parts))
        return {
            name: None
            if array is None
            else np.concatenate([each[name] for each in found], axis=int(array.ndim > 1))[
                (slice(None),) * (array.ndim > 1) + (slice(channels),)
            ]
            for name, array in found[0].items()
        }

    def _results(self, module: Any, names: Mapping[str, str], inputs: Inputs) -> dict[str, Any]:
        """Write the inputs into the module, and run it on x and dy."""
        import torch

        whole = inputs["x"]
        assert whole is not None
        data = [_with_rank(inputs[name], self._rank) for name in ("x", "dy")]
        with self._tensors.operands([*data, *(inputs[name] for name in names)]) as values:
            x, dy, *written = values
            module.to(device=x.device, dtype=x.dtype)
            state = _state(module)
            with torch.no_grad():
                for buffer in module.buffers():
                    buffer.zero_()
                for name, value in zip(names.values(), written, strict=True):
                    if value is not None:
                        state[name].copy_(value)
            module.zero_grad(set_to_none=True)
            x = x.detach().requires_grad_()
            y = module(x)
            y.backward(dy)
            own = {role: state[name] for role, name in names.items()}
            found = {role: each for role, each in own.items() if role.startswith("running")}
            found |= {f"d{role}": own[role].grad for role in ("gamma", "beta") if role in own}
            found |= {"y": y, "dx": x.grad}
        arrays = {name: None if each is None else to_array(each) for name, each in found.items()}
        for name in ("y", "dx"):
            arrays[name] = _with_shape(arrays[name], whole.shape)
        return {"dgamma": None, "dbeta": None} | {
            name: None if a is None else a.copy() for name, a in arrays.items()
        }


def _state(module: Any) -> dict[str, Any]:
    """Return the parameters and buffers of a module by name."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _names(module: Any) -> dict[str, str]:
    """Return the names of a layer's tensors: gamma, beta, and the running statistics, if it has
    them.
    """
    found: dict[str, str] = {}
    for name in _state(module):
        for role, spellings in _NAMES.items():
            if name.rpartition(".")[2] in spellings:
                if role in found:
                    raise ArgumentValueError(
                        "SUBJECT", f"must have only one {role}", came=f"{found[role]} and {name}",
                        accepted="a module with one batch normalisation and nothing else",
                    )  # fmt: skip
                found[role] = name
    return found


def _options(module: Any) -> dict[str, Any]:
    """Return `OfModule.options` of a module."""
    known: dict[str, Any] = {}
    for part in module.modules():
        known |= {n: getattr(part, n) for n in ("eps", "momentum", "affine") if hasattr(part, n)}
    momentum = known.get("momentum", _MOMENTUM)
    return {
        "epsilon": float(known.get("eps", _EPSILON)),
        # None is the average of all batches, of which there is one.
        "momentum": 1.0 if momentum is None else float(momentum),
        "scaled": known.get("affine") is not False,
    }


def _rank_of(module: Any, channels: int) -> int:
    """Return a rank of x that a module takes."""
    import torch

    state = next(iter(_state(module).values()), torch.zeros(()))
    for rank in _RANKS:
        x = torch.ones((2, channels, 2, 2, 2)[:rank], device=state.device)
        with contextlib.suppress(Exception), torch.no_grad():
            module(x)
            return rank
    return _RANKS[0]


def _with_rank(array: Any, rank: Any) -> np.ndarray:
    """Return x or dy with as many axes as a module takes, and the same channels."""
    images, channels, *space = array.shape
    if rank == 2:
        return np.ascontiguousarray(np.moveaxis(array, 1, -1)).reshape(-1, channels)
    ones = [1] * max(rank - 2 - len(space), 0)
    sizes = [*space, *ones][: rank - 3]
    found: np.ndarray = array.reshape(images, channels, *sizes, -1)
    return found


def _with_shape(array: Any, shape: tuple[int, ...]) -> Any:
    """Return y or dx with the shape of the case's x; `array` itself if it has not its elements."""
    if array is None or array.size != math.prod(shape):
        return array
    if array.ndim == 2:
        images, channels, *space = shape
        return np.moveaxis(array.reshape(images, *space, channels), -1, 1)
    return array.reshape(shape)
