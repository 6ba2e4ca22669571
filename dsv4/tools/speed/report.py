"""Results of timed steps as lines, as a record, and as a picture."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import cycle
from pathlib import Path

from dsv4.tools.bench_ops import Ceilings, run_facts
from dsv4.tools.speed.expert_memory import PlacedModel, PlacedResult
from dsv4.tools.speed.steps import StepResult
from dsv4.util.sizes import size_text

ROW, LABEL, WIDTH = 22, 110, 560


def lines_of(result: StepResult) -> list[str]:
    """A few lines for the terminal."""
    r = result
    size = f"{r.context} tokens" if r.what == "prefill" else f"{r.batch} x {r.context}"
    size += f" after {r.position}" if r.position else ""
    size += "" if r.weights == "nvfp4" else f", {r.weights}"
    head = (
        f"{r.what} {r.shape} {r.layers} layers, {size}: {r.ms:.3f} ms (spread {r.spread_ms:.3f}), "
        f"floor {r.floor_ms:.3f}, x{r.ratio}, {size_text(r.gb_read * 1e9)} read"
    )
    found = [
        head,
        f"  {r.full_layers} layers: {r.full_ms:.3f} ms, {r.tokens_per_s} tok/s "
        f"(embedding, head and sampling once: {r.rest_us:.0f} us)",
    ]
    if r.layer_us:
        layers = ", ".join(
            f"{kind} {us} us / {r.kernels_of_layer.get(kind, 0):g} kernels"
            for kind, us in r.layer_us.items()
        )
        found.append(f"  a layer: {layers}; a step: {r.kernels} kernels, no host sync")
    if r.family_us:
        shares = ", ".join(f"{name} {us:.0f} us" for name, us in r.family_us.items())
        found.append(f"  shares: {shares}")
    return found


def drafting_lines(rows: Sequence[Ceilings | StepResult], acceptance: float) -> list[str]:
    """The speed of verify steps if each draft is right with this chance, given those before it."""
    found, plain = [], dict[tuple[int, int], float]()
    for row in rows:
        if not isinstance(row, StepResult):
            continue
        if row.what == "decode":
            plain[row.batch, row.context] = row.full_ms
        elif row.what.startswith("verify"):
            width = int(row.what.split()[1])
            tokens = sum(acceptance**place for place in range(width))
            ms = row.full_ms / tokens
            found.append(
                f"  {row.batch} x {row.context}, width {width}, acceptance {acceptance:g}: "
                f"{tokens:.2f} tokens a step, {ms:.3f} ms a token, "
                f"x{plain[row.batch, row.context] / ms:.2f} (drafts cost nothing here)"
            )
    return found


def write_record(path: Path, rows: Sequence[Ceilings | StepResult | dict[str, object]]) -> None:
    """One JSON object per line: the run, the ceilings, the results."""
    lines = [json.dumps({"run": run_facts()})]
    for row in rows:
        kind = "ceilings" if isinstance(row, Ceilings) else "result"
        lines.append(json.dumps({kind: row if isinstance(row, dict) else asdict(row)}))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def picture(result: StepResult) -> str:
    """An SVG: time of each op family as a bar, its floor as a mark."""
    names = list(dict.fromkeys([*result.family_us, *result.family_floor_us]))
    floors = dict(result.family_floor_us)
    if "head" in floors and "head" not in result.family_us:  # the head is a linear op
        floors["linear"] = floors.get("linear", 0.0) + floors.pop("head")
        names.remove("head")
    most = max([*result.family_us.values(), *floors.values(), 1e-9])
    height = ROW * (len(names) + 2)
    title = f"{result.what} {result.shape}, {result.batch} x {result.context}: us by op family"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL + WIDTH + 90}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<text x="4" y="15">{title} (bar: measured, line: floor)</text>',
    ]
    for place, name in enumerate(names):
        top = ROW * (place + 1) + 4
        us, floor = result.family_us.get(name, 0.0), floors.get(name, 0.0)
        long, mark = WIDTH * us / most, LABEL + WIDTH * floor / most
        parts += [
            f'<text x="{LABEL - 6}" y="{top + 12}" text-anchor="end">{name}</text>',
            f'<rect x="{LABEL}" y="{top}" width="{long:.1f}" height="14" fill="#7aa6c2"/>',
            f'<line x1="{mark:.1f}" x2="{mark:.1f}" y1="{top - 2}" y2="{top + 16}" '
            'stroke="#b03030" stroke-width="2"/>',
            f'<text x="{LABEL + long + 6:.1f}" y="{top + 12}">{us:.0f} / {floor:.0f}</text>',
        ]
    return "\n".join([*parts, "</svg>\n"])


def placed_line(row: PlacedModel | PlacedResult) -> str:
    if isinstance(row, PlacedModel):
        return (
            f"{row.line}; made in {row.seconds:g} s ({row.pinning_s:g} of them pinning); so far at "
            f"most {row.gpu_gb:g} GB of the GPU were used, planned are {row.planned_gb:g} GB "
            f"and {row.step_gb:g} GB for a step"
        )
    size = f"{row.context} tokens" if row.what == "prompt" else f"{row.batch} x {row.context}"
    return (
        f"{row.what} {row.shape} {row.layers} layers, {size}, {row.routing}: {row.ms:.3f} ms "
        f"(spread {row.spread_ms:.3f}, without swaps {row.still_ms:.3f}), "
        f"{row.tokens_per_s} tok/s, {100 * row.resident_share:.1f} % resident, "
        f"{row.missing_mb:g} MB from the host ({row.missing_gbs:g} GB/s), {row.num_swaps} swaps"
    )


Curves = dict[str, list[tuple[float, float]]]  # by name: (x, y)
COLORS = ("#b03030", "#2f6f9f", "#555", "#8bb174", "#b07aa1", "#d9893b")


def share_points(rows: Sequence[PlacedModel | PlacedResult]) -> Curves:
    found: Curves = {}
    for row in rows:
        if isinstance(row, PlacedResult) and row.what == "decode" and row.batch == 1:
            found.setdefault(row.routing, []).append((row.resident_share, row.ms))
    return found


def share_picture(found: Curves) -> str:
    """An SVG: milliseconds per token of one sequence against the share of resident experts."""
    shares = [share for points in found.values() for share, _ in points]
    least = min(math.floor(10 * min(shares, default=0.0)), 9)
    marks = [(tenth / 10, f"{10 * tenth} %") for tenth in range(least, 11)]
    below = "share of the experts that are on the GPU"
    return _curves(found, marks, "ms a token of one sequence", below, ".1f")


def position_picture(rows: Sequence[StepResult]) -> str:
    """An SVG: tokens per second of a prompt's chunks against the tokens before them."""
    found: Curves = {}
    for row in rows:
        name = f"{row.shape}, {row.weights}, chunks of {row.context}"
        found.setdefault(name, []).append((row.position, row.tokens_per_s))
    most = max(row.position for row in rows)
    marks = [(most * n / 4, f"{most * n // 4:,}") for n in range(5)]
    return _curves(found, marks, "tokens a second, scaled to all layers", "tokens before", ",.0f")


