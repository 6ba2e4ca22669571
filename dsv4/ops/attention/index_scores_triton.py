# mypy: ignore-errors
"""`index_scores` on a GPU: a program loops over tiles of BN entries of a token.

The result has the page table's width; the reference's width depends on the data. Columns a token
cannot see are -inf in both. Heads are summed in one tile shape for every batch. Rows of prompts
share their keys (variants/prompt_scores_triton.py).
"""

from importlib import import_module

import torch
import triton
import triton.language as tl

from dsv4.ops.core.helpers_device import depend, from_e4m3
from dsv4.ops.core.launch import dependent_options, device_reason, interpreting
from dsv4.ops.kv import entry_device as ed

RATIO = 4
BN = 64  # entries per tile
STAGES = 2
PROGRAMS = 512  # nearly all that run concurrently, four per multiprocessor
SHARING = 4  # rows of a sequence, on average, from which on rows share their keys

# one E2M1 code of each of two 16-bit words as two bf16, times 2^-126
_SLOT0 = tl.constexpr(
    "{ .reg .b32 u; and.b32 u, $1, 0x000F000F; mul.lo.u32 u, u, 0x1040; "
    "and.b32 $0, u, 0x81C081C0; }"
)
_SLOT1 = tl.constexpr(
    "{ .reg .b32 u; and.b32 u, $1, 0x00F000F0; mul.lo.u32 u, u, 0x104; and.b32 $0, u, 0x81C081C0; }"
)
_SLOT2 = tl.constexpr(
    "{ .reg .b32 u; shr.u32 u, $1, 2; and.b32 u, u, 0x03C003C0; mul.lo.u32 u, u, 0x41; "
    "and.b32 $0, u, 0x81C081C0; }"
)
_SLOT3 = tl.constexpr(
    "{ .reg .b32 u; shr.u32 u, $1, 6; and.b32 u, u, 0x01C001C0; "
    "lop3.b32 $0, $1, 0x80008000, u, 0xEA; }"
)


