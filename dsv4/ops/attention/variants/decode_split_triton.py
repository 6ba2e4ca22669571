# mypy: ignore-errors
"""`attention` of few queries: one program per tile of entries and block of heads; a second launch
merges their sums.

Such a program is a chain of dependent waits: for the position, page numbers, entries, and the
products over 512 channels. Everything else is overlapped: queries and the selected entries are
loaded before the position is known; queries are converted to fp16 behind an opaque instruction
before they go to shared memory (otherwise the compiler places each piece's round trip through
shared memory next to its load, with one wait after another, and converts in every warp); and all
sums are transposed together for the threads that store them.
"""

from math import gcd

import torch
import triton
import triton.language as tl

from dsv4.ops.attention import tile_device as td
from dsv4.ops.attention.query_triton import load_heads, norm_heads, store_heads, turn_heads
from dsv4.ops.attention.variants.merge_triton import merge_tiles
from dsv4.ops.core.helpers_device import append, depend
from dsv4.ops.core.launch import dependent_options
from dsv4.ops.core.workspace import workspace

GROUP = 4  # pieces of keys converted together; more would displace a third program
MOST_TILES = 600  # (tile, 64 heads) pairs: their sums take 78 MB


@triton.jit
def _keys_and_scores(
    queries, stored, scales, GROUP: tl.constexpr, BH: tl.constexpr, T: tl.constexpr
):
    """Keys in T.mt by piece, and scores. GROUP pieces are multiplied while the next convert."""
    keys = ()
    ENTRIES: tl.constexpr = T.bt
    scores = tl.zeros((BH, ENTRIES), tl.float32)
    for i in tl.static_range(len(stored)):
        k = td.widen_piece(stored[i], scales, td.piece_first(T.dim, T.rope, i), T, T.asm)
        keys = append(keys, k)
        if (i + 1) % GROUP == 0:
            for j in tl.static_range(i + 1 - GROUP, i + 1):
                scores = td.dot(queries[j], tl.trans(keys[j]), scores, T.mt)
    return keys, scores


@triton.jit(do_not_specialize=["num_tokens", "num_selected", "w_width", "c_width"])
def _split_kernel(
    raw, q, acc_out, stat_out, at, num_selected, w_width, c_width, frequencies, num_heads,
    num_tokens, window, qk_scale, eps, RATIO: tl.constexpr, PREPARE: tl.constexpr,
    BH: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr, T: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A block of heads, a token and a tile. PREPARE: queries are prepared from `raw` first; all
    programs of the same heads write equal values. WHOLE: all channels form one product."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(2)
    head = block * BH + tl.arange(0, BH)
    live = head < num_heads
    position = tl.load(at.positions + row).to(tl.int32)
    seq = tl.load(at.seq_idx + row).to(tl.int64)
    q_at = (row * num_heads + head)[:, None] * T.dim
    depend(DEPENDENT)
    if PREPARE or WHOLE:
        turned = load_heads(raw, num_heads, row, block, BH, T.dim)
    else:
        found = td.load_queries(q, q_at, live, T)
    visible = tl.minimum((position + 1) // RATIO, num_selected)
    # with selected entries all tiles exist except at the very start: no wait to find out
    if not T.selected:  # noqa: SIM102 - settled by the compiler
        if tile >= T.wt + tl.cdiv(visible, T.bt):
            return
    older = td.tile_choice(tile, visible, row, at, num_selected, T)
    page, inside, present = td.tile_pages(
        tile, older, position, seq, window, at, w_width, c_width, T
    )
    if PREPARE:  # while page numbers are in flight; the rest while entries are
        turned = norm_heads(turned, eps, T.dim, T.asm)
    slot = td.slots_of(tile, page, inside, T)
    if T.selected:
        slot = tl.where((visible > 0) | (tile < T.wt), slot, 0)  # no compressed entries, no page
    stored, scales = td.fetch_tile(slot, tile < T.wt, at, T)
    if PREPARE:
        turned = turn_heads(turned, position, frequencies, BH, T.dim, T.rope, T.asm)
        if not WHOLE:
            store_heads(turned, q, num_heads, row, block, BH, T.dim)
    # issues all loads before the first wait; other threads' stores are read below
    tl.debug_barrier()
    JOINED: tl.constexpr = td.num_joined(T.dim, T.rope, T.dim)
    if WHOLE:
        queries = (td.to_half(turned, T.mt, T.asm),)
        keys = td.widen_tile(stored, scales, JOINED, T, T.asm and BH < 64)
        weights, part, top = td.tile_weights(
            queries, keys, present, num_tokens, qk_scale, JOINED, BH, T
        )
    else:
        if PREPARE:
            found = td.load_queries(q, q_at, live, T)
        queries = ()
        for i in tl.static_range(len(td.pieces(T.dim, T.rope))):
            queries = append(queries, td.to_half(found[i], T.mt, T.asm))
        keys, scores = _keys_and_scores(queries, stored, scales, GROUP, BH, T)
        weights, top = td.softmax(scores, present, qk_scale, T.mt)
        part = td.weights_sum(weights, BH, T.bt, T.mt)
    to = (tile.to(tl.int64) * num_tokens + row) * num_heads + head
    tl.store(stat_out + to * 2, top, mask=live)
    tl.store(stat_out + to * 2 + 1, part, mask=live)
    sums = ()
    for i in tl.static_range(len(keys)):
        zero = tl.zeros((BH, keys[i].shape[1]), tl.float32)
        sums = append(sums, td.dot(weights, keys[i], zero, T.mt))
    joined = td.join_pieces(sums, 1 if WHOLE else JOINED)
    for i in tl.static_range(len(joined)):
        channel = td.piece_first(T.dim, T.rope, i * JOINED) + tl.arange(0, joined[i].shape[1])
        tl.store(acc_out + to[:, None] * T.dim + channel[None, :], joined[i], mask=live[:, None])


def run(q, to, out, config, eps) -> None:
    """With `eps` the queries are raw projections."""
    tokens, heads, dim = q.shape
    places, counts = td.tile_places(to)
    num_tiles = triton.cdiv(to.window, td.BT) + triton.cdiv(counts[0], td.BT)
    # sized for any number of tokens: growing would allocate later
    most_tokens = MOST_TILES // (triton.cdiv(heads, 64) * num_tiles)
    room = num_tiles * max(tokens, most_tokens) * heads
    sums = workspace(q.device, "attention_sums", room * dim, torch.float32)
    stats = workspace(q.device, "attention_stats", 2 * room, torch.float32)
    ready = q
    if eps is not None:
        size = max(q.numel(), most_tokens * heads * dim)
        ready = workspace(q.device, "prepared", size, q.dtype)
    rope_dim = 2 * to.frequencies.shape[0]
    count = len(td.pieces(dim, rope_dim))
    _split_kernel[(triton.cdiv(heads, config.heads), tokens, num_tiles)](
        q, ready, sums, stats, places, *counts, to.frequencies, heads, tokens, to.window,
        dim**-0.5 * td.LOG2E.value, 0.0 if eps is None else eps, RATIO=td.ratio_of(to),
        PREPARE=eps is not None, BH=config.heads, GROUP=gcd(GROUP, count),
        WHOLE=config.channels == dim and td.num_joined(dim, rope_dim, dim) == count,
        T=td.tile_format(q, to),
        **dependent_options(q.device, config.num_warps, config.num_stages),
    )  # fmt: skip
    merge_tiles(q, to, out, sums, stats)
