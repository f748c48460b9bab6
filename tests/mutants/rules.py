"""Broken rules of operators: a check that is gone, a value that is wrong, another wording.

For each rule that tables of refusals, crashers or values test for all operators at once.
"""

from __future__ import annotations

from .adapters import Mutant

_REFUSALS = ("tests/refusals/test_operators.py",)
_CRASHERS = ("tests/crashers/test_crashers.py",)
_VALUES = ("tests/dialects/test_values.py",)
_CHECK, _ATTRIBUTES = "dialects/_check.py", "dialects/_attributes.py"

MUTANTS = (
    # Inputs of a dialect's operator.
    Mutant(
        "dialects: a required input may be absent",
        _CHECK,
        "            if tensor.required:\n",
        "            if tensor.required and tensor.kind == 'data':\n",
        # A kernel without an operand that it reads ends the process.
        _CRASHERS,
    ),
    Mutant(
        "dialects: the wording of a required input is another one",
        _CHECK,
        "is a required input of",
        "is required by",
        _REFUSALS,
    ),
    Mutant(
        "dialects: an unknown input or attribute is ignored",
        _ATTRIBUTES,
        "if name not in known:",
        "if name not in known and kind == 'input':",
        _REFUSALS,
    ),
    Mutant(
        "dialects: the highest rank is not checked",
        _CHECK,
        "if x.ndim < low or (high and x.ndim > high):",
        "if x.ndim < low:",
        _REFUSALS,
    ),
    Mutant(
        "dialects: a format for another rank is accepted",
        _CHECK,
        "if data_format.rank is not None and x.ndim != data_format.rank:",
        "if data_format.rank is not None and x.ndim > data_format.rank:",
        _REFUSALS,
    ),
    Mutant(
        "dialects: a gradient of the size of x has another shape",
        _CHECK,
        "if like.shape != x.shape:",
        "if like.size != x.size:",
        _CRASHERS,
    ),
    Mutant(
        "dialects: a gradient has another type than x",
        _CHECK,
        "if own is None or own != ELEMENT_TYPE_NAMES[rule.data]:",
        "if own is None:",
        _REFUSALS,
    ),
    Mutant(
        "dialects: an unsupported type is taken for float64, which NumPy compares equal to None",
        _CHECK,
        "if own is None or own != ELEMENT_TYPE_NAMES[rule.data]:",
        "if own != ELEMENT_TYPE_NAMES[rule.data]:",
        _CRASHERS,
    ),
    Mutant(
        "dialects: per-channel tensors have a type that is not listed",
        _CHECK,
        "if own is None or own not in accepted:",
        "if own is None:",
        _REFUSALS,
    ),
    Mutant(
        "dialects: per-channel tensors have several types",
        _CHECK,
        "elif schema.one_channel_type and own != first[1]:",
        "elif own != first[1] and schema.dialect == 'aten':",
        _REFUSALS,
    ),
    Mutant(
        "dialects: per-channel tensors may be longer",
        _CHECK,
        'if tensor.kind != "vector" and shape != expected:',
        'if tensor.kind != "vector" and shape < expected:',
        _CRASHERS,
    ),
    Mutant(
        "dialects: tensors without channels are accepted",
        _CHECK,
        "if channels < schema.min_channels:",
        "if channels < 0:",
        _REFUSALS,
    ),
    Mutant(
        "dialects: one of two inputs that belong together is accepted",
        _CHECK,
        "if present and len(present) != len(group):",
        "if present and len(present) > len(group):",
        _REFUSALS,
    ),
    Mutant(
        "dialects: an axis beyond the rank is accepted",
        _CHECK,
        "if not lowest <= axis < x.ndim:",
        "if axis < lowest:",
        _REFUSALS,
    ),
    # Outputs, and memory for them.
    Mutant(
        "dialects: a required output need not be requested",
        _CHECK,
        "    if unknown or missing:",
        "    if unknown:",
        _REFUSALS,
    ),
    Mutant(
        "dialects: a mask of outputs has numbers",
        _CHECK,
        "if type(flag) is not bool and type(flag) is not np.bool_:",
        "if type(flag) is str:",
        _REFUSALS,
    ),
    Mutant(
        "dialects: memory for an output is any sequence",
        _CHECK,
        "if not issubclass(type(memory), np.ndarray):",
        "if memory is None:",
        _REFUSALS,
    ),
    Mutant(
        "memory for results may be read-only",
        "aliasing.py",
        "    if not array.flags.writeable:\n",
        "    if array.size == 0:\n",
        _REFUSALS,
    ),
    # Attributes.
    Mutant(
        "dialects: epsilon 0 is positive",
        _ATTRIBUTES,
        "number > 0 or",
        "number >= 0 or",
        _REFUSALS,
    ),
    Mutant(
        "dialects: an unknown word is accepted",
        _ATTRIBUTES,
        "if spec.choices and word not in spec.choices:",
        "if spec.choices and not word:",
        _REFUSALS,
    ),
    Mutant(
        "dialects: an attribute is not rounded to float32",
        _ATTRIBUTES,
        "number = float(np.float32(number))",
        "np.float32(number)",
        _VALUES,
    ),
    Mutant(
        "dialects: reduced axes may occur twice",
        _ATTRIBUTES,
        "if any(axis < 0 for axis in axes) or len(set(axes)) < len(axes):",
        "if any(axis < 0 for axis in axes):",
        _REFUSALS,
    ),
    # What one specification says.
    Mutant(
        "tensorflow dialect: statistics that are read have any size",
        "dialects/tensorflow.py",
        "        if size != channels:",
        "        if size > channels:",
        _REFUSALS,
    ),
    Mutant(
        "cudnn dialect: an output without memory counts as zeros",
        "dialects/cudnn.py",
        "if memory is None and call.number(beta) != 0.0:",
        "if memory is None and call.number(beta) > 1.0:",
        _REFUSALS,
    ),
    Mutant(
        "onnxruntime dialect: any training mode is accepted",
        "dialects/onnxruntime.py",
        "    if mode not in (0, 1):",
        "    if mode not in (0, 1, 2):",
        _REFUSALS,
    ),
    Mutant(
        "directml dialect: statistics of another rank are accepted",
        "dialects/directml.py",
        "    if len(mean) != len(shape):",
        "    if len(mean) > len(shape):",
        _REFUSALS,
    ),
    Mutant(
        "cann dialect: empty data is accepted",
        "dialects/cann.py",
        "    if 0 in shape:",
        "    if 0 in shape[:1]:",
        _REFUSALS,
    ),
    Mutant(
        "aten dialect: a count is a number of any type",
        "dialects/aten.py",
        'if array.dtype.kind not in "iu":',
        'if array.dtype.kind not in "iuf":',
        _REFUSALS,
    ),
    # Values.
    Mutant(
        "dialects: constant statistics are those of a batch",
        "dialects/_call.py",
        'schema.operation != "inference" and training,',
        'schema.operation != "inference",',
        _VALUES,
    ),
    Mutant(
        "dialects: epsilon counts beside an inverse deviation",
        "dialects/_call.py",
        '0.0 if takes_inverse else call.number(schema.words["epsilon"]),',
        'call.number(schema.words["epsilon"]),',
        _VALUES,
    ),
    Mutant(
        "dialects: a negative inverse deviation is accepted",
        "dialects/_statistics.py",
        "    if negative.size:\n",
        "    if negative.size > 1:\n",
        _REFUSALS,
    ),
    Mutant(
        "dialects: results have the type of the kernel",
        "dialects/_run.py",
        "    if dtype is None or dtype == problem.statistics_dtype:",
        "    if dtype is None or dtype.itemsize <= problem.statistics_dtype.itemsize:",
        (*_VALUES, "tests/dialects/test_onednn_spec.py"),
    ),
    # backnorm's own operators.
    Mutant(
        "a mask of another type is accepted",
        "problem.py",
        "if array.dtype != np.uint8:",
        "if array.dtype.kind == 'f':",
        _REFUSALS,
    ),
    Mutant(
        "a mask of another shape is accepted",
        "problem.py",
        "if array.shape != (size,):",
        "if array.size < size:",
        _REFUSALS,
    ),
    Mutant(
        "an operand of another shape than x is accepted",
        "problem.py",
        "    if array.shape != shape:",
        "    if array.ndim != len(shape):",
        _REFUSALS,
    ),
    Mutant(
        "an activation without an own kernel is accepted",
        "activations.py",
        "if not issubclass(type(found), Activation) or found.name not in accepted:",
        "if not issubclass(type(found), Activation):",
        _REFUSALS,
    ),
)
