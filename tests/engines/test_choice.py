"""The engine of a call comes from the block, the environment, or the installed packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import backnorm
from backnorm import engines
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from tests.support.engines import NAMES

X = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
INSTALL = "pip install ./kernels in a checkout of backnorm"

# The beginning of a program: a call, and the engine that plans it.
BEGIN = """
import warnings
import numpy as np
import backnorm
x = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
def call():
    return backnorm.batch_norm_forward(x, epsilon=1e-5)
def planned():
    text = str(backnorm.explain(x, x, x[0, :, 0], x[0, :, 0], epsilon=1e-5))
    return "numpy" if "engine   numpy" in text else "kernels"
def large():
    big = np.empty((1, 1, (1 << 22) + 1), np.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            backnorm.explain(big, big, big[0, :, 0], big[0, :, 0], epsilon=1e-5)
        backnorm.explain(big[..., 1:], big[..., 1:], big[0, :, 0], big[0, :, 0], epsilon=1e-5)
    return [str(each.message) for each in caught]
"""


def planned(**options):
    """Return the lines of a plan that name its engine."""
    plan = backnorm.explain(X, X, X[0, :, 0], X[0, :, 0], epsilon=1e-5, **options)
    return [line.split()[1].rstrip(",") for line in str(plan).splitlines() if " engine " in line]


def said(done):
    """Return what a process printed, after it ended well."""
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", ["fortran", "NumPy", ""])
def test_engine_of_unknown_name_raises_argument_value_error(name):
    with pytest.raises(ArgumentValueError) as caught, backnorm.engine(name):
        pass
    assert str(caught.value) == (
        f"name: unknown engine; got {name!r}; expected 'kernels' or 'numpy'"
    )


@pytest.mark.parametrize("name", [None, 1, b"numpy", np])
def test_engine_of_another_type_raises_argument_type_error(name):
    with pytest.raises(ArgumentTypeError, match=r"^name: "), backnorm.engine(name):
        pass


@pytest.mark.parametrize("name", NAMES)
def test_engine_block_chooses_engine_of_plan(name):
    with backnorm.engine(name):
        assert engines.current() == name
        assert planned() == (["numpy"] if name == "numpy" else [])


def test_engine_as_decorator_chooses_engine_in_each_call():
    @backnorm.engine("numpy")
    def call():
        return engines.current(), planned()

    before = engines.current()
    for _ in range(2):
        assert call() == ("numpy", ["numpy"])
        assert engines.current() == before


@pytest.mark.parametrize("other", NAMES)
def test_inner_engine_has_precedence_and_outer_one_returns(other):
    with backnorm.engine("numpy"):
        with backnorm.engine(other):
            assert engines.current() == other
        assert engines.current() == "numpy"
        with pytest.raises(KeyError), backnorm.engine(other):
            raise KeyError
        assert engines.current() == "numpy"


def test_engine_block_does_not_affect_other_threads():
    before, found, inside, seen = engines.current(), [], threading.Event(), threading.Event()

    def other():
        inside.wait(30)
        found.append(engines.current())
        with backnorm.engine(NAMES[0]):
            seen.set()

    thread = threading.Thread(target=other)
    thread.start()
    name = "numpy" if before == "kernels" else NAMES[0]
    with backnorm.engine(name):
        inside.set()
        assert seen.wait(30)
        assert engines.current() == name
    thread.join()
    assert found == [before]


@pytest.mark.parametrize("variable", ["numpy", *NAMES])
def test_engine_block_has_precedence_over_environment_variable(variable):
    code = (
        BEGIN
        + """
print(planned())
with backnorm.engine("numpy"):
    print(planned())
"""
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "BACKNORM_ENGINE": variable},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert said(done).split() == [variable, "numpy"]


@pytest.mark.parametrize("value", ["fortran", "", "Numpy"])
def test_call_with_bad_environment_variable_raises_argument_value_error(value, without_kernels):
    code = (
        BEGIN
        + """
for _ in range(2):
    try:
        call()
    except backnorm.ArgumentValueError as error:
        print(error)
with backnorm.engine("numpy"):
    call()
"""
    )
    lines = said(without_kernels(code, BACKNORM_ENGINE=value)).splitlines()
    assert lines == 2 * [
        "BACKNORM_ENGINE: environment variable must name what computes calls on NumPy arrays; "
        f"got {value!r}; expected kernels, numpy"
    ]


def test_default_without_kernels_is_numpy(without_kernels):
    assert said(without_kernels(BEGIN + "call()\nprint(planned())")) == "numpy"


def test_kernels_that_are_not_installed_raise_error_with_command(without_kernels):
    code = (
        BEGIN
        + """
try:
    with backnorm.engine("kernels"):
        raise SystemExit("no error")
except backnorm.errors.MachineCodeError as error:
    print(error)
call()
"""
    )
    done = without_kernels(code)
    assert said(done) == f"the engine 'kernels' needs the kernels: {INSTALL}"


def test_kernels_of_environment_that_are_not_installed_raise_at_first_call(without_kernels):
    code = (
        BEGIN
        + """
for _ in range(2):
    try:
        call()
    except backnorm.errors.MachineCodeError as error:
        print(error)
"""
    )
    lines = said(without_kernels(code, BACKNORM_ENGINE="kernels")).splitlines()
    assert lines == 2 * [f"the engine 'kernels' needs the kernels: {INSTALL}"]


def test_large_array_on_default_numpy_engine_warns_once(without_kernels):
    (message,) = json.loads(
        said(without_kernels(BEGIN + "import json\nprint(json.dumps(large()))"))
    )
    assert message.startswith("backnorm computes a large array with NumPy, on one thread; ")
    assert message.endswith(INSTALL)


def test_large_array_on_chosen_numpy_engine_does_not_warn(without_kernels):
    code = (
        BEGIN
        + """
with backnorm.engine("numpy"):
    print(large())
"""
    )
    assert said(without_kernels(code)) == "[]"
    assert said(without_kernels(BEGIN + "print(large())", BACKNORM_ENGINE="numpy")) == "[]"


def test_array_of_few_elements_on_default_numpy_engine_does_not_warn(without_kernels):
    code = (
        BEGIN
        + """
warnings.simplefilter("error")
big = np.ones((1, 1, 1 << 22), np.float32)
backnorm.explain(big, big, big[0, :, 0], big[0, :, 0], epsilon=1e-5)
call()
"""
    )
    assert said(without_kernels(code)) == ""


@pytest.mark.parametrize("arguments", [("info",), ("info", "--json")])
def test_info_without_kernels_names_engine_and_what_installs_kernels(arguments, without_kernels):
    code = f"""
from backnorm.cli.app import main
sys.argv = ["backnorm", *{arguments!r}]
main()
"""
    output = said(without_kernels(code))
    if "--json" in arguments:
        facts = json.loads(output)
        assert (facts["engine"], facts["machine_code"], facts["threads_of"]) == (
            "numpy",
            None,
            None,
        )
    else:
        assert "numpy" in output
        assert INSTALL.removesuffix(" of backnorm") in output


@pytest.mark.parametrize("name", NAMES)
def test_info_as_json_has_engine_of_environment(name):
    done = subprocess.run(
        [sys.executable, "-m", "backnorm", "info", "--json"],
        env={**os.environ, "BACKNORM_ENGINE": name},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    facts = json.loads(said(done))
    assert facts["engine"] == name
    assert (facts["machine_code"] is None) == ("kernels" not in NAMES)


@pytest.mark.skipif("kernels" not in NAMES, reason="backnorm-kernels is not installed")
def test_kernels_of_another_version_raise_error_at_each_call():
    code = (
        """
import sys, types
version = types.ModuleType("backnorm.version")
version.__version__ = "9.8.7"
sys.modules["backnorm.version"] = version
"""
        + BEGIN
        + """
for _ in range(2):
    try:
        call()
    except backnorm.errors.MachineCodeError as error:
        print(error)
with backnorm.engine("numpy"):
    call()
"""
    )
    environment = {name: value for name, value in os.environ.items() if name != "BACKNORM_ENGINE"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment,
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    lines = said(done).splitlines()
    assert lines == 2 * [
        f"backnorm 9.8.7 and backnorm-kernels {backnorm.__version__} do not belong together; "
        "install both from one checkout: pip install . ./kernels"
    ]


@pytest.mark.skipif("kernels" not in NAMES, reason="backnorm-kernels is not installed")
@pytest.mark.parametrize("module", ["library", "engine", "plan", "stage"])
def test_module_of_kernels_can_be_imported_before_backnorm(module):
    code = f"from backnorm_kernels import {module}\nimport backnorm\nprint(backnorm.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert said(done).strip() == backnorm.__version__
