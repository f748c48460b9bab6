"""Print the sentences and names in the sources that break rule 2 of CONTRIBUTING.md.

A sentence of a string or comment begins with its subject, and a name is a noun of its content. The
name of a test begins with the unit that is tested.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

_FOLDERS = "src", "benchmarks", "scripts", "examples", "tests"
_WORDS = re.compile(
    r"(?:^\s*|[.:!?]\s+)((?:What|Who|Whom|Whose|Of|That of|Those of)\b)"
    r"|\b(nobody|somebody|whoever|whatever|as it lies|what comes)\b",
    re.MULTILINE,
)
_NAME = re.compile(r"(how|given|held|asked)$|.*nobody")
# The first word of a test's name is the unit that is tested.
_TEST = re.compile(
    r"test_(an?|the|its?|they|this|that|these|what|who|whom|whoever|whatever|if|when|there|on|with"
    r"|without|every|each|all|any|some|both|no|not|nothing|only|two|three|four)_"
)


def strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the strings of a file that have more than one word."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments of a file; adjacent lines are one comment."""
    with path.open("rb") as file:
        found = [t for t in tokenize.tokenize(file.readline) if t.type == tokenize.COMMENT]
    block = ""
    for comment, after in zip(found, [*found[1:], None], strict=False):
        block = f"{block} {comment.string.strip('#: ')}"
        if after is None or after.start != (comment.start[0] + 1, comment.start[1]):
            yield comment.start[0], block
            block = ""


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the names of the functions, classes, parameters and variables of a file."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()):
                yield node.lineno, name


def offences(path: Path) -> Iterator[str]:
    """Yield a line for each offence in a file; in tests, only names are checked."""
    tree = ast.parse(path.read_bytes())
    texts = () if path.parts[0] == "tests" else (*strings(tree), *comments(path))
    for line, text in texts:
        for found in _WORDS.finditer(text):
            yield f"{path}:{line}: {text[found.start(found.lastindex or 0) :][:70]!r}"
    for line, name in names(tree):
        if _NAME.match(name):
            yield f"{path}:{line}: name {name!r} must be a noun of its content, such as `expected`"
        if _TEST.match(name):
            yield f"{path}:{line}: name {name!r} must begin with the unit that is tested, a noun"


if __name__ == "__main__":
    paths = [path for folder in _FOLDERS for path in sorted(Path(folder).rglob("*.py"))]
    checked = [path for path in paths if path.name != "check_words.py"]
    sys.exit("\n".join(line for path in checked for line in offences(path)) or None)
