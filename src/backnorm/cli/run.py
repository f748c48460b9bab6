"""Run operators that are described in one file, on tensors from another file (`backnorm run`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

import backnorm
from backnorm.arithmetics import Arithmetic
from backnorm.cli.measure import timed, traffic
from backnorm.cli.progress import Advance, progress
from backnorm.conformance.judge.calls import check_call, check_pointwise
from backnorm.conformance.ladder import Grade
from backnorm.conformance.verify.options import option
from backnorm.dialects import registry
from backnorm.dialects.random_tensors import random_data, random_tensors
from backnorm.dialects.registry import CanonicalCall
from backnorm.errors import ArgumentValueError
from backnorm.graph import override_graph, parse_graph, run_program
from backnorm.graph.call import parse_call
from backnorm.graph.pointwise import POINTWISE
from backnorm.graph.program import Program, Step, Tensor
from backnorm.graph.run import Arrays
from backnorm.graph.strict_json import expect, read_json
from backnorm.problem import channel_axis_of
from backnorm.tensor_files import MEBIBYTES, check_output, read_tensors, write_tensors


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of `backnorm run`; `overrides` and `only_known` are allowed only for a graph."""

    tensors: Path | None = option(None, "The inputs, .npz or .safetensors.", metavar="FILE")
    out: Path | None = option(
        None,
        "The results, and with --random the inputs: .npz or .safetensors.",
        metavar="FILE",
    )
    check: bool = option(False, "Compare the results with the exact ones.")
    random: int | None = option(
        None, "The seed of random values for missing tensors.", min=0, metavar="SEED"
    )
    repeat: int = option(3, "The number of timed calls, after an untimed one.", min=1)
    arithmetic: Arithmetic | None = option(None, "The compute type of elements.")
    max_unpacked: int = option(
        MEBIBYTES, "How much a .npz may grow when unpacked.", min=1, metavar="MIB"
    )
    in_shapes: str | None = option(
        None, "Shapes of a graph's inputs.", metavar="ID:SHAPE[*STRIDES]+..."
    )
    dt: str | None = option(
        None, "The type of a graph's data: f32, bf16, f16; or ID:TYPE+...", metavar="TYPE"
    )
    op_attrs: str | None = option(
        None, "Attributes of a graph's operators.", metavar="ID:NAME:VALUE*..."
    )
    only_known: bool = option(False, "Leave out a graph's operators of unknown kinds.")

    @property
    def overrides(self) -> dict[str, str]:
        """The arguments of :func:`backnorm.graph.override_graph` that were given."""
        texts = {"in_shapes": self.in_shapes, "dt": self.dt, "op_attrs": self.op_attrs}
        return {name: text for name, text in texts.items() if text is not None}


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
class OutputCheck:
    """The part of an output's `Grade` that the report has."""

    worst_ulp: float
    worst_excess: float
    passed: bool
    where: tuple[int, ...]
    detail: str


