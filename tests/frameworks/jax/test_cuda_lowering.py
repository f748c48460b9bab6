"""What is lowered for CUDA devices: kernels or formulas; and kernels compiled, without a device.

jax-triton compiles with nothing but the files that JAX brings for CUDA.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import backnorm.jax
from backnorm.errors import ArgumentValueError
from backnorm.gpu.device import KNOWN
from backnorm.jax import cuda, ffi, launches
from tests.support import internals
from tests.support.dtypes import ELEMENT_TYPES

from .conftest import EPSILON

ASKED = "BACKNORM_JAX_CUDA"
TARGET = "triton_kernel_call"
# One launch does all; and never, since a row holds a few channels many times over.
ONE, SEVERAL = (6, 5, 3, 4), (300, 3)


def normalised(x, gamma, beta):
    return backnorm.jax.batch_norm(x, gamma, beta, epsilon=EPSILON, axis=1)


def trained(x, gamma, beta):
    (y, *_), pull_back = jax.vjp(normalised, x, gamma, beta)
    return y, pull_back((jnp.sin(y), gamma, beta))


def inferred(x, gamma, beta):
    return backnorm.jax.batch_norm_inference(
        x, beta, gamma * gamma, gamma, beta, epsilon=EPSILON, axis=1
    )


def inputs(shape, dtype="float32"):
    statistics = "float64" if dtype == "float64" else "float32"
    channels = jax.ShapeDtypeStruct(shape[1:2], statistics)
    return jax.ShapeDtypeStruct(shape, dtype), channels, channels


def lowered(function, *operands):
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.delenv(ASKED, raising=False)
    kept = launches.reason_against, launches._library, cuda.warn_of_formulas
    for function in kept:
        function.cache_clear()
    jax.clear_caches()
    yield
    for function in kept:
        function.cache_clear()
    jax.clear_caches()


@pytest.fixture
def at_hand(monkeypatch):
    """A device, and jax-triton, as far as the choice is concerned."""
    monkeypatch.setattr(cuda, "device", lambda: KNOWN["h200"])
    monkeypatch.setattr(launches, "is_installed", lambda: True)
    monkeypatch.setattr(launches, "reason_against", lambda: None)


@pytest.fixture
def real(monkeypatch):
    """jax-triton itself, and a device that is not there."""
    if importlib.util.find_spec("jax_triton") is None:
        pytest.skip("jax-triton is not installed")
    from jax._src.lib import gpu_triton

    if not hasattr(gpu_triton, "TritonKernel"):
        pytest.skip("JAX's files for CUDA are not installed: jax-cuda12-plugin")
    monkeypatch.setattr(cuda, "device", lambda: KNOWN["h200"])


class TestChoice:
    X = (4, 3)

    def test_by_kernels_with_device_and_jax_triton_returns_true(self, at_hand):
        assert cuda.by_kernels(self.X, None)

    def test_by_kernels_without_jax_triton_returns_false(self, at_hand, monkeypatch):
        monkeypatch.setattr(launches, "is_installed", lambda: False)
        assert not cuda.by_kernels(self.X, None)

    def test_lowering_without_device_uses_formulas(self):
        assert cuda.device() is None
        assert TARGET not in lowered(trained, *inputs(ONE))

    def test_lowering_with_formulas_requested_uses_formulas(self, at_hand, monkeypatch):
        monkeypatch.setenv(ASKED, "formulas")
        assert TARGET not in lowered(trained, *inputs(ONE))

    @pytest.mark.parametrize(
        ("installed", "reason", "device", "said"),
        [
            (False, None, KNOWN["h200"], "jax-triton is not installed"),
            (True, None, None, "no CUDA device"),
            (True, "jax-triton 0.3.0 is older than 0.3.1", KNOWN["h200"], "0.3.0 is older"),
        ],
    )
    def test_lowering_with_unavailable_kernels_requested_raises_argument_value_error(
        self, installed, reason, device, said, monkeypatch
    ):
        monkeypatch.setenv(ASKED, "triton")
        monkeypatch.setattr(launches, "is_installed", lambda: installed)
        monkeypatch.setattr(launches, "reason_against", lambda: reason)
        monkeypatch.setattr(cuda, "device", lambda: device)
        monkeypatch.setattr(cuda, "warn_of_formulas", lambda *_: None)
        with pytest.raises(ArgumentValueError, match=f"(?s)BACKNORM_JAX_CUDA.*{said}"):
            lowered(trained, *inputs(ONE))

    def test_lowering_with_unknown_request_raises_argument_value_error(self, monkeypatch):
        monkeypatch.setenv(ASKED, "cudnn")
        with pytest.raises(ArgumentValueError, match=r"'cudnn'.*triton, formulas"):
            lowered(trained, *inputs(ONE))

    def test_cpu_call_with_kernels_requested_succeeds(self, monkeypatch):
        monkeypatch.setenv(ASKED, "triton")
        x, channels = jnp.ones((2, 3)), jnp.ones(3)
        normalised(x, channels, channels)

    def test_export_with_symbolic_sizes_uses_formulas_or_raises(self, at_hand, monkeypatch):
        (batch,) = export.symbolic_shape("batch")
        operands = (jax.ShapeDtypeStruct((batch, 5, 3), "float32"), *inputs(ONE)[1:])
        exported = export.export(jax.jit(inferred), platforms=["cuda"])(*operands)
        assert TARGET not in exported.mlir_module()
        monkeypatch.setenv(ASKED, "triton")
        jax.clear_caches()
        with pytest.raises(ArgumentValueError, match="symbolic"):
            export.export(jax.jit(inferred), platforms=["cuda"])(*operands)

    def test_by_kernels_with_broken_jax_triton_warns_and_returns_false(self, monkeypatch):
        monkeypatch.setattr(launches, "is_installed", lambda: True)

        def broken():
            raise AttributeError("jax.core.Primitive")

        internals.jax_triton_is(monkeypatch, broken)
        with pytest.warns(RuntimeWarning, match=r"AttributeError: jax\.core\.Primitive"):
            assert not cuda.by_kernels(self.X, None)

    @pytest.mark.parametrize(
        ("version", "old"), [("0.3.0", True), ("0.3.1", False), ("1.0", False)]
    )
    def test_reason_against_rejects_only_old_jax_triton(self, version, old, monkeypatch):
        internals.jax_triton_is(monkeypatch, lambda: type("", (), {"__version__": version}))
        assert (launches.reason_against() is not None) == old


def mesh(*names):
    sizes = (4,) if len(names) == 1 else (2, 2)
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


class TestSeveralDevices:
    """XLA splits formulas, but no call."""

    @pytest.fixture(autouse=True)
    def recorded(self, at_hand, monkeypatch):
        """Whether kernels were chosen, in place of compiling them."""
        self.chosen = []
        original = cuda.by_kernels

        def by_kernels(*operands):
            self.chosen.append(original(*operands))
            return False

        monkeypatch.setattr(cuda, "by_kernels", by_kernels)

    def spread(self):
        arrays = jnp.ones((8, 5, 3)), jnp.ones(5), jnp.zeros(5)
        places = P("batch"), P(), P()
        return [
            jax.device_put(each, NamedSharding(mesh("batch"), place))
            for each, place in zip(arrays, places, strict=True)
        ]

    def test_lowering_for_one_device_chooses_kernels(self):
        lowered(trained, *inputs(ONE))
        assert self.chosen == [True, True]

    def test_lowering_of_sharded_arrays_chooses_formulas(self):
        lowered(trained, *self.spread())
        assert self.chosen == [False, False]

    def test_lowering_of_sharded_arrays_with_kernels_requested_chooses_kernels(self, monkeypatch):
        monkeypatch.setenv(ASKED, "triton")
        lowered(trained, *self.spread())
        assert self.chosen == [True, True]

    def test_lowering_in_shard_map_chooses_kernels(self):
        places = P("batch"), P(), P()

        def function(x, gamma, beta):
            return normalised(x, gamma, beta)[0]

        each = jax.shard_map(function, mesh=mesh("batch"), in_specs=places, out_specs=P("batch"))
        lowered(each, *self.spread())
        assert self.chosen == [True]

    def test_lowering_in_shard_map_over_some_axes_chooses_formulas(self):
        places = P("batch"), P(), P()

        def function(x, gamma, beta):
            return normalised(x, gamma, beta)[0]

        each = jax.shard_map(
            function, mesh=mesh("batch", "model"), in_specs=places, out_specs=P("batch"),
            axis_names={"batch"},
        )  # fmt: skip
        lowered(each, *inputs((8, 5, 3)))
        assert self.chosen == [False]

    def test_lowering_in_pmap_chooses_kernels(self):
        operands = [jax.ShapeDtypeStruct((4, *each.shape), each.dtype) for each in inputs(ONE)]
        lowered(jax.pmap(inferred), *operands)
        assert self.chosen == [True]


class TestCompiled:
    """By jax-triton."""

    @pytest.fixture(params=["h200", "a100", "t4"])
    def device(self, request, real, monkeypatch):
        monkeypatch.setattr(cuda, "device", lambda: KNOWN[request.param])
        return KNOWN[request.param]

    @pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
    @pytest.mark.parametrize(("shape", "calls"), [(ONE, 2), (SEVERAL, 6)])
    def test_lowered_training_calls_kernels_compiled_for_device(self, shape, calls, dtype, device):
        text = lowered(trained, *inputs(shape, dtype.name))
        assert text.count(f"@{TARGET}(") == calls
        major, minor = device.capability
        found = re.findall(r'backend_config = "((?:[^"\\]|\\.)*)"', text)
        assert len(found) == calls
        for machine_code in found:
            ptx = decoded(machine_code)
            assert f".target sm_{major}{minor}".encode() in ptx
            # What the `ptxas` of CUDA 12.9 assembles, the last of those for `jax[cuda12]`.
            assert b".version 8.8" in ptx

    def test_lowered_inference_and_frozen_backward_make_four_kernel_calls(self, real):
        def both(x, gamma, beta):
            options = {"epsilon": EPSILON, "axis": 1}
            y = inferred(x, gamma, beta)
            return backnorm.jax.batch_norm_backward(
                x, y, beta, gamma, gamma, **options, training=False
            )

        assert lowered(both, *inputs(SEVERAL)).count(f"@{TARGET}(") == 4

    @pytest.mark.parametrize("shape", [ONE, SEVERAL])
    def test_lowered_sums_without_x64_keep_64_bits(self, shape, real):
        wide = lowered(trained, *inputs(shape))
        with jax.enable_x64(False):
            narrow = lowered(trained, *inputs(shape))
        calls = [re.findall(rf"@{TARGET}\(.*-> (.*)", text) for text in (wide, narrow)]
        assert calls[0] == calls[1]
        assert ("f64" in str(calls[1])) == (shape == SEVERAL)

    def test_lowered_vmap_makes_as_many_kernel_calls_as_one_instance(self, real):
        operands = [jax.ShapeDtypeStruct((7, *each.shape), each.dtype) for each in inputs(SEVERAL)]
        text = lowered(jax.vmap(trained), *operands)
        assert text.count(f"@{TARGET}(") == 6
        assert "tensor<300x21x1xf32>" in text

    def test_lowering_with_a_size_of_1_reuses_compiled_kernel(self, real):
        from jax_triton import triton_lib

        triton_lib._COMPILED_KERNEL_CACHE.clear()
        # A row of every channel is one tile, and two.
        lowered(inferred, *inputs((64, 3, 32, 32)))
        lowered(inferred, *inputs((64, 3, 32, 64)))
        assert len(triton_lib._COMPILED_KERNEL_CACHE) == 1

    @pytest.mark.parametrize("shape", [(3, 1, 7), (2, 1), (1, 2, 8), (1, 1), (300, 1, 400)])
    def test_lowering_of_axes_of_size_1_calls_kernels(self, shape, real):
        assert f"@{TARGET}(" in lowered(trained, *inputs(shape))

    @pytest.mark.parametrize("platforms", [["cpu", "cuda"], ["cuda", "cpu", "tpu"]])
    def test_export_for_cpu_and_cuda_contains_calls_of_both(self, platforms, real):
        checks = [export.DisabledSafetyCheck.custom_call(each) for each in (TARGET, ffi.TARGET)]
        exported = export.export(jax.jit(trained), platforms=platforms, disabled_checks=checks)
        module = exported(*inputs(ONE)).mlir_module()
        assert f"@{TARGET}" in module
        assert f"@{ffi.TARGET}" in module

    def test_lowering_does_not_change_triton_assembler(self, real):
        from triton import knobs

        before = knobs.nvidia.ptxas_blackwell
        lowered(inferred, *inputs(ONE))
        assert knobs.nvidia.ptxas_blackwell == before
        assert "TRITON_PTXAS_BLACKWELL_PATH" not in os.environ

    def test_reason_against_does_not_change_triton_cache_dir(self, real):
        code = (
            "import os, backnorm.jax.launches as launches;"
            "assert launches.reason_against() is None;"
            "assert os.environ.get('TRITON_CACHE_DIR') == {!r};"
        )
        for folder in (None, "/somewhere"):
            environment = {**os.environ, "TRITON_CACHE_DIR": folder or ""}
            if folder is None:
                del environment["TRITON_CACHE_DIR"]
            subprocess.run([sys.executable, "-c", code.format(folder)], env=environment, check=True)


def decoded(text):
    """Return the bytes of a string of MLIR's, decompressed."""
    quoted = re.compile(rb"\\([0-9A-F]{2}|.)")

    def byte(match):
        found = match.group(1)
        return bytes([int(found, 16)]) if len(found) == 2 else found

    return zlib.decompress(quoted.sub(byte, text.encode()))


def test_size_equals_same_size_but_not_int():
    size = launches._Size
    assert size(1) != 1
    assert size(1) == size(1) != size(2)
    assert len({size(1), size(1), size(2)}) == 2
    assert int(size(1)) == 1
    assert np.int64(int(size(3))) == 3
