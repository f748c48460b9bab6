"""Each operator has the bits of backnorm's own, in each format, rank, element type and mode."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import backnorm
from backnorm.dialects.schema import ELEMENT_TYPE_NAMES
from tests.support.calls import CHANNELS, Subject, dialect_subjects
from tests.support.dtypes import is_16_bit

SUBJECTS = {subject.name: subject for subject in dialect_subjects()}
EPSILON = 0.01
# The axes of data besides the channel axis, by rank.
OTHERS = {2: (7,), 3: (3, 5), 4: (2, 5, 4), 5: (2, 3, 2, 4), 6: (2, 2, 3, 2, 2)}


def formats_of(schema):
    """Yield each format with each rank that it can have, up to 6."""
    # A list of axes is for one rank.
    low, high = (4, 4) if "reduced_axes" in schema.words else schema.ranks
    for form in schema.formats:
        for rank in OTHERS:
            if rank == form.rank or (form.rank is None and low <= rank <= (high or rank)):
                yield form, rank


def flags_of(subject):
    """Yield the rules and the attribute of training and of constant statistics, if both are."""
    schema = subject.schema
    flags = [spec for spec in schema.attributes if spec.role in ("training", "frozen")]
    yield schema, {spec.name: spec.role == "training" for spec in flags}
    if flags:
        frozen = schema.with_constants
        yield frozen, {spec.name: spec.role == "frozen" for spec in flags}


def calls_of(subject):
    """Yield calls that differ in one property or several, with the element types."""
    choices = [False, True] if any(not each.required for each in subject.schema.inputs) else [False]
    for (form, rank), (schema, flags), types, only_required in itertools.product(
        formats_of(subject.schema), flags_of(subject), subject.type_pairs, choices
    ):
        if rank != 4 and types != subject.type_pairs[0]:
            # The rank decides about axes, the type about rounding: neither about the other.
            continue
        of_call = Subject(schema, form)
        arrays = of_call.arrays(of_call.shape(*OTHERS[rank]), *types)
        if "inverse_deviation" in arrays:
            # A power of two, whose square is exact: so is the variance that it stands for.
            power = 2 ** np.round(np.log2(arrays["inverse_deviation"].astype("d")))
            arrays["inverse_deviation"] = power.astype(types[1])
        if only_required:
            roles = {tensor.role for tensor in schema.inputs if tensor.required}
            arrays = {role: array for role, array in arrays.items() if role in roles}
        yield of_call, of_call.named(arrays) | of_call.attributes(EPSILON) | flags, types


def expected_of(canonical, inputs):
    """Return the results, by role, of backnorm's own operation."""
    arrays = canonical.arrays(inputs)
    options = {"epsilon": canonical.epsilon, "data_format": canonical.data_format}
    if canonical.operation == "backward":
        arrays.setdefault("gamma", None)
        options["training"] = canonical.training
        # The variance of an inverse deviation is float64; here it is a power of two.
        arrays["variance"] = arrays["variance"].astype(arrays["mean"].dtype)
    result = getattr(backnorm, f"batch_norm_{canonical.operation}")(**arrays, **options)
    return {"y": result} if canonical.operation == "inference" else result._asdict()


def check_call(subject, arguments, types):
    """Assert that a call has the types, shapes and bits of its canonical call."""
    data, channel = types
    schema = subject.schema
    call = subject.canonical(**arguments)
    if call.recomputes:
        # Statistics that are computed in float64 are no operands of backnorm's own operator.
        return
    is_single = subject.epsilon is not None and subject.epsilon.type == "f32"
    epsilon = float(np.float32(EPSILON)) if is_single else EPSILON
    takes_inverse = schema.words.get("inverse_deviation") in arguments
    assert call.epsilon == (0.0 if takes_inverse else epsilon)
    assert call.data_format == subject.layout
    constant = arguments.get(schema.words.get("frozen"), schema.frozen)
    training = arguments.get(schema.words.get("training"), not constant)
    assert call.training == (training and call.operation != "inference")
    returned = subject.returned(**arguments, **subject.options())
    x = arguments[schema.words["x"]]
    outputs = {tensor.name: tensor for tensor in schema.outputs}
    shapes = {"data": x.shape, "channel": (CHANNELS,), "vector": (0,)}
    found = dict(zip(outputs, returned, strict=True))
    if all(t.kind in ("data", "opaque") for t in schema.inputs if t.name in arguments):
        # No input says which type the statistics have.
        channel = np.float32 if is_16_bit(data) else data
    for tensor, array in zip(outputs.values(), returned, strict=True):
        if array is None:
            assert not tensor.required
            assert schema.words[tensor.role] not in arguments
            continue
        empty = np.uint8 if tensor.role == "reserve" else np.float32
        wanted = {"data": data, "vector": empty}.get(tensor.kind, channel)
        assert array.dtype == ELEMENT_TYPE_NAMES.get(tensor.type, wanted), tensor
        assert array.shape == shapes.get(tensor.kind, array.shape), tensor
    inputs = {name: each for name, each in arguments.items() if isinstance(each, np.ndarray)}
    expected = expected_of(call, inputs)
    for role, name in call.outputs.items():
        # Without gamma, statistics have the type of the running ones.
        wanted = expected[role].astype(found[name].dtype)
        np.testing.assert_array_equal(found[name].reshape(wanted.shape), wanted)


@pytest.mark.parametrize("name", SUBJECTS)
def test_operator_has_the_bits_of_its_canonical_call(name):
    for call in calls_of(SUBJECTS[name]):
        check_call(*call)
