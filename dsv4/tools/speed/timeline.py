"""Timeline picture of loads: per step the prompt tokens, decode rows and duration over time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from dsv4.tools.speed.serving.serve import Measured, StepMark

LEFT, WIDTH, RIGHT = 110, 900, 90
LANE, SPACE, HEAD, FOOT = 44, 8, 40, 34
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)  # seconds; the first with at most 12 ticks is used


@dataclass(frozen=True)
class _Lane:
    name: str
    color: str
    value: Callable[[StepMark], float]


LANES = (
    _Lane("prompt tokens", "#d9893b", lambda step: step.num_prompt),
    _Lane("decode rows", "#7aa6c2", lambda step: step.num_decode),
    _Lane("step, ms", "#5d6b75", lambda step: (step.end_s - step.begin_s) * 1e3),
)
BLOCK = HEAD + len(LANES) * (LANE + SPACE) + FOOT


def picture(loads: Sequence[Measured], max_gap_ms: float) -> str:
    """An SVG. Red line: the bound on gaps caused by prompts (0: none); ticks on top: arrivals."""
    width, height = LEFT + WIDTH + RIGHT, BLOCK * len(loads) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for place, measured in enumerate(loads):
        parts += _block(measured, BLOCK * place, max_gap_ms)
    return "\n".join([*parts, "</svg>\n"])


def _block(measured: Measured, top: float, max_gap_ms: float) -> list[str]:
    result = measured.result
    scale = WIDTH / max(result.seconds, 1e-9)
    figures = f"{result.tokens_per_s:g} tokens/s"
    for name, times in (("first token", result.first_ms), ("gap", result.gap_ms)):
        if times:
            figures += f"; {name} p50 {times['p50']:.3g}, p99 {times['p99']:.3g} ms"
    parts = [
        _text(LEFT, top + 16, str(measured.load), "start", 'font-weight="bold"'),
        _text(LEFT + WIDTH, top + 16, figures, "end"),
    ]
    marks = "".join(f"M{LEFT + at * scale:.1f} {top + 26}v8" for at in measured.arrivals_s)
    parts.append(f'<path d="{marks}" stroke="#999" fill="none"/>')
    parts.append(_text(LEFT - 8, top + 34, "arrivals", "end"))
    for number, lane in enumerate(LANES):
        floor = top + HEAD + number * (LANE + SPACE) + LANE
        columns = _columns(measured.steps, lane.value, scale)
        most = max([*columns, 1e-9])
        parts.append(f'<path d="{_area(columns, most, floor)}" fill="{lane.color}"/>')
        parts.append(f'<path d="M{LEFT} {floor}h{WIDTH}" stroke="#bbb"/>')
        parts.append(_text(LEFT - 8, floor - LANE / 2 + 4, lane.name, "end"))
        parts.append(_text(LEFT + WIDTH + 8, floor - LANE + 10, f"{most:.4g}", "start"))
    if 0 < max_gap_ms <= most:  # of the last lane
        y = floor - LANE * max_gap_ms / most
        parts.append(f'<path d="M{LEFT} {y:.1f}h{WIDTH}" stroke="#b03030"/>')
        below = max(y + 4, floor - LANE + 24)  # the longest step's label
        parts.append(_text(LEFT + WIDTH + 8, below, f"{max_gap_ms:g}", "start", 'fill="#b03030"'))
    return parts + _axis(result.seconds, scale, floor)


def _columns(
    steps: Sequence[StepMark], value: Callable[[StepMark], float], scale: float
) -> list[float]:
    """The largest value per pixel column, which keeps the file small."""
    found = [0.0] * WIDTH
    for step in steps:
        first = min(int(step.begin_s * scale), WIDTH - 1)
        last = min(max(int(step.end_s * scale), first + 1), WIDTH)
        size = value(step)
        for column in range(first, last):
            found[column] = max(found[column], size)
    return found


def _area(columns: Sequence[float], most: float, floor: float) -> str:
    path, last = [f"M{LEFT} {floor:g}"], 0.0
    for column, size in enumerate([*columns, 0.0]):
        if size != last:
            path.append(f"H{LEFT + column}V{floor - LANE * size / most:.1f}")
            last = size
    return "".join([*path, "z"])


def _axis(seconds: float, scale: float, floor: float) -> list[str]:
    tick = next((tick for tick in TICKS if seconds <= 12 * tick), TICKS[-1])
    parts = []
    for number in range(int(seconds / tick) + 1):
        x = LEFT + number * tick * scale
        parts.append(f'<path d="M{x:.1f} {floor}v4" stroke="#777"/>')
        parts.append(_text(x, floor + 16, f"{number * tick:g} s", "middle"))
    return parts


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    more = f" {more}" if more else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{more}>{escape(text)}</text>'
