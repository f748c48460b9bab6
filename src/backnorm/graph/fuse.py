"""Fuse a batch normalisation with the ReLU or ReLUBackward next to it.

Two kinds of pairs of steps are fused. Fusing them does not change the bits of the results. The
first kind is a normalisation and the ReLU that reads the normalisation's `dst`. This pair is fused
if no other step reads this `dst`. The second kind is a ReLUBackward and the
BatchNormTrainingBackward that reads the `diff_src` of the ReLUBackward as its own `diff_dst`. This
pair is fused if no other step reads this `diff_src`. oneDNN itself fuses another pattern, in which
BatchNormTrainingBackward reads the `diff_src` of the ReLUBackward as its `src`. That pattern is a
different computation and is not fused here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from backnorm.graph.program import RELU_PORT, Program, Step, Tensor

_NORMALISATIONS = ("BatchNormForwardTraining", "BatchNormInference")
_BACKWARD = "BatchNormTrainingBackward"


def fused(program: Program) -> Program:
    """Return `program` with one step in place of each pair of steps that can be fused."""
    steps, tensors = list(program.steps), dict(program.tensors)
    reads = Counter(key for step in steps for key in step.inputs.values())
    reads.update(program.results.values())
    producers = {key: step for step in steps for key in step.outputs.values()}
    for step in program.steps:
        if step.op not in ("ReLU", _BACKWARD):
            continue
        between = step.inputs["src" if step.op == "ReLU" else "diff_dst"]
        producer = producers.get(between)
        if producer is None or reads[between] > 1:
            continue
        if step.op == "ReLU" and producer.op in _NORMALISATIONS:
            joined = producer.outputs["dst"] == between
            dst = tensors[step.outputs["dst"]]
            if joined and _agree(tensors[between], dst):
                # The fused step takes the place of the normalisation in the order of steps, because
                # steps before the ReLU may read the statistics.
                steps[steps.index(producer)] = _normalisation(producer, step)
                steps.remove(step)
                shape = tensors.pop(between).shape
                tensors[dst.key] = replace(dst, shape=shape if dst.shape is None else dst.shape)
        elif (
            step.op == _BACKWARD
            and producer.op == "ReLUBackward"
            and _agree(tensors[between], tensors[producer.inputs["src"]])
        ):
            steps[steps.index(step)] = _backward(producer, step)
            steps.remove(producer)
            del tensors[between]
    return replace(program, steps=tuple(steps), tensors=tensors)


def notes(program: Program) -> tuple[str, ...]:
    """Return a remark on each ReLUBackward that feeds the `src` of a backward pass."""
    producers = {key: step for step in program.steps for key in step.outputs.values()}
    return tuple(
        f"{producer.label} (ReLUBackward) feeds src of {step.label}, as in oneDNN's own pattern: "
        "this is not the gradient of normalisation followed by ReLU, where it feeds diff_dst"
        for step in program.steps
        if step.op == _BACKWARD
        and (producer := producers.get(step.inputs["src"])) is not None
        and producer.op == "ReLUBackward"
    )


def _agree(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors can have the same shape. If they cannot, the steps are not fused, and one
    of them raises an error when it runs.
    """
    return first.shape is None or second.shape is None or first.shape == second.shape


def _normalisation(step: Step, relu: Step) -> Step:
    return replace(
        step,
        label=f"{step.label} + {relu.label}",
        outputs=dict(step.outputs) | {"dst": relu.outputs["dst"]},
        relu=True,
    )


def _backward(relu: Step, step: Step) -> Step:
    inputs = dict(step.inputs) | {"diff_dst": relu.inputs["diff_dst"]}
    return replace(
        step,
        label=f"{relu.label} + {step.label}",
        inputs=inputs | {RELU_PORT: relu.inputs["src"]},
        relu=True,
    )
