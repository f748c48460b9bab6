"""Layers of frameworks as functions of their parameters, their state and x.

Each class makes such functions of one kind of objects: modules and autograd functions of PyTorch,
modules of flax (linen and nnx), layers of Keras. For another kind, add a class and a line to
`_KINDS`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from backnorm.conformance.verify.operations import RefusedError
from backnorm.errors import ArgumentValueError

__all__ = ["Layer", "kind_of", "role_of"]

# The last parts of the names of a layer's tensors. Other floating-point tensors keep their values.
_NAMES = {
    "gamma": ("weight", "gamma", "scale"),
    "beta": ("bias", "beta", "shift"),
    "running_mean": ("running_mean", "moving_mean", "mean"),
    "running_variance": (
        "running_var", "running_variance", "moving_var", "moving_variance", "var", "variance",
    ),
}  # fmt: skip
# The names of arguments that select training, and whether True means training.
_MODES = {
    "training": True,
    "train": True,
    "is_training": True,
    "use_running_average": False,
    "deterministic": False,
}
# Names that do not say whose statistics they are, which an autograd function may get, too.
_BARE = "mean", "var", "variance"
_EPSILON = "eps", "epsilon"
# Attributes that say which parameters a layer has.
_SCALED, _SHIFTED = ("affine", "use_scale", "scale"), ("affine", "use_bias", "center")

Named = Mapping[str, Any]


class Layer(Protocol):
    """A layer of a framework.

    Parameters
    ----------
    found : object
        The layer, or a class of layers.
    arguments : sequence or None
        The arguments of a class; None: the usual ones of the framework.
    channels : int
    types : tuple of numpy.dtype
        The element types of x and of the parameters.

    Attributes
    ----------
    axis : int
        The channel axis of x: 1 or -1.
    width : int or None
        The number of channels; None: that of x.
    options : dict
        The options by which the layer is judged, see :meth:`LayerCase.with_options`.
    """

    axis: int
    width: int | None
    options: dict[str, Any]

    def __init__(
        self, found: Any, arguments: Any, channels: int, types: tuple[np.dtype, np.dtype]
    ) -> None: ...

    def names(self, x: Any) -> dict[str, bool]:
        """Return the names of the layer's tensors for this x, and whether each is a parameter."""

    def __call__(self, parameters: Named, state: Named, x: Any, training: bool) -> tuple[Any, Any]:
        """Return y and the new state by name, computed with these parameters and this state."""


def role_of(name: str) -> str | None:
    """Return which array of a layer a name means; None if it is none."""
    last = re.split(r"[./]", name)[-1]
    return next((role for role, known in _NAMES.items() if last in known), None)


def kind_of(found: Any) -> tuple[type[Layer], str] | None:
    """Return the class that makes layers of a subject, and the framework of their tensors; None if
    it is no layer.
    """
    kind = found if isinstance(found, type) else type(found)
    bases = [f"{base.__module__}.{base.__name__}" for base in kind.mro()]
    return next((made() for base, made in _KINDS.items() if base in bases), None)


class TorchModule:
    """A module of PyTorch. A class is called with the number of channels."""

    axis = 1

    def __init__(self, found: Any, arguments: Any, channels: int, types: Any) -> None:
        import torch

        self._module = _made(found, arguments, channels)
        if isinstance(self._module, torch.jit.ScriptModule):
            problem = "must be a module before torch.jit compiles it"
            raise ArgumentValueError("SUBJECT", problem, came=type(found).__name__)
        self.options = _options(self._module.modules(), 1e-5, 0.1) | {"unbiased": True}
        named = [*self._module.named_parameters(), *self._module.named_buffers()]
        self.width = next((each.numel() for name, each in named if role_of(name)), None)

    def names(self, x: Any) -> dict[str, bool]:
        """See :class:`Layer`."""
        module = self._module.to(x.device)
        own = dict.fromkeys(dict(module.named_parameters()), True)
        return own | dict.fromkeys(dict(module.named_buffers()), False)

    def __call__(self, parameters: Named, state: Named, x: Any, training: bool) -> tuple[Any, Any]:
        """See :class:`Layer`. The number of tracked batches and other integers are 0."""
        from torch.func import functional_call

        own = {
            name: buffer.clone() if buffer.is_floating_point() else buffer.new_zeros(buffer.shape)
            for name, buffer in self._module.named_buffers()
        } | dict(state)
        module = self._module.train(training)
        return functional_call(module, {**parameters, **own}, (x,)), own


