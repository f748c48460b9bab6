"""Levels of processors, by what made-up processors and systems say, and this one."""

from __future__ import annotations

import itertools

import pytest

from backnorm.cpu import levels, library
from backnorm.cpu.kinds import PROBE
from backnorm.cpu.levels import _CPUID, HOST, LEVELS, below, features_by, is_x86, supported

# What the system saves: x87 and SSE, AVX, the parts of AVX-512.
_SSE, _AVX, _AVX512 = 0b11, 0b100, 0b11100000

_ALL = frozenset(_CPUID)
_EVERY_BIT = (2**32 - 1,) * 4


def _processor(has=_ALL, leaves=0x1F, extended=0x80000008, subleaves=2):
    """Return `cpuid` of a processor; beyond its leaves it returns what is in others."""

    def cpuid(leaf, subleaf):
        if leaf in (0, 0x80000000):
            return (leaves if leaf == 0 else extended, 0, 0, 0)
        if leaf > (extended if leaf >= 0x80000000 else leaves):
            return _EVERY_BIT
        if leaf == 7 and subleaf > subleaves:
            return _EVERY_BIT
        registers = [0, 0, 0, 0]
        for name in has:
            where, below_it, register, bit = _CPUID[name]
            if (where, below_it) == (leaf, subleaf):
                registers[register] |= 1 << bit
        if (leaf, subleaf) == (7, 0):
            registers[0] = subleaves
        return tuple(registers)

    return cpuid


def _levels(saved=_SSE | _AVX | _AVX512, **processor):
    return supported(features_by(_processor(**processor), lambda: saved))


def test_a_processor_that_has_everything():
    assert features_by(_processor(), lambda: _SSE | _AVX | _AVX512) == _ALL
    assert _levels() == tuple(LEVELS) == ("x86-64-v4-bf16", "x86-64-v4", "x86-64-v3", "x86-64")


def test_more_than_is_known_of_does_no_harm():
    assert features_by(lambda leaf, subleaf: _EVERY_BIT, lambda: 2**64 - 1) == _ALL


def test_a_system_that_does_not_save_the_registers_of_avx():
    found = features_by(_processor(), lambda: _SSE)
    assert not found & {"avx", "avx2", "fma", "f16c", "avx512f", "avx512bf16"}
    assert {"sse4.2", "bmi2", "popcnt", "lzcnt"} <= found
    assert _levels(saved=_SSE) == ("x86-64",)


@pytest.mark.parametrize("saved", [0, 0b100000, 0b1000000, 0b10000000, 0b01100000, 0b11000000])
def test_a_system_that_does_not_save_all_registers_of_avx512(saved):
    assert _levels(saved=_SSE | _AVX | saved) == ("x86-64-v3", "x86-64")


def test_registers_of_avx512_without_those_of_avx():
    assert _levels(saved=_SSE | _AVX512) == ("x86-64",)


def test_xgetbv_is_not_executed_where_it_is_an_illegal_instruction():
    def xgetbv():
        raise AssertionError("an illegal instruction")

    found = features_by(_processor(has=_ALL - {"xsave"}), xgetbv)
    assert not found & {"avx", "avx2", "fma", "f16c", "avx512f"}
    assert supported(found) == ("x86-64",)


def test_leaves_that_an_old_processor_has_not_are_not_believed():
    found = features_by(_processor(leaves=1, extended=0), lambda: _SSE | _AVX | _AVX512)
    assert found == {name for name in _ALL if _CPUID[name][0] == 1}
    assert supported(found) == ("x86-64",)


def test_a_part_of_a_leaf_that_a_processor_has_not_is_not_believed():
    assert _levels(subleaves=0) == ("x86-64-v4", "x86-64-v3", "x86-64")


@pytest.mark.parametrize("name", sorted(_ALL))
def test_a_level_needs_all_its_features(name):
    expected = tuple(level.name for level in LEVELS.values() if name not in level.features)
    assert _levels(has=_ALL - {name}) == expected
    assert expected[-1] == "x86-64"


def test_a_level_has_all_that_the_levels_below_it_have():
    ordered = list(LEVELS.values())
    for better, worse in itertools.pairwise(ordered):
        assert set(better.features) > set(worse.features)
    assert {name for level in ordered for name in level.features} == _ALL


def test_below():
    assert below("x86-64-v4-bf16") == tuple(LEVELS)
    assert below("x86-64-v3") == ("x86-64-v3", "x86-64")
    assert below("x86-64") == ("x86-64",)
    assert below(HOST) == (HOST,)


@pytest.mark.skipif(not is_x86(), reason="there is one level elsewhere")
def test_this_processor_has_what_its_compiler_says(monkeypatch):
    import llvmlite.binding as llvm

    says = frozenset(name for name, has in llvm.get_host_cpu_features().items() if has)
    assert library.levels() == supported(says)
    monkeypatch.setattr(levels, "supported", lambda features: features)
    assert levels.probed.__wrapped__(library.load(PROBE)) == says & _ALL


@pytest.mark.skipif(is_x86(), reason="a processor that is not x86-64")
def test_elsewhere_there_is_one_level():
    assert library.levels() == (HOST,)
