"""Run the operators that a file describes on the tensors of another (`backnorm run`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

import backnorm
from backnorm.arithmetics import Arithmetic
from backnorm.cli.allowance import MEBIBYTES, Allowance
from backnorm.cli.check import check
from backnorm.cli.fill import fill
from backnorm.cli.measure import timed, traffic
from backnorm.cli.program_file import load_program
from backnorm.cli.progress import Advance, progress
from backnorm.cli.report import RunReport, StepReport, TensorFacts
from backnorm.cli.tensors import check_output, open_tensors, write_tensors
from backnorm.dialects import registry
from backnorm.errors import ArgumentValueError
from backnorm.graph.program import Program, Step
from backnorm.graph.run import gather, run_step, store, supply

__all__ = ["RunOptions", "run_file"]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What to run and how.

    Attributes
    ----------
    file : Path
        oneDNN Graph JSON, or a call.
    tensors, out : Path or None
        .npz or .safetensors files to read from and write to.
    check : bool
        Compare each output with the oracle.
    seed : int or None
        Make up missing tensors with this seed.
    repeat : int
        Timed calls of each operator, after one that does not count.
    arithmetic : {"float32", "float64"} or None
        What elements are computed in.
    max_unpacked : int
        Mebibytes of memory for compressed tensors, all together, and for JSON.
    """

    file: Path
    tensors: Path | None = None
    out: Path | None = None
    check: bool = False
    seed: int | None = None
    repeat: int = 3
    arithmetic: Arithmetic | None = None
    max_unpacked: int = MEBIBYTES


def run_file(options: RunOptions) -> RunReport:
    """Run what `options` say, write the results, and return the report.

    Raises
    ------
    ArgumentError
        If a file is not acceptable, a tensor is missing, or an operator refuses its arguments.
    OSError
        If a file cannot be read or written.
    """
    allowance = Allowance(options.max_unpacked)
    program = load_program(options.file, allowance)
    if options.out is not None:
        check_output(options.out)
    with progress(len(program.inputs) + 2 * len(program.steps) + 1) as advance:
        values = _load(program, options, allowance, advance)
        report = RunReport(str(options.file), backnorm.get_num_threads(), options.repeat)
        for step in program.steps:
            report.steps.append(_run_step(program, step, values, options, advance))
        if options.out is not None:
            advance(f"writing {options.out}")
            write_tensors(options.out, {name: values[key] for name, key in program.results.items()})
            report.written = str(options.out)
    return report


def _load(
    program: Program, options: RunOptions, allowance: Allowance, advance: Advance
) -> dict[str, np.ndarray]:
    """Return the inputs that the tensor file has; raise if some are missing and not to be made."""
    values: dict[str, np.ndarray] = {}
    if options.tensors is not None:
        with open_tensors(options.tensors, allowance) as file:
            for key, name in program.find_inputs(file.names).items():
                advance(f"reading {name}")
                values[key] = supply(program, key, file.load(name))
    missing = [key for key in program.inputs if key not in values]
    if missing and options.seed is None:
        where = "--tensors" if options.tensors is None else str(options.tensors)
        raise ArgumentValueError(
            where,
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
    operator = registry.operator(step.dialect, step.op)
    missing = {p: program.tensors[key] for p, key in step.inputs.items() if key not in values}
    if missing:
        assert options.seed is not None
        schema = operator.schema_for(step.attributes)
        given = {p: values[key] for p, key in step.inputs.items() if key in values}
        made = fill(schema, step.attributes, given, missing, options.seed)
        for port, array in made.items():
            key = step.inputs[port]
            values[key] = supply(program, key, array)
    inputs = gather(step, values)
    how = step.attributes, tuple(step.outputs)
    canonical = operator.canonical(inputs, *how, arithmetic=options.arithmetic)
    advance(f"running {step.label}")
    outputs, seconds = timed(lambda: run_step(step, inputs, options.arithmetic), options.repeat)
    store(program, step, values, outputs)
    advance(f"checking {step.label}")
    return StepReport(
        step.dialect,
        step.op,
        step.label,
        canonical.data_format,
        canonical.arithmetic,
        tuple(
            TensorFacts.of(port, step.inputs[port], array, random=port in missing)
            for port, array in inputs.items()
        ),
        tuple(
            TensorFacts.of(port, _result_name(program, step.outputs[port]), array)
            for port, array in outputs.items()
        ),
        seconds,
        traffic(canonical, inputs),
        check(canonical, inputs, outputs) if options.check else None,
    )


def _result_name(program: Program, key: str) -> str | None:
    """Return the name under which a tensor is written, or None if it is not."""
    return next((name for name, of in program.results.items() if of == key), None)
