"""Run operators that are described in one file, on tensors from another file (`backnorm run`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

import backnorm
from backnorm.activations import RELU
from backnorm.arithmetics import Arithmetic
from backnorm.cli.call import parse_call
from backnorm.cli.measure import check, check_pointwise, timed, traffic, worst_errors
from backnorm.cli.progress import Advance, progress
from backnorm.cli.random_tensors import random_data, random_tensors
from backnorm.conformance.ladder import Grade
from backnorm.dialects import registry
from backnorm.dialects.registry import CanonicalCall
from backnorm.errors import ArgumentValueError
from backnorm.graph import build_program, override_graph, parse_graph
from backnorm.graph.pointwise import POINTWISE
from backnorm.graph.program import RELU_PORT, Program, Step, Tensor
from backnorm.graph.run import errors_of, gather, run_step, store, supply
from backnorm.graph.strict_json import expect_object, read_json
from backnorm.problem import channel_axis_of
from backnorm.tensor_files import MEBIBYTES, check_output, read_tensors, write_tensors


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of `backnorm run`.

    Attributes
    ----------
    file : Path
        oneDNN Graph JSON, or a call.
    tensors, out : Path or None
        .npz or .safetensors files to read from and write to. With a seed, `out` also gets the
        inputs, so that `tensors` of a later run may be this file.
    check : bool
        Compare each output with the oracle.
    seed : int or None
        Make up missing tensors with this seed.
    repeat : int
        Timed calls of each operator, after an untimed one.
    arithmetic : {"float32", "float64"} or None
        The type in which elements are computed.
    max_unpacked : int
        Mebibytes by which compressed tensors may be larger in memory than on disk.
    overrides : mapping of str to str
        Arguments of :func:`backnorm.graph.override_graph`, allowed only for a graph.
    only_known : bool
        Leave out the operators of unknown kinds; allowed only for a graph.
    """

    file: Path
    tensors: Path | None = None
    out: Path | None = None
    check: bool = False
    seed: int | None = None
    repeat: int = 3
    arithmetic: Arithmetic | None = None
    max_unpacked: int = MEBIBYTES
    overrides: Mapping[str, str] = field(default_factory=dict)
    only_known: bool = False


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Metadata of an input or output of a step.

    Attributes
    ----------
    port : str
        The operator's name for the tensor.
    name : str or None
        The name in the tensor file; None for an output that is not written.
    shape : tuple of int
    dtype : str
    random : bool
        Whether the values are random.
    """

    port: str
    name: str | None
    shape: tuple[int, ...]
    dtype: str
    random: bool = False


@dataclass(frozen=True, slots=True)
class StepReport:
    """One operator that was run.

    Attributes
    ----------
    dialect, op, label : str
        `op` also names a fused ReLU.
    layout : str or None
        NCX, NXC or the channel axes, as in "axis 2". None for an elementwise operator.
    arithmetic : str or None
        The type in which elements are computed; None if they are only copied or zeroed.
    inputs, outputs : tuple of TensorFacts
    seconds : float
        The median time of a call.
    gigabytes_per_second : float
        By the convention of :func:`backnorm.cli.measure.traffic`.
    worst_ulp : float or None
        Largest error of any checked output, in ulps of its type; None if not checked.
    budget_used : float or None
        Largest ratio of an element's error to its allowed error.
    check : mapping of str to Grade, or None
        The verdicts by output.
    """

    dialect: str
    op: str
    label: str
    layout: str | None
    arithmetic: str | None
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    seconds: float
    gigabytes_per_second: float
    worst_ulp: float | None
    budget_used: float | None
    check: Mapping[str, Grade] | None

    @property
    def failures(self) -> dict[str, str]:
        """The outputs that failed the check, each with a description of the error."""
        return {name: v.detail for name, v in (self.check or {}).items() if not v.passed}


@dataclass(frozen=True, slots=True)
class RunReport:
    """The result of `backnorm run`; `asdict` gives the JSON report. `notes` are remarks on the
    graph.
    """

    file: str
    threads: int
    repeat: int
    steps: tuple[StepReport, ...]
    written: str | None
    passed: bool
    notes: tuple[str, ...] = ()


def run_file(options: RunOptions) -> RunReport:
    """Run a file's operators, write the results, and return the report.

    Raises
    ------
    ArgumentError
        If a file is invalid, a tensor is missing, or an operator rejects its arguments.
    OSError
        If a file cannot be read or written.
    """
    program = _read_program(options)
    to_write = _names_to_write(program, options)
    if options.out is not None:
        check_output(options.out)
    with progress(2 * len(program.steps) + 2) as advance:
        values = _read_inputs(program, options, advance)
        steps = []
        for step in program.steps:
            with errors_of(step):
                steps.append(_run_step(program, step, values, options, advance))
        if options.out is not None:
            advance(f"writing {options.out}")
            write_tensors(options.out, {name: values[key] for name, key in to_write.items()})
    written = None if options.out is None else str(options.out)
    passed = not any(step.failures for step in steps)
    threads = backnorm.get_num_threads()
    facts = str(options.file), threads, options.repeat, tuple(steps), written, passed, program.notes
    return RunReport(*facts)


def _names_to_write(program: Program, options: RunOptions) -> dict[str, str]:
    """Return the names in the file of results, each with the key of its tensor."""
    names = dict(program.results)
    if options.out is None or options.seed is None:
        return names
    for key in program.inputs:
        if key in names:
            raise ArgumentValueError(
                "outputs",
                "must differ from the names of inputs, because with --random both are written",
                came=repr(key),
                accepted="another name",
            )
    return {key: key for key in program.inputs} | names


def _read_program(options: RunOptions) -> Program:
    """Return the program that a JSON file describes: a oneDNN graph, or a call."""
    path, overrides = options.file, options.overrides
    document = expect_object(read_json(path), str(path))
    if "graph" in document:
        graph = parse_graph(document, str(path), only_known=options.only_known)
        return build_program(override_graph(graph, **overrides))
    if "dialect" in document:
        for name in (*overrides, *(["only_known"] if options.only_known else ())):
            raise ArgumentValueError(
                f"--{name.replace('_', '-')}",
                "applies only to a oneDNN graph",
                came=f"{path}, a call",
                accepted="a file with the key 'graph'",
            )
        return parse_call(document)
    raise ArgumentValueError(
        str(path),
        "is neither a oneDNN graph nor a call",
        accepted="an object with the key 'graph' or the key 'dialect'",
    )


def _read_inputs(program: Program, options: RunOptions, advance: Advance) -> dict[str, np.ndarray]:
    """Return the inputs in the tensor file; raise if inputs are missing and there is no seed."""
    values: dict[str, np.ndarray] = {}
    if options.tensors is not None:
        advance(f"reading {options.tensors}")
        tensors = read_tensors(options.tensors, program.find_inputs, options.max_unpacked)
        values = {key: supply(program, key, array) for key, array in tensors.items()}
    missing = [key for key in program.inputs if key not in values]
    if missing and options.seed is None:
        raise ArgumentValueError(
            "--tensors" if options.tensors is None else str(options.tensors),
            f"missing tensors: {', '.join(missing)}",
            hint="name them in the tensor file, or pass --random SEED to make them up",
        )
    return values


def _run_step(
    program: Program,
    step: Step,
    values: dict[str, np.ndarray],
    options: RunOptions,
    advance: Advance,
) -> StepReport:
    missing = {p: program.tensors[key] for p, key in step.inputs.items() if key not in values}
    if missing:
        for port, array in _random(step, values, missing, options).items():
            key = step.inputs[port]
            values[key] = supply(program, key, array)
    inputs = gather(step, values)
    canonical = None if step.op in POINTWISE else _canonical(step, inputs, options.arithmetic)
    advance(f"running {step.label}")
    call = partial(run_step, step, inputs, options.arithmetic)
    outputs, seconds = timed(call, options.repeat)
    store(program, step, values, outputs)
    advance(f"checking {step.label}")
    verdicts = _check(step, canonical, inputs, outputs) if options.check else None
    ulp, budget = (None, None) if verdicts is None else worst_errors(verdicts)
    names = {key: name for name, key in program.results.items()}
    if canonical is None:
        layout, arithmetic = None, POINTWISE[step.op].arithmetic
        moved = sum(array.nbytes for array in (*inputs.values(), *outputs.values()))
    else:
        layout, arithmetic = _layout(canonical, inputs), canonical.arithmetic
        moved = traffic(canonical, inputs)
    return StepReport(
        dialect=step.dialect,
        op=step.title,
        label=step.label,
        layout=layout,
        arithmetic=arithmetic,
        inputs=tuple(
            TensorFacts(p, step.inputs[p], array.shape, str(array.dtype), random=p in missing)
            for p, array in inputs.items()
        ),
        outputs=tuple(
            TensorFacts(p, names.get(step.outputs[p]), array.shape, str(array.dtype))
            for p, array in outputs.items()
        ),
        seconds=seconds,
        gigabytes_per_second=moved / seconds / 1e9,
        worst_ulp=ulp,
        budget_used=budget,
        check=verdicts,
    )


def _layout(canonical: CanonicalCall, inputs: Mapping[str, np.ndarray]) -> str:
    """Return NCX, NXC, or the channel axes of a call as text, for example "axis 2"."""
    axes, rank = canonical.channel_axes, inputs[canonical.inputs["x"]].ndim
    for layout in (canonical.data_format, "NCX", "NXC"):
        if axes == (channel_axis_of(layout) % rank,):
            return layout
    return f"{'axis' if len(axes) == 1 else 'axes'} {', '.join(map(str, axes))}"


def _random(
    step: Step,
    values: Mapping[str, np.ndarray],
    missing: Mapping[str, Tensor],
    options: RunOptions,
) -> dict[str, np.ndarray]:
    """Return random arrays for the missing inputs of a step."""
    assert options.seed is not None
    seed = options.seed
    if step.op in POINTWISE:
        return {port: random_data(tensor, seed) for port, tensor in missing.items()}
    schema = registry.operator(step.dialect, step.op).schema_for(step.attributes)
    known = {
        port: values[key]
        for port, key in step.inputs.items()
        if key in values and port != RELU_PORT
    }
    unknown = {port: tensor for port, tensor in missing.items() if port != RELU_PORT}
    made = random_tensors(schema, step.attributes, known, unknown, seed)
    if RELU_PORT in missing:
        made[RELU_PORT] = random_data(missing[RELU_PORT], seed)
    return made


def _canonical(
    step: Step, inputs: Mapping[str, np.ndarray], arithmetic: Arithmetic | None
) -> CanonicalCall:
    """Return the call of backnorm's own operator for a step of a program.

    If the step is a forward pass with a fused ReLU, the returned call has this ReLU. If it is a
    backward pass with a fused ReLU, the returned call has no ReLU, because `_check` applies the
    ReLU's mask to dy first.
    """
    arrays = {port: array for port, array in inputs.items() if port != RELU_PORT}
    call = registry.canonical(
        step.dialect, step.op, arrays, step.attributes, tuple(step.outputs), arithmetic=arithmetic
    )
    behind = step.relu and call.operation != "backward"
    return replace(call, activation=RELU) if behind else call


def _check(
    step: Step,
    canonical: CanonicalCall | None,
    inputs: Mapping[str, np.ndarray],
    outputs: Mapping[str, np.ndarray],
) -> dict[str, Grade]:
    if canonical is None:
        return check_pointwise(step, inputs, outputs)
    if RELU_PORT in inputs:
        dy = inputs["diff_dst"]
        passes = inputs[RELU_PORT].astype(np.float64) > 0
        inputs = {**inputs, "diff_dst": np.where(passes, dy, np.zeros((), dy.dtype))}
    return check(canonical, inputs, outputs)
