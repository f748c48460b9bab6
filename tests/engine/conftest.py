"""Libraries of any level, this processor's or not."""

from __future__ import annotations

import subprocess

import pytest

from backnorm_kernels import library
from backnorm_kernels.build.demand import command, environment, file_of


@pytest.fixture(scope="session")
def built():
    """Return the files of libraries of a level; those that are not there are built."""

    def files(level, *names):
        paths = {name: file_of(name, level, library.FOLDER) for name in names}
        missing = [name for name, path in paths.items() if not path.exists()]
        if missing:
            done = subprocess.run(
                command(level, library.FOLDER, *missing),
                env=environment(level),
                capture_output=True,
                text=True,
                timeout=280,
            )
            assert done.returncode == 0, done.stderr
        return list(paths.values())

    return files


@pytest.fixture(scope="session")
def tool():
    """Return what a program of binutils says of a library."""

    def said(program, *arguments):
        try:
            done = subprocess.run(
                [program, *map(str, arguments)], capture_output=True, text=True, timeout=60
            )
        except FileNotFoundError:
            pytest.skip(f"{program} is not installed (binutils)")
        assert done.returncode == 0, done.stderr
        return done.stdout

    return said
