"""The custom call: the header that it relies on, the calls that it rejects, and threads."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import backnorm.jax
from backnorm.executable import executable
from backnorm.jax import ffi
from backnorm.problem import Problem
from backnorm_kernels import engine, xla
from backnorm_kernels.kinds import LIBRARIES
from backnorm_kernels.record import ADDRESSES, CLAIMED, LAYOUT, LINE, SLOTS
from backnorm_kernels.xla_structures import offsets

from .conftest import EPSILON, agree
from .xla_header import differences

INCLUDED = Path(jax.ffi.include_dir())
HEADER = Path("xla") / "ffi" / "api" / "c_api.h"
EVERY = [kind for each in LIBRARIES.values() for kind in each.kinds]
FOREIGN = r"FAILED_PRECONDITION: backnorm: the record .* of another version of backnorm"


def backward(*arrays):
    return backnorm.jax.batch_norm_backward(*arrays, epsilon=EPSILON, axis=1)


@pytest.fixture
def make_operands(rng):
    """Return a function that makes x, dy, mean and variance; large enough for helpers."""

    def make(shape=(32, 8, 40, 40), seed=0):
        again = np.random.default_rng(seed)
        arrays = [again.normal(size=shape) for _ in range(2)]
        arrays += [again.normal(size=shape[1]), again.random(shape[1]) + 0.5]
        return [jnp.asarray(each, jnp.float32) for each in arrays]

    return make


class TestHeader:
    @pytest.fixture
    def changed(self, tmp_path):
        """Return what differs in a header in which one text is another."""

        def read(old, new):
            text = (INCLUDED / HEADER).read_text()
            assert old in text
            path = tmp_path / "c_api.h"
            path.write_text(text.replace(old, new))
            return differences(path)

        return read

    def test_differences_of_installed_header_returns_none(self):
        assert differences(INCLUDED / HEADER) == []
        assert ffi.reason_against() is None

    def test_offsets_match_compiler_layout(self):
        # As a compiler has them.
        assert offsets("CallFrame").attrs == 120
        assert offsets("CallFrame").size_ == 168
        assert offsets("Error_Create_Args").size_ == 28
        assert offsets("Buffer").dims == 40
        assert offsets("Metadata").traits == 32
        assert offsets("Api").ThreadPool_Schedule == 136

    @pytest.mark.parametrize(
        ("old", "new", "structure"),
        [
            ("  int64_t rank;\n", "  int32_t rank;\n", "Buffer"),
            ("  void* data;\n  int64_t rank;", "  int64_t rank;\n  void* data;", "Buffer"),
            ("  XLA_FFI_ExecutionStage stage;\n  XLA_FFI_Args args;", "  XLA_FFI_Args args;",
             "CallFrame"),
            ("  XLA_FFI_Task* task;", "  XLA_FFI_Task* task;\n  int64_t priority;",
             "ThreadPool_Schedule_Args"),
            ("  _XLA_FFI_API_STRUCT_FIELD(XLA_FFI_Stream_Get);\n", "", "Api"),
            ("struct XLA_FFI_Array {", "struct XLA_FFI_Arrays {", "Array"),
        ],
    )  # fmt: skip
    def test_differences_of_header_with_other_layout_reports_structure(
        self, old, new, structure, changed
    ):
        assert f"XLA_FFI_{structure}" in changed(old, new)

    def test_differences_of_header_with_other_type_code_reports_type(self, changed):
        assert changed("XLA_FFI_DataType_BF16 = 16", "XLA_FFI_DataType_BF16 = 34") == ["bfloat16"]

    def test_differences_ignores_fields_added_at_end(self, changed):
        end = ("  XLA_FFI_Future* future;  // out\n};\n\nXLA_FFI_DEFINE_STRUCT_"
               "TRAITS(XLA_FFI_CallFrame")  # fmt: skip
        assert changed(end, end.replace("// out\n", "// out\n  void* more;\n")) == []


class TestVersion:
    @pytest.fixture
    def without_interface(self, tmp_path, monkeypatch):
        """Return a function that puts another header in the place of jaxlib's; None: no header."""

        def install(text):
            monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
            if text is not None:
                path = tmp_path / HEADER
                path.parent.mkdir(parents=True)
                path.write_text(text)
            ffi.version.cache_clear()
            ffi.is_usable.cache_clear()
            jax.clear_caches()

        yield install
        monkeypatch.undo()
        ffi.version.cache_clear()
        ffi.is_usable.cache_clear()
        jax.clear_caches()

    @pytest.mark.covering(0)
    @pytest.mark.parametrize(
        ("header", "came"),
        [
            (None, "none"),
            ("#define XLA_FFI_API_MAJOR 0\n", "none"),
            ("#define XLA_FFI_API_MAJOR 0\n#define XLA_FFI_API_MINOR 77\n", "0.77"),
            ("#define XLA_FFI_API_MAJOR 1\n#define XLA_FFI_API_MINOR 1\n", "1.1"),
        ],
    )
    def test_unknown_version_runs_formulas_and_warns(
        self, header, came, make_operands, without_interface
    ):
        arguments = make_operands((4, 8, 5, 5))
        expected = backward(*arguments)
        without_interface(header)
        with pytest.warns(RuntimeWarning, match=rf"has version {came}, expected 0\.1 to 0\.4"):
            found = jax.jit(backward)(*arguments)
        agree(found, expected, 1e-5)
        assert "backnorm_kernel" not in jax.jit(backward).lower(*arguments).as_text()

    def test_unknown_version_rejects_reproducible_sums(self, make_operands, without_interface):
        without_interface(None)
        x, *_ = make_operands((4, 8, 5, 5))
        with (
            pytest.warns(RuntimeWarning, match="has version none"),
            pytest.raises(backnorm.ArgumentValueError, match="reproducible"),
        ):
            backnorm.jax.batch_norm(x, epsilon=EPSILON, axis=1, reproducible=True)


