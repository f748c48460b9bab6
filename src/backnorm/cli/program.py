"""The common parts of all commands: exit statuses, errors in one line, the number of threads.

Exit status: 0 success; 1 a check failed; 2 bad input, or results that cannot be written; 130
interrupted.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

import backnorm
from backnorm.cli import text
from backnorm.errors import ArgumentValueError, BacknormError
from backnorm.graph.logical_tensor import check_elements

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="The most threads of a call (default: backnorm.get_num_threads()).",
        show_default=False,
    ),
]


@contextlib.contextmanager
def exits_in_one_line() -> Iterator[None]:
    """Turn bad input, or an interruption, into one line on stderr and an exit status."""
    try:
        yield
    except KeyboardInterrupt:
        text.warn("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except (BacknormError, MemoryError) as error:
        message = str(error) or "there is not enough memory"
    except OSError as error:
        reason = error.strerror or str(error)
        message = reason if error.filename is None else f"{error.filename}: {reason}"
    else:
        return
    text.warn(f"error: {message}")
    raise typer.Exit(BAD_INPUT)


def takes_records(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with options in the place of each record that `command` takes: one for each
    field, as `backnorm.conformance.verify.options.option` declares it.
    """
    signature = inspect.signature(command, eval_str=True)
    own = signature.parameters
    records: dict[str, Any] = {
        name: each.annotation for name, each in own.items() if is_dataclass(each.annotation)
    }

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, record in records.items():
            values[name] = record(**{each.name: values.pop(each.name) for each in fields(record)})
        command(**values)

    parameters = [
        parameter
        for name, each in own.items()
        for parameter in (_options_of(records[name]) if name in records else [each])
    ]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def _options_of(record: Any) -> Iterator[inspect.Parameter]:
    types = get_type_hints(record)
    for each in fields(record):
        kind = types[each.name]
        # Without a name of its own, a flag would have an opposite, such as --no-show.
        names = [f"--{each.name.replace('_', '-')}"] * (kind is bool)
        yield inspect.Parameter(
            each.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=each.default,
            annotation=Annotated[kind, typer.Option(*names, **each.metadata)],
        )


def begin(threads: int | None = None) -> None:
    """Set the number of threads, unless `threads` is None."""
    if threads is not None:
        backnorm.set_num_threads(threads)


def shape_of(text: str, least: int = 1) -> tuple[int, ...]:
    """Return the shape that a text says; `least` is the smallest size."""
    sizes = listed(text)
    if len(sizes) < 2 or not all(size.isdecimal() and int(size) >= least for size in sizes):
        accepted = f"two or more sizes of at least {least}, separated by commas"
        raise ArgumentValueError("--shape", "must be a shape", came=repr(text), accepted=accepted)
    shape = tuple(map(int, sizes))
    check_elements(shape, "--shape")
    return shape


def listed(text: str) -> tuple[str, ...]:
    """Return the words of a list that is separated by commas or spaces."""
    return tuple(text.replace(",", " ").split())
