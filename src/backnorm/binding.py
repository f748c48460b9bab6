"""The code of a call, generated from the operation's signature.

A repeated call should cost little more than its kernel. A call takes 9.6 microseconds with closures
over tuples, and 7.7 with generated functions (x of 8 x 16 x 8 x 8, one thread of an AMD EPYC, Zen
4, interleaved runs). Therefore two functions are generated as source and compiled, as `dataclasses`
does with ``__init__``. `caller` makes the function that looks up the executable of a call in the
call cache. `runner` makes the function that allocates the results and passes the address of every
array to the kernel. Both take their operands from the signature, so no operand can be forgotten.
"""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable, Iterable
from typing import Any

from backnorm.interfaces import ADDRESSES, AnyArrays, Call, Code
from backnorm.signature import Number, Operand, Signature

#: Exceptions that can be raised while an executable is looked up: when the facts of an object that
#: is not an array are read, and when a key with an unhashable option is hashed.
NO_FACTS = (AttributeError, TypeError, RuntimeError)
# The same exceptions as source text, for the ``except`` clauses of the generated code.
_NO_FACTS = f"({', '.join(error.__name__ for error in NO_FACTS)})"


def _facts(code: Code, operand: Operand) -> str:
    """Return the expressions for the facts of an operand.

    For an optional operand, there is one expression. Its value is a tuple of the facts, or None if
    the operand is absent. For a required operand, there is one expression for each fact, because
    evaluating these expressions takes half as long as building a tuple of the facts.
    """
    kinds, name = {"channel": code.channel_facts, "mask": code.mask_facts}, operand.name
    of_kind = kinds.get(operand.kind) or code.facts
    expressions = of_kind.format(*[name] * of_kind.count("{}"))
    return expressions[1:-1] if operand.required else f"None if {name} is None else {expressions}"


def caller(signature: Signature, arrays: AnyArrays) -> Callable[..., Call]:
    """Return a function ``make(calls, first, settings)`` that returns a `Call`.

    The `Call` makes a key from the facts of its arguments, and looks up the key's executable in the
    dictionary ``calls``. If ``calls`` does not have the key, the `Call` passes the key, the
    operands, the options, `out` and the numbers to ``first``. ``settings`` returns the settings
    that are part of the key.
    """
    options, operands = ", ".join(signature.options), ", ".join(signature.names)
    # The key contains the classes of the options, because the values True, 1 and 1.0 are equal.
    key = [
        # One string names the operation and the kind of arrays. It is hashed only once, because a
        # string stores its hash.
        repr(f"{signature.operation}, {arrays.code.arrays}"),
        *(_facts(arrays.code, operand) for operand in signature.operands),
    ]
    # The options are put into one tuple, which is a part of the key. If each option were a part of
    # the key, the key could have more than 30 parts. Python builds a tuple of more than 30 parts
    # from a list, which takes 0.2 us longer.
    parts = (part for option in signature.options for part in (f"type({option})", option))
    key.append(f"({', '.join(parts)}, settings())")
    parameters, numbers = _parameters(signature), _arguments(signature.numbers)
    lines = [
        "def make(calls, first, settings):",
        f"    def call({operands}, {options}, out=None{parameters}):",
        "        try:",
        f"            key = ({', '.join(key)})",
        "            executable = calls.get(key)",
        f"        except {_NO_FACTS}:",
        "            key = executable = None",
        "        except Exception:",
        # The exception comes from a signal handler, or from a method of an option, such as
        # `__hash__`. If it comes from an option, `first` raises its own error for this option,
        # because `first` checks the options.
        f"            first(None, ({operands},), ({options},), out{numbers})",
        "            raise",
        "        if executable is None:",
        f"            return first(key, ({operands},), ({options},), out{numbers})",
        "        if out is None:",
        f"            return executable.plain({operands}{numbers})",
        f"        return executable.into(({operands},), out{numbers})",
        "    return call",
    ]
    make: Callable[..., Call]
    make = _written(f"call of {signature.operation}", lines, arrays.names)["make"]
    return make


