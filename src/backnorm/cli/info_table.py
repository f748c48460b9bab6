"""Tables of what `backnorm info` knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from backnorm.cli.text import plain

__all__ = ["info_tables"]

Facts = Mapping[str, Any]

_ENGINES = {"team": "PyTorch's team", "pool": "our own pool", "caller": "the caller alone"}


def info_tables(facts: Facts) -> Iterator[Table]:
    """Yield the tables of what :func:`backnorm.cli.info.describe` returned."""
    if "schemas" in facts:
        for schema in facts["schemas"]:
            yield from _schema_tables(schema)
    elif "operators" in facts:
        rows = [[o["op"], o["operation"], o["summary"], o["source"]] for o in facts["operators"]]
        yield _table(facts["dialect"], ("operator", "operation", "computes", "after"), rows)
    else:
        yield _installation_table(facts)


def _installation_table(facts: Facts) -> Table:
    machine, code, of = facts["machine"], facts["machine_code"], facts["threads_of"]
    libraries = [f"{count} of {level}" for level, count in code["libraries"].items()]
    if code["missing"]:
        libraries.append(f"{len(code['missing'])} not built")
    rows = [[name, version or "not installed"] for name, version in facts["versions"].items()]
    rows += [
        ["processor", machine["name"]],
        ["processors usable", machine["threads"]],
        ["cache per core", _bytes_text(machine["cache_per_core"])],
        ["cache shared", _bytes_text(machine["cache_shared"])],
        ["threads", facts["threads"]],
        ["threads of", f"{_ENGINES[of['name']]}: {of['reason']}"],
        ["machine code", code["folder"]],
        ["level", code["level"] or "none is there that could tell"],
        ["libraries", ", ".join(libraries) or "none"],
        ["functions", code["functions"]],
        ["digest", code["digest"] or ""],
    ]
    rows += [[f"dialect {name}", ", ".join(ops)] for name, ops in facts["dialects"].items()]
    return _table("backnorm", ("", ""), rows)


def _schema_tables(schema: Facts) -> Iterator[Table]:
    title = f"{schema['dialect']}.{schema['op']}"
    if schema["revision"]:
        title += f" ({schema['revision']})"
    tensors = [
        [way, t["name"], t["role"], t["type"], t["shape"], _need(t["required"]), t["summary"]]
        for way in ("inputs", "outputs")
        for t in schema[way]
    ]
    yield _table(
        f"{title}: {schema['summary']} After: {schema['source']}",
        ("", "name", "role", "type", "shape", "", "what"),
        tensors,
    )
    attributes = [
        [a["name"], a["type"], _need(a["required"]), _default(a), _accepted(a), a["summary"]]
        for a in schema["attributes"]
    ]
    headings = ("attribute", "type", "", "default", "accepted", "what")
    yield _table("attributes", headings, attributes)
    yield _table("rules", ("", ""), _rules(schema))


def _rules(schema: Facts) -> list[list[object]]:
    rows: list[list[object]] = [["call", schema["call"]]]
    rows += [
        [f"data {rule['data']}", f"per-channel tensors {' or '.join(rule['channel'])}"]
        for rule in schema["type_rules"]
    ]
    if schema["one_channel_type"]:
        rows.append(["", "all per-channel tensors of one type"])
    rows += [
        [f"format {f['name']}", f["layout"] + (f", rank {f['rank']}" if f["rank"] else "")]
        for f in schema["formats"]
    ]
    rows.append(["rank", schema["ranks"]])
    rows.append(["beside mean", schema["encoding"]])
    if schema["min_channels"]:
        rows.append(["channels", f"at least {schema['min_channels']}"])
    for group in (*schema["inputs_together"], *schema["outputs_together"]):
        rows.append(["together", f"{' and '.join(group)}: all or none"])
    rows += [["note", note] for note in schema["notes"]]
    return rows


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    table = Table(title=plain(title), title_justify="left", show_header=any(headings))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(plain(cell) for cell in row))
    return table


def _need(required: bool) -> str:
    return "required" if required else "optional"


def _default(attribute: Facts) -> str:
    return "" if attribute["required"] else str(attribute["default"])


def _accepted(attribute: Facts) -> str:
    if attribute["choices"]:
        return " | ".join(attribute["choices"])
    return attribute["range"] if attribute["type"] in ("f32", "f64") else ""


def _bytes_text(count: int) -> str:
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}"