class TestRefusals:
    """Calls that backnorm never makes: each raises an error, and the process goes on."""

    @pytest.fixture
    def called(self):
        """Return a function that makes a call of the inference kernel, with some of it changed."""
        x, channels = jnp.ones((2, 3, 4), jnp.float32), jnp.ones(3, jnp.float32)
        # The kernel, and the handler.
        float32 = np.dtype(np.float32)
        known = (2, 3, 4), (1,), float32, float32, True, True, EPSILON
        problem = Problem("inference", *known, arithmetic="float64")
        backnorm.jax.batch_norm_inference(x, *[channels] * 4, epsilon=EPSILON, axis=1)
        stage = executable(problem).stage
        names = ("mean", "variance", "gamma", "beta")
        described = [ffi._described(engine, x, "x", 1)]
        described += [ffi._described(engine, channels, name, 1) for name in names]
        described.append(ffi._described(engine, x, "out", 1))

        def call(*operands, result=x, **changed):
            attributes = {
                "buffers": np.concatenate(described),
                "call": np.array([xla.register(stage.kind), 1, stage.participants - 1]),
                "record": stage.template,
            }
            for name, change in changed.items():
                attributes[name] = change(attributes.get(name))
            kept = {name: value for name, value in attributes.items() if value is not None}
            kind = jax.ShapeDtypeStruct(result.shape, result.dtype)
            function = jax.ffi.ffi_call(ffi.TARGET, kind)
            operands = operands or (x, *[channels] * 4)
            return np.asarray(jax.jit(lambda *arrays: function(*arrays, **kept))(*operands))

        return call

    def at(self, place, value):
        def change(array):
            array = array.copy()
            array[place] = value
            return array

        return change

    def by(self, array, place, difference):
        """Return an array with one number changed."""
        array = array.copy()
        array[place] += difference
        return array

    def for_many(self, array, participants, own_bytes=None):
        """Return a record for so many participants, each with so much memory."""
        made = np.zeros(CLAIMED + 2 * LINE * participants, np.int64)
        made[:CLAIMED] = array[:CLAIMED]
        for name in ("scratch", "own"):
            made[SLOTS[name]] += made.nbytes - array.nbytes
        if own_bytes is not None:
            made[SLOTS["own_bytes"]] = own_bytes
        made[SLOTS["participants"]] = participants
        made[SLOTS["bytes"]] = made[SLOTS["own"]] + participants * made[SLOTS["own_bytes"]]
        return made

    def test_custom_call_without_change_returns_result(self, called):
        np.testing.assert_allclose(called(), 1.0, rtol=1e-6)

    @pytest.mark.parametrize(
        "changed",
        [
            {"record": lambda array: array[:-1]},
            {"record": lambda array: np.append(array, 0)},
            {"record": lambda array: array.astype(np.int32)},
            {"record": lambda _: None},
            {"record": lambda _: np.int64(3)},
            {"call": lambda array: array[:2]},
            {"buffers": lambda array: array[:-6]},
            {"buffers": lambda array: np.concatenate([array, array[:6]])},
            {"more": lambda _: np.zeros(3, np.int64)},
            {"call": lambda _: None, "zall": lambda _: np.zeros(3, np.int64)},
        ],
    )
    def test_custom_call_with_malformed_attributes_raises_runtime_error(self, changed, called):
        with pytest.raises(jax.errors.JaxRuntimeError, match="backnorm: the attributes are not"):
            called(**changed)

    @pytest.mark.parametrize(
        "changed",
        [
            ("call", 1, -1),
            ("call", 2, -1),
            ("call", 2, 1 << 16),
            ("call", 2, 1 << 40),
            ("buffers", 0, -1),
            ("buffers", 0, len(ADDRESSES)),
            ("record", SLOTS["bytes"], -1),
            ("record", SLOTS["bytes"], 1 << 50),
        ],
    )
    def test_custom_call_with_numbers_out_of_bounds_raises_runtime_error(self, changed, called):
        name, place, value = changed
        with pytest.raises(jax.errors.JaxRuntimeError, match="backnorm: the attributes are not"):
            called(**{name: self.at(place, value)})

    @pytest.mark.parametrize("name", ["bytes", "scratch", "own", "own_bytes", "participants"])
    def test_custom_call_with_inconsistent_record_sizes_raises_runtime_error(self, name, called):
        for change in (-(1 << 62), -64, -1, 1, 64, 1 << 41, 1 << 62):
            with pytest.raises(jax.errors.JaxRuntimeError, match="backnorm: the attributes are"):
                called(record=lambda array, by=change: self.by(array, SLOTS[name], by))

    def test_custom_call_with_record_too_small_for_participants_raises_runtime_error(self, called):
        # The record and the call agree, but there are no cells for the claims of the second.
        with pytest.raises(jax.errors.JaxRuntimeError, match="backnorm: the attributes are not"):
            called(record=self.at(SLOTS["participants"], 2), call=self.at(2, 1))

    def test_custom_call_with_1000_participants_returns_result(self, called):
        found = called(record=lambda array: self.for_many(array, 1000), call=self.at(2, 999))
        np.testing.assert_allclose(found, 1.0, rtol=1e-6)

    def test_custom_call_beyond_available_memory_raises_runtime_error(self, called):
        # More than a processor can address.
        with pytest.raises(jax.errors.JaxRuntimeError, match="backnorm: no memory"):
            called(
                record=lambda array: self.for_many(array, 1000, own_bytes=1 << 39),
                call=self.at(2, 999),
            )

    @pytest.mark.parametrize("layout", [LAYOUT - 1, LAYOUT + 1, LAYOUT ^ 1 << 40, 0, -1])
    def test_custom_call_with_record_of_other_layout_raises_runtime_error(self, layout, called):
        with pytest.raises(jax.errors.JaxRuntimeError, match=FOREIGN):
            called(record=self.at(SLOTS["layout"], layout))

    @pytest.mark.parametrize("cells", [0, 5, CLAIMED - 1])
    def test_custom_call_with_truncated_record_head_raises_runtime_error(self, cells, called):
        with pytest.raises(jax.errors.JaxRuntimeError, match=FOREIGN):
            called(record=lambda array: array[:cells])

    @pytest.mark.parametrize("number", [12345, 0, -1])
    def test_custom_call_of_unloaded_kernel_raises_runtime_error(self, number, called):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"NOT_FOUND.*backnorm: .*not loaded"):
            called(call=self.at(0, number))

    @pytest.mark.parametrize("column", [1, 2, 3])
    def test_custom_call_with_wrong_buffer_description_raises_runtime_error(self, column, called):
        for k in range(5):
            with pytest.raises(jax.errors.JaxRuntimeError, match="backnorm: an argument is not"):
                called(buffers=self.at(5 * k + column, 7))
        with pytest.raises(jax.errors.JaxRuntimeError, match="backnorm: a result is not"):
            called(buffers=self.at(5 * 5 + column, 7))

    def test_custom_call_with_other_arrays_raises_runtime_error(self, called):
        x, channels = jnp.ones((2, 3, 4), jnp.float32), jnp.ones(3, jnp.float32)
        for other in (x.astype(jnp.float16), x[:1], x.reshape(6, 4)):
            with pytest.raises(jax.errors.JaxRuntimeError, match="backnorm: an argument is not"):
                called(other, *[channels] * 4)
            with pytest.raises(jax.errors.JaxRuntimeError, match="backnorm: a result is not"):
                called(result=other)
        with pytest.raises(jax.errors.JaxRuntimeError, match="backnorm: the attributes are not"):
            called(x, channels)

    def test_custom_call_with_negative_variance_raises_runtime_error(self, called):
        # Our functions see to it that none comes here.
        x, channels = jnp.ones((2, 3, 4), jnp.float32), jnp.ones(3, jnp.float32)
        with pytest.raises(jax.errors.JaxRuntimeError, match="backnorm: variance"):
            called(x, channels, -channels, channels, channels)


