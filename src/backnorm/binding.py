"""The code of a call, generated from the operation's signature.

A repeated call should cost little more than its kernel, and a Python loop over the operands would
cost more than the work in it. So two functions are generated as source and compiled (as
`dataclasses` does with ``__init__``): `caller` makes the function that looks up a call's executable
in the call cache, `runner` the one that allocates the results and passes the address of every array
to the kernel. Both come from the signature alone, so that no operand is in one of them and missing
in the other.
"""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from backnorm.cpu.record import ADDRESSES
from backnorm.signature import Number, Signature

__all__ = ["NO_FACTS", "Code", "caller", "facts", "runner", "written"]


#: What facts raise of an object that is no array, and a key of one that has no hash.
NO_FACTS = "(AttributeError, TypeError, RuntimeError)"


class Code(NamedTuple):
    """Source expressions for a framework's arrays; ``{}`` stands for the variable's name.

    Attributes
    ----------
    arrays : str
        Whose arrays: it tells keys of the same facts apart.
    facts : str
        A tuple of everything that validation reads: the array's part of a cache key.
    channel_facts : str
        The same of a per-channel array, where fewer do.
    mask_facts : str
        The same of a mask, where there are more.
    address : str
        Where the elements begin, as the kernels take it.
    absent : str
        The address of an array that is absent.
    header : int
        Size of the header after which an object has the address of its elements, if `address` is
        that of the object; else 0.
    stage : str
        How a stage is called: as a method it is called in half the time of an object.
    lost : str
        Whether the memory of an operand is not what its facts promise, where memory can be taken
        away from an array; ``{0}`` is its name, ``{1}`` its kind.
    held : str
        The address of an operand, where `lost` has looked it up.
    constants : tuple of str
        Names of the values that an executable provides for `new`.
    new : mapping of str to str
        How a result is allocated, by its name or kind, from the constants and the operands; where
        an array has many pages first by "large" and its name or kind, if there is such an entry.
    """

    arrays: str
    facts: str
    address: str
    constants: tuple[str, ...]
    new: Mapping[str, str]
    absent: str = "0"
    header: int = 0
    stage: str = "stage"
    channel_facts: str = ""
    mask_facts: str = ""
    lost: str = ""
    held: str = ""


def facts(code: Code, name: str, kind: str = "data", *, given: bool = False) -> str:
    """Return the expressions for the facts of an operand.

    One, if it may be absent; else as many as there are facts, which takes half the time of a tuple
    of them.
    """
    of_kind = {"channel": code.channel_facts, "mask": code.mask_facts}.get(kind) or code.facts
    found = of_kind.format(*[name] * of_kind.count("{}"))
    return found[1:-1] if given else f"None if {name} is None else {found}"


def caller(signature: Signature, code: Code, names: dict[str, Any]) -> Callable[..., Any]:
    """Return ``make(calls, first, get_num_threads, chosen)``, which returns the function of a call.

    That function takes the operands, the options, `out` and the numbers. It looks up its executable
    in the dictionary ``calls``; where there is none yet, it calls ``first`` with the key, the
    operands, the options, `out` and the numbers. `names` are the global names of the code. The last
    two say what holds for a call beside its arguments, and are part of the key.
    """
    options, operands = ", ".join(signature.options), ", ".join(signature.names)
    # True == 1 == 1.0: a key cannot tell them apart without their classes.
    key = [
        # One text: a hash that is known.
        repr(f"{signature.operation}, {code.arrays}"),
        *(facts(code, o.name, o.kind, given=o.required) for o in signature.operands),
    ]
    # A tuple of its own: one of more than 30 parts Python makes by way of a list, in 0.2 us more.
    parts = (part for option in signature.options for part in (f"type({option})", option))
    key.append(f"({', '.join(parts)}, get_num_threads(), chosen())")
    given, passed = _given(signature), _passed(signature.numbers)
    lines = [
        "def make(calls, first, get_num_threads, chosen):",
        f"    def call({operands}, {options}, out=None{given}):",
        "        try:",
        f"            key = ({', '.join(key)})",
        "            found = calls.get(key)",
        f"        except {NO_FACTS}:",
        "            key = found = None",
        "        except Exception:",
        # Either an option's own method raised it, and the option is refused, or a signal handler.
        f"            first(None, ({operands},), ({options},), out{passed})",
        "            raise",
        "        if found is None:",
        f"            return first(key, ({operands},), ({options},), out{passed})",
        "        if out is None:",
        f"            return found.plain({operands}{passed})",
        f"        return found.into(({operands},), out{passed})",
        "    return call",
    ]
    made: Callable[..., Any] = written(f"call of {signature.operation}", lines, names)["make"]
    return made