@functools.lru_cache(maxsize=256)
def runner(
    signature: Signature,
    arrays: AnyArrays,
    present: tuple[str, ...],
    options: tuple[str, ...],
) -> Callable[..., Call]:
    """Return ``make(stage, refuse, *constants, again)``, which returns a function that runs a
    stage.

    That function takes the operands, the numbers, and `out` (an array for the first result, or None
    to allocate one), and returns the results. If an operand has lost its memory (`Code.lost`), the
    call passes its arguments on to ``again`` instead, and returns the results of ``again``.

    Parameters
    ----------
    signature : Signature
    arrays : Arrays
    present : tuple of str
        The operands that are not None.
    options : tuple of str
        The true attributes of the problem among relu, residual and reproducible.
    """
    code = arrays.code
    inputs = [o for o in signature.operands if o.name in present and o.field]
    address = code.known_address or code.address
    addresses = {o.field: address.format(o.name) for o in inputs}
    body = []
    if code.lost:
        lost = " or ".join(code.lost.format(o.name, o.kind) for o in inputs)
        every = f"{', '.join(signature.names)}, out=out{_arguments(signature.numbers)}"
        body += [
            "try:",
            f"    lost = {lost}",
            f"except {_NO_FACTS}:",
            # The expression raises for an object that is not an array but has an array's facts
            # (such as a shape and a type).
            "    lost = True",
            "if lost:",
            f"    return again({every})",
        ]
    made = [r for r in signature.results if r.option is None or r.option in options]
    first = next((result for result in made if result.kind == "data"), None)
    for result in signature.results:
        if result not in made:
            body.append(f"{result.name} = None")
            continue
        keys = result.name, result.kind
        if result.kind == "sums" and "reproducible" in options:
            keys = "bins", "bins"
        new = code.new.get(keys[0]) or code.new[keys[1]]
        if result is first:
            new = f"{new} if out is None else out"
        if result.name != new:
            body.append(f"{result.name} = {new}")
        addresses[result.field] = code.address.format(result.name)
    numbers = [n for n in signature.numbers if n.operand is None or n.operand in present]
    arguments = ", ".join(addresses.get(field, code.absent) for field in ADDRESSES)
    header = f", header={code.header}" if code.header else ""
    body.append(f"refused = stage({arguments}{_arguments(numbers)}{header})")
    results = [result.name for result in signature.results]
    if "variance" in (*signature.names, *results):
        body += ["if refused >= 0:", "    refuse(variance, refused)"]
    body.append(f"return {', '.join(results)},")
    lines = [
        f"def make({', '.join(('stage', 'refuse', *code.constants, 'again=None'))}):",
        f"    stage = {code.stage}",
        f"    def run({', '.join(signature.names)}, out=None{_parameters(signature)}):",
        *(f"        {line}" for line in body),
        "    return run",
    ]
    make: Callable[..., Call]
    make = _written(f"run of {signature.operation}", lines, arrays.names)["make"]
    return make


def _parameters(signature: Signature) -> str:
    """Return the source code of a function's parameters for the numbers of a signature."""
    return "".join(f", {number.name}={number.default!r}" for number in signature.numbers)


def _arguments(numbers: Iterable[Number]) -> str:
    """Return the source of a call's arguments: each number is passed by its name."""
    return "".join(f", {number.name}={number.name}" for number in numbers)


def _written(title: str, lines: Iterable[str], names: dict[str, Any]) -> dict[str, Any]:
    """Compile lines of code and return the names that they define.

    Tracebacks and debuggers show the lines.

    Parameters
    ----------
    title : str
        The name of the code in tracebacks.
    lines : iterable of str
    names : dict
        The global names of the code. The dictionary is not copied, so later changes take effect.
    """
    source = "\n".join(lines) + "\n"
    file = f"<backnorm: {title}, {hash(source) & 0xFFFFFFFF:08x}>"
    # The second item of an entry is a file's modification time. If it is None,
    # `linecache.checkcache` keeps the entry, although no such file exists.
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    defined: dict[str, Any] = {}
    # The source has only names and constants of the package, and no input of the caller.
    exec(compile(source, file, "exec"), names, defined)  # noqa: S102
    return defined