class TestThreads:
    def test_kernel_finishes_while_caller_holds_gil(self, make_operands):
        x, dy, mean, variance = make_operands()

        @jax.jit
        def function(x, dy, mean, variance):
            # Work that XLA does not do at once, in the thread that called.
            x = jax.lax.fori_loop(0, 100, lambda _, x: jnp.sin(x) + 1e-3, x)
            return backward(x, dy, mean, variance)

        jax.block_until_ready(function(x, dy, mean, variance))
        results = function(x, dy, mean, variance)
        assert not results[0].is_ready()
        hold = ctypes.PyDLL(None).usleep  # does not let go of the GIL
        for _ in range(100):
            hold(100_000)
            # This looks without letting go of it either.
            if results[0].is_ready():
                break
        assert results[0].is_ready()

    def test_jit_in_concurrent_threads_has_the_same_bits(self, make_operands):
        function = jax.jit(backward)
        failed = []

        def work(seed):
            # Of different sizes: with and without helpers.
            inputs = make_operands((32, 8, 40, 40) if seed % 2 else (4, 8, 6, 6), seed)
            expected = [np.asarray(each) for each in function(*inputs)]
            for _ in range(100):
                found = [np.asarray(each) for each in function(*inputs)]
                if not all(map(np.array_equal, found, expected)):
                    failed.append(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
        assert failed == []

    def test_independent_calls_in_one_function_match_separate_calls(self, make_operands):
        x, dy, mean, variance = make_operands()

        @jax.jit
        def several(x, dy, mean, variance):
            # Independent of each other: XLA may run them side by side.
            return [backward(x * scale, dy, mean, variance) for scale in (1.0, 2.0, 3.0, 4.0)]

        found = several(x, dy, mean, variance)
        for scale, each in zip((1.0, 2.0, 3.0, 4.0), found, strict=True):
            agree(each, backward(x * scale, dy, mean, variance), 1e-6)

    def test_pmap_on_all_devices_is_deterministic(self, make_operands):
        inputs = [jnp.stack([each] * 4) for each in make_operands((8, 8, 40, 40))]
        function = jax.pmap(backward)
        expected = function(*inputs)
        for _ in range(50):
            for found, each in zip(function(*inputs), expected, strict=True):
                np.testing.assert_array_equal(found, each)

    def test_vmap_of_many_instances_equals_single_call(self, make_operands):
        # One after the other within a call, each with helpers.
        inputs = [jnp.stack([each] * 20) for each in make_operands((8, 8, 40, 40))]
        found = jax.jit(jax.vmap(backward))(*inputs)
        for each, one in zip(found, backward(*make_operands((8, 8, 40, 40))), strict=True):
            np.testing.assert_array_equal(each, jnp.stack([one] * 20))

    def test_process_exit_during_calls_succeeds(self):
        # While calls are under way.
        code = (
            "import jax, jax.numpy as jnp, backnorm.jax as bj\n"
            "f = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, x: "
            "bj.batch_norm(x, epsilon=1e-3, axis=1)[0] + 1.0, x))\n"
            "x = jnp.ones((32, 8, 40, 40))\n"
            "jax.block_until_ready(f(x))\n"
            "kept = [f(x + k) for k in range(4)]\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_backward_with_donated_arrays_returns_the_same_results(make_operands):
    inputs = make_operands()
    expected = [np.asarray(each) for each in jax.jit(backward)(*inputs)]
    for donated in ((0,), (1,), (0, 1)):
        copies = [each + 0.0 for each in inputs]
        found = jax.jit(backward, donate_argnums=donated)(*copies)
        for each, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(each, other)


def test_jit_of_unaligned_numpy_input_equals_numpy_function(make_operands):
    # Of the caller's alignment.
    memory = np.random.default_rng(0).normal(size=4 * 3 * 50 + 1).astype(np.float32)
    x = memory[1:].reshape(4, 3, 50)
    x.flags.writeable = False
    found = jax.jit(lambda x: backnorm.jax.batch_norm(x, epsilon=EPSILON, axis=1))(x)
    y, mean, variance = backnorm.batch_norm_forward(x, epsilon=EPSILON)
    for mine, other in zip(found, (y, mean, variance), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_number_of_is_unique_for_each_kernel():
    assert len({xla.number_of(kind) for kind in EVERY}) == len(EVERY)


def test_register_of_known_kernels_keeps_table():
    def table():
        _, _, _, known, *entries = xla._environment()
        return list(zip(entries[::2], entries[1::2], strict=True))[:known]

    before, numbers = table(), {kind: xla.number_of(kind) for kind in EVERY}
    there = [kind for kind in EVERY if numbers[kind] in dict(before)]
    assert there
    threads = [threading.Thread(target=xla.register, args=(kind,)) for kind in there * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    xla.register_built()
    ffi.register()
    after = table()
    # Another process may have built more.
    assert after[: len(before)] == before
    assert len(dict(after)) == len(after)
