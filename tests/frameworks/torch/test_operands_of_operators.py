"""The same as `check_operands`, for PyTorch's operators ``torch.ops.backnorm.*``, by their schemas.

The result is the one that a first call gives on new tensors of the same elements.
"""

from __future__ import annotations

import traceback
from pathlib import Path

import numpy as np
import pytest
import torch

import backnorm
import backnorm.torch
from backnorm.executable import forget
from backnorm.layout import mask_size
from backnorm.signature import SIGNATURES

from .operand_kinds import OTHER, SAME, elements_of, plain, quietly

SHAPE, CHANNELS, EPSILON = (3, 5, 4, 2), 5, 1e-3
NAMES = sorted(name for name in torch._C._dispatch_get_all_op_names() if "backnorm::" in name)
OPERATORS = {
    name.removeprefix("backnorm::"): getattr(torch.ops.backnorm, name[10:]).default
    for name in NAMES
}
KINDS = {
    operand.name: operand.kind
    for signature in SIGNATURES.values()
    for operand in signature.operands
}

# Where the tensors of a call may be if all are there.
ANYWHERE = ("on the meta device", "fake")
# What one phase tells the next.
MESSAGES = ("moments", "sums")

# Refused by PyTorch's dispatcher, or by their classes, before an operator is called.
OF_CLASSES = (
    "fake", "distributed", "masked", "nested", "jagged", "of a vmap that is over",
    "an uninitialised parameter", "an uninitialised buffer",
)  # fmt: skip
PACKAGE = Path(backnorm.__file__).parent

pytestmark = [quietly, pytest.mark.long]


def tensors_of(operator):
    """Return the names of an operator's tensors."""
    arguments = operator._schema.arguments
    return [each.name for each in arguments if "Tensor" in str(each.type)]


# Those of messages alone, without x, are called by phases and exchanges.
OPERATORS = {name: each for name, each in OPERATORS.items() if "x" in tensors_of(each)}


def good(names, dtype, channels_last):
    """Return good tensors by name."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name in names:
        kind = KINDS.get(name, "channel")
        if kind == "mask":
            size = mask_size(int(np.prod(SHAPE)))
            made[name] = torch.randint(256, (size,), generator=generator).to(torch.uint8)
            continue
        if name in MESSAGES:
            made[name] = torch.rand(2 * CHANNELS + 1, generator=generator).double() + 0.5
            made[name][-1] = 24.0
            continue
        shape = SHAPE if kind == "data" else CHANNELS
        tensor = (torch.rand(shape, generator=generator) + 0.5).to(dtype)
        if kind == "data" and channels_last:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        made[name] = tensor
    return made


def called(operator, given, options):
    """Return the results of a call, in a list."""
    found = operator(**given, **options)
    return [found] if isinstance(found, torch.Tensor) else list(found)


def expected(operator, given, options):
    """Return what a first call gives for new tensors like these, or None if it is an error."""
    forget()
    try:
        new = {name: None if tensor is None else _new(tensor) for name, tensor in given.items()}
        return called(operator, new, options)
    except Exception:
        return None


def _new(tensor):
    """Return a new tensor of the same elements, which lies in memory as a clone does."""
    if tensor.is_complex():
        return tensor.detach().clone()
    elements, tensor = elements_of(tensor), plain(tensor)
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return torch.empty_like(like, device="cpu").copy_(elements)


def cases(names):
    """Yield an operand, a label, and how to make all tensors with that operand changed."""
    for name in names:
        for label, change in (SAME | OTHER).items():
            # With no other tensor beside it such a one is as good as any.
            if len(names) == 1 and label in ANYWHERE:
                continue
            yield name, label, lambda g, name=name, change=change: g | {name: change(g[name])}
        for other in names:
            if other != name:
                yield name, f"which is {other}", lambda g, n=name, o=other: g | {n: g[o]}


def judge(error, name, label):
    """Return what is wrong with an error, None if it names the operand."""
    if label in SAME:
        return f"refused: {error!r}"
    if label in OF_CLASSES:
        *_, last = traceback.extract_tb(error.__traceback__)
        return f"raised here: {error!r}" if Path(last.filename).is_relative_to(PACKAGE) else None
    if isinstance(error, backnorm.ArgumentError):
        # Where x has another shape or type, the others do not go with it.
        named = error.argument == name or name == "x"
        # What is asked for beside a mask cannot be had without it.
        named |= label == "absent" and name in error.accepted
        return None if named else f"another is named: {error!r}"
    # The dispatcher looks at types that are no tensors at all.
    return None if f"'{name}'" in str(error) else f"not ours: {error!r}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["", "NHWC"])
@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_every_tensor_of_an_operator(name, flag, channels_last, dtype):
    operator = OPERATORS[name]
    names, how = tensors_of(operator), (dtype, channels_last)
    values = {"eps": EPSILON, "relu": flag, "training": flag, "has_residual": flag}
    taken = {each.name: str(each.type) for each in operator._schema.arguments}
    options = {option: value for option, value in values.items() if option in taken}
    # A residual and a mask come with a ReLU, and only then.
    absent = {each: None for each in ("residual", "mask")
              if not flag and taken.get(each, "").startswith("Optional")}  # fmt: skip
    names = [each for each in names if each not in absent]
    wrong, count = [], 0
    for operand, label, make in cases(names):
        wanted = expected(operator, make(good(names, *how)) | absent, options)
        forget()
        for _ in range(2):
            called(operator, good(names, *how) | absent, options)
        for _ in range(2):
            count += 1
            try:
                found = called(operator, make(good(names, *how)) | absent, options)
            except Exception as error:
                what = judge(error, operand, label)
            else:
                what = "a first call is refused" if wanted is None else differences(found, wanted)
            if what:
                wrong.append(f"{operand} {label}: {what}")
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(dict.fromkeys(wrong))
    assert count >= 2 * len(names) * (len(SAME) + len(OTHER) - len(ANYWHERE))


def differences(found, wanted):
    """Return the numbers of results that are not the same."""
    wrong = []
    for number, (one, other) in enumerate(zip(map(plain, found), wanted, strict=True)):
        alike = one.dtype is other.dtype and one.stride() == other.stride()
        if not alike or not np.array_equal(elements_of(one), elements_of(other), equal_nan=True):
            wrong.append(number)
    return wrong
