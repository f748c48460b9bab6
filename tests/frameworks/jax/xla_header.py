"""XLA's header of its foreign function interface, read to compare it with `xla_structures`.

The handler reads structures by offsets. A version of jaxlib that moves a field without a new major
version would crash; this finds it in the header that jaxlib comes with.
"""

from __future__ import annotations

import re
from pathlib import Path

from backnorm_kernels.xla_structures import ELEMENTS, MADE, STRUCTURES, parsed

__all__ = ["differences"]

_Fields = list[tuple[str, int | str]]

# The name of a structure from version 0.4 on, and the one before.
_RENAMED = {"XLA_FFI_InternalExtension": "XLA_FFI_Extension_Base"}
_SIZES = {"size_t": 8, "int64_t": 8, "int32_t": 4, "uint32_t": 4, "int": 4}
_SAME_AS = {
    "uint8": "U8",
    "int64": "S64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
}


def differences(path: Path) -> list[str]:
    """Return what in a header is not as `xla_structures` has it."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(), flags=re.DOTALL)
    for name, before in _RENAMED.items():
        text = re.sub(rf"\b{name}\b", before, text)
    structures = _structures(text)
    different = [
        f"XLA_FFI_{name}"
        for name, fields in STRUCTURES.items()
        if not _agrees(parsed(fields), structures.get(name, []), exactly=name in MADE)
    ]
    codes = dict(re.findall(r"XLA_FFI_DataType_(\w+) = (\d+)", text))
    return different + [
        name for name, code in ELEMENTS.items() if codes.get(_SAME_AS[name]) != str(code)
    ]


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
