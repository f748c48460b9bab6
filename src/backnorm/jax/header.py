"""Whether XLA's foreign function interface is the one that our handler is written for.

jaxlib comes with the header of its interface. The handler reads structures by offsets; so each is
looked up in that header and compared, and what a later version moved is found here and not in a
crash.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from backnorm.cpu.xla_structures import ELEMENTS, MADE, STRUCTURES, parsed

__all__ = ["Version", "read"]

_Fields = list[tuple[str, int | str]]

# What would be changed without a new number, is a field at the end of a structure.
_MAJOR = 0
_SIZES = {"size_t": 8, "int64_t": 8, "int32_t": 4, "uint32_t": 4, "int": 4}
_SAME_AS = {
    "uint8": "U8",
    "int64": "S64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
}


class Version(NamedTuple):
    """Version of the interface, as the header has it."""

    major: int
    minor: int


def read(folder: str) -> Version | str:
    """Return the version of the interface in the header in jaxlib's `folder`, or why it is foreign.

    Parameters
    ----------
    folder : str
        What `jax.ffi.include_dir` returned.
    """
    path = Path(folder) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        return f"jaxlib has no header of its foreign function interface ({error})"
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    return _version(text, _structures(text))


def _version(text: str, found: dict[str, _Fields]) -> Version | str:
    numbers = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", text))
    if len(numbers) != 2:
        return "the header has no version"
    if int(numbers["MAJOR"]) != _MAJOR:
        return f"version {numbers['MAJOR']}.{numbers['MINOR']} is not known, only {_MAJOR}"
    for name, fields in STRUCTURES.items():
        if not _agrees(parsed(fields), found.get(name, []), exactly=name in MADE):
            return f"the structure XLA_FFI_{name} is not the one that is known"
    codes = dict(re.findall(r"XLA_FFI_DataType_(\w+) = (\d+)", text))
    for name, code in ELEMENTS.items():
        if codes.get(_SAME_AS[name]) != str(code):
            return f"the code of {name} is not the one that is known"
    return Version(int(numbers["MAJOR"]), int(numbers["MINOR"]))


def _agrees(known: _Fields, there: _Fields, *, exactly: bool) -> bool:
    """Whether a structure begins as it is known, or is exactly that."""
    if len(there) < len(known) or (exactly and len(there) > len(known)):
        return False
    return all(
        size == its_size and (name == its_name or name.startswith("_"))
        for (name, size), (its_name, its_size) in zip(known, there, strict=False)
    )


def _structures(text: str) -> dict[str, _Fields]:
    """Return the fields of all structures: their names, and their bytes or structures."""
    text = re.sub(r"_XLA_FFI_API_STRUCT_FIELD\(XLA_FFI_(\w+)\)", r"void* \1", text)
    aliases = re.findall(r"typedef (\w+) XLA_FFI_(\w+);", text)
    sizes = {name: _SIZES[kind] for kind, name in aliases if kind in _SIZES}
    sizes |= dict.fromkeys(re.findall(r"typedef enum \{[^}]*\} XLA_FFI_(\w+);", text), 4)
    found = {}
    for name, body in re.findall(r"struct XLA_FFI_(\w+) \{(.*?)\n\}", text, flags=re.DOTALL):
        fields = [_field(" ".join(line.split()), _SIZES | sizes) for line in body.split(";")]
        found[name] = [field for field in fields if field is not None]
    return found


def _field(declaration: str, sizes: dict[str, int]) -> tuple[str, int | str] | None:
    """Return name and bytes, or structure, of a field."""
    if not declaration:
        return None
    pointer = re.search(r"\(\*(\w+)\)\(", declaration)
    if pointer:
        return pointer[1], 8
    kind, _, name = declaration.rpartition(" ")
    kind = kind.removeprefix("const ").removeprefix("struct ").removeprefix("XLA_FFI_")
    if kind.endswith("*"):
        return name, 8
    return name, sizes.get(kind, kind)
