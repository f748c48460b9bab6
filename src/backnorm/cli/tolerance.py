"""`backnorm tolerance`: bounds of right kernels, and the wrong ones that a tolerance accepts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from backnorm.cli.program import shape_of, takes_records
from backnorm.cli.text import LiteralConsole
from backnorm.conformance.verify.options import option
from backnorm.errors import ArgumentError, ArgumentValueError, visible

# Defaults. The options are None by default, so that a given option is recognised.
_DTYPE, _ELEMENTS, _SHAPE = "float32", 50176, "16,8,14,14"


@dataclass(frozen=True, slots=True)
class AuditedTest:
    """A test of kernels, and its data."""

    audit: str | None = option(
        None,
        "List the wrong kernels that pass a test with this tolerance: rtol=1e-2,atol=1e-2 (atol/M= "
        "grows with M, share=0.99 of the elements suffice), or a number after pcc=, cosine=, rms=, "
        "l2= or ulp=.",
        metavar="TOLERANCE",
    )
    policy: str | None = option(
        None, "Like --audit, for the test of a project, e.g. pytorch.", metavar="NAME"
    )
    compare: str | None = option(
        None,
        "Like --audit, with a function of an array and the expected array: file.py:function or "
        "module:function.",
        metavar="FUNCTION",
    )
    data: str | None = option(
        None,
        "The data of the test: randn, scaled, fresh, rand, traced, layer, uniform, small, sparse, "
        "or FILE.npz with x and dy.",
        metavar="DATA",
    )
    shape: str | None = option(None, "The shape of x, channels second.", show_default=_SHAPE)
    loss: Literal["none", "sum", "mean", "square", "cube"] | None = option(
        None, "The loss whose gradient is dy; none: dy is part of DATA."
    )


@takes_records
def tolerance(
    dtype: Annotated[
        str | None, typer.Option(help="The element type of x.", show_default=_DTYPE)
    ] = None,
    elements: Annotated[
        int | None,
        typer.Option(min=1, help="Elements per channel, M.", show_default=str(_ELEMENTS)),
    ] = None,
    *,
    test: AuditedTest,
) -> None:
    """Print the error bounds of right kernels, or the wrong kernels that a tolerance accepts."""
    from backnorm.conformance.audit import audit as audit_of
    from backnorm.conformance.audit import bounds, lines, policies
    from backnorm.conformance.audit import data as audit_data

    tests = {"--audit": test.audit, "--policy": test.policy, "--compare": test.compare}
    named = [name for name, value in tests.items() if value is not None]
    if len(named) > 1:
        raise ArgumentValueError(
            named[1], "must be the only test", came=" and ".join(named), accepted="one of them"
        )
    if not named:
        unused = {"--data": test.data, "--shape": test.shape, "--loss": test.loss}
        _check_absent("without --audit, --policy or --compare", **unused)
        own = _element_type(_DTYPE if dtype is None else dtype)
        LiteralConsole().print(bounds(own, elements or _ELEMENTS))
        return
    _check_absent(f"with {named[0]}", **{"--elements": elements})
    if test.policy is not None:
        chosen, label = policies.policy_of(test.policy), f"{test.policy}: "
    elif test.compare is not None:
        chosen, label = policies.of_function(test.compare, _comparison(test.compare)), ""
    else:
        assert test.audit is not None
        chosen, label = policies.of_text(test.audit), ""
    is_layer = chosen.operation == "layer"
    if is_layer:
        _check_absent("with the test of a layer", **{"--loss": test.loss})
    chosen = replace(chosen, data=test.data or chosen.data, loss=test.loss or chosen.loss)
    if chosen.data.endswith(".npz") and not is_layer:
        unused = {"--dtype": dtype, "--shape": test.shape, "--loss": test.loss}
        _check_absent("with a file of x and dy", **unused)
        runs = [audit_data.read(Path(chosen.data), chosen.epsilon)]
        dtype = str(runs[0].data.x.dtype)
        about = f"{chosen.data}, {dtype}, x of {runs[0].data.x.shape}"
        has_every_mistake = False
    else:
        dtype = _DTYPE if dtype is None else dtype
        if test.shape is not None or not chosen.shapes:
            chosen = replace(
                chosen, shapes=[shape_of(_SHAPE if test.shape is None else test.shape)]
            )
        runs = list(chosen.runs(_element_type(dtype)))
        sizes = " and ".join(",".join(map(str, each)) for each in chosen.shapes)
        about = chosen.data if is_layer else f"{chosen.data}, loss {chosen.loss}"
        about += f", {dtype}, x of {sizes}, {audit_data.SEEDS} seeds"
        has_every_mistake = chosen.data == "layer" and chosen.loss in ("none", "cube")
    print(visible(f"{label}{chosen.text(dtype)} on {about}"))
    if chosen.source:
        print(f"  {chosen.source}")
    if chosen.forgives:
        print(f"  {chosen.forgives}")
    for line in lines(audit_of(chosen.test(dtype), runs)):
        print(f"  {line}")
    if not (has_every_mistake or is_layer):
        print("  --data layer --loss cube shows every mistake that a loss can show.")


def _check_absent(condition: str, **options: object) -> None:
    """Raise an error if one of `options` was given. `condition` says when they have no effect, as
    in "without --audit".
    """
    for name, value in options.items():
        if value is not None:
            raise ArgumentValueError(
                name, f"has no effect {condition}", came=str(value), hint="leave it out"
            )


def _comparison(name: str) -> Callable[..., Any]:
    """Return the function that --compare names.

    The function takes two arguments: an array, and the expected array.
    """
    from backnorm.conformance.verify.subjects import described, function_of

    try:
        function = function_of(name, "--compare")
        inspect.signature(function).bind(None, None)
    except ArgumentError:
        raise
    except Exception as error:
        raise ArgumentValueError(
            "--compare", "cannot be imported, or does not take two arrays", came=name,
            hint=described(error),
        ) from error  # fmt: skip
    return function


def _element_type(name: str) -> Any:
    from backnorm.conformance.verify.cases import DTYPES, check_names

    check_names("--dtype", [name], DTYPES)
    return DTYPES[name]
