"""`backnorm compare-model`: measure whether backnorm's layers make a user's model faster."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated, Any

import typer

from backnorm.cli import text
from backnorm.cli.program import FAILED, Json
from backnorm.errors import ArgumentTypeError, ArgumentValueError, BacknormError, described


def compare_model(
    make: Annotated[
        str,
        typer.Argument(
            metavar="MAKE",
            help="A function that returns (model, batch) or (model, batch, loss): file.py:function "
            "or module:function.",
        ),
    ],
    seconds: Annotated[
        float, typer.Option(min=0.001, help="The time for training steps in turns.")
    ] = 20.0,
    json: Json = False,
) -> None:
    """Time training steps of a PyTorch model with PyTorch's layers and with backnorm's.

    The last line is a verdict: keep, revert, no difference measured, or not timed. Exit status 1:
    gradients of steps with backnorm's layers are wrong, or no such step was timed.
    """
    # PyTorch's profiler would print lines of its own.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    try:
        from backnorm.torch import compare
    except ModuleNotFoundError as error:
        raise BacknormError(str(error)) from error
    found = compare(*_made(make), seconds=seconds)
    if json:
        text.print_report(asdict(found) | {"verdict": found.verdict}, [], json)
    else:
        text.print_line(str(found))
    if any(step.detail for step in found.steps):
        raise typer.Exit(FAILED)


def _made(name: str) -> tuple[Any, ...]:
    """Return what the user's function returns."""
    from backnorm.conformance.verify.subjects import described as line_of
    from backnorm.conformance.verify.subjects import function_of

    try:
        made = function_of(name, "MAKE")()
    except BacknormError:
        raise
    except Exception as error:  # a user's function can raise any
        raise ArgumentValueError("MAKE", "failed", came=name, hint=line_of(error)) from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ArgumentTypeError(
            "MAKE", "must return a tuple", came=described(made),
            accepted="(model, batch) or (model, batch, loss)",
        )  # fmt: skip
    return made
