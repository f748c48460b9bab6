"""The structures of XLA's foreign function interface (``xla/ffi/api/c_api.h``), as the offsets of
their fields.

Names are those of the header without the prefix XLA_FFI. `STRUCTURES` is the package's only copy
of the header; a test compares it with the header that jaxlib ships.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

#: The cells of the data of backnorm's handler (the function that XLA calls). Each cell has 64 bits.
#: Cells 0 and 1 have the major and minor version of XLA's interface. Cell 2 has the address of the
#: function that runs a task on XLA's thread pool. Cell 3 has the number of registered kernels. From
#: cell 4 on, each kernel has two cells: its identifying number, and its address.
ENVIRONMENT = range(5)
ENVIRONMENT_CELLS = len(ENVIRONMENT) - 1 + 2 * 256

#: Maps NumPy's name of each element type to XLA's code of the type.
ELEMENTS = {"int64": 5, "uint8": 6, "float16": 10, "float32": 11, "float64": 12, "bfloat16": 16}

#: The structures of XLA that backnorm reads or fills in, with their fields in order. A field has 8
#: bytes unless its name is followed by a colon. After the colon stands the field's size in bytes,
#: or the name of the structure that the field is. Fields that begin with an underscore are not
#: used; their names differ between versions.
STRUCTURES = {
    "Extension_Base": "struct_size type:4 next",
    "Api_Version": "struct_size extension_start major_version:4 minor_version:4",
    "Metadata": "struct_size api_version:Api_Version traits:4",
    "Metadata_Extension": "extension_base:Extension_Base metadata",
    "Error_Create_Args": "struct_size extension_start message errc:4",
    "Error_Destroy_Args": "struct_size extension_start error",
    "ThreadPool_Schedule_Args": "struct_size extension_start ctx task data",
    "ThreadPool_NumThreads_Args": "struct_size extension_start ctx num_threads",
    "Buffer": "struct_size extension_start dtype:4 data rank dims",
    "ByteSpan": "ptr len",
    "Array": "dtype:4 size data",
    "Args": "struct_size extension_start size types args",
    "Rets": "struct_size extension_start size types rets",
    "Attrs": "struct_size extension_start size types names attrs",
    "CallFrame": "struct_size extension_start api ctx stage:4 args:Args rets:Rets attrs:Attrs",
    "Api": "struct_size extension_start api_version:Api_Version internal_api Error_Create"
    " _Error_GetMessage Error_Destroy _Handler_Register _Stream_Get _Type_Register"
    " _ExecutionContext_Get _State_Set _State_Get _DeviceMemory_Allocate _DeviceMemory_Free"
    " ThreadPool_Schedule ThreadPool_NumThreads",
}
#: Structures that backnorm makes, or that are part of other structures. For these structures, the
#: fields listed above must be exactly those in XLA's header. All other structures may have further
#: fields in the header, after those that are listed above.
MADE = frozenset({"Api_Version", "Args", "Attrs", "Extension_Base", "Rets"}) | {
    name for name in STRUCTURES if name.endswith("_Args")
}


def parsed(fields: str) -> list[tuple[str, int | str]]:
    """Return the name and the kind of each field of a structure. The kind is the field's size in
    bytes or, if the field is a structure, the name of that structure.
    """
    found: list[tuple[str, int | str]] = []
    for field in fields.split():
        name, _, kind = field.partition(":")
        found.append((name, int(kind or 8) if kind.isdigit() or not kind else kind))
    return found


def offsets(name: str) -> Any:
    """Return the offset of every field of a structure and, as `size_`, the structure's size as
    defined by the header.

    This size does not include the padding that a C compiler adds after the last field.
    """
    found = _laid_out(name)
    return namedtuple(name, found)(**found)


def _laid_out(name: str) -> dict[str, int]:
    found, end = {}, 0
    for field, kind in parsed(STRUCTURES[name]):
        size = _laid_out(kind)["size_"] if isinstance(kind, str) else kind
        end = -(-end // min(size, 8)) * min(size, 8)
        if not field.startswith("_"):
            found[field] = end
        end += size
    return {**found, "size_": end}
