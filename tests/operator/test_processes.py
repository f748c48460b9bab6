"""The operator in a forked child of a process whose kernels have already run on several threads."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import os, signal, sys
    import numpy as np
    import backnorm
    from backnorm.conformance.data import realistic_data

    def bits():
        gradients = backnorm.batch_norm_backward(*data.backward_inputs, **data.options)
        normalized = backnorm.batch_norm_forward(data.x, data.gamma, data.beta, **data.options)
        return [array.tobytes() for array in (*gradients, *normalized)]

    shape = {"NCX": (32, 16, 40, 40), "NXC": (32, 40, 40, 16)}[sys.argv[1]]
    data = realistic_data(
        shape, np.dtype("float32"), data_format=sys.argv[1], rng=np.random.default_rng(3)
    )
    backnorm.set_num_threads(4)
    before = bits()
    for _ in range(2):
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os._exit(0 if bits() == before and bits() == before else 3)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, status
        assert bits() == before
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_backward_and_forward_in_forked_child_have_the_bits_of_parent(data_format):
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PROGRAM), data_format],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
