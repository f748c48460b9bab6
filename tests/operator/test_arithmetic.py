"""The arithmetic of a call comes from its argument, block, environment or elements."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading

import numpy as np
import pytest

import backnorm
from backnorm import ArgumentTypeError, ArgumentValueError, BacknormError
from backnorm.arithmetics import resolved
from backnorm.dialects.registry import DIALECTS, operators
from backnorm.executable import CALLS, forget
from backnorm.graph.call import parse_call
from backnorm.graph.run import run_program
from backnorm.problem import problem_of
from backnorm.signature import SIGNATURES

FLOAT32 = np.dtype(np.float32)
OWN = {"float64": "float64", "float32": "float64", "float16": "float32", "bfloat16": "float32"}
TYPES = pytest.mark.parametrize("dtype", [*map(np.dtype, OWN)], ids=OWN)


def _operands(dtype=FLOAT32):
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 4, 3, 5, 2)).astype(dtype)[:2]
    return x, dy, *rng.uniform(0.5, 2, (3, 3)).astype(dtype)


def _asked(**options):
    x, dy, mean, variance, gamma = _operands()
    return backnorm.batch_norm_backward(x, dy, mean, variance, gamma, epsilon=1e-3, **options)


@TYPES
def test_arithmetic_without_option_is_default_of_element_type(dtype):
    assert resolved(dtype) == OWN[dtype.name]
    plan = backnorm.explain(*_operands(dtype), epsilon=1e-3)
    assert plan.problem.arithmetic == OWN[dtype.name]
    assert f"arithmetic {OWN[dtype.name]}" in str(plan).splitlines()[0]


@TYPES
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_arithmetic_block_sets_arithmetic_except_of_float64(dtype, name):
    with backnorm.arithmetic(name):
        assert resolved(dtype) == ("float64" if dtype == np.float64 else name)
        other = "float32" if name == "float64" else "float64"
        if dtype != np.float64:
            # A call's own argument has precedence.
            assert resolved(dtype, other) == other
    assert resolved(dtype) == OWN[dtype.name]


@pytest.mark.parametrize("operation", SIGNATURES)
def test_problem_in_float32_block_has_float32_except_double_backward(operation):
    signature = SIGNATURES[operation]
    made = {"data": np.ones((2, 3, 4), FLOAT32), "channel": np.ones(3, FLOAT32)}
    operands = [made[o.kind] if o.required else None for o in signature.operands]
    with backnorm.arithmetic("float32"):
        expected = "float32" if "arithmetic" in signature.options else "float64"
        assert problem_of(operation, *operands).arithmetic == expected
        # Of the second order elements are float64, whatever the block says.
        assert (expected == "float64") == (operation == "double_backward")


@pytest.mark.parametrize("name", ["float16", "Float32", "", "float32 "])
def test_arithmetic_with_unknown_name_raises_value_error(name):
    for call in (lambda: _asked(arithmetic=name), backnorm.arithmetic(name).__enter__):
        with pytest.raises(ArgumentValueError, match=r"^arithmetic: unknown") as raised:
            call()
        assert raised.value.came == repr(name)
        assert "'float32' or 'float64'" in str(raised.value)


@pytest.mark.parametrize("name", [1, np.float32, FLOAT32, b"float32", ["float32"], True])
def test_arithmetic_of_wrong_type_raises_type_error(name):
    for call in (lambda: _asked(arithmetic=name), backnorm.arithmetic(name).__enter__):
        with pytest.raises(ArgumentTypeError, match=r"^arithmetic: must be a string"):
            call()


def test_float32_argument_of_float64_elements_raises_but_block_is_ignored():
    operands = _operands(np.float64)
    expected = backnorm.batch_norm_backward(*operands, epsilon=1e-3)
    with pytest.raises(ArgumentValueError, match=r"^arithmetic: float64 elements") as raised:
        backnorm.batch_norm_backward(*operands, epsilon=1e-3, arithmetic="float32")
    assert raised.value.came == "'float32'"
    # A block holds for all that is called in it.
    with backnorm.arithmetic("float32"):
        found = backnorm.batch_norm_backward(*operands, epsilon=1e-3)
    np.testing.assert_array_equal(found.dx, expected.dx)


def _problems():
    """Return the arithmetic of each executable in the call cache."""
    return {found.problem.arithmetic for found in CALLS.values()}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_call_cache_separates_calls_of_different_arithmetic(dtype):
    forget()
    operands = _operands(dtype)

    def call(**options):
        backnorm.batch_norm_backward(*operands, epsilon=1e-3, **options)
        return len(CALLS)

    assert call() == call() == 1
    assert _problems() == {OWN[dtype]}
    with backnorm.arithmetic("float32" if OWN[dtype] == "float64" else "float64"):
        assert call() == call() == 2
        assert _problems() == {"float32", "float64"}
        assert call(arithmetic=OWN[dtype]) == 3
    assert call() == 3
    assert call(arithmetic=OWN[dtype]) == 4


def test_nested_arithmetic_blocks_restore_outer_arithmetic():
    found = []
    with backnorm.arithmetic("float32"):
        found.append(resolved(FLOAT32))
        with backnorm.arithmetic("float64"):
            found.append(resolved(FLOAT32))
        found.append(resolved(FLOAT32))
        with contextlib.suppress(ZeroDivisionError), backnorm.arithmetic("float64"):
            raise ZeroDivisionError
        found.append(resolved(FLOAT32))
    assert found == ["float32", "float64", "float32", "float32"]
    assert resolved(FLOAT32) == "float64"


def test_arithmetic_as_decorator_applies_inside_function():
    @backnorm.arithmetic("float32")
    def inside():
        return resolved(FLOAT32)

    assert [inside(), inside(), resolved(FLOAT32)] == ["float32", "float32", "float64"]


def test_arithmetic_block_applies_to_its_own_thread_only():
    found, ready, done = [], threading.Event(), threading.Event()

    def other():
        with backnorm.arithmetic("float64"):
            ready.set()
            done.wait(30)
        found.append(resolved(FLOAT32))

    with backnorm.arithmetic("float32"):
        thread = threading.Thread(target=other)
        thread.start()
        ready.wait(30)
        found.append(resolved(FLOAT32))
        done.set()
        thread.join(30)
    assert found == ["float32", "float64"]


def test_arithmetic_block_applies_to_its_own_task_only():
    async def task(name, turn):
        with backnorm.arithmetic(name):
            for _ in range(3):
                await turn.wait()
                await asyncio.sleep(0)
                assert resolved(FLOAT32) == name
        return resolved(FLOAT32)

    async def main():
        turn = asyncio.Event()
        tasks = [asyncio.create_task(task(n, turn)) for n in ("float32", "float64", "float32")]
        turn.set()
        return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == ["float64"] * 3


_ENVIRONMENT = """
import numpy as np, backnorm
from backnorm.arithmetics import resolved
for dtype in (np.float64, np.float32, np.float16):
    try:
        print(resolved(np.dtype(dtype)))
    except backnorm.BacknormError as error:
        print(type(error).__name__, error)