class AutogradFunction:
    """A ``torch.autograd.Function``. Its `apply` gets x, and then a value for each parameter of its
    `forward`, which the parameter's name or its default determines.
    """

    axis = 1
    width: int | None = None

    def __init__(self, found: Any, arguments: Any, channels: int, types: Any) -> None:
        import torch

        self._function = found
        own = list(inspect.signature(found.forward).parameters.values())
        # Without `setup_context`, the first parameter is the context.
        has_context = found.setup_context is torch.autograd.Function.setup_context
        self._others = own[1 + has_context :]
        self._values = dict.fromkeys(_EPSILON, 1e-5) | {"momentum": 0.1}
        known = [*self._values, *_MODES, *(n for names in _NAMES.values() for n in names)]
        for each in self._others:
            is_array = each.name in known and each.name not in (*self._values, *_BARE)
            if each.default is not each.empty and not is_array:
                self._values[each.name] = each.default
            elif each.name not in known or each.name in _BARE:
                raise ArgumentValueError(
                    "SUBJECT", f"{found.__name__}.forward has an unknown parameter",
                    came=each.name, accepted=", ".join(n for n in known if n not in _BARE),
                )  # fmt: skip
        epsilon = (self._values[each.name] for each in self._others if each.name in _EPSILON)
        self.options = {"epsilon": next(epsilon, 1e-5), "momentum": self._values["momentum"]}
        self.options["unbiased"] = True

    def names(self, x: Any) -> dict[str, bool]:
        """See :class:`Layer`."""
        own = {each.name: role_of(each.name) for each in self._others}
        return {
            name: not role.startswith("running")
            for name, role in own.items()
            if role and name not in self._values
        }

    def __call__(self, parameters: Named, state: Named, x: Any, training: bool) -> tuple[Any, Any]:
        """See :class:`Layer`. If the function has several results, y is the first."""
        mode = _mode(self._function.forward, training)
        values = {**self._values, **mode, **parameters, **state}
        y = self._function.apply(x, *(values[each.name] for each in self._others))
        return (y[0] if isinstance(y, tuple) else y), state


class LinenModule:
    """A module of flax.linen. A class is called without arguments."""

    width: int | None = None

    def __init__(self, found: Any, arguments: Any, channels: int, types: Any) -> None:
        self._module = _made(found, arguments)
        self.axis = _axis(self._module)
        self.options: dict[str, Any] = {}
        self._variables: dict[str, Any] = {}

    def names(self, x: Any) -> dict[str, bool]:
        """See :class:`Layer`. The parts of a module are known when it is called."""
        import jax
        from flax import linen
        from flax.traverse_util import flatten_dict

        if not self._variables:
            parts = []

            def noted(call: Any, arguments: Any, named: Any, context: Any) -> Any:
                parts.append(context.module)
                return call(*arguments, **named)

            with linen.intercept_methods(noted):
                module, mode = self._in_mode(True)
                variables = module.init(jax.random.key(0), x, **mode)
            self.options = _options_of_flax(parts)
            self._variables = flatten_dict(variables, sep="/")
        return {name: name.startswith("params/") for name in self._variables}

    def __call__(self, parameters: Named, state: Named, x: Any, training: bool) -> tuple[Any, Any]:
        """See :class:`Layer`."""
        from flax.traverse_util import flatten_dict, unflatten_dict

        module, mode = self._in_mode(training)
        variables = unflatten_dict({**self._variables, **parameters, **state}, sep="/")
        mutable = [name for name in variables if name != "params"]
        y, after = module.apply(variables, x, mutable=mutable, **mode)
        return y, flatten_dict(after, sep="/")

    def _in_mode(self, training: bool) -> tuple[Any, dict[str, bool]]:
        """Return the module, and the arguments of its call: one of them selects the mode."""
        mode = _mode(type(self._module).__call__, training, is_required=False)
        if mode:
            return self._module, mode
        return self._module.clone(**_mode(type(self._module), training)), {}


class NnxModule:
    """A module of flax.nnx. A class is called with the number of channels, and `rngs`."""

    def __init__(self, found: Any, arguments: Any, channels: int, types: Any) -> None:
        from flax import nnx

        self._module = _made(found, arguments, channels, rngs=nnx.Rngs(0))
        self.axis = _axis(self._module)
        self.options = _options_of_flax(part for _, part in nnx.iter_modules(self._module))
        self._graph, state = nnx.split(self._module)
        self._own = {".".join(map(str, path)): each for path, each in nnx.to_flat_state(state)}
        self.width = next((each.size for name, each in self._own.items() if role_of(name)), None)

    def names(self, x: Any) -> dict[str, bool]:
        """See :class:`Layer`."""
        from flax import nnx

        return {name: isinstance(each, nnx.Param) for name, each in self._own.items()}

    def __call__(self, parameters: Named, state: Named, x: Any, training: bool) -> tuple[Any, Any]:
        """See :class:`Layer`."""
        from flax import nnx

        values = {**parameters, **state}
        flat = nnx.to_flat_state(nnx.split(self._module)[1])
        named = zip(self._own, flat, strict=True)
        own = ((path, each.replace(values.get(n, each[...]))) for n, (path, each) in named)
        module = nnx.merge(self._graph, nnx.from_flat_state(own))
        module.train() if training else module.eval()
        y = module(x, **_mode(type(module).__call__, training, is_required=False))
        after = nnx.to_flat_state(nnx.split(module)[1])
        return y, {name: each[...] for name, (_, each) in zip(self._own, after, strict=True)}


