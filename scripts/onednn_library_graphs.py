"""Run benchdnn's graphs in oneDNN's library, and print a table of the errors.

Each graph has a child process, which adds the operators of the file to a graph of the library's C
API (oneapi/dnnl/dnnl_graph.h), gets the partitions of the fusion policy, compiles and executes them
on random tensors, and writes the results. Results of batch normalisation are compared with the
exact ones. The error beyond half an ulp is given in u T: u is 2**-24, the unit roundoff of float32,
and T is the sum of the magnitudes of the element's terms. A sum of M elements in float32 may have
an error of M u T, so a result with at most this error counts as equal. Integers count as equal if
no element differs from ours by more than 1.

    python -m scripts.onednn_library_graphs [LIBRARY ...]

Without an argument, LIBRARY is the libdnnl of the package onednn-cpu-gomp. The library of the
package onednn computes with SYCL, and needs the package dpctl.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from ctypes import byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint8, c_void_p
from pathlib import Path

import ml_dtypes
import numpy as np

from backnorm import reference
from backnorm.activations import RELU
from backnorm.conformance.judge._ulps import absolute_error, ulp_at
from backnorm.conformance.verify._onednn import find
from backnorm.dialects import registry
from backnorm.graph import Graph, LogicalTensor, Step, build_program, load_graph
from backnorm.graph.pointwise import POINTWISE
from backnorm.graph.run import gather, run_step, store
from scripts.benchdnn_graphs import write

CPU, IN_ORDER, STRIDED, FUSION, MAX_RANK, SYCL = 1, 1, 2, 1, 12, 512
KINDS = {
    "BatchNormTrainingBackward": 5,
    "BatchNormForwardTraining": 6,
    "BatchNormInference": 7,
    "Dequantize": 19,
    "Quantize": 49,
    "ReLU": 58,
    "ReLUBackward": 59,
}
# Name -> number in dnnl_graph_op_attr_t, and the suffix of the function that sets it.
ATTRIBUTES = {
    "epsilon": (0x3, "f32"),
    "momentum": (0x6, "f32"),
    "scales": (0x20, "f32"),
    "axis": (0x30, "s64"),
    "zps": (0x4D, "s64"),
    "use_dst": (0x68, "bool"),
    "data_format": (0x83, "str"),
    "qtype": (0x85, "str"),
}
C_TYPES = {"f32": c_float, "s64": c_int64, "bool": c_uint8}
TYPES = {"float16": 1, "bfloat16": 2, "float32": 3, "int8": 5, "uint8": 6}
UNIT = 2.0**-24


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("id", c_size_t),
        ("ndims", c_int),
        ("dims", c_int64 * MAX_RANK),
        ("data_type", c_int),
        ("property", c_int),
        ("layout_type", c_int),
        ("strides", c_int64 * MAX_RANK),
    )

    @classmethod
    def of(cls, tensor: LogicalTensor) -> _Tensor:
        """Return the logical tensor, dense in row-major order."""
        assert tensor.shape is not None
        made = cls(id=tensor.id, ndims=len(tensor.shape), layout_type=STRIDED)
        made.data_type = TYPES[str(tensor.dtype)]
        made.dims[: made.ndims] = tensor.shape
        strides = np.empty(tensor.shape, np.int8).strides
        made.strides[: made.ndims] = strides
        return made


class _Runner:
    """The library, with an engine and a stream; each call must return success."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._engine, self._stream = c_void_p(), c_void_p()
        self._prepare()
        self.call("stream_create", byref(self._stream), self._engine, c_int(IN_ORDER))

    def _prepare(self) -> None:
        """Make the engine."""
        allocator = c_void_p()
        self.call("graph_allocator_create", byref(allocator), None, None)
        engine = byref(self._engine), c_int(CPU), c_size_t(0), allocator
        self.call("graph_make_engine_with_allocator", *engine)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array that the library can read and write."""
        return np.empty(shape, dtype)

    def _execute(self, compiled: c_void_p, memory: list[object]) -> None:
        self.call("graph_compiled_partition_execute", compiled, self._stream, *memory)

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, f"dnnl_{name}")(*arguments)
        if status != 0:
            print(f"dnnl_{name} returned status {status}", file=sys.stderr)
            sys.exit(3)

    def run(self, graph: Graph, arrays: dict[int, np.ndarray]) -> int:
        """Add the tensors that `graph` computes to `arrays`; return the number of partitions."""
        handle, count = c_void_p(), c_size_t()
        self.call("graph_graph_create", byref(handle), c_int(CPU))
        for operator in graph.operators:
            made = c_void_p()
            name = operator.name.encode()
            kind = c_int(KINDS[operator.kind])
            self.call("graph_op_create", byref(made), c_size_t(operator.id), kind, name)
            for attribute, value in operator.attributes.items():
                self._set(made, attribute, value)
            for id_ in operator.inputs:
                self.call("graph_op_add_input", made, byref(_Tensor.of(graph.tensors[id_])))
            for id_ in operator.outputs:
                self.call("graph_op_add_output", made, byref(_Tensor.of(graph.tensors[id_])))
            self.call("graph_add_op", handle, made)
        self.call("graph_graph_finalize", handle)
        self.call("graph_graph_filter", handle, c_int(FUSION))
        self.call("graph_graph_get_partition_num", handle, byref(count))
        partitions = (c_void_p * count.value)()
        self.call("graph_graph_get_partitions", handle, count, partitions)
        for partition in partitions:
            self._run_partition(c_void_p(partition), graph, arrays)
        return count.value

    def _run_partition(
        self, partition: c_void_p, graph: Graph, arrays: dict[int, np.ndarray]
    ) -> None:
        supported, compiled = c_uint8(), c_void_p()
        self.call("graph_partition_is_supported", partition, byref(supported))
        if not supported.value:
            print("a partition is not supported", file=sys.stderr)
            sys.exit(3)
        ports = [self._ports(partition, side, graph) for side in ("input", "output")]
        for id_ in ports[1]:
            shape, dtype = graph.tensors[id_].shape, graph.tensors[id_].dtype
            assert shape is not None
            arrays[id_] = self.empty(shape, dtype)
        logical = [[_Tensor.of(graph.tensors[id_]) for id_ in ids] for ids in ports]
        self.call("graph_compiled_partition_create", byref(compiled), partition)
        sides = [
            part
            for tensors in logical
            for part in (
                c_size_t(len(tensors)),
                (ctypes.POINTER(_Tensor) * len(tensors))(*map(ctypes.pointer, tensors)),
            )
        ]
        self.call("graph_partition_compile", partition, compiled, *sides, self._engine)
        memory = []
        for ids, tensors in zip(ports, logical, strict=True):
            handles = (c_void_p * len(ids))()
            for i, (id_, tensor) in enumerate(zip(ids, tensors, strict=True)):
                made, address = c_void_p(), c_void_p(arrays[id_].ctypes.data)
                arguments = byref(made), byref(tensor), self._engine, address
                self.call("graph_tensor_create", *arguments)
                handles[i] = made
            memory += [c_size_t(len(ids)), handles]
        self._execute(compiled, memory)
        self.call("stream_wait", self._stream)

    def _ports(self, partition: c_void_p, side: str, graph: Graph) -> list[int]:
        count = c_size_t()
        self.call(f"graph_partition_get_{side}_ports_num", partition, byref(count))
        tensors = (_Tensor * count.value)()
        self.call(f"graph_partition_get_{side}_ports", partition, count, tensors)
        return [tensor.id for tensor in tensors]

    def _set(self, operator: c_void_p, name: str, value: object) -> None:
        number, suffix = ATTRIBUTES[name]
        if suffix == "str":
            text = str(value).encode()
            arguments = c_char_p(text), c_size_t(len(text))
            self.call("graph_op_set_attr_str", operator, c_int(number), *arguments)
            return
        values = value if isinstance(value, list) else [value]
        array = (C_TYPES[suffix] * len(values))(*values)
        length = c_size_t(len(values) if isinstance(value, list) else (suffix == "bool"))
        self.call(f"graph_op_set_attr_{suffix}", operator, c_int(number), array, length)


class _SyclRunner(_Runner):
    """A library that computes with SYCL, in memory that the package dpctl allocates."""

    def _prepare(self) -> None:
        import dpctl.memory

        self._memory = dpctl.memory.MemoryUSMShared
        self._queue = dpctl.SyclQueue("cpu")
        device, context = self._queue.sycl_device, self._queue.sycl_context
        arrays: dict[int, np.ndarray] = {}

        def allocate(size: int, alignment: int, device: int, context: int) -> int:
            made = self.empty((size,), np.dtype(np.uint8))
            arrays[made.ctypes.data] = made
            return made.ctypes.data

        def free(address: int, device: int, context: int, event: int) -> None:
            arrays.pop(address, None)

        pointer = c_void_p
        self._functions = (
            ctypes.CFUNCTYPE(pointer, c_size_t, c_size_t, pointer, pointer)(allocate),
            ctypes.CFUNCTYPE(None, pointer, pointer, pointer, pointer)(free),
        )
        allocator = c_void_p()
        self.call("graph_sycl_interop_allocator_create", byref(allocator), *self._functions)
        references = (c_void_p(each.addressof_ref()) for each in (device, context))
        engine = byref(self._engine), *references, allocator
        self.call("graph_sycl_interop_make_engine_with_allocator", *engine)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        size = int(np.prod(shape)) * dtype.itemsize
        return np.frombuffer(self._memory(size, queue=self._queue), dtype).reshape(shape)

    def _execute(self, compiled: c_void_p, memory: list[object]) -> None:
        name = "graph_sycl_interop_compiled_partition_execute"
        self.call(name, compiled, self._stream, *memory, None, None)


def _serve(library: str, file: str, source: str, target: str) -> None:
    graph = load_graph(file)
    runner = (_SyclRunner if _version(library).cpu_runtime == SYCL else _Runner)(library)
    arrays = {}
    with np.load(source) as found:
        for name, array in found.items():
            array = array.view(ml_dtypes.bfloat16) if array.dtype == "V2" else array
            arrays[int(name)] = runner.empty(array.shape, array.dtype)
            arrays[int(name)][...] = array
    partitions = runner.run(graph, arrays)
    results = {str(id_): arrays[id_] for id_ in graph.outputs}
    np.savez(target, partitions=np.array(partitions), **results)  # type: ignore[arg-type]


def _inputs(graph: Graph) -> dict[str, np.ndarray]:
    """Return random inputs: values per channel in [0.5, 1.5), integers uniform, others normal."""
    produced = {id_ for operator in graph.operators for id_ in operator.outputs}
    rng, made = np.random.default_rng(0), {}
    for id_, tensor in graph.tensors.items():
        if id_ in produced:
            continue
        assert tensor.shape is not None
        if tensor.dtype.kind in "iu":
            limits = np.iinfo(tensor.dtype)
            array = rng.integers(limits.min, limits.max, tensor.shape, endpoint=True)
        elif len(tensor.shape) == 1:
            array = rng.uniform(0.5, 1.5, tensor.shape)
        else:
            array = rng.normal(size=tensor.shape)
        made[str(id_)] = array.astype(tensor.dtype)
    return made


def _errors(
    graph: Graph, inputs: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]
) -> tuple[float, int, int]:
    """Return the largest error in u T, the largest difference of integers, and M."""
    program = build_program(graph)
    values, beyond, steps, count = dict(inputs), 0.0, 0, 1
    for step in program.steps:
        arrays = gather(step, values)
        outputs = run_step(step, arrays)
        if step.op in POINTWISE:
            for port, key in step.outputs.items():
                if key in theirs:
                    difference = outputs[port].astype(int) - theirs[key].astype(int)
                    steps = int(np.abs(difference).max())
        else:
            beyond = max(beyond, _of_normalisation(step, arrays, theirs))
            count = arrays["src"].size // arrays["mean"].size
        store(program, step, values, outputs)
    return beyond, steps, count


def _of_normalisation(
    step: Step, arrays: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]
) -> float:
    """Return the largest error of a batch normalisation beyond half an ulp, in u T."""
    call = registry.canonical(step.dialect, step.op, arrays, step.attributes, tuple(step.outputs))
    options = {} if call.operation == "backward" else {"activation": RELU if step.relu else None}
    oracle = getattr(reference, call.operation)
    exact = oracle(
        **call.arrays(arrays), epsilon=call.epsilon, data_format=call.data_format, **options
    )
    worst = 0.0
    for role, port in call.outputs.items():
        if step.outputs[port] in theirs:
            result, value = theirs[step.outputs[port]], getattr(exact, role)
            error = absolute_error(result, value, result.dtype) - 0.5 * ulp_at(value, result.dtype)
            terms = np.maximum(getattr(exact, f"{role}_terms"), np.finfo(np.float64).tiny)
            worst = max(worst, float((error / (UNIT * terms)).max()))
    return worst


def compare(library: str, file: Path, folder: Path) -> str:
    """Run a graph in the library; return the outcome in words."""
    graph = load_graph(file)
    inputs = _inputs(graph)
    source, target = folder / "in.npz", folder / "out.npz"
    target.unlink(missing_ok=True)
    np.savez(source, **inputs)  # type: ignore[arg-type]
    command = [sys.executable, "-m", __spec__.name, "--serve", library]
    finished = subprocess.run(  # noqa: S603
        [*command, str(file), str(source), str(target)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if finished.returncode < 0:
        return f"crashed: signal {-finished.returncode}"
    if finished.returncode != 0:
        return f"refused: {finished.stderr.strip().splitlines()[-1]}"
    with np.load(target) as found:
        types = {str(id_): graph.tensors[id_].dtype for id_ in graph.outputs}
        theirs = {name: found[name].view(dtype) for name, dtype in types.items()}
        partitions = int(found["partitions"])
    beyond, steps, count = _errors(graph, inputs, theirs)
    word = "equal" if beyond <= count and steps <= 1 else "differs"
    is_integer = all(dtype.kind in "iu" for dtype in types.values())
    error = f"{steps} steps" if is_integer else f"{beyond:.3g} u T of {count}"
    return f"{word}: {error}; {partitions} partition{'s' if partitions > 1 else ''}"


class _Version(ctypes.Structure):
    _fields_ = (
        ("numbers", c_int * 3),
        ("hash", c_char_p),
        ("cpu_runtime", ctypes.c_uint),
        ("gpu_runtime", ctypes.c_uint),
    )

    @property
    def text(self) -> str:
        return ".".join(map(str, self.numbers))


def _version(path: object) -> _Version:
    function = ctypes.CDLL(str(path)).dnnl_version
    function.restype = ctypes.POINTER(_Version)
    found: _Version = function().contents
    return found


def main() -> None:
    """Print a row for each graph, and a column for each library."""
    libraries = sys.argv[1:] or [find() or sys.exit("onednn-cpu-gomp is not installed")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        print(
            "| graph |",
            " | ".join(f"oneDNN {_version(path).text}" for path in libraries),
            "|",
        )
        print("|---" * (1 + len(libraries)) + "|")
        for file in sorted((folder / "3.2").rglob("*.json")):
            cells = [compare(str(path), file, folder) for path in libraries]
            print("|", file.relative_to(folder / "3.2"), "|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        _serve(*sys.argv[2:])
    else:
        main()
