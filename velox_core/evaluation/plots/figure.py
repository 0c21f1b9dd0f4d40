"""Figures in velox's style, and how they become files and SVG."""

from __future__ import annotations

import functools
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import VeloxError
from .display import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The colour of text and axes; where an SVG is put into a page, it becomes the page's own.
INK = "#262626"
#: Colours that can be told apart, by the colour-blind and on dark ground too (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")
#: What a plot's file may be.
FORMATS = (".svg", ".png", ".pdf")

STYLE: dict[str, Any] = {
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": "medium",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "font.family": "sans-serif",
    "grid.alpha": 0.25,
    "grid.color": "#888888",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",  # text stays text, in the reader's font
    "svg.hashsalt": "velox",  # the same file from the same results
    "text.color": INK,
    "text.parse_math": False,  # a $ in a name is a $
    "xtick.color": INK,
    "ytick.color": INK,
}


def need_matplotlib() -> None:
    """Raise ``VeloxError`` unless matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise VeloxError(
            f"plots need {error.name}, which isn't installed: pip install 'velox-kv[eval]'"
        ) from error


def styled(plot: Callable[[list[Record]], Figure]) -> Callable[[list[Record]], Figure]:
    """Let a function that plots do so in velox's style, and say so where matplotlib is missing.

    Raises:
        VeloxError: from the function, if matplotlib isn't installed.
    """

    @functools.wraps(plot)
    def drawn(records: list[Record]) -> Figure:
        need_matplotlib()
        from cycler import cycler
        from matplotlib import rc_context

        style: Any = {**STYLE, "axes.prop_cycle": cycler(color=COLOURS)}
        with rc_context(style):
            return plot(records)

    return drawn


def figure(
    rows: int = 1, columns: int = 1, size: tuple[float, float] = (7.0, 4.2), **kwargs: Any
) -> tuple[Figure, Any]:
    """An empty figure and its axes, ``[rows, columns]``, for a function that is ``styled``.

    Args:
        size: width and height, in inches.
        kwargs: what ``Figure.subplots`` takes.
    """
    from matplotlib.figure import Figure  # not pyplot, which would look for a display

    made = Figure(figsize=size, layout="constrained")
    return made, made.subplots(rows, columns, squeeze=False, **kwargs)


def check_plot(path: Path) -> Path:
    """The path, if a plot can be drawn and written there.

    Raises:
        VeloxError: it can't: matplotlib isn't installed, the name has another ending than those of
            ``FORMATS``, or there is no such folder.
    """
    if path.suffix.lower() not in FORMATS:
        raise VeloxError(
            f"a plot can't be written to {path}: its name must end in .svg, .png, .pdf"
        )
    if not path.parent.is_dir():
        raise VeloxError(f"no folder {path.parent} for the plot: make it, or name another")
    need_matplotlib()
    return path


def save(made: Figure, path: Path) -> None:
    """Write the figure, on white; whole or not at all. The name's ending says the format."""
    from matplotlib import rc_context

    style: Any = STYLE
    partial = path.with_name(f".{os.getpid()}{path.name}")
    try:
        with rc_context(style):
            metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
            made.savefig(partial, dpi=150, facecolor="white", metadata=metadata)
        partial.replace(path)
    except OSError as error:
        raise VeloxError(f"can't write {path}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def inline_svg(made: Figure, name: str) -> str:
    """The figure as an SVG element for a page, in the page's colour of text.

    Args:
        name: what its ids begin with, so that figures on one page don't meet.
    """
    from matplotlib import rc_context

    text = io.StringIO()
    style: Any = STYLE
    with rc_context(style):
        made.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    return svg.replace(INK, "currentColor")