with backnorm.arithmetic("float64"):
    print(resolved(np.dtype(np.float16)))
print(resolved(np.dtype(np.float32), "float64"))
"""


def _with_environment(value, monkeypatch):
    monkeypatch.setenv("BACKNORM_ARITHMETIC", value)
    command = [sys.executable, "-c", _ENVIRONMENT]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_environment_variable_sets_arithmetic_without_block_or_argument(name, monkeypatch):
    expected = ["float64", name, name, "float64", "float64"]
    assert _with_environment(name, monkeypatch) == expected


def test_environment_variable_with_unknown_arithmetic_raises_value_error(monkeypatch):
    lines = _with_environment("single", monkeypatch)
    wrong = (
        "ArgumentValueError BACKNORM_ARITHMETIC: environment variable must name the type that "
        "elements are computed in; got 'single'; expected float32, float64"
    )
    assert lines == ["float64", wrong, wrong, "float64", "float64"]


def _every_operator():
    for dialect in DIALECTS:
        for op, operator in operators(dialect).items():
            yield dialect, op, operator


def test_dialect_schemas_do_not_contain_arithmetic():
    for _, _, operator in _every_operator():
        schema = operator.schema
        tensors = (*schema.inputs, *schema.outputs, *schema.attributes)
        assert "arithmetic" not in {each.name for each in tensors}
        assert "arithmetic" not in str(schema.to_dict())


def test_run_program_passes_arithmetic_to_operators():
    document = {"dialect": "ngraph", "op": "BatchNormInference", "attributes": {"epsilon": 1e-3}}
    program = parse_call(document)
    x, _, mean, variance, gamma = _operands(np.float64)
    tensors = {"input": x, "gamma": gamma, "beta": gamma, "mean": mean, "variance": variance}
    (y,) = run_program(program, tensors, arithmetic="float64").values()
    np.testing.assert_array_equal(y, *run_program(program, tensors).values())
    with pytest.raises(BacknormError, match=r"^arithmetic: float64 elements"):
        run_program(program, tensors, arithmetic="float32")
