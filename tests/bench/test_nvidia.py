"""What is asked of PyTorch and of the driver, where both are made up."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest

from backnorm.errors import ArgumentValueError
from benchmarks.cuda import nvidia
from benchmarks.cuda.nvidia import Cuda

UUID = "5d6a28f4-0000-1111-2222-333344445555"


def pytorch(*, cuda="13.0", hip=None, available=True):
    properties = types.SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=150 << 30,
        L2_cache_size=60 << 20,
        uuid=UUID,
    )
    return types.SimpleNamespace(
        __version__="2.13.0",
        __spec__=types.SimpleNamespace(name="torch"),
        version=types.SimpleNamespace(cuda=cuda, hip=hip),
        cuda=types.SimpleNamespace(
            is_available=lambda: available,
            current_device=lambda: 0,
            get_device_properties=lambda device: properties,
            mem_get_info=lambda: (100, 1000),
            memory_reserved=lambda: 30,
            memory_allocated=lambda: 20,
        ),
    )


@pytest.fixture
def installed(monkeypatch):
    """Make PyTorch and Triton appear, or not; neither is imported."""

    def install(torch, *, triton=True):
        there = {"torch": torch is not None, "triton": triton}
        found = importlib.util.find_spec
        monkeypatch.setattr(
            nvidia.importlib.util,
            "find_spec",
            lambda name: (object() if there[name] else None) if name in there else found(name),
        )
        monkeypatch.setitem(sys.modules, "torch", torch)

    return install


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Put a program of the driver's name on the path; returns where its arguments are noted."""

    def install(output, status=0):
        program, notes = tmp_path / "nvidia-smi", tmp_path / "arguments"
        program.write_text(f"#!/bin/sh\necho \"$@\" > {notes}\necho '{output}'\nexit {status}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return notes

    return install


def refusal():
    with pytest.raises(ArgumentValueError) as caught:
        Cuda().library()
    assert caught.value.argument == "--device cuda"
    text = str(caught.value)
    assert "accepted: cpu; or cuda where PyTorch is built with CUDA and sees an NVIDIA GPU" in text
    return text


def test_a_gpu_and_triton_are_all_it_takes(installed):
    torch = pytorch()
    installed(torch)
    assert Cuda().library() is torch


def test_without_pytorch_it_says_so(installed):
    installed(None)
    assert refusal().startswith("--device cuda: PyTorch is not installed; got no torch")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"cuda": None}, "got PyTorch 2.13.0, which is built for the CPU alone"),
        ({"cuda": None, "hip": "6.2"}, "got PyTorch 2.13.0, which is built for ROCm"),
        ({"available": False}, "2.13.0 for CUDA 13.0, which sees no GPU or no driver"),
    ],
)
def test_without_a_gpu_it_says_why(installed, options, expected):
    installed(pytorch(**options))
    text = refusal()
    assert text.startswith("--device cuda: no CUDA device; got ")
    assert expected in text


def test_without_triton_it_says_how_to_get_it(installed):
    installed(pytorch(), triton=False)
    text = refusal()
    assert text.startswith("--device cuda: Triton is not installed")
    assert text.endswith("pip install 'backnorm[cuda]'")


def test_facts_are_pytorchs_and_the_drivers(driver):
    arguments = driver("580.65.06, 1980, 3201")
    device = Cuda()
    device.torch = pytorch()
    facts = device.facts()
    assert (facts.name, facts.capability, facts.cuda) == ("NVIDIA H200", "9.0", "13.0")
    assert (facts.multiprocessors, facts.memory, facts.cache) == (132, 150 << 30, 60 << 20)
    assert (facts.driver, facts.clock, facts.memory_clock) == ("580.65.06", 1980, 3201)
    # Of the GPU that PyTorch uses, which need not be the driver's first.
    assert f"--id=GPU-{UUID}" in arguments.read_text()


@pytest.mark.parametrize(
    ("output", "status", "expected"),
    [
        ("580.65.06, [N/A], 3201", 0, ("580.65.06", 0, 3201)),
        ("No devices were found", 6, ("", 0, 0)),
        ("something else", 0, ("", 0, 0)),
    ],
)
def test_what_the_driver_does_not_tell_is_not_known(driver, output, status, expected):
    driver(output, status)
    device = Cuda()
    device.torch = pytorch()
    facts = device.facts()
    assert (facts.driver, facts.clock, facts.memory_clock) == expected


def test_without_the_drivers_program_nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    device = Cuda()
    device.torch = pytorch()
    assert device.facts().driver == ""


def test_memory_that_pytorch_keeps_without_using_it_is_free():
    device = Cuda()
    device.torch = pytorch()
    assert device.free_memory() == 110
