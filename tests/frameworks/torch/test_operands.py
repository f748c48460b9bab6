"""A repeated call, then one with an operand absent, of another kind or in another's place.

For every tensor of every function and module, from their signatures: the result is that of PyTorch
on tensors of the same elements, or the error names the operand, whatever the calls before were.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import backnorm
import backnorm.torch
from backnorm.executable import forget

from .operand_kinds import OTHER, SAME, elements_of, plain, quietly

CHANNELS, EPSILON = 5, 1e-3
PUBLIC = [getattr(backnorm.torch, name) for name in backnorm.torch.__all__]
DATA, RUNNING = ("input", "residual"), ("running_mean", "running_var")


def tensors_of(function):
    """Return the names of the parameters that are tensors."""
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if "Tensor" in str(each.annotation)]


def called(function):
    """Return how a function is called with tensors by name."""
    has_activation = "activation" in inspect.signature(function).parameters
    how = {"activation": "silu"} if has_activation else {}

    def call(given, training):
        return function(**given, training=training, eps=EPSILON, **how)

    return call


def as_module(cls):
    """Return how a module is called with tensors by name, some of which are its own."""

    def call(given, training):
        module = cls(CHANNELS, eps=EPSILON).train(training)
        for name in given.keys() - tensors_of(cls.forward):
            own = module._parameters if name in module._parameters else module._buffers
            own[name] = given[name]
        return module(**{name: given[name] for name in given if name in DATA})

    return call


def behind(name):
    """Return PyTorch's function of what comes behind the normalisation, by the name of ours."""
    if "relu" in name.lower():
        return torch.relu
    return functional.silu if "activation" in name else lambda y: y


def _subjects():
    for function in PUBLIC:
        if inspect.isfunction(function) and "running_mean" in tensors_of(function):
            name = function.__name__
            yield name, called(function), tensors_of(function), behind(name), 4
    for cls in PUBLIC:
        # What is lazy becomes one of the others with its first batch.
        if inspect.isclass(cls) and issubclass(cls, torch.nn.Module) and "Lazy" not in cls.__name__:
            module = cls(CHANNELS)
            own = [*module._parameters, *module._buffers]
            own.remove("num_batches_tracked")
            names = [*tensors_of(cls.forward), *own]
            rank = 4 if cls is backnorm.torch.SyncBatchNorm else int(cls.__name__[-2]) + 2
            yield cls.__name__, as_module(cls), names, behind(cls.__name__), rank


pytestmark = [quietly, pytest.mark.long, pytest.mark.usefixtures("one_thread")]


SUBJECTS = {name: rest for name, *rest in _subjects()}


def good(names, rank, dtype, channels_last):
    """Return good tensors by name."""
    generator = torch.Generator().manual_seed(0)
    shape = (3, CHANNELS, 4, 2, 2)[:rank]
    made = {}
    for name in names:
        tensor = torch.rand(shape if name in DATA else CHANNELS, generator=generator) + 0.5
        tensor = tensor.to(dtype)
        if name in DATA and channels_last:
            tensor = tensor.movedim(1, -1).contiguous().movedim(-1, 1)
        made[name] = tensor
    return made


def with_gradients(given):
    """Let tensors that can have gradients ask for them, and return which do."""
    for name, tensor in given.items():
        if name not in RUNNING and isinstance(tensor, Tensor):
            # Not tensors of integers, nor those that were made in inference mode.
            with contextlib.suppress(RuntimeError):
                tensor.requires_grad_()
    return {
        name: tensor
        for name, tensor in given.items()
        if name not in RUNNING and isinstance(tensor, Tensor) and tensor.requires_grad
    }


def values(function, given, training, wants_gradients):
    """Return y, the running statistics after, and the gradients by name."""
    leaves = with_gradients(given) if wants_gradients else {}
    y = plain(function(given, training))
    found = {"y": y, **{name: given.get(name) for name in RUNNING}}
    if leaves:
        # The same in all types.
        dy = (torch.arange(y.numel()) % 7 - 3).to(y.dtype).view(y.shape)
        gradients = torch.autograd.grad(y, list(leaves.values()), dy, allow_unused=True)
        found |= {f"d{name}": each for name, each in zip(leaves, gradients, strict=True)}
    return {name: each for name, each in found.items() if each is not None}


