"""A page that needs nothing beside itself, on the sheet that all reports share."""

from __future__ import annotations

from importlib import resources

from benchmarks.report.canvas import COLOURS
from benchmarks.report.libraries import needs

__all__ = ["render"]

# The folder of templates and styles, here and in the package of each report.
_FOLDER = "page"


def render(package: str, name: str, /, **values: object) -> str:
    """Return the page `name` of a report.

    Its templates, which extend ``base.html.jinja`` of this package, lie in the folder ``page`` of
    `package`: ``name.html.jinja``; beside it, if the report has them, ``name.css``, which follows
    the style of all pages, and ``name.js``. A `Plot` is shown by the macro ``figure`` of
    ``figure.html.jinja``.

    Raises
    ------
    BacknormError
        If Jinja is not installed.
    """
    jinja2 = needs("jinja2", "the page")
    markup = needs("markupsafe", "the page").Markup

    def template(file: str) -> str | None:
        return _file(package, file) or _file(__package__, file) or None

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(template),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["drawn"] = lambda plot: markup(plot.inline())
    page: str = environment.get_template(f"{name}.html.jinja").render(
        base_style=markup(_file(__package__, "base.css")),
        style=markup(_file(package, f"{name}.css")),
        script=markup(_file(package, f"{name}.js")),
        colours=COLOURS,
        **values,
    )
    return page


def _file(package: str, name: str) -> str:
    """Return the text of a file; empty if there is none."""
    file = resources.files(package) / _FOLDER / name
    return file.read_text("utf-8") if file.is_file() else ""
