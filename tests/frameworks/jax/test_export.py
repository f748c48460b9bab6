"""Functions that are exported by one process and run in another, which has traced none of them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import backnorm.jax
from backnorm.jax.ffi import TARGET
from backnorm_kernels.record import LAYOUT

from .conftest import EPSILON

# Large enough for helpers.
COMMON = """
    import sys
    from pathlib import Path
    import numpy as np
    import jax
    from jax import export

    jax.config.update("jax_enable_x64", True)
    folder = Path(sys.argv[1])

    def arrays(name, axis):
        rng = np.random.default_rng(0)
        parts = 2 if name == "mapped" else 1
        shape = (parts, 16, 8, 40, 40) if axis == 1 else (parts, 16, 40, 40, 8)
        shapes = (shape, shape, (parts, 8), (parts, 8))
        dtype = "float32" if name == "mapped" else name
        found = [jax.numpy.asarray(rng.normal(size=each), dtype) for each in shapes]
        return found if name == "mapped" else [each[0] for each in found]

    def write(name, found):
        np.savez(folder / name, *[np.asarray(each).view(np.uint8) for each in found])

    NAMES = [
        (name, axis)
        for name in ("float64", "float32", "float16", "bfloat16", "mapped")
        for axis in (1, -1)
    ]
"""

EXPORTING = (
    COMMON
    + f"""
    import dataclasses
    import backnorm.jax
    from backnorm import engines
    from backnorm.machine import detect

    threads, launched, original = int(sys.argv[2]), [], engines.planned
    # As if this machine had as many processors.
    engines._machine = lambda _: dataclasses.replace(detect(), threads=threads)

    def planned(problem, extents, place):
        plan, launch = original(problem, extents, place)
        launched.append(launch.stage(problem.operation).participants)
        return plan, launch

    engines.planned = planned

    def step(axis):
        how = {{"epsilon": {EPSILON}, "axis": axis}}

        def function(x, dy, gamma, beta):
            found = backnorm.jax.batch_norm(x, gamma, beta, **how)
            gradients = backnorm.jax.batch_norm_backward(x, dy, *found[1:], gamma, **how)
            y = backnorm.jax.batch_norm_inference(x, *found[1:], gamma, beta, **how)
            return *found, *gradients, y

        return function

    allowed = [export.DisabledSafetyCheck.custom_call("{TARGET}")]
    for name, axis in NAMES:
        function = step(axis)
        compiled = jax.jit(jax.vmap(function) if name == "mapped" else function)
        given = arrays(name, axis)
        (folder / f"{{name}}{{axis}}.txt").write_text(compiled.lower(*given).as_text())
        exported = export.export(compiled, disabled_checks=allowed)(*given)
        (folder / f"{{name}}{{axis}}.exported").write_bytes(exported.serialize())
        write(f"{{name}}{{axis}}", compiled(*given))
    assert set(launched) == {{threads}}, launched
"""
)

RUNNING = (
    """
    import os, sys
    # Before JAX counts the processors.
    if sys.argv[2] == "one":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
"""
    + COMMON
    + """
    import backnorm.jax

    for name, axis in NAMES:
        exported = export.deserialize((folder / f"{name}{axis}.exported").read_bytes())
        write(f"{name}{axis}.again", exported.call(*arrays(name, axis)))
    assert not {"numba", "llvmlite"} & set(sys.modules)
"""
)


def run(program, *arguments, seed=0):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
    )
    assert done.returncode == 0, done.stderr[-3000:]


def results(folder, ending):
    found = {}
    for path in sorted(Path(folder).glob(f"*[1]{ending}.npz")):
        with np.load(path) as arrays:
            found[path.name.removesuffix(f"{ending}.npz")] = [
                arrays[name].tobytes() for name in arrays
            ]
    assert len(found) == 10
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return folders with what was exported, by the number of threads; for four, twice."""
    made = {}
    for seed, name in enumerate(("1", "4", "4 again")):
        made[name] = tmp_path_factory.mktemp("exported")
        run(EXPORTING, made[name], name.split()[0], seed=seed)
    return made


@pytest.mark.long
@pytest.mark.parametrize("processors", ["all", "one"])
@pytest.mark.parametrize("threads", ["1", "4"])
def test_exported_function_in_new_process_has_the_same_bits(folders, threads, processors):
    if processors == "one" and not hasattr(os, "sched_setaffinity"):
        pytest.skip("processes cannot be kept to one processor")
    run(RUNNING, folders[threads], processors)
    assert results(folders[threads], ".again") == results(folders[threads], "")


@pytest.mark.long
def test_jit_bits_do_not_depend_on_planned_thread_count(folders):
    assert results(folders["4"], "") == results(folders["1"], "")


@pytest.mark.long
def test_export_does_not_depend_on_exporting_process(folders):
    # No address, for one.
    for ending in ("*.txt", "*.exported"):
        paths = sorted(folders["4"].glob(ending))
        assert len(paths) == 10
        for path in paths:
            assert path.read_bytes() == (folders["4 again"] / path.name).read_bytes(), path.name


def test_exported_function_of_other_layout_raises_jax_runtime_error():
    allowed = [export.DisabledSafetyCheck.custom_call(TARGET)]
    function = jax.jit(lambda x: backnorm.jax.batch_norm(x, epsilon=EPSILON)[0])
    x = jnp.ones((4, 3), jnp.float32)
    text = bytes(export.export(function, disabled_checks=allowed)(x).serialize())
    known, other = (number.to_bytes(8, "little") for number in (LAYOUT, LAYOUT + 1))
    assert text.count(known) == 1
    again = export.deserialize(bytearray(text.replace(known, other)))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"backnorm: the record .* another ver"):
        jax.block_until_ready(again.call(x))


class TestImport:
    @pytest.mark.long
    def test_import_creates_no_jax_backends(self):
        # What JAX is told before it makes them still counts.
        run("import jax, backnorm.jax, jax._src.xla_bridge as b; assert not b._backends")

    def test_import_compiles_no_kernels(self, tmp_path):
        run(
            """
            import sys
            from pathlib import Path
            from backnorm_kernels import library

            library.FOLDER = Path(sys.argv[1])
            import backnorm.jax

            built = {path.name.partition("-")[0] for path in library.FOLDER.rglob("*.so")}
            # What this processor can has to be known.
            assert built <= {"probe"}, built
            """,
            tmp_path,
        )

    @pytest.mark.long
    def test_import_with_unknown_cpu_level_defers_error_to_first_call(self, monkeypatch):
        monkeypatch.setenv("BACKNORM_CPU_LEVEL", "x86-64-v40")
        run(
            """
            import jax
            import backnorm.jax

            try:
                backnorm.jax.batch_norm(jax.numpy.ones((4, 3)), epsilon=1e-3)
            except backnorm.ArgumentError as error:
                assert "BACKNORM_CPU_LEVEL" in str(error), error
            else:
                raise AssertionError("no error")
            """
        )
