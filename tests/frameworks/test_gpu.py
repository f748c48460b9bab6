"""The checks of the GPU's kernels, each file in a process of its own.

`gpu/` runs them in Triton's interpreter, `gpu_code/` compiles them for devices that are not there,
and `gpu_device/` wants a GPU: `make gpu-check` runs that.
"""

from __future__ import annotations

import pytest

from . import children

TIMEOUT = pytest.mark.timeout(children.LIMIT + 60)


@TIMEOUT
@pytest.mark.parametrize("file", children.files("gpu"))
def test_checks_in_the_interpreter(file):
    children.run("gpu", file, "triton", TRITON_INTERPRET="1")


@TIMEOUT
@pytest.mark.parametrize("file", children.files("gpu_code"))
def test_checks_of_machine_code(file):
    children.run("gpu_code", file, "triton")


@pytest.mark.sweep
@pytest.mark.timeout(4 * children.LIMIT)
@pytest.mark.parametrize("file", children.files("gpu"))
def test_rare_checks_in_the_interpreter(file):
    children.run("gpu", file, "triton", sweep=True, TRITON_INTERPRET="1")


@pytest.mark.sweep
@TIMEOUT
@pytest.mark.parametrize("file", children.files("gpu_code"))
def test_rare_checks_of_machine_code(file):
    children.run("gpu_code", file, "triton", sweep=True)