def runner(
    signature: Signature,
    code: Code,
    names: dict[str, Any],
    *,
    present: Iterable[str],
    options: Iterable[str],
    large: bool,
) -> Callable[..., Any]:
    """Return ``make(stage, refuse, *constants, again)``, which returns what runs a kernel.

    That function takes the operands and `out`, an array for the first result, or None to allocate
    all results. It returns all results, None for those that the options exclude. If an operand is
    `lost`, it calls ``again`` with its own arguments instead.

    Parameters
    ----------
    signature : Signature
    code : Code
    names : dict
        The global names of the code.
    present : iterable of str
        The operands that are given.
    options : iterable of str
        The attributes of the problem that are true, of those on which results depend.
    large : bool
        Whether an array has many pages.
    """
    return _runner(signature, _Hashed(code, names), tuple(present), tuple(options), large)


class _Hashed(NamedTuple):
    """Code and its global names, compared by identity: a cache key."""

    code: Code
    names: dict[str, Any]

    def __hash__(self) -> int:
        return id(self.names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and other.names is self.names

    def __ne__(self, other: object) -> bool:
        return not self == other


@functools.lru_cache(maxsize=256)
def _runner(
    signature: Signature,
    hashed: _Hashed,
    present: tuple[str, ...],
    options: tuple[str, ...],
    large: bool,
) -> Callable[..., Any]:
    code, names = hashed
    taken = [o for o in signature.operands if o.name in present and o.field]
    given = {o.field: (code.held or code.address).format(o.name) for o in taken}
    numbers = [n for n in signature.numbers if n.operand is None or n.operand in present]
    body, places = [], {}
    if code.lost:
        lost = " or ".join(code.lost.format(o.name, o.kind) for o in taken)
        every = f"{', '.join(signature.names)}, out=out{_passed(signature.numbers)}"
        body += [
            "try:",
            f"    lost = {lost}",
            f"except {NO_FACTS}:",
            # It has the facts of an array, and is something else.
            "    lost = True",
            "if lost:",
            f"    return again({every})",
        ]
    sizes = ("large ", "") if large else ("",)
    made = [r for r in signature.results if r.option is None or r.option in options]
    first = next((result for result in made if result.kind == "data"), None)
    for result in signature.results:
        if result not in made:
            body.append(f"{result.name} = None")
            continue
        keys: tuple[str, ...] = (result.name, result.kind)
        if result.kind == "sums" and "reproducible" in options:
            keys = ("bins",)
        ways = [size + name for name in keys for size in sizes]
        new = next(code.new[way] for way in ways if way in code.new)
        if result is first:
            new = f"{new} if out is None else out"
        if result.name != new:
            body.append(f"{result.name} = {new}")
        places[result.field] = code.address.format(result.name)
    places = given | places
    found = [places.get(field, code.absent) for field in ADDRESSES]
    passed = _passed(numbers) + (f", header={code.header}" if code.header else "")
    body.append(f"refused = stage({', '.join(found)}{passed})")
    results = [result.name for result in signature.results]
    if "variance" in (*signature.names, *results):
        body += ["if refused >= 0:", "    refuse(variance, refused)"]
    body.append(f"return {', '.join(results)},")
    lines = [
        f"def make({', '.join(('stage', 'refuse', *code.constants, 'again=None'))}):",
        f"    stage = {code.stage}",
        f"    def run({', '.join(signature.names)}, out=None{_given(signature)}):",
        *(f"        {line}" for line in body),
        "    return run",
    ]
    make: Callable[..., Any] = written(f"run of {signature.operation}", lines, names)["make"]
    return make


def _given(signature: Signature) -> str:
    """Return the parameters of a function's numbers."""
    return "".join(f", {number.name}={number.default!r}" for number in signature.numbers)


def _passed(numbers: Iterable[Number]) -> str:
    """Return the arguments that pass them on."""
    return "".join(f", {number.name}={number.name}" for number in numbers)


def written(title: str, lines: Iterable[str], names: dict[str, Any]) -> dict[str, Any]:
    """Compile lines of code, which tracebacks and debuggers show; return what they define.

    Parameters
    ----------
    title : str
        What tracebacks call the code.
    lines : iterable of str
    names : dict
        Its global names, which it shares with whoever changes them later.
    """
    source = "\n".join(lines) + "\n"
    file = f"<backnorm: {title}, {hash(source) & 0xFFFFFFFF:08x}>"
    # A cache entry without a time of change is never thrown away.
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    found: dict[str, Any] = {}
    # Of our own: signatures and expressions are constants of the package.
    exec(compile(source, file, "exec"), names, found)  # noqa: S102
    return found
