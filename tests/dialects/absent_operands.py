"""Call every operator warm, then with an operand or attribute absent, of another kind or swapped.

Each line of output is a case with what came of it; after a crash the last line names the case. A
result is right if a first call gives it, of plain arrays and values: `invoke` repeats nothing.
"""

from __future__ import annotations

import itertools
import warnings

import numpy as np

from backnorm.arithmetics import own_arithmetic
from backnorm.dialects.registry import operator
from tests.support.calls import FLAGS, PARTS_OF_GRADIENTS, SUBJECTS, dialect_subjects
from tests.support.contract import begin, report, sampled, share_of

from ..support.kinds import (
    Kind,
    attempt,
    is_integer,
    kinds,
    own,
    values,
    verdict,
    verdict_of_refused,
)


def arguments_of(subject):
    """Return good inputs, with memory for outputs and what is not used, and the other arguments."""
    good, words = subject.good(), subject.schema.words
    per_channel = next(role for role in ("gamma", "mean", "x") if role in words)
    for tensor in subject.schema.inputs:
        like = good[words["x" if tensor.kind == "data" else per_channel]]
        good.setdefault(tensor.name, like.copy())
    inputs = {name: value for name, value in good.items() if isinstance(value, np.ndarray)}
    return inputs, {name: value for name, value in good.items() if name not in inputs}


def options(subject):
    """Yield the name of an attribute, or of a choice of outputs, and what stands there."""
    schema = subject.schema
    # Which axes fit depends on the shapes of others.
    names = [spec.name for spec in schema.attributes if spec.role != "reduced_axes"]
    for name in (*names, *(flag for flag in FLAGS if flag in schema.order), "arithmetic"):
        yield name, Kind("absent", None, None)
        for kind in values():
            yield name, kind
    word = own_arithmetic(np.dtype(np.float32))
    yield "arithmetic", Kind("a word of NumPy", np.str_(word), word)
    choice, names = schema.choice, [tensor.name for tensor in schema.outputs]
    if choice == "outputs":
        yield choice, Kind("absent", None, None)
        for number in range(len(names) + 2):
            yield choice, Kind(f"{number} names", names[:number], names[:number])
            yield choice, Kind(f"{number} swapped", {*names[:number]}, names[:number])
        yield choice, Kind("names as an array", np.array(names), names)
        yield choice, Kind("names by name", dict.fromkeys(names), names)
        yield choice, Kind("another name", ["dx"], None, refused=True)
        yield choice, Kind("a name", names[0], None, refused=True)
        yield choice, Kind("of arrays", [np.array(names)], None, refused=True)
        for kind in values():
            yield choice, kind
    elif choice == "output_mask":
        mask = [True, False, True]
        for kind in (list, tuple, np.array, lambda mask: [np.bool_(each) for each in mask]):
            yield choice, Kind(f"by {kind}", kind(mask), mask)
        for wrong in ([], [True] * 2, [True] * 4, [1, 0, 1], [mask] * 3, np.ones((3, 2), bool)):
            yield choice, Kind(f"{wrong}", wrong, None, refused=True)
        for kind in values():
            refused = type(kind.plain) is not list or kind.plain != mask
            yield choice, kind._replace(refused=refused)


def outcome(subject, name, kind, inputs, others):
    """Return what came of a call: an error of ours, the right result, or what is wrong."""
    # The memory for an output is among the inputs: each call gets its own.
    found = attempt(subject.returned, **others | copied(inputs) | {name: kind.value})
    data = [tensor.name for tensor in subject.schema.inputs if tensor.kind == "data"]
    # Where x has another shape or type, or another axis that of the channels, others do not fit.
    names = [*inputs] if name in (*data, "Mean") or name not in inputs else [name]
    if found.results is not None and issubclass(type(kind.value), np.ndarray):
        # Memory for an output stays in its byte order.
        results = [native(each) if each is kind.value else each for each in found.results]
        found = found._replace(results=results)
    if kind.refused:
        return verdict_of_refused(found, name)
    meant = others | copied(inputs) | {name: kind.plain}
    return verdict(found, attempt(subject.fresh, **meant), name, *names)


def native(array):
    """Return an array in this machine's byte order, whatever its methods do."""
    plain = own(array)
    return plain.astype(plain.dtype.newbyteorder("="))


def copied(inputs):
    return {n: a.copy() if type(a) is np.ndarray and a.flags.c_contiguous else a
            for n, a in inputs.items()}  # fmt: skip


