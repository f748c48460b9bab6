"""What all plots share: colours, marks, the look of axes, and figures as SVG text."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

__all__ = ["COLOURS", "Mark", "Plot", "look", "mark", "new_figure", "quiet", "show_legend"]

#: The role of every colour. The hues are Okabe and Ito's, which the colour-blind can tell apart,
#: darkened or lightened for contrast with the paper.
COLOURS = {
    "paper": "#ffffff",
    "ink": "#1c2128",
    "muted": "#59636e",
    "grid": "#e4e7eb",
    "lose": "#fdeeea",
    "loss": "#c2330e",
    "floor": "#3d444d",
    "backnorm": "#0a62b5",
    "backnorm-float32": "#54a0e8",
    "torch": "#d55e00",
    "cudnn": "#6f8000",
    "compile": "#6a51a3",
    "tensorflow": "#b88700",
    "jax": "#a8478c",
    "onednn": "#00875f",
    "numpy": "#7b8591",
}

# For contestants that have no colour of their own yet.
_OTHER = "muted"
_MARKERS = {
    "backnorm": "o",
    "backnorm-float32": "h",
    "torch": "s",
    "cudnn": "<",
    "compile": ">",
    "tensorflow": "^",
    "jax": "D",
    "onednn": "v",
    "numpy": "P",
    "floor": "_",
}
_INCH = 72


@dataclass(frozen=True, slots=True)
class Mark:
    """How a contestant is drawn."""

    colour: str
    marker: str


@dataclass(frozen=True, slots=True, eq=False)
class Plot:
    """A drawn figure.

    Attributes
    ----------
    name : str
        For file names and anchors.
    title, caption : str
        The caption says how to read it.
    alternative : str
        What the plot shows, for those who do not see it.
    figure : matplotlib.figure.Figure
    """

    name: str
    title: str
    caption: str
    alternative: str
    figure: Figure

    def __post_init__(self) -> None:
        # Arranged once: each drawing would start from the last one's layout, and end elsewhere.
        self.figure.draw_without_rendering()
        self.figure.set_layout_engine("none")

    def svg(self) -> str:
        """Return an SVG file: text as outlines, which look the same everywhere; the same bytes."""
        # Identifiers are hashes, salted with a random number unless one is given.
        with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": self.name}):
            stream = io.StringIO()
            metadata = {"Date": None, "Title": self.title, "Description": self.alternative}
            self.figure.savefig(stream, format="svg", metadata=metadata)
        return re.sub(r"[ \t]+$", "", stream.getvalue(), flags=re.MULTILINE)

    def address(self) -> str:
        """Return the address of the figure as an image, which holds all of it."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg().encode()).decode()}"


def mark(contestant: str) -> Mark:
    """Return how a contestant is drawn, on light paper."""
    role = contestant if contestant in _MARKERS else _OTHER
    return Mark(COLOURS[role], _MARKERS.get(contestant, "X"))


@contextmanager
def look() -> Iterator[None]:
    """Draw in the style of the report; everything that makes a figure belongs in this context."""
    ink, muted = COLOURS["ink"], COLOURS["muted"]
    style = {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 8,
        # A dollar sign in a name is no formula.
        "text.parse_math": False,
        "text.color": ink,
        "axes.labelcolor": muted,
        "axes.edgecolor": COLOURS["grid"],
        "axes.facecolor": COLOURS["paper"],
        "figure.facecolor": COLOURS["paper"],
        "axes.titlesize": 8.5,
        "axes.titlelocation": "left",
        "axes.titlecolor": ink,
        "axes.titleweight": "bold",
        "axes.labelsize": 8,
        "axes.axisbelow": True,
        "xtick.color": muted,
        "ytick.color": muted,
        "xtick.labelsize": 7.5,
        "ytick.labelsize": 7.5,
        "grid.color": COLOURS["grid"],
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "lines.markeredgewidth": 1.0,
    }
    with matplotlib.rc_context(style):
        yield


def new_figure(
    width: float, height: float, rows: int, columns: int, **options: object
) -> tuple[Figure, list[list[Axes]]]:
    """Return a figure of `width` x `height` points and its axes, row by row."""
    # A little more room at the edges than by default, where labels otherwise touch the card.
    engine = ConstrainedLayoutEngine(w_pad=5 / _INCH, h_pad=4 / _INCH, wspace=0.03)
    # Any: matplotlib's overloads do not know options that are passed on.
    figure: Any = Figure(figsize=(width / _INCH, height / _INCH), layout=engine)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, [list(row) for row in axes]


def quiet(axes: Axes, grid: Literal["both", "x", "y"] = "both") -> None:
    """Take away what is not data: frames, and ticks where grid lines say the same."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, which="both")
    axes.grid(True, axis=grid)


def show_legend(figure: Figure, handles: Sequence[Artist]) -> None:
    """Put one legend for all panels above them."""
    figure.legend(
        handles=list(handles),
        loc="outside upper left",
        ncols=min(len(handles), 8),
        handletextpad=0.4,
        columnspacing=1.4,
        borderaxespad=0.2,
    )