def _curves(
    found: Curves, marks: Sequence[tuple[float, str]], title: str, below: str, form: str
) -> str:
    most = max((value for points in found.values() for _, value in points), default=1.0)
    each = next(
        n * 10**power for power in range(-3, 7) for n in (1, 2, 5) if n * 10**power * 8 > most
    )
    lines, (least, _), (last, _) = math.ceil(most / each), marks[0], marks[-1]
    wide, high, left, top = 520, 260, 60, 30

    def place(across: float, value: float) -> tuple[float, float]:
        share = (across - least) / max(last - least, 1e-9)
        return left + wide * share, top + high * (1 - value / (lines * each))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide + 130}" height="{high + 74}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="16">{title}</text>',
        f'<text x="{left}" y="{high + 66}">{below}</text>',
    ]
    for line in range(lines + 1):
        y = place(last, line * each)[1]
        parts.append(f'<path d="M{left} {y:.1f}h{wide}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{line * each:g}</text>'
        )
    for across, text in marks:
        x, y = place(across, 0)
        parts.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{text}</text>')
    for (name, points), color in zip(found.items(), cycle(COLORS), strict=False):
        places = [(*place(*point), point[1]) for point in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for index, (x, y, value) in enumerate(places):
            text = f"{value:{form}}" + ("" if index else f", {name}")
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>')
            parts.append(f'<text x="{x + 5:.1f}" y="{y - 7:.1f}" fill="{color}">{text}</text>')
    return "\n".join([*parts, "</svg>\n"])
