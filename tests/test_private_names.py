"""Modules import no private name or module of another folder."""

from __future__ import annotations

import ast

import pytest

from tests.support.pages import ROOT

#: Each folder of code, and the folder that its imports begin at.
FOLDERS = {"src": "src", "kernels/src": "kernels/src", "benchmarks": ".", "scripts": "."}
PACKAGES = {"backnorm": "src", "backnorm_kernels": "kernels/src", "benchmarks": ".", "scripts": "."}


def private_imports(tree, package):
    """Yield imported names, in full, that are private to a folder which does not have `package`.

    A name or module that begins with an underscore is private to its folder and to the folders
    below.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            module = [*parents, *(node.module.split(".") if node.module else [])]
            names = [[*module, alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        else:
            continue
        for name in (each for each in names if each[0] in PACKAGES):
            private = (i for i, part in enumerate(name) if part[0] == "_" and part[:2] != "__")
            owner = name[: next(private, 0)]
            if not (ROOT / PACKAGES[name[0]]).joinpath(*owner).is_dir():
                owner.pop()
            if package[: len(owner)] != owner:
                yield ".".join(name)


@pytest.mark.parametrize("folder", FOLDERS)
def test_modules_import_no_private_name_of_another_folder(folder):
    base = ROOT / FOLDERS[folder]
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in private_imports(
            ast.parse(path.read_bytes()), list(path.relative_to(base).parent.parts)
        )
    ]
    assert found == []


@pytest.mark.parametrize(
    ("code", "package", "found"),
    [
        ("from backnorm.dialects._call import BoundCall", "backnorm.cli", True),
        ("from backnorm.dialects._call import BoundCall", "backnorm.dialects", False),
        ("from backnorm.conformance._fit import Fit", "backnorm.conformance.verify", False),
        ("from backnorm.torch.modules import _BatchNorm", "backnorm.torch", False),
        ("from backnorm.torch.modules import _BatchNorm", "backnorm.jax", True),
        ("from backnorm.dialects import _call", "benchmarks", True),
        ("import backnorm.dialects._call as call", "scripts", True),
        ("from ..dialects import _call", "backnorm.cli", True),
        ("from torch.utils import _pytree", "backnorm.torch", False),
        ("from backnorm import __version__", "scripts", False),
    ],
)
def test_private_imports_finds_name_of_another_folder(code, package, found):
    assert any(private_imports(ast.parse(code), package.split("."))) == found
