# mypy: ignore-errors
"""`index_scores` and `index_select` of few long rows in two launches: programs that score a row's
entries already hold the peaks of its parts in registers."""

import torch
import triton

from dsv4.ops.attention import index_scores_triton, index_select_triton
from dsv4.ops.core.workspace import workspace


def _parts(tokens, table, pool, topk) -> tuple[int, int]:
    """Parts of a row and of each program: 2 topk in all, at most a tile's columns per program."""
    programs = index_scores_triton.num_programs(tokens, table, pool)
    wanted = triton.cdiv(2 * triton.next_power_of_2(topk), programs)
    parts = min(index_scores_triton.BN, triton.next_power_of_2(wanted))
    return programs * parts, parts


def supports(q, weights, pool, table, batch, topk) -> str | None:
    rows, width = q.shape[0], table.shape[1] * pool.page_entries
    if rows == 0 or width <= index_select_triton.ONE or topk > index_select_triton.MOST:
        return f"{rows} rows of {width} entries, {topk} of them wanted"
    if not batch.appends_at_once:
        return "not few new tokens for each sequence: prompts would need more variants"
    if _parts(rows, table, pool, topk)[0] < 2 * topk:
        return f"so many rows leave too few parts to find {topk} entries by their peaks"
    return index_scores_triton.supports(q, weights, pool, table, batch, topk)


def run(q, weights, pool, table, batch, topk):
    total, parts = _parts(q.shape[0], table, pool, topk)
    peaks = workspace(q.device, "select_peaks", q.shape[0] * total, torch.int32)
    scores = index_scores_triton.run(
        q, weights, pool, table, batch, topk, peaks=peaks, parts=parts
    )  # fmt: skip
    out = torch.empty(q.shape[0], topk, dtype=torch.int64, device=q.device)
    index_select_triton.select_long(scores, topk, peaks, total, out)
    return out
