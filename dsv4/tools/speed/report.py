"""Results of timed steps as lines, as a record, and as a picture."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dsv4.tools.bench_ops import Ceilings, run_facts
from dsv4.tools.speed.steps import StepResult
from dsv4.util.sizes import size_text

ROW, LABEL, WIDTH = 22, 110, 560


def lines_of(result: StepResult) -> list[str]:
    """A few lines for the terminal."""
    r = result
    size = f"{r.context} tokens" if r.what == "prefill" else f"{r.batch} x {r.context}"
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