@dataclass(frozen=True, slots=True)
class StepReport:
    """One operator that was run.

    Attributes
    ----------
    dialect, op, label : str
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
    check : mapping of str to OutputCheck, or None
        The grades by output.
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
    check: Mapping[str, OutputCheck] | None

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


def run_file(file: Path, options: RunOptions) -> RunReport:
    """Run a file's operators, write the results, and return the report.

    Raises
    ------
    ArgumentError
        If a file is invalid, a tensor is missing, or an operator rejects its arguments.
    OSError
        If a file cannot be read or written.
    """
    program = _read_program(file, options)
    if options.out is not None:
        check_output(options.out)
        _check_names(program, options)
    steps: list[StepReport] = []
    used: Arrays = {}
    with progress(2 * len(program.steps) + 2) as advance:
        supplied = _read_inputs(program, options, advance)
        random = {key for key in program.inputs if key not in supplied}

        def watch(step: Step, inputs: Arrays, call: Callable[[], Arrays]) -> Arrays:
            advance(f"running {step.label}")
            outputs, seconds = timed(call, options.repeat)
            advance(f"checking {step.label}")
            used.update({step.inputs[port]: array for port, array in inputs.items()})
            steps.append(_report(program, step, (inputs, outputs), random, seconds, options))
            return outputs

        fill = None if options.random is None else partial(_random, options.random)
        results = run_program(
            program, supplied, arithmetic=options.arithmetic, watch=watch, fill=fill
        )
        if options.out is not None:
            advance(f"writing {options.out}")
            inputs = {} if options.random is None else {key: used[key] for key in program.inputs}
            write_tensors(options.out, inputs | results)
    written = None if options.out is None else str(options.out)
    passed = not any(step.failures for step in steps)
    threads = backnorm.get_num_threads()
    facts = str(file), threads, options.repeat, tuple(steps), written, passed, program.notes
    return RunReport(*facts)


def _check_names(program: Program, options: RunOptions) -> None:
    """Raise if two tensors would have one name in the file of results."""
    for key in program.inputs:
        if options.random is not None and key in program.results:
            raise ArgumentValueError(
                "outputs",
                "must differ from the names of inputs, because with --random both are written",
                came=repr(key),
                accepted="another name",
            )


def _read_program(path: Path, options: RunOptions) -> Program:
    """Return the program that a JSON file describes: a oneDNN graph, or a call."""
    document = expect(read_json(path), dict, str(path))
    if "graph" in document:
        graph = parse_graph(document, str(path), only_known=options.only_known)
        return override_graph(graph, **options.overrides)
    if "dialect" in document:
        for name in (*options.overrides, *(["only_known"] if options.only_known else ())):
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
        values = read_tensors(options.tensors, program.find_inputs, options.max_unpacked)
    missing = [key for key in program.inputs if key not in values]
    if missing and options.random is None:
        raise ArgumentValueError(
            "--tensors" if options.tensors is None else str(options.tensors),
            f"missing tensors: {', '.join(missing)}",
            hint="name them in the tensor file, or pass --random SEED to make them up",
        )
    return values


def _report(
    program: Program,
    step: Step,
    arrays: tuple[Arrays, Arrays],
    random: Collection[str],
    seconds: float,
    options: RunOptions,
) -> StepReport:
    """Return the report of a step with inputs and outputs `arrays`; `random` has keys of inputs."""
    inputs, outputs = arrays
    grades: Mapping[str, Grade] | None = None
    if step.op in POINTWISE:
        layout, arithmetic = None, POINTWISE[step.op].arithmetic
        moved = sum(array.nbytes for array in (*inputs.values(), *outputs.values()))
        if options.check:
            grades = check_pointwise(step.op, step.attributes, inputs, outputs)
    else:
        canonical = registry.operator(step.dialect, step.op).canonical(
            inputs, step.attributes, tuple(step.outputs), arithmetic=options.arithmetic
        )
        layout, arithmetic = _layout(canonical, inputs), canonical.arithmetic
        moved = traffic(canonical, inputs)
        if options.check:
            grades = check_call(canonical, inputs, outputs)
    names = {key: name for name, key in program.results.items()}
    return StepReport(
        dialect=step.dialect,
        op=step.op,
        label=step.label,
        layout=layout,
        arithmetic=arithmetic,
        inputs=tuple(
            TensorFacts(p, key, inputs[p].shape, str(inputs[p].dtype), random=key in random)
            for p, key in step.inputs.items()
        ),
        outputs=tuple(
            TensorFacts(p, names.get(key), outputs[p].shape, str(outputs[p].dtype))
            for p, key in step.outputs.items()
        ),
        seconds=seconds,
        gigabytes_per_second=moved / seconds / 1e9,
        worst_ulp=_worst(grades, "worst_ulp"),
        budget_used=_worst(grades, "worst_excess"),
        check=None if grades is None else {n: _output_check(g) for n, g in grades.items()},
    )


def _output_check(grade: Grade) -> OutputCheck:
    errors = grade.worst_ulp, grade.worst_excess
    return OutputCheck(*errors, grade.passed, grade.where, grade.detail)


def _worst(grades: Mapping[str, Grade] | None, error: str) -> float | None:
    """Return the largest `worst_ulp` or `worst_excess` of some grades."""
    if grades is None:
        return None
    return max((getattr(grade, error) for grade in grades.values()), default=0.0)


def _layout(canonical: CanonicalCall, inputs: Mapping[str, np.ndarray]) -> str:
    """Return NCX, NXC, or the channel axes of a call as text, for example "axis 2"."""
    axes, rank = canonical.channel_axes, inputs[canonical.inputs["x"]].ndim
    for layout in (canonical.data_format, "NCX", "NXC"):
        if axes == (channel_axis_of(layout) % rank,):
            return layout
    return f"{'axis' if len(axes) == 1 else 'axes'} {', '.join(map(str, axes))}"


def _random(
    seed: int, step: Step, inputs: Mapping[str, np.ndarray], missing: Mapping[str, Tensor]
) -> Arrays:
    """Return random arrays for the missing inputs of a step."""
    if step.op in POINTWISE:
        return {port: random_data(tensor, seed) for port, tensor in missing.items()}
    schema = registry.operator(step.dialect, step.op).schema_for(step.attributes)
    return random_tensors(schema, step.attributes, inputs, missing, seed)
