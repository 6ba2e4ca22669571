"""A grid of layers and ops, coloured by error over limit, for the terminal and as SVG."""

import math
from html import escape
from pathlib import Path

from rich.text import Text

from dsv4.tools.doctor.check import GridCell
from dsv4.tools.doctor.examine import ModelReport
from dsv4.tools.doctor.plain.stations import STATIONS

# error in units of the limit, its colour and its letter in the terminal
_STEPS = (
    (0.01, "#1a7f4b", "·", "below a hundredth of the limit"),
    (0.1, "#4fa968", "·", "below a tenth"),
    (0.5, "#9bd1a1", "∘", "below half"),
    (1.0, "#f2d45c", "o", "near the limit"),
    (10.0, "#f08a3c", "X", "beyond the limit"),
    (float("inf"), "#c62828", "X", "beyond ten times the limit"),
)
_MISSING = ("#9e9e9e", "?", "expected, not seen or not compared")
_NONE = ("#f3f3f3", " ", "not in this kind of layer")
_CELL, _LEFT, _TOP, _ROW = 26, 150, 74, 20


def _look(cell: GridCell | None) -> tuple[str, str, str]:
    if cell is None:
        return _NONE
    if cell.status in ("not run", "not compared"):
        return _MISSING
    ratio = max(cell.ratio, 1.01) if cell.status == "wrong" else min(cell.ratio, 1.0)
    color, letter, label = next(rest for top, *rest in _STEPS if ratio <= top)
    return color, letter, label


def _grid(report: ModelReport) -> tuple[list[str], list[int], dict[tuple[str, int], GridCell]]:
    cells = {(cell.station, cell.layer): cell for cell in report.cells}
    rows = [name for name in STATIONS if any(station == name for station, _ in cells)]
    return rows, sorted({layer for _, layer in cells}), cells


def terminal(report: ModelReport) -> Text:
    """One letter per cell; wide models are still one line per op."""
    rows, layers, cells = _grid(report)
    text = Text()
    text.append(" " * 16)
    text.append("".join(str(layer // 10) if layer % 10 == 0 else " " for layer in layers) + "\n")
    text.append(f"{'layer':>15} " + "".join(str(layer % 10) for layer in layers) + "\n")
    for name in rows:
        text.append(f"{name:>15} ")
        for layer in layers:
            color, letter, _ = _look(cells.get((name, layer)))
            text.append(letter, style=f"bold {color}" if letter != " " else "")
        text.append("\n")
    text.append("                ")
    for _, color, letter, label in (*_STEPS[1:5], (0, *_MISSING)):
        text.append(f"{letter} ", style=f"bold {color}")
        text.append(f"{label}   ")
    return text


def svg(report: ModelReport, ratios: tuple[int, ...]) -> str:
    rows, layers, cells = _grid(report)
    width = max(_LEFT + _CELL * len(layers) + 30, 640)
    height = _TOP + _ROW * len(rows) + 150
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="14" y="24" font-size="16" font-weight="bold">{escape(_title(report))}</text>',
    ]
    for place, layer in enumerate(layers):
        x = _LEFT + _CELL * place + _CELL / 2
        parts.append(_label(x, _TOP - 20, str(layer), "middle"))
        parts.append(_label(x, _TOP - 7, f"r{ratios[layer]}", "middle", 8, "#777"))
    for place, name in enumerate(rows):
        y = _TOP + _ROW * place
        parts.append(_label(_LEFT - 8, y + 14, name, "end"))
        for column, layer in enumerate(layers):
            parts.append(_square(_LEFT + _CELL * column, y, cells.get((name, layer))))
    parts += _legend(_TOP + _ROW * len(rows) + 18)
    first = report.first
    if first is not None:
        column, row = layers.index(first.cell.layer), rows.index(first.cell.station)
        x, y = _LEFT + _CELL * column, _TOP + _ROW * row
        parts.append(
            f'<rect x="{x - 2}" y="{y - 2}" width="{_CELL + 2}" height="{_ROW + 2}" fill="none" '
            'stroke="black" stroke-width="2.5"/>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _title(report: ModelReport) -> str:
    if report.first is None:
        return f"{report.name}: {'no op is wrong' if report.ok else 'see the report'}"
    cell = report.first.cell
    return f"{report.name}: first wrong op is {cell.title} in layer {cell.layer}"


def _label(
    x: float, y: float, text: str, anchor: str = "start", size: int = 12, color: str = "#222"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{color}">'
        f"{escape(text)}</text>"
    )


def _square(x: float, y: float, cell: GridCell | None) -> str:
    color, _, label = _look(cell)
    tip = label
    if cell is not None and cell.tap:
        tip = (
            f"layer {cell.layer} {cell.title}: {cell.tap} off by {cell.error.worst:.2g} "
            f"at position {cell.position}, allowed {cell.limit.worst:.2g}"
        )
        tip += f"; {cell.cause.text}" if cell.cause else ""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{_CELL - 2}" height="{_ROW - 2}" rx="3" fill="{color}">'
        f"<title>{escape(tip)}</title></rect>"
    )


def _legend(y: float) -> list[str]:
    steps = [(color, label) for _, color, _, label in _STEPS]
    steps += [(_MISSING[0], _MISSING[2]), (_NONE[0], _NONE[2])]
    half = math.ceil(len(steps) / 2)
    parts = []
    for number, (color, label) in enumerate(steps):
        x, row = 20 + 300 * (number // half), y + 22 * (number % half)
        parts.append(f'<rect x="{x}" y="{row:g}" width="16" height="14" rx="3" fill="{color}"/>')
        parts.append(_label(x + 24, row + 12, label))
    parts.append(
        _label(20, y + 22 * half + 16, "black frame: the first wrong op of the run", size=11)
    )
    return parts


def write_picture(path: Path, report: ModelReport, ratios: tuple[int, ...]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg(report, ratios), encoding="utf-8")