class KerasLayer:
    """A layer of Keras, with any backend. A class is called without arguments, while the global
    policy has the types of the case.
    """

    def __init__(self, found: Any, arguments: Any, channels: int, types: Any) -> None:
        import keras

        x, statistics = map(str, types)
        if x == "float64" != keras.backend.result_type(x, "float32"):
            raise RefusedError("with this backend, layers of Keras compute in float32")
        keras.config.set_dtype_policy(x if x == statistics else f"mixed_{x}")
        self._layer = _made(found, arguments)
        own = self._layer.compute_dtype, self._layer.variable_dtype
        if own != (x, statistics):
            raise RefusedError(f"the layer computes in {own[0]}, and its variables are {own[1]}")
        self.axis = _axis(self._layer)
        parts = vars(self._layer).values()
        parts = [each for each in parts if isinstance(each, keras.Layer)]
        self.options = _options([self._layer, *parts], 1e-3, 0.99) | {"unbiased": False}
        self.options["momentum"] = 1.0 - self.options["momentum"]
        self.width = next((v.shape[0] for v in self._layer.variables if role_of(v.path)), None)

    def names(self, x: Any) -> dict[str, bool]:
        """See :class:`Layer`."""
        if not self._layer.built:
            self._layer(x)
        return {each.path: each.trainable for each in self._layer.variables}

    def __call__(self, parameters: Named, state: Named, x: Any, training: bool) -> tuple[Any, Any]:
        """See :class:`Layer`."""
        values, layer = {**parameters, **state}, self._layer
        both = layer.trainable_variables, layer.non_trainable_variables
        own = [[values.get(each.path, each.value) for each in part] for part in both]
        y, after = layer.stateless_call(*own, x, **_mode(type(layer).call, training))
        return y, dict(zip([each.path for each in both[1]], after, strict=True))


def _keras() -> tuple[type[Layer], str]:
    import keras

    return KerasLayer, keras.backend.backend()


_KINDS: dict[str, Callable[[], tuple[type[Layer], str]]] = {
    # With the backend torch, a layer of Keras is a module of PyTorch, too.
    "keras.src.layers.layer.Layer": _keras,
    "torch.nn.modules.module.Module": lambda: (TorchModule, "torch"),
    "torch.autograd.function.Function": lambda: (AutogradFunction, "torch"),
    "flax.linen.module.Module": lambda: (LinenModule, "jax"),
    "flax.nnx.module.Module": lambda: (NnxModule, "jax"),
}


def _made(found: Any, arguments: Any, *usual: Any, **named: Any) -> Any:
    """Return the object that a class makes; another object as it is."""
    if not isinstance(found, type):
        return found
    return found(*(usual if arguments is None else arguments), **named)


def _axis(made: Any) -> int:
    """Return the channel axis of a layer, whose default is the last."""
    axis = getattr(made, "axis", -1)
    axis = axis[0] if isinstance(axis, list | tuple) and len(axis) == 1 else axis
    if axis not in (1, -1):
        raise ArgumentValueError(
            "SUBJECT", "must have its channels on one axis", came=axis, accepted="1 or -1"
        )
    return int(axis)


def _mode(function: Any, training: bool, *, is_required: bool = True) -> dict[str, bool]:
    """Return the arguments by which a function is in training or in evaluation.

    Raises
    ------
    RefusedError
        In evaluation, if there are none, but `is_required`.
    """
    known = inspect.signature(function).parameters
    mode = {name: training == meaning for name, meaning in _MODES.items() if name in known}
    if is_required and not (training or mode):
        raise RefusedError("the layer has no argument that says that it is not in training")
    return mode


def _options(parts: Iterable[Any], epsilon: float, momentum: float) -> dict[str, Any]:
    """Return the options that attributes of a layer's parts say, or else the framework's."""
    known: dict[str, Any] = {}
    for part in parts:
        names = (*_EPSILON, "momentum", *_SCALED, *_SHIFTED)
        known |= {name: getattr(part, name) for name in names if hasattr(part, name)}
    own = known.get("momentum", momentum)
    return {
        "epsilon": next((float(known[name]) for name in _EPSILON if name in known), epsilon),
        # None is the average of all batches, of which there is one.
        "momentum": 1.0 if own is None else float(own),
        "absent": [
            role for role, names in (("gamma", _SCALED), ("beta", _SHIFTED))
            if any(known.get(name) is False for name in names)
        ],
    }  # fmt: skip


def _options_of_flax(parts: Iterable[Any]) -> dict[str, Any]:
    """Return the options of a module of flax, whose momentum weighs the old running statistics."""
    options = _options(parts, 1e-5, 0.99)
    return options | {"momentum": 1.0 - options["momentum"], "unbiased": False}
