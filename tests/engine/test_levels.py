"""Levels of processors: of simulated processors and systems, and of this processor."""

from __future__ import annotations

import itertools

import pytest

from backnorm_kernels import levels, library
from backnorm_kernels.kinds import PROBE
from backnorm_kernels.levels import _CPUID, HOST, LEVELS, below, features_by, is_x86, supported

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


def test_supported_with_complete_processor_returns_all_levels():
    assert features_by(_processor(), lambda: _SSE | _AVX | _AVX512) == _ALL
    assert _levels() == tuple(LEVELS) == ("x86-64-v4-bf16", "x86-64-v4", "x86-64-v3", "x86-64")


def test_features_by_with_all_bits_set_returns_only_known_features():
    assert features_by(lambda leaf, subleaf: _EVERY_BIT, lambda: 2**64 - 1) == _ALL


def test_features_by_without_saved_avx_registers_omits_avx_features():
    found = features_by(_processor(), lambda: _SSE)
    assert not found & {"avx", "avx2", "fma", "f16c", "avx512f", "avx512bf16"}
    assert {"sse4.2", "bmi2", "popcnt", "lzcnt"} <= found
    assert _levels(saved=_SSE) == ("x86-64",)


@pytest.mark.parametrize("saved", [0, 0b100000, 0b1000000, 0b10000000, 0b01100000, 0b11000000])
def test_supported_without_all_avx512_registers_saved_omits_v4_levels(saved):
    assert _levels(saved=_SSE | _AVX | saved) == ("x86-64-v3", "x86-64")


def test_supported_with_avx512_but_not_avx_registers_returns_baseline():
    assert _levels(saved=_SSE | _AVX512) == ("x86-64",)


def test_features_by_without_xsave_does_not_execute_xgetbv():
    def xgetbv():
        raise AssertionError("an illegal instruction")

    found = features_by(_processor(has=_ALL - {"xsave"}), xgetbv)
    assert not found & {"avx", "avx2", "fma", "f16c", "avx512f"}
    assert supported(found) == ("x86-64",)


def test_features_by_of_old_processor_ignores_missing_leaves():
    found = features_by(_processor(leaves=1, extended=0), lambda: _SSE | _AVX | _AVX512)
    assert found == {name for name in _ALL if _CPUID[name][0] == 1}
    assert supported(found) == ("x86-64",)


def test_supported_with_missing_subleaf_omits_bf16_level():
    assert _levels(subleaves=0) == ("x86-64-v4", "x86-64-v3", "x86-64")


@pytest.mark.parametrize("name", sorted(_ALL))
def test_supported_without_one_feature_omits_levels_that_need_it(name):
    expected = tuple(level.name for level in LEVELS.values() if name not in level.features)
    assert _levels(has=_ALL - {name}) == expected
    assert expected[-1] == "x86-64"


def test_levels_contain_features_of_all_lower_levels():
    ordered = list(LEVELS.values())
    for better, worse in itertools.pairwise(ordered):
        assert set(better.features) > set(worse.features)
    assert {name for level in ordered for name in level.features} == _ALL


def test_below_returns_level_and_all_lower_levels():
    assert below("x86-64-v4-bf16") == tuple(LEVELS)
    assert below("x86-64-v3") == ("x86-64-v3", "x86-64")
    assert below("x86-64") == ("x86-64",)
    assert below(HOST) == (HOST,)


@pytest.mark.skipif(not is_x86(), reason="there is one level elsewhere")
def test_levels_of_this_processor_match_llvm_host_features(monkeypatch):
    import llvmlite.binding as llvm

    says = frozenset(name for name, has in llvm.get_host_cpu_features().items() if has)
    assert library.supported() == supported(says)
    monkeypatch.setattr(levels, "supported", lambda features: features)
    assert levels.probed.__wrapped__(library.load(PROBE)) == says & _ALL


@pytest.mark.skipif(is_x86(), reason="a processor that is not x86-64")
def test_levels_on_other_architectures_returns_host_only():
    assert library.supported() == (HOST,)