@triton.jit
def _e2m1(words, SLOT: tl.constexpr, ASM: tl.constexpr):
    """bf16 of one of the four E2M1 numbers of each 16-bit word, times 2^-126."""
    if ASM:
        CODE: tl.constexpr = (
            _SLOT0 if SLOT == 0 else (_SLOT1 if SLOT == 1 else (_SLOT2 if SLOT == 2 else _SLOT3))
        )
        return tl.inline_asm_elementwise(
            CODE, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    code = (words >> (4 * SLOT)) & 15
    return ((code * 0x1040) & -32320).to(tl.bfloat16, bitcast=True)


@triton.jit
def positive(x, ASM: tl.constexpr):
    """max(x, 0) for x below one, by a saturating add, which leaves the integer units free."""
    if ASM:
        return tl.inline_asm_elementwise(
            "add.sat.f32 $0, $1, 0f00000000;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.maximum(x, 0.0, tl.PropagateNan.ALL)


@triton.jit
def _by_group(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Columns `[ROWS, WIDTH / 4, 4]` (word, number of the word) in product order: a thread then
    multiplies the 32 numbers of one scale."""
    GROUPS: tl.constexpr = WIDTH // 32
    x = x.reshape(ROWS, GROUPS, 2, 2, 2, 2, 2)
    return x.permute(0, 6, 5, 2, 3, 1, 4).reshape(ROWS, WIDTH)


@triton.jit
def _by_warp(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows in the warp layout of a product; loads use another one."""
    x = x.reshape(ROWS // 64, 2, 4, 8, WIDTH)
    return x.permute(0, 2, 1, 3, 4).reshape(ROWS, WIDTH)


@triton.jit
def _by_thread(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Permute each 16 columns, the same way for keys and queries: a thread then multiplies four
    adjacent ones."""
    return x.reshape(ROWS, WIDTH // 16, 4, 2, 2).permute(0, 1, 3, 2, 4).reshape(ROWS, WIDTH)


@triton.jit
def load_queries(
    q, q_at, live, DIM: tl.constexpr, H: tl.constexpr, FORMAT: tl.constexpr, MT: tl.constexpr
):
    """Query heads `[H, DIM]`, columns in the keys' order."""
    x = tl.load(q + q_at + tl.arange(0, DIM)[None, :], mask=live[:, None], other=0.0).to(MT)
    if FORMAT == 4:
        x = _by_group(x, H, DIM)
    elif FORMAT == 3:
        x = _by_thread(x, H, DIM)
    return x


@triton.jit
def _times(k, queries, ROWS: tl.constexpr, H: tl.constexpr, MT: tl.constexpr):
    zero = tl.zeros((ROWS, H), tl.float32)
    if tl.float32 == MT:
        out = tl.dot(k.to(tl.float32), tl.trans(queries), zero, input_precision="ieee")
    else:
        out = tl.dot(k, tl.trans(queries), zero)
    return out


@triton.jit
def multiply_keys(
    queries, data, scale, slot, H: tl.constexpr, DIM: tl.constexpr, BN: tl.constexpr,
    FORMAT: tl.constexpr, MT: tl.constexpr,
):  # fmt: skip
    """fp32 `[BN, H]`: keys times query heads; and the keys' factor `[BN]`."""
    own = tl.full((BN,), 1.0, tl.float32)
    k = tl.load(data + slot[:, None] * DIM + tl.arange(0, DIM)[None, :])
    if FORMAT == 3:
        k = _by_thread(k, BN, DIM)
        own = tl.load(scale + slot)
        k = from_e4m3(k, MT)
    return _times(k.to(MT), queries, BN, H, MT), own


@triton.jit
def fetch_codes(data, scale, slot, DIM: tl.constexpr):
    """Codes of FP4 keys, four per word `[BN, DIM / 4]`, and their scale bytes `[BN, DIM / 32]`."""
    slot = slot[:, None]
    words = data.to(tl.pointer_type(tl.int16)) + slot * (DIM // 4)
    group = tl.trans(slot * (DIM // 32)) + tl.arange(0, DIM // 32)[:, None]
    # viewed as single bytes, groups first: then the threads that need them load them
    power = tl.trans(tl.load(scale + tl.max_contiguous(group, (1, 1))))
    return tl.load(words + tl.arange(0, DIM // 4)[None, :]), power


@triton.jit
def multiply_codes(
    queries, words, power, DIM: tl.constexpr, BN: tl.constexpr, H: tl.constexpr,
    MT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """fp32 `[BN, H]`: FP4 keys, times 2^-63, times query heads. Rows as in `_by_warp`."""
    # 2^(e + 63) as bf16: with the codes' 2^-126 a key is scaled by 2^-63
    factor = (tl.minimum(power.to(tl.int32) + 63, 254) << 7).to(tl.int16)
    factor = factor.to(tl.bfloat16, bitcast=True)
    factor = factor[:, :, None].broadcast_to(BN, DIM // 32, 8).reshape(BN, DIM // 4)
    even = tl.join(_e2m1(words, 0, ASM) * factor, _e2m1(words, 2, ASM) * factor)
    odd = tl.join(_e2m1(words, 1, ASM) * factor, _e2m1(words, 3, ASM) * factor)
    k = _by_warp(_by_group(tl.join(even, odd), BN, DIM), BN, DIM)
    return _times(k, queries, BN, H, MT)


@triton.jit
def locate(table, tile, last, PAGE: tl.constexpr, BN: tl.constexpr):
    """The page of each entry of a tile and its offset there; past the end the last one repeats."""
    seen = tl.minimum(tile * BN + tl.arange(0, BN), last).to(tl.uint32)
    return tl.load(table + seen // PAGE), seen % PAGE


@triton.jit
def _store_scores(out, score, tile, visible, width, BN: tl.constexpr):
    entry = tile * BN + tl.arange(0, BN)
    tl.store(out + entry, tl.where(entry < visible, score, float("-inf")), mask=entry < width)


@triton.jit
def _score_codes(
    out, queries, weight, data, scale, table, visible, width, first, tiles, apart,
    PAGE: tl.constexpr, H: tl.constexpr, DIM: tl.constexpr, BN: tl.constexpr, MT: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """FP4 keys go from memory straight into the registers that multiply them. The next tile's keys
    and the pages of the one after are prefetched."""
    last = tl.minimum(visible, width) - 1
    page, place = locate(table, first, last, PAGE, BN)
    words, power = fetch_codes(data, scale, page.to(tl.int64) * PAGE + place, DIM)
    page, place = locate(table, first + apart, last, PAGE, BN)
    for tile in tl.range(first, tiles, apart, num_stages=1):
        slot = page.to(tl.int64) * PAGE + place
        next_words, next_power = fetch_codes(data, scale, slot, DIM)
        page, place = locate(table, tile + 2 * apart, last, PAGE, BN)
        products = multiply_codes(queries, words, power, DIM, BN, H, MT, ASM)
        score = tl.sum(positive(products, ASM) * weight[None, :], axis=1)
        score = score.reshape(BN // 64, 4, 2, 8).permute(0, 2, 1, 3).reshape(BN)
        _store_scores(out, score, tile, visible, width, BN)
        words, power = next_words, next_power


@triton.jit(do_not_specialize=["table_width", "width"])
def _scores_kernel(
    q, weights, out, positions, seq_idx, data, scale, table, table_width, width, num_heads,
    topk, PAGE: tl.constexpr, H: tl.constexpr, DIM: tl.constexpr, BN: tl.constexpr,
    FORMAT: tl.constexpr, STAGES: tl.constexpr, MT: tl.constexpr,
    ASM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Tiles of one token, `tl.num_programs(0)` apart; columns that it cannot see get -inf."""
    first = tl.program_id(0)
    apart = tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    depend(DEPENDENT)
    visible = (tl.load(positions + row).to(tl.int32) + 1) // 4
    out += row * width
    tiles = tl.cdiv(tl.minimum(visible, width), BN)
    begin = first
    if visible > topk:
        table += tl.load(seq_idx + row).to(tl.int64) * table_width
        head = tl.arange(0, H)
        live = head < num_heads
        q_at = (row * num_heads + head)[:, None] * DIM
        weight = tl.load(weights + row * num_heads + head, mask=live, other=0.0).to(tl.float32)
        queries = load_queries(q, q_at, live, DIM, H, FORMAT, MT)
        if FORMAT == 4:
            _score_codes(
                out, queries, weight * 9223372036854775808.0, data, scale, table, visible,
                width, first, tiles, apart, PAGE, H, DIM, BN, MT, ASM,
            )  # 2^63  # fmt: skip
        else:
            for tile in tl.range(first, tiles, apart, num_stages=STAGES):
                page, place = locate(table, tile, tl.minimum(visible, width) - 1, PAGE, BN)
                slot = page.to(tl.int64) * PAGE + place
                products, own = multiply_keys(queries, data, scale, slot, H, DIM, BN, FORMAT, MT)
                # scales are powers of two above zero: they may wait until the heads are summed
                score = tl.sum(positive(products, False) * weight[None, :], axis=1) * own
                _store_scores(out, score, tile, visible, width, BN)
        begin = first + tl.cdiv(tl.maximum(tiles - first, 0), apart) * apart
    for tile in tl.range(begin, tl.cdiv(width, BN), apart):
        _store_scores(out, tl.zeros((BN,), tl.float32), tile, visible, width, BN)


def supports(q, weights, to) -> str | None:
    pool, batch = to.pool, to.batch
    if q.dtype not in (torch.float32, torch.bfloat16) or not q.is_contiguous():
        return f"q is {q.dtype} with strides {q.stride()}, not contiguous bfloat16 or float32"
    if not weights.is_contiguous():
        return f"weights have strides {weights.stride()}, kernels need them contiguous"
    if pool.dim & (pool.dim - 1) or pool.dim < 32:
        return f"index keys of {pool.dim} numbers, kernels need a power of two from 32 on"
    return (
        device_reason(q.device)
        or ed.pool_reason(pool)
        or ed.index_tensors_reason(table=to.table, positions=batch.positions, seq_idx=batch.seq_idx)
    )


def run(q, weights, to):
    pool, table, batch = to.pool, to.table, to.batch
    tokens, heads, dim = q.shape
    width = table.shape[1] * pool.page_entries
    fmt = ed.pool_format(pool)
    out = torch.empty(tokens, width, dtype=torch.float32, device=q.device)
    data, _, scale = ed.entry_pool(pool)
    if q.dtype == torch.float32 or fmt == ed.FP32:
        mt = tl.float32
    else:
        mt = tl.bfloat16 if fmt in (ed.INDEX_FP4, 1) else tl.float16
    launch = {"PAGE": pool.page_entries, "H": max(16, triton.next_power_of_2(heads)), "DIM": dim}
    launch |= {"BN": BN, "FORMAT": fmt, "STAGES": STAGES, "MT": mt, "ASM": not interpreting()}
    tensors = (q, weights, out, batch.positions, batch.seq_idx, data, scale, table)
    facts = (table.shape[1], width, heads)
    if tokens >= SHARING * batch.starts.shape[0] and not batch.is_few and mt != tl.float32:
        shared = import_module("dsv4.ops.attention.variants.prompt_scores_triton")
        shared.score_prompt(*tensors, *facts, tokens, to.topk, **launch)
        return out
    programs = min(triton.cdiv(width, BN), max(1, PROGRAMS // tokens))
    _scores_kernel[(programs, tokens)](
        *tensors, *facts, to.topk, **launch, **dependent_options(q.device, 4)
    )
    return out
