"""The checks in `keras/` with each of Keras's backends, each file in a process of its own."""

from __future__ import annotations

import pytest

from . import children

# They take a minute: with TensorFlow always, with the others in the long run.
_LONG = (
    "check_applications.py",
    "check_examples.py",
    "check_files.py",
    "check_models.py",
    "check_training.py",
    "check_types.py",
)


def _cases():
    for backend in ("tensorflow", "torch", "jax"):
        for file in children.files("keras"):
            long = file in _LONG and backend != "tensorflow"
            yield pytest.param(backend, file, marks=[pytest.mark.sweep] if long else [])


@pytest.mark.timeout(children.LIMIT + 60)
@pytest.mark.parametrize(("backend", "file"), list(_cases()))
def test_checks(backend, file):
    children.run("keras", file, backend, KERAS_BACKEND=backend)


@pytest.mark.sweep
@pytest.mark.timeout(4 * children.LIMIT)
def test_rare_checks():
    children.run(
        "keras", "check_applications.py", "tensorflow", sweep=True, KERAS_BACKEND="tensorflow"
    )
