"""`backnorm info`: facts about the installation, a dialect or an operator, as tables or JSON."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

from rich.table import Table

import backnorm
from backnorm import engines, machine
from backnorm.dialects import registry
from backnorm.errors import ArgumentValueError, shown

Facts = Mapping[str, Any]

_REQUIRED = ("numpy", "ml_dtypes", "array-api-compat", "typer", "rich", "safetensors")
_OPTIONAL = ("torch", "jax", "tensorflow", "tensorflow-cpu", "triton", "onednn-cpu-gomp")
#: All dialects, including those whose functions compute a part of a gradient (`registry.PARTS`).
_DIALECTS = {**registry.DIALECTS, **registry.PARTS}
_NEED = {True: "required", False: "optional"}
_SERVICES = {
    "team": "PyTorch's team",
    "pool": "backnorm's pool",
    "caller": "the calling thread alone",
}


def describe(dialect: str | None = None, op: str | None = None) -> dict[str, object]:
    """Return facts about the installation, a dialect, or an operator as plain values.

    Returns
    -------
    dict
        Without arguments: ``versions``, ``machine``, ``threads``, ``engine``, ``threads_of``,
        ``machine_code``, ``dialects``.
        With a dialect: ``dialect``, ``operators``. With an operator: ``dialect``, ``op``,
        ``schema``, ``frozen_roles`` (input -> its role if the statistics are constants, for inputs
        whose role then differs).

    Raises
    ------
    ArgumentValueError
        If there is no such dialect or operator, or BACKNORM_CPU_LEVEL has an invalid value.
    """
    if dialect is None:
        return _installation()
    if dialect not in _DIALECTS:
        raise ArgumentValueError(
            "dialect", "unknown dialect", came=shown(dialect), accepted=", ".join(_DIALECTS)
        )
    functions = registry.parts(dialect)
    if op is None:
        keys = ("op", "operation", "summary", "source")
        schemas = [operator.schema for operator in _operators(dialect).values()]
        schemas += functions.values()
        operators = [{key: getattr(schema, key) for key in keys} for schema in schemas]
        return {"dialect": dialect, "operators": operators}
    if op in functions:
        return {"dialect": dialect, "op": op, "schema": functions[op].to_dict()}
    known = _operators(dialect)
    if op not in known:
        raise ArgumentValueError(
            "op", f"unknown operator of {dialect}", came=shown(op),
            accepted=", ".join([*known, *functions]),
        )  # fmt: skip
    schema = known[op].schema
    roles = {tensor.name: tensor.role for tensor in schema.inputs}
    frozen = schema.with_constants.inputs
    return {
        "dialect": dialect,
        "op": op,
        "schema": schema.to_dict(),
        "frozen_roles": {t.name: t.role for t in frozen if t.role != roles[t.name]},
    }


def _operators(dialect: str) -> Mapping[str, Any]:
    """Return the operators of a dialect; empty for a dialect that has only functions."""
    if dialect in registry.PARTS and dialect not in registry.DIALECTS:
        return {}
    return registry.operators(dialect)


def _installation() -> dict[str, object]:
    return {
        "versions": _versions(),
        "machine": asdict(machine.detect()),
        "threads": backnorm.get_num_threads(),
        **engines.facts(),
        "dialects": {name: [*_operators(name), *registry.parts(name)] for name in _DIALECTS},
    }


def _versions() -> dict[str, str | None]:
    own = {"backnorm": backnorm.__version__, "python": platform.python_version()}
    # Reading the versions from metadata avoids importing the packages.
    return own | {package: _version(package) for package in (*_REQUIRED, *_OPTIONAL)}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def info_tables(facts: Facts) -> Iterator[Table]:
    """Yield tables of the facts that :func:`describe` returned."""
    if "schema" in facts:
        yield from _schema_tables(facts["schema"], facts.get("frozen_roles", {}))
    elif "operators" in facts:
        rows = [[o["op"], o["operation"], o["summary"], o["source"]] for o in facts["operators"]]
        yield _table(facts["dialect"], ("operator", "operation", "computes", "specification"), rows)
    else:
        yield _installation_table(facts)


def _installation_table(facts: Facts) -> Table:
    machine = facts["machine"]
    rows = [[name, version or "not installed"] for name, version in facts["versions"].items()]
    rows += [
        ["processor", machine["name"]],
        ["usable processors", machine["threads"]],
        ["cache of a core", _bytes_text(machine["cache_per_core"])],
        ["shared cache", _bytes_text(machine["cache_shared"])],
        ["threads", facts["threads"]],
        ["engine", facts["engine"]],
    ]
    if facts["machine_code"] is None:
        rows.append(["kernels", "not installed: pip install ./kernels in a checkout"])
    else:
        rows += _kernels_rows(facts["machine_code"], facts["threads_of"])
    rows += [[f"dialect {name}", ", ".join(ops)] for name, ops in facts["dialects"].items()]
    return _table("backnorm", ("", ""), rows)


def _kernels_rows(code: Facts, threads_of: Facts) -> list[list[object]]:
    libraries = [f"{count} of {level}" for level, count in code["libraries"].items()]
    if code["missing"]:
        libraries.append(f"{len(code['missing'])} not built")
    return [
        ["thread pool", f"{_SERVICES[threads_of['name']]}: {threads_of['reason']}"],
        ["kernels in", code["folder"]],
        ["processor level", code["level"] or "unknown: no library that detects it is built"],
        ["libraries", ", ".join(libraries) or "none"],
        ["kernels", code["functions"]],
        ["digest of sources", code["digest"] or "none"],
    ]


def _schema_tables(schema: Facts, frozen_roles: Mapping[str, str]) -> Iterator[Table]:
    title = f"{schema['dialect']}.{schema['op']}: {schema['summary']}"
    tensors = [
        [
            way,
            t["name"],
            _role(t, frozen_roles),
            t["type"],
            t["shape"],
            _NEED[t["required"]],
            t["summary"],
        ]
        for way in ("inputs", "outputs")
        for t in schema[way]
    ]
    headings = "", "name", "role", "type", "shape", "", "meaning"
    yield _table(f"{title} Specification: {schema['source']}", headings, tensors)
    attributes = [
        [a["name"], a["type"], _NEED[a["required"]], _default(a), _accepted(a), a["summary"]]
        for a in schema["attributes"]
    ]
    yield _table(
        "attributes", ("attribute", "type", "", "default", "accepted", "meaning"), attributes
    )
    yield _table("rules", ("", ""), _rules(schema))


def _role(tensor: Facts, frozen_roles: Mapping[str, str]) -> str:
    """Return the role of a tensor, or both roles if constant statistics change it."""
    role = str(tensor["role"])
    frozen = frozen_roles.get(tensor["name"], role)
    return role if frozen == role else f"{role} in training, {frozen} with constant statistics"


def _rules(schema: Facts) -> Iterator[tuple[str, object]]:
    yield "call", schema["call"]
    for rule in schema["type_rules"]:
        yield f"data {rule['data']}", f"per-channel tensors {' or '.join(rule['channel'])}"
    if schema["one_channel_type"]:
        yield "", "all per-channel tensors of one type"
    for f in schema["formats"]:
        layout = f"any channel axis, usually {f['layout']}" if f["is_any"] else f["layout"]
        yield f"format {f['name']}", layout + (f", rank {f['rank']}" if f["rank"] else "")
    yield "rank", schema["ranks"]
    yield "statistics", f"mean and {schema['encoding']}"
    if schema["min_channels"]:
        yield "channels", f"at least {schema['min_channels']}"
    for group in (*schema["inputs_together"], *schema["outputs_together"]):
        yield "together", f"{' and '.join(group)}, or none of them"
    for note in schema["notes"]:
        yield "note", note


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=any(headings))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    return table


def _default(attribute: Facts) -> str:
    return "" if attribute["required"] else str(attribute["default"])


def _accepted(attribute: Facts) -> str:
    if attribute["choices"]:
        return " | ".join(attribute["choices"])
    if attribute["role"] == "channel_axis":
        return "any (negative: from the end)" if attribute["range"] == "any" else "0 or more"
    return attribute["range"] if attribute["type"] in ("f32", "f64") else ""


def _bytes_text(count: int) -> str:
    return f"{count / 2**20:.0f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"
