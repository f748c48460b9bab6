"""The errors of backnorm.

The errors of backnorm's own checks are instances of :class:`BacknormError`. The error of a bad
argument is also a ``ValueError`` or a ``TypeError``, so both ``except backnorm.BacknormError`` and
``except ValueError`` work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

# A message shows at most this many characters of a value.
_LONGEST = 200


class BacknormError(Exception):
    """Base class of the errors of backnorm's own checks."""


class MachineCodeError(BacknormError, RuntimeError):
    """Machine code for this processor is missing or unusable; the message says why."""


class ArgumentError(BacknormError):
    """A bad argument: its name, the received value, and the accepted values.

    Parameters
    ----------
    argument : str
        The name of the argument as the caller knows it (a dialect uses its own names). Without
        `problem`, the whole message: code that extends messages (Keras) constructs the error again
        from one string.
    problem : str, optional
        The mistake, as a clause, e.g. ``"must have the shape of {x}"``. Names of other arguments
        are in braces, here and in `accepted` and `hint`, so that `in_words` can replace them.
    came : object, optional
        The received value, or its description.
    accepted : object, optional
        The accepted values.
    hint : str, optional
        How the caller can correct the call.
    """

    def __init__(
        self,
        argument: str,
        problem: str = "",
        *,
        came: object = None,
        accepted: object = None,
        hint: str | None = None,
    ) -> None:
        # The parameters of this constructor as they were passed. Names of other arguments are still
        # in braces in them, so that `in_words` can replace these names.
        self._given = argument, problem, came, accepted, hint
        self.argument = argument
        self.problem = _named(problem, {})
        self.came = came
        self.accepted = _named(accepted, {})
        self.hint = _named(hint, {})
        details = []
        if came is not None:
            details.append(f"got {came if isinstance(came, str) else shown(came, str)}")
        if accepted is not None:
            details.append(f"expected {self.accepted}")
        if hint is not None:
            details.append(self.hint)
        rest = f"; {'; '.join(details)}" if details else ""
        super().__init__(f"{argument}: {self.problem}{rest}" if problem else argument)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process may be unable to unpickle the value `came`, so the value's text is pickled
        # instead.
        came = self.came if self.came is None else shown(self.came, str)
        return partial(type(self), **{**self.parts(), "came": came}), ()

    def parts(self) -> dict[str, Any]:
        """Return the parts of the error by name: its argument, problem, came, accepted and hint."""
        names = "argument", "problem", "came", "accepted", "hint"
        return dict(zip(names, self._given, strict=True))

    def in_words(self, words: Mapping[str, str]) -> ArgumentError:
        """Return the same error with the names of arguments replaced as `words` maps them."""
        argument, problem, came, accepted, hint = self._given
        return type(self)(
            words.get(argument, argument),
            _named(problem, words),
            came=came,
            accepted=_named(accepted, words),
            hint=_named(hint, words),
        )


def shown(value: Any, text_of: Callable[[Any], str] = repr) -> str:
    """Return a short text in one line that shows a value, even if the value's methods raise.

    An array of rank 1 or more is shown by its shape and type, not by its elements.
    """
    try:
        kind = type(value)
        if hasattr(kind, "shape") and hasattr(kind, "dtype") and len(value.shape):
            return f"an array of shape {tuple(value.shape)} and dtype {value.dtype}"
        text = " ".join(text_of(value).split())
    # `text_of` may raise any exception. Even `repr` raises one (ValueError) for an integer with too
    # many digits.
    except Exception:
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def visible(text: str) -> str:
    """Return `text` with control characters and lone surrogates as escapes, except line breaks.

    Names that were read from a file can contain escape sequences, which must not reach a terminal,
    and characters that XML or UTF-8 cannot encode.
    """
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def described(value: object) -> str:
    """Return a value and its type as text for a message."""
    return f"{shown(value)} of type {type(value).__name__}"


def counted(number: int, noun: str) -> str:
    """Return a number followed by a noun, with an "s" unless the number is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def not_installed(error: ModuleNotFoundError, package: str, adapter: str) -> ModuleNotFoundError:
    """Return an error that names `package`, or `error` itself if another package is missing."""
    if error.name != package:
        return error
    return ModuleNotFoundError(
        f"{adapter} needs the package {package}, which is not installed: pip install {package}",
        name=package,
    )


def _named(text: Any, words: Mapping[str, str]) -> Any:
    """Return `text` with each name in braces replaced by the word to which `words` maps the name.

    If `words` does not map a name, only the braces are removed.
    """
    if not isinstance(text, str):
        return text
    return re.sub(r"\{([a-z_]+)\}", lambda found: words.get(found[1], found[1]), text)


class ArgumentValueError(ArgumentError, ValueError):
    """An argument of the right type with a value, shape or layout that is not accepted."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument whose type or element type is not accepted."""