def expected(given, training, wants_gradients, last):
    """Return what PyTorch makes of the same elements in float64, or None if there is nothing."""

    def theirs(given, training):
        residual = given.get("residual")
        plain = {name: each for name, each in given.items() if name != "residual"}
        # Whether a module's own statistics are used where it has no others.
        y = functional.batch_norm(**plain, training=training, eps=EPSILON)
        return last(y if residual is None else y + residual)

    try:
        given = {name: elements_of(each) for name, each in given.items()}
        if given.get("residual") is not None and given["residual"].shape != given["input"].shape:
            return None
        return values(theirs, given, training, wants_gradients)
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


def cases(names, rank, dtype, channels_last):
    """Yield an operand, a label, and how to make all tensors with that operand changed."""

    def changed(name, change):
        given = good(names, rank, dtype, channels_last)
        return {**given, name: change(given[name])}

    def swapped(name, other):
        given = good(names, rank, dtype, channels_last)
        # Not the same one twice: running statistics are written to.
        return {**given, name: given[other].clone()}

    for name in names:
        for label, change in (SAME | OTHER).items():
            yield name, label, lambda name=name, change=change: changed(name, change)
        for other in names:
            if other != name:
                yield name, f"which is {other}", lambda n=name, o=other: swapped(n, o)


def test_another_is_absent():
    """As many tensors as before, but others: nothing of the call before is taken for this one."""
    for function, training in itertools.product(FUNCTIONS, [False, True]):
        call, names, last, rank = SUBJECTS[function]
        how = names, rank, torch.float32, False
        for before, now in itertools.permutations(names, 2):
            forget()
            for _ in range(2):
                with contextlib.suppress(backnorm.ArgumentError):
                    values(call, good(*how) | {before: None}, training, False)
            given = good(*how) | {now: None}
            wanted = expected(good(*how) | {now: None}, training, False, last)
            # A residual is required where there is one.
            if wanted is None or now == "residual":
                with pytest.raises(backnorm.ArgumentError, match=f"^{now}: "):
                    values(call, given, training, False)
                continue
            found = values(call, given, training, False)
            assert not differences(found, wanted, torch.float32), (function, before, now)


def judge(error, name, label):
    """Return what is wrong with an error, None if it names the operand."""
    if "Inference tensors cannot be saved for backward" in str(error):
        # They cannot be in PyTorch's own functions either.
        return None if label == "made in inference mode" else f"refused: {error!r}"
    if "Attempted to use an uninitialized" in str(error):
        return None if "uninitialised" in label else f"refused: {error!r}"
    if label in SAME:
        return f"refused: {error!r}"
    if not isinstance(error, backnorm.ArgumentError):
        # A module looks at its input before all else, in PyTorch's words.
        if name == "input" and "input" in str(error):
            return None
        return f"not ours: {error!r}"
    # Where the input has another shape or type, the others do not go with it.
    named = error.argument == name or name == "input"
    return None if named else f"another is named: {error!r}"


FUNCTIONS = [name for name in SUBJECTS if name.islower()]
MODULES = [name for name in SUBJECTS if name not in FUNCTIONS]
in_channels_last = pytest.mark.parametrize("channels_last", [False, True], ids=["", "NHWC"])
in_training = pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wants_gradients", [False, True], ids=["", "gradients"])
@in_channels_last
@in_training
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_tensor_of_a_function(function, training, channels_last, wants_gradients, dtype):
    check(function, training, channels_last, wants_gradients, dtype)


@in_channels_last
@in_training
@pytest.mark.parametrize("module", MODULES)
def test_every_tensor_of_a_module(module, training, channels_last):
    check(module, training, channels_last, True, torch.float32)


