"""Draw the gain from drafts: tokens a step and milliseconds a token, by rows of a verify step.

    python scripts/draw_drafting.py RECORD [RECORD ...]     writes docs/pictures/drafting_h200.svg

Records of `benchmarks/draft_speed.py` are drawn as measured, end to end. Records of `dsv4 bench
decode --width` measure only steps: the gain at acceptance 0.6, 0.7 and 0.8 is computed from them,
as if drafts cost nothing, and the picture says so.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent.parent / "docs" / "pictures" / "drafting_h200.svg"
ACCEPTANCES = (0.6, 0.7, 0.8)
COLORS = {0.6: "#7aa6c2", 0.7: "#3f6f8f", 0.8: "#1d3d52"}
LEFT, TOP, WIDTH, HEIGHT, GAP = 60, 46, 280, 150, 110


@dataclass(frozen=True)
class Point:
    acceptance: float
    rows: int
    tokens: float  # a step
    ms: float  # a token


def read(paths: list[Path]) -> tuple[list[Point], float, bool]:
    """Points of one sequence, milliseconds of plain decoding, whether everything was measured."""
    results: list[dict[str, Any]] = []
    for path in paths:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        results += [line["result"] for line in lines if "result" in line]
    results = [result for result in results if result["batch"] == 1]
    measured = any("ms_per_token" in result for result in results)
    if measured:
        plain = next(r["ms_per_token"] for r in results if r["draft"] == "off")
        points = [
            Point(r["acceptance"], 1 + r["draft_tokens"], r["tokens_per_step"], r["ms_per_token"])
            for r in results
            if r["draft"] != "off"
        ]
        return points, plain, True
    plain = next(r["full_ms"] for r in results if r["what"] == "decode")
    points = []
    for result in results:
        kind, _, rows = result["what"].partition(" ")
        if kind == "verify":
            for chance in ACCEPTANCES:
                tokens = sum(chance**place for place in range(int(rows)))
                points.append(Point(chance, int(rows), tokens, result["full_ms"] / tokens))
    return points, plain, False


def panel(x: int, title: str, series: dict[float, list[tuple[int, float]]], plain: float) -> str:
    """One line for each acceptance, a dashed one for plain decoding."""
    most = 1.1 * max(plain, *(value for line in series.values() for _, value in line))
    rows = sorted({row for line in series.values() for row, _ in line} | {1})

    def at(row: int, value: float) -> tuple[float, float]:
        across = (row - rows[0]) / max(rows[-1] - rows[0], 1)
        return x + WIDTH * across, TOP + HEIGHT * (1 - value / most)

    bottom, level = TOP + HEIGHT, at(1, plain)[1]
    parts = [
        f'<text x="{x}" y="{TOP - 12}">{title}</text>',
        f'<line x1="{x}" x2="{x + WIDTH}" y1="{bottom}" y2="{bottom}" stroke="#999"/>',
        f'<line x1="{x}" x2="{x + WIDTH}" y1="{level:.1f}" y2="{level:.1f}" stroke="#b03030" '
        'stroke-dasharray="4 3"/>',
        f'<text x="{x - 6}" y="{level + 4:.1f}" text-anchor="end" fill="#b03030">'
        f"{plain:.2f}</text>",
    ]
    for row in rows:
        parts.append(
            f'<text x="{at(row, 0)[0]:.1f}" y="{bottom + 16}" text-anchor="middle">{row}</text>'
        )
    for acceptance, line in sorted(series.items()):
        color = COLORS.get(acceptance, "#555")
        line = [(1, plain), *sorted(line)]
        where = " ".join(f"{a:.1f},{b:.1f}" for a, b in (at(*pair) for pair in line))
        parts.append(f'<polyline points="{where}" fill="none" stroke="{color}" stroke-width="2"/>')
        end, height = at(*line[-1])
        parts.append(
            f'<text x="{end + 6:.1f}" y="{height + 4:.1f}" fill="{color}">{acceptance:g}: '
            f"{line[-1][1]:.2f}</text>"
        )
    return "\n".join(parts)


def picture(points: list[Point], plain: float, measured: bool) -> str:
    tokens: dict[float, list[tuple[int, float]]] = {}
    times: dict[float, list[tuple[int, float]]] = {}
    for point in points:
        tokens.setdefault(point.acceptance, []).append((point.rows, point.tokens))
        times.setdefault(point.acceptance, []).append((point.rows, point.ms))
    how = "measured end to end" if measured else "steps measured, drafts taken to cost nothing"
    wide, high = LEFT + 2 * WIDTH + GAP + 90, TOP + HEIGHT + 44
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" '
        f'viewBox="0 0 {wide} {high}" font-family="sans-serif" font-size="12">\n'
        f'<text x="4" y="16">Flash on an H200, one sequence, by the share of drafts that are right '
        f"({how})</text>\n"
        + panel(LEFT, "tokens a step", tokens, 1.0)
        + "\n"
        + panel(LEFT + WIDTH + GAP, "ms a token (dashed: plain decoding)", times, plain)
        + f'\n<text x="{LEFT}" y="{high - 8}">rows of a step: the newest token and drafts</text>\n'
        "</svg>\n"
    )


def main() -> None:
    paths = [Path(name) for name in sys.argv[1:]]
    if not paths:
        raise SystemExit("which records? python scripts/draw_drafting.py RECORD [RECORD ...]")
    OUT.write_text(picture(*read(paths)), encoding="utf-8")
    sys.stdout.write(f"{OUT}\n")


if __name__ == "__main__":
    main()
