"""A repeated call, then one with an operand absent, of another kind or in another's place.

For every tensor of the function, of the modules and of the operators: the result is that of tensors
of the same elements, or the error names the operand, whatever the calls before were.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import backnorm
import backnorm.torch
from backnorm.executable import forget
from tests.support.contract import sampled

from .operand_kinds import OTHER, SAME, elements_of, plain, quietly

CHANNELS, EPSILON = 5, 1e-3
# Of the kinds of an operand, in a sample.
SHARE = 0.1
DATA, RUNNING = ("input", "residual", "dy"), ("running_mean", "running_var")
FUNCTIONS = {"batch_norm": None, "relu": "relu", "add relu": "relu", "silu": "silu"}


def called(activation):
    """Return how the function is called with tensors by name."""

    def call(operands, training):
        return backnorm.torch.batch_norm(
            **operands, training=training, eps=EPSILON, activation=activation
        )

    return call


def as_module(cls):
    """Return how a module is called with tensors by name, some of which are its own."""

    def call(operands, training):
        module = cls(CHANNELS, eps=EPSILON).train(training)
        for name in operands.keys() - {*DATA}:
            own = module._parameters if name in module._parameters else module._buffers
            own[name] = operands[name]
        return module(**{name: operands[name] for name in operands if name in DATA})

    return call


def _subjects():
    for name, activation in FUNCTIONS.items():
        names = ["input", *RUNNING, "weight", "bias"]
        names += ["residual"] if name.startswith("add") else []
        yield name, called(activation), names, activation, 4
    for name in backnorm.torch.__all__:
        cls = getattr(backnorm.torch, name)
        # A lazy layer becomes one of the others with its first batch.
        if inspect.isclass(cls) and issubclass(cls, torch.nn.Module) and "Lazy" not in name:
            has_relu = "ReLU" in name
            names = ["input", "weight", "bias", *RUNNING, *(["residual"] if has_relu else [])]
            rank = 4 if name == "SyncBatchNorm" else int(name[-2]) + 2
            yield name, as_module(cls), names, "relu" if has_relu else None, rank


LAST = {None: lambda y: y, "relu": torch.relu, "silu": functional.silu}
pytestmark = [quietly, pytest.mark.usefixtures("one_thread")]


SUBJECTS = {name: rest for name, *rest in _subjects()}


def good(names, rank=4, dtype=torch.float32):
    """Return good tensors by name."""
    generator = torch.Generator().manual_seed(0)
    shape = (3, CHANNELS, 4, 2, 2)[:rank]
    made = {}
    for name in names:
        tensor = torch.rand(shape if name in DATA else CHANNELS, generator=generator) + 0.5
        made[name] = tensor.to(dtype)
    return made


def with_gradients(operands):
    """Let tensors that can have gradients ask for them, and return which do."""
    for name, tensor in operands.items():
        if name not in (*RUNNING, "dy") and isinstance(tensor, Tensor):
            # Not tensors of integers, nor those that were made in inference mode.
            with contextlib.suppress(RuntimeError):
                tensor.requires_grad_()
    return {
        name: tensor
        for name, tensor in operands.items()
        if name not in (*RUNNING, "dy") and isinstance(tensor, Tensor) and tensor.requires_grad
    }


def values(function, operands, training, wants_gradients):
    """Return y, the running statistics after, and the gradients by name."""
    operands = dict(operands)
    leaves = with_gradients(operands) if wants_gradients else {}
    # The same in all types.
    dys = [operands.pop("dy")] if "dy" in operands else []
    y = plain(function(operands, training))
    found = {"y": y, **{name: operands.get(name) for name in RUNNING}}
    if leaves:
        (dy,) = dys or [(torch.arange(y.numel()) % 7 - 3).to(y.dtype).view(y.shape)]
        gradients = torch.autograd.grad(y, list(leaves.values()), dy, allow_unused=True)
        found |= {f"d{name}": each for name, each in zip(leaves, gradients, strict=True)}
    return {name: each for name, each in found.items() if each is not None}


def expected(operands, training, wants_gradients, activation):
    """Return what PyTorch computes of the same elements in float64, or None for an error."""

    def theirs(operands, training):
        residual = operands.pop("residual", None)
        y = functional.batch_norm(**operands, training=training, eps=EPSILON)
        return LAST[activation](y if residual is None else y + residual)

    try:
        operands = {name: elements_of(each) for name, each in operands.items()}
        if (
            operands.get("residual") is not None
            and operands["residual"].shape != operands["input"].shape
        ):
            return None
        return values(theirs, operands, training, wants_gradients)
    except (ValueError, RuntimeError, AttributeError, TypeError, IndexError):
        return None


def differences(found, wanted, dtype):
    """Return the names of what is not the same."""
    wrong = []
    for name, each in found.items():
        tolerance = 40 * max(torch.finfo(dtype).eps, torch.finfo(each.dtype).eps)
        value, other = elements_of(each), wanted.get(name)
        if other is None or value.shape != other.shape:
            wrong.append(name)
            continue
        if not torch.allclose(value, other, rtol=tolerance, atol=tolerance * 10):
            wrong.append(name)
    return wrong


def cases(make_good):
    """Yield an operand, a label, and how to make all tensors with that operand changed."""
    names = list(make_good())

    def changed(name, change):
        operands = make_good()
        return {**operands, name: change(operands[name])}

    def swapped(name, other):
        operands = make_good()
        # Not the same one twice: running statistics are written to.
        return {**operands, name: operands[other].clone()}

    for name in names:
        for label, change in (SAME | OTHER).items():
            # Any device will do for an operand that is the only one.
            if len(names) > 1 or label not in ("on the meta device", "fake"):
                yield name, label, functools.partial(changed, name, change)
        for other in names:
            if other != name:
                yield name, f"which is {other}", functools.partial(swapped, name, other)


def judge(error, name, label):
    """Return what is wrong with an error, None if it names the operand."""
    if "Inference tensors cannot be saved for backward" in str(error):
        # They cannot be in PyTorch's own functions either.
        return None if label == "made in inference mode" else f"refused: {error!r}"
    if "Attempted to use an uninitialized" in str(error):
        return None if "uninitialised" in label else f"refused: {error!r}"
    if label in SAME:
        return f"refused: {error!r}"
    if name == "dy":
        # It comes from autograd, which checks its shape and device.
        return None if str(error) else repr(error)
    if not isinstance(error, backnorm.ArgumentError):
        # A module looks at its input before all else, in PyTorch's words.
        if name == "input" and "input" in str(error):
            return None
        return f"not ours: {error!r}"
    # Where the input has another shape or type, the others do not go with it.
    named = error.argument == name or name == "input"
    return None if named else f"another is named: {error!r}"


MODULES = [name for name in SUBJECTS if name not in FUNCTIONS]
in_training = pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])


@in_training
@pytest.mark.parametrize("subject", SUBJECTS)
def test_sample_of_hostile_calls_gives_documented_error_or_right_result(subject, training):
    check(subject, training, True, torch.float32, SHARE)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("dtype", "wants_gradients"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)],
)
@in_training
@pytest.mark.parametrize("function", FUNCTIONS)
def test_function_accepts_or_names_every_kind_of_tensor(function, training, wants_gradients, dtype):
    check(function, training, wants_gradients, dtype)


@pytest.mark.sweep
@in_training
@pytest.mark.parametrize("module", MODULES)
def test_module_accepts_or_names_every_kind_of_tensor(module, training):
    check(module, training, True, torch.float32)


def check(subject, training, wants_gradients, dtype, share=1.0):
    """Check all cases of the function or a module, or a share of them."""
    call, names, activation, rank = SUBJECTS[subject]
    make_good = functools.partial(good, [*names, *(["dy"] * wants_gradients)], rank, dtype)
    forget()
    wrong = []
    for name, label, make in sampled(cases(make_good), share, subject):
        if name in ("dy", "residual") and "memory" in label and not training and activation:
            # PyTorch's operators, which add and activate, do not look at it.
            continue

        def made(name=name, make=make):
            operands = make()
            return (
                operands if name == "dy" else {k: each for k, each in operands.items() if k != "dy"}
            )

        wanted = expected(made(), training, wants_gradients, activation)
        for _ in range(2):
            values(call, make_good(), training, wants_gradients)
        # What the first call may have kept is there for the second.
        for _ in range(2):
            try:
                found = values(call, made(), training, wants_gradients)
            except Exception as error:
                what = judge(error, name, label)
            else:
                # Two steps round what is between them to the input's type.
                kind = found["y"].dtype if activation == "silu" else dtype
                what = "PyTorch has none" if wanted is None else differences(found, wanted, kind)
            if what:
                wrong.append(f"{name} {label}: {what}")
    assert not wrong, "\n".join(dict.fromkeys(wrong))


# The operators ``torch.ops.backnorm.*``, by their schemas. The result is the one that a first call
# gives on new tensors of the same elements.

OPERATORS = {
    name.removeprefix("backnorm::"): getattr(torch.ops.backnorm, name[10:]).default
    for name in sorted(torch._C._dispatch_get_all_op_names())
    if name.startswith("backnorm::")
}
SHAPE = (3, CHANNELS, 4, 2)
# Refused by PyTorch's dispatcher, or by their classes, before an operator is called.
OF_CLASSES = (
    "fake", "distributed", "masked", "nested", "jagged", "of a vmap that is over",
    "an uninitialised parameter", "an uninitialised buffer",
)  # fmt: skip
PACKAGE = Path(backnorm.__file__).parent


def tensors_of(operator):
    """Return the names of an operator's tensors."""
    return [each.name for each in operator._schema.arguments if "Tensor" in str(each.type)]