def kinds_of_input(subject, name, good):
    """Yield what may stand in the place of an input."""
    found = {tensor.name: tensor for tensor in subject.schema.inputs}
    role, shape = (found[name].role, found[name].kind) if name in found else (name, "channel")
    for kind in kinds(good):
        if role.startswith("memory_") and kind.value is not None:
            # Written to: it is nothing but an array.
            kind = kind._replace(
                refused=kind.refused or not issubclass(type(kind.value), np.ndarray)
            )
        elif name == "count" and type(kind.value) is bytearray:
            # An array of bytes.
            kind = kind._replace(plain=np.frombuffer(kind.value, np.uint8), refused=False)
        elif shape == "opaque" and kind.label == "an object without attributes":
            # Nothing refuses it, and what it raises is not ours to keep.
            continue
        elif shape == "opaque":
            kind = kind._replace(plain=good if kind.value is not None else None, refused=False)
        yield kind


def cases(subject):
    """Yield a name, the kind that stands there, and the good inputs."""
    good, _ = arguments_of(subject)
    optional = [tensor.name for tensor in subject.schema.inputs if not tensor.required]
    required = {name: array for name, array in good.items() if name not in optional}
    for operands in [good, required] if optional else [good]:
        for name in good:
            for other in good:
                if other != name:
                    # Of its own, should it be written to.
                    kind = Kind(f"which is {other}", good[other].copy(), good[other].copy())
                    yield name, kind, operands
            for kind in kinds_of_input(subject, name, good[name]):
                yield name, kind, operands
    # A key that left out what is absent would take one of these for the other.
    bound = {name for group in subject.schema.inputs_together for name in group}
    unbound = [name for name in optional if name not in bound]
    for one, other in itertools.permutations(unbound, 2):
        kind = Kind(f"given, after {one}", good[other], good[other])
        yield other, kind, required | {one: good[one]}
    for name, kind in options(subject):
        yield name, kind, good


def outcome_of_memory(subject, kind, inputs):
    """Return what came of a call with memory for the first output."""
    found = attempt(subject.returned, **inputs, **{subject.memory: kind.value})
    if found.results is None:
        return verdict_of_refused(found, subject.memory)
    expected = attempt(subject.fresh, **inputs)
    if kind.refused:
        return "a result"
    if found.results[0] is not kind.value and kind.value is not None:
        return "another array"
    first, *others = found.results
    return verdict(found._replace(results=[native(first), *others]), expected)


def cases_of_registry():
    """Yield a label, a call, and the argument that it must name."""
    subject = SUBJECTS["ngraph.BatchNormTraining"]
    inputs, attributes = subject.named(subject.arrays()), subject.attributes()
    good = ["ngraph", "BatchNormTraining", inputs, attributes, None]
    names = ("dialect", "op", "inputs", "attributes", "outputs")

    def invoke(dialect, op, *others):
        return operator(dialect, op).invoke(*others)

    def canonical(dialect, op, *others):
        return operator(dialect, op).canonical(*others)

    for function in (invoke, canonical):
        function(*good)
        for place, name in enumerate(names):
            for kind in values():
                refused = kind.refused or name != "outputs" or not is_integer(kind.plain)
                operands = [*good[:place], kind.value, *good[place + 1 :]]
                label = f"{function.__name__}: {name} {kind.label}"
                # A dictionary of no input is a mapping.
                known = {"inputs": [*inputs, "a"], "attributes": ["epsilon", "a"]}
                yield label, function, operands, refused, [*known.get(name, []), name]


def main() -> None:
    warnings.simplefilter("error")
    share = share_of()
    for label, function, operands, refused, names in sampled(
        cases_of_registry(), share, "registry"
    ):
        begin(label)
        found = attempt(function, *operands)
        ours = "result" if found.results is not None else verdict_of_refused(found, *names)
        report(label, [verdict_of_refused(found, *names) if refused else ours])
    for subject in (*dialect_subjects(), *PARTS_OF_GRADIENTS.values()):
        _, others = arguments_of(subject)
        for name, kind, warm in sampled(cases(subject), share, subject.name):
            case = f"{subject.name}: {name} {kind.label}, with {len(warm)} inputs"
            begin(case)
            for _ in range(2):
                subject.call(**others | copied(warm))
            # Twice: what the first call may have kept is there for the second.
            report(case, [outcome(subject, name, kind, warm, others) for _ in range(2)])
        if not subject.schema.takes_memory:
            continue
        good, name = subject.good(), subject.memory
        for kind in sampled(kinds(subject.fresh(**good)[0]), share, f"{subject.name} memory"):
            begin(f"{subject.name}: {name} {kind.label}")
            if kind.label != "absent":
                subject.call(**good, **{name: np.empty_like(subject.fresh(**good)[0])})
            outcomes = [outcome_of_memory(subject, kind, good) for _ in range(2)]
            report(f"{subject.name}: {name} {kind.label}", outcomes)


if __name__ == "__main__":
    main()
