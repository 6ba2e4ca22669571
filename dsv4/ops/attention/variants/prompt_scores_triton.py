# mypy: ignore-errors
"""`index_scores` of prompts: TOKENS adjacent rows share each tile of keys, read and unpacked once.

Each row's heads are summed as in `index_scores_triton`, so bits are equal. Rows of a program that
belong to several sequences take turns: all of its rows are then the same one.
"""

import triton
import triton.language as tl

from dsv4.ops.attention.index_scores_triton import (
    fetch_codes,
    load_queries,
    locate,
    multiply_codes,
    multiply_keys,
    positive,
)
from dsv4.ops.core.gpu import describe
from dsv4.ops.core.launch import launch_options

TOKENS, FEWER, WARPS = 4, 2, 4  # FEWER without wgmma, where sums of 4 rows do not fit
PROGRAMS = 264  # that run concurrently, two per multiprocessor


@triton.jit
def _sum_heads(
    products, weight, BN: tl.constexpr, H: tl.constexpr, TOKENS: tl.constexpr, ASM: tl.constexpr
):
    """fp32 `[BN, TOKENS]`."""
    score = positive(products, ASM) * weight[None, :]
    return tl.sum(score.reshape(BN, TOKENS, H), axis=2)


@triton.jit
def _store_scores(out, row64, score, tile, visible, topk, width, BN: tl.constexpr):
    """A row that sees no more than `topk` entries takes all of them: their scores are zero."""
    entry = (tile * BN + tl.arange(0, BN))[:, None]
    score = tl.where((visible > topk)[None, :], score, 0.0)
    score = tl.where(entry < visible[None, :], score, float("-inf"))
    at = (row64 * width)[None, :] + entry
    tl.store(out + at, score, mask=(entry < width).broadcast_to(score.shape))


@triton.jit
def _score_rows(
    row, row_of_head, q, weights, out, positions, seq_idx, data, scale, table, table_width, width,
    num_heads, topk, PAGE: tl.constexpr, H: tl.constexpr, DIM: tl.constexpr, BN: tl.constexpr,
    FORMAT: tl.constexpr, STAGES: tl.constexpr, MT: tl.constexpr, ASM: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    first, apart = tl.program_id(0), tl.num_programs(0)
    visible = (tl.load(positions + row).to(tl.int32) + 1) // 4
    most = tl.max(visible, 0)
    row64 = row.to(tl.int64)
    tiles = tl.cdiv(tl.minimum(most, width), BN)
    begin = first
    if most > topk:
        table += tl.max(tl.load(seq_idx + row), 0).to(tl.int64) * table_width
        head = tl.arange(0, TOKENS * H) % H
        live = head < num_heads
        at = row_of_head.to(tl.int64) * num_heads + head
        weight = tl.load(weights + at, mask=live, other=0.0).to(tl.float32)
        queries = load_queries(q, (at * DIM)[:, None], live, DIM, TOKENS * H, FORMAT, MT)
        last = tl.minimum(most, width) - 1
        if FORMAT == 4:
            weight *= 9223372036854775808.0  # 2^63
            page, place = locate(table, first, last, PAGE, BN)
            words, power = fetch_codes(data, scale, page.to(tl.int64) * PAGE + place, DIM)
            page, place = locate(table, first + apart, last, PAGE, BN)
            for tile in tl.range(first, tiles, apart, num_stages=1):
                slot = page.to(tl.int64) * PAGE + place
                next_words, next_power = fetch_codes(data, scale, slot, DIM)
                page, place = locate(table, tile + 2 * apart, last, PAGE, BN)
                products = multiply_codes(queries, words, power, DIM, BN, TOKENS * H, MT, ASM)
                score = _sum_heads(products, weight, BN, H, TOKENS, ASM)
                score = score.reshape(BN // 64, 4, 2, 8, TOKENS).permute(0, 2, 1, 3, 4)
                score = score.reshape(BN, TOKENS)
                _store_scores(out, row64, score, tile, visible, topk, width, BN)
                words, power = next_words, next_power
        else:
            for tile in tl.range(first, tiles, apart, num_stages=STAGES):
                page, place = locate(table, tile, last, PAGE, BN)
                slot = page.to(tl.int64) * PAGE + place
                products, own = multiply_keys(
                    queries, data, scale, slot, TOKENS * H, DIM, BN, FORMAT, MT
                )
                score = _sum_heads(products, weight, BN, H, TOKENS, False) * own[:, None]
                _store_scores(out, row64, score, tile, visible, topk, width, BN)
        begin = first + tl.cdiv(tl.maximum(tiles - first, 0), apart) * apart
    for tile in tl.range(begin, tl.cdiv(width, BN), apart):
        zero = tl.zeros((BN, TOKENS), tl.float32)
        _store_scores(out, row64, zero, tile, visible, topk, width, BN)


@triton.jit(do_not_specialize=["table_width", "width", "num_rows"])
def _prompt_scores_kernel(
    q, weights, out, positions, seq_idx, data, scale, table, table_width, width, num_heads,
    num_rows, topk, PAGE: tl.constexpr, H: tl.constexpr, DIM: tl.constexpr, BN: tl.constexpr,
    FORMAT: tl.constexpr, STAGES: tl.constexpr, MT: tl.constexpr, ASM: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Tiles of TOKENS rows, `tl.num_programs(0)` apart."""
    base = tl.program_id(1) * TOKENS
    rows = tl.minimum(base + tl.arange(0, TOKENS), num_rows - 1)
    owner = tl.load(seq_idx + rows)
    alike = tl.max(owner, 0) == tl.min(owner, 0)
    token = tl.arange(0, TOKENS * H) // H
    for turn in range(0, tl.where(alike, 1, TOKENS)):
        row = tl.minimum(base + tl.where(alike, tl.arange(0, TOKENS), turn), num_rows - 1)
        row_of_head = tl.minimum(base + tl.where(alike, token, turn), num_rows - 1)
        _score_rows(
            row, row_of_head, q, weights, out, positions, seq_idx, data, scale, table, table_width,
            width, num_heads, topk, PAGE, H, DIM, BN, FORMAT, STAGES, MT, ASM, TOKENS,
        )  # fmt: skip


def score_prompt(q, weights, out, positions, *more, BN, **launch) -> None:
    rows, width = out.shape
    tokens = TOKENS if describe(q.device).products == "wgmma" else FEWER
    groups = triton.cdiv(rows, tokens)
    programs = min(triton.cdiv(width, BN), max(1, PROGRAMS // groups))
    _prompt_scores_kernel[(programs, groups)](
        q, weights, out, positions, *more, BN=BN, TOKENS=tokens, **launch, **launch_options(WARPS)
    )
