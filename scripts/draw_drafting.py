"""Draw the gain from drafts: tokens a step and milliseconds a token, by rows of a verify step.

    python scripts/draw_drafting.py RECORD [RECORD ...]     writes docs/pictures/drafting_h200.svg

Lines: measured steps and computed tokens, for drafts that are right in 6, 7 or 8 of 10 cases. Steps
in records of `benchmarks/draft_speed.py` include making the drafts; those of `dsv4 bench decode
--width` do not, and the picture says so. Circles: whole answers of the former, measured, at the
mean number of rows that `auto` chose.
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
    rows: float
    tokens: float  # a step
    ms: float  # a token


def step_of(parts: dict[str, float]) -> float:
    """A whole step, or the sum of its parts if rows of this number were never chosen."""
    alone = ("model", "sampling", "drafts", "draft_keys")
    return parts["step"] if "step" in parts else sum(parts[name] for name in alone)


def read(paths: list[Path]) -> tuple[list[Point], list[Point], float, bool]:
    """Lines and circles of one sequence, milliseconds of plain decoding, whether steps include
    making drafts."""
    results: list[dict[str, Any]] = []
    for path in paths:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        results += [line["result"] for line in lines if "result" in line]
    results = [result for result in results if result.get("batch") == 1]
    whole = any("ms_per_token" in result for result in results)
    if whole:
        plain = next(r["ms_per_token"] for r in results if r["draft"] == "off")
        steps = {r["parts"]["rows"]: step_of(r["parts"]) for r in results if "parts" in r}
    else:
        plain = next(r["full_ms"] for r in results if r["what"] == "decode")
        verify = [r for r in results if r["what"].startswith("verify")]
        steps = {int(r["what"].split()[1]): r["full_ms"] for r in verify}
    points, answers = [], []
    for rows, ms in steps.items():
        for chance in ACCEPTANCES if rows > 1 else ():
            tokens = sum(chance**place for place in range(rows))
            points.append(Point(chance, rows, tokens, ms / tokens))
    for r in results:
        if r.get("acceptance") in ACCEPTANCES and r["tokens_per_step"] > 1:
            num_steps = r["accepted"] / (r["tokens_per_step"] - 1)
            rows = 1 + r["drafted"] / num_steps
            answers.append(Point(r["acceptance"], rows, r["tokens_per_step"], r["ms_per_token"]))
    return points, answers, plain, whole


Series = dict[float, list[tuple[float, float]]]  # by acceptance: rows, value


def panel(x: int, title: str, series: Series, answers: Series, plain: float) -> str:
    """One line for each acceptance, its circle, a dashed line for plain decoding."""
    both = [*series.values(), *answers.values()]
    most = 1.1 * max(plain, *(value for line in both for _, value in line))
    rows = sorted({row for line in series.values() for row, _ in line} | {1})

    def at(row: float, value: float) -> tuple[float, float]:
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
            f'<text x="{at(row, 0)[0]:.1f}" y="{bottom + 16}" text-anchor="middle">{row:g}</text>'
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
        for across, down in (at(*pair) for pair in answers.get(acceptance, [])):
            parts.append(f'<circle cx="{across:.1f}" cy="{down:.1f}" r="4" fill="{color}"/>')
    return "\n".join(parts)


def series_of(points: list[Point], what: str) -> Series:
    found: Series = {}
    for point in points:
        found.setdefault(point.acceptance, []).append((point.rows, getattr(point, what)))
    return found


def picture(points: list[Point], answers: list[Point], plain: float, whole: bool) -> str:
    how = "" if whole else "; drafts taken to cost nothing"
    circles = "; circles: whole answers, rows chosen by auto" if answers else ""
    wide, high = LEFT + 2 * WIDTH + GAP + 90, TOP + HEIGHT + 44

    def side(x: int, title: str, what: str, base: float) -> str:
        return panel(x, title, series_of(points, what), series_of(answers, what), base)

    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" '
        f'viewBox="0 0 {wide} {high}" font-family="sans-serif" font-size="12">\n'
        f'<text x="4" y="16">Flash on an H200, one sequence, by the share of drafts that are right '
        f"(steps measured{how}{circles})</text>\n"
        + side(LEFT, "tokens a step", "tokens", 1.0)
        + "\n"
        + side(LEFT + WIDTH + GAP, "ms a token (dashed: plain decoding)", "ms", plain)
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