# Phases and exchanges call those of messages alone, without x.
OPERATORS = {name: each for name, each in OPERATORS.items() if "x" in tensors_of(each)}


def operands_of(names):
    """Return good tensors of an operator by name."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name in names:
        shape = SHAPE if name in ("x", "dy", "ddx") else CHANNELS
        made[name] = torch.rand(shape, generator=generator) + 0.5
        if name in ("moments", "sums"):
            made[name] = torch.cat((made[name], made[name], torch.tensor([24.0]))).double()
    return made


def results_of(operator, operands, options):
    """Return the results of a call, in a list."""
    found = operator(**operands, **options)
    return [found] if isinstance(found, Tensor) else list(found)


def first_results(operator, operands, options):
    """Return the results of a first call for new tensors like these, or None for an error."""
    forget()
    try:
        new = {name: None if tensor is None else _new(tensor) for name, tensor in operands.items()}
        return results_of(operator, new, options)
    except Exception:
        return None


def _new(tensor):
    """Return a new tensor of the same elements, which lies in memory as a clone does."""
    if tensor.is_complex():
        return tensor.detach().clone()
    elements, tensor = elements_of(tensor), plain(tensor)
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return torch.empty_like(like, device="cpu").copy_(elements)


def judge_operator(error, name, label):
    """Return what is wrong with an error of an operator, None if it names the operand."""
    if label in SAME:
        return f"refused: {error!r}"
    if label in OF_CLASSES:
        *_, last = traceback.extract_tb(error.__traceback__)
        return f"raised here: {error!r}" if Path(last.filename).is_relative_to(PACKAGE) else None
    if isinstance(error, backnorm.ArgumentError):
        # Where x has another shape or type, the others do not go with it.
        named = name in (error.argument, "x")
        return None if named else f"another is named: {error!r}"
    # The dispatcher raises for objects that are not tensors.
    return None if f"'{name}'" in str(error) else f"not ours: {error!r}"


def same(one, other):
    one = plain(one)
    alike = one.dtype is other.dtype and one.stride() == other.stride()
    return alike and np.array_equal(elements_of(one), elements_of(other), equal_nan=True)


@pytest.mark.sweep
@pytest.mark.parametrize("name", OPERATORS)
def test_operator_accepts_or_names_every_kind_of_tensor(name):
    operator = OPERATORS[name]
    settings = {
        "eps": EPSILON, "training": True, "arithmetic": "float64", "reproducible": False,
        "layer": "layer 'norm'", "group": None,
    }  # fmt: skip
    names = [each.name for each in operator._schema.arguments]
    options = {name: value for name, value in settings.items() if name in names}
    make_good = functools.partial(operands_of, tensors_of(operator))
    wrong = []
    for operand, label, make in cases(make_good):
        wanted = first_results(operator, make(), options)
        forget()
        for _ in range(2):
            results_of(operator, make_good(), options)
        for _ in range(2):
            try:
                found = results_of(operator, make(), options)
            except Exception as error:
                what = judge_operator(error, operand, label)
            else:
                what = "a first call is refused" if wanted is None else None
                if what is None and not all(map(same, found, wanted)):
                    what = "other results"
            if what:
                wrong.append(f"{operand} {label}: {what}")
    assert not wrong, "\n".join(dict.fromkeys(wrong))