def check(subject, training, channels_last, wants_gradients, dtype):
    """Check all cases of a function or a module."""
    call, names, last, rank = SUBJECTS[subject]
    how = names, rank, dtype, channels_last
    forget()
    wrong, count = [], 0
    for name, label, make in cases(*how):
        wanted = expected(make(), training, wants_gradients, last)
        for _ in range(2):
            values(call, good(*how), training, wants_gradients)
        # What the first call may have kept is there for the second.
        for _ in range(2):
            count += 1
            try:
                found = values(call, make(), training, wants_gradients)
            except Exception as error:
                what = judge(error, name, label)
            else:
                # Two steps round what is between them to the input's type.
                kind = found["y"].dtype if last is functional.silu else dtype
                what = "PyTorch has none" if wanted is None else differences(found, wanted, kind)
            if what:
                wrong.append(f"{name} {label}: {what}")
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(dict.fromkeys(wrong))
    assert count > 2 * len(names) * (len(SAME) + len(OTHER))


@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
@in_channels_last
@in_training
def test_the_gradient_of_y(training, channels_last, relu):
    """It comes from autograd, which looks at shape and place."""
    call, names, _, rank = SUBJECTS["batch_norm_relu" if relu else "batch_norm"]

    def gradients(function, given, dy):
        leaves = list(with_gradients(given).values())
        return torch.autograd.grad(function(given, training), leaves, dy)

    def theirs(given, training):
        y = functional.batch_norm(**given, training=training, eps=EPSILON)
        return torch.relu(y) if relu else y

    wrong = []
    for label, change in (SAME | OTHER).items():
        for _ in range(2):
            given = good(names, rank, torch.float32, channels_last)
            usual = torch.rand(given["input"].shape) - 0.5
            gradients(call, good(names, rank, torch.float32, channels_last), usual)
            dy = change(usual)
            try:
                plain = torch.ones_like(usual) if dy is None else elements_of(dy)
                wanted = gradients(theirs, good(names, rank, torch.float64, False), plain)
            except (ValueError, RuntimeError, TypeError, AttributeError):
                wanted = None
            try:
                found = gradients(call, given, dy)
            except (RuntimeError, TypeError, ValueError) as error:
                if label in SAME or not str(error):
                    wrong.append(f"{label}: {error!r}")
                continue
            if wanted is None:
                wrong.append(f"{label}: PyTorch has none")
                continue
            pairs = zip(found, wanted, strict=True)
            wrong += [f"{label}: {number}" for number, (one, other) in enumerate(pairs)
                      if not torch.allclose(one.double(), other, rtol=1e-3, atol=1e-3)]  # fmt: skip
    assert not wrong, "\n".join(dict.fromkeys(wrong))


@pytest.mark.parametrize("wants_second", [False, True], ids=["", "second order"])
@in_channels_last
@in_training
@pytest.mark.parametrize("function", FUNCTIONS)
def test_memory_that_is_taken_away_before_the_backward_pass(
    function, training, channels_last, wants_second
):
    """As of parameters that are sharded: what is saved has no elements, or fewer."""
    call, names, _, rank = SUBJECTS[function]
    for name, short in itertools.product(["input", "weight", "y", "dy"], [False, True]):
        for taken in (False, False, True):
            given = good(names, rank, torch.float32, channels_last)
            leaves = list(with_gradients(given).values())
            y = call(given, training)
            given |= {"y": y, "dy": torch.rand(y.shape).contiguous(**_format(y, channels_last))}
            if taken and (name != "y" or (not training and "relu" in function)):
                storage = given[name].untyped_storage()
                storage.resize_(storage.nbytes() - 4 if short else 0)
                text = "out of bounds" if short else "its data is not allocated yet"
                with pytest.raises(backnorm.ArgumentError, match=f"^{name}: .*{text}") as raised:
                    torch.autograd.grad(y, leaves, given["dy"], create_graph=wants_second)
                assert isinstance(raised.value, RuntimeError)
            else:
                torch.autograd.grad(y, leaves, given["dy"], create_graph=wants_second)


def _format(y, channels_last):
    return {"memory_format": torch.channels_last} if channels_last and y.dim() == 4 else {}
