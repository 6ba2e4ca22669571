# mypy: ignore-errors
"""`sample` on a GPU, five launches: statistics, candidates, filters, draw, best of a row.

The tokens that pass top-k and top-p are a prefix of the row in descending order. They are described
by the order-preserving key of the last one and, for ties, the last id. Both are found bit by bit,
without sorting, among the candidates that a bound on either filter leaves, or in the whole row if
these are too many. Rows without filters skip both. All sums have a fixed order.
"""

import torch
import triton
import triton.language as tl

from dsv4.ops.core.helpers_device import depend
from dsv4.ops.core.launch import dependent_options, device_reason, interpreting
from dsv4.ops.core.workspace import workspace
from dsv4.ops.sample import filter_triton as ft

CHUNK = 2048  # logits per program
WARPS = 4  # fixes the order of summation, like CHUNK
TILE = 4096  # logits that a filter reads at a time
PARTS = 16  # parts of a chunk whose largest logits and masses bound the filters
CANDIDATES = 256  # most per chunk
SOME_CANDIDATES = 64  # per chunk: a row then has a few thousand
FEW_CANDIDATES = 256  # what a row usually has
PROGRAMS = 528  # that search for candidates
EARLY_ROWS = 8  # up to here launches start before the one before them is complete


@triton.jit
def _exp_below(x, top, ASM: tl.constexpr):
    below = x - tl.where(top > -3e38, top, 0.0)
    return ft.exp2_fast(below * 1.4426950408889634, ASM)


@triton.jit
def _stats_kernel(
    logits, stats, parts, temperature, o, size, num_chunks, CHUNK: tl.constexpr,
    PARTS: tl.constexpr, ASM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Largest logit and sum of exponentials of a chunk, unmodified and adjusted; the latter also
    for each of its parts."""
    depend(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    live = place < size
    at = row * size + place
    raw = tl.load(logits + at, mask=live, other=float("-inf"))
    x = ft.adjusted(raw, row, place, live, size, temperature, o)
    part_tops = tl.max(x.reshape(PARTS, CHUNK // PARTS), axis=1)
    x_top = tl.max(part_tops, axis=0)
    part_sums = tl.sum(_exp_below(x, x_top, ASM).reshape(PARTS, CHUNK // PARTS), axis=1)
    part = parts + ((row * num_chunks + chunk) * PARTS + tl.arange(0, PARTS)) * 2
    tl.store(part, part_tops)
    tl.store(part + 1, part_sums)
    x_sum = tl.sum(part_sums, axis=0)
    raw_top, raw_sum = x_top, x_sum
    heat = tl.load(temperature + row)
    changed = (heat > 0) & (heat != 1.0)
    if len(o) > 0:
        changed = changed | (tl.load(o.flags + row) != 0)
    if changed:
        raw_top = tl.max(raw, axis=0)
        raw_sum = tl.sum(_exp_below(raw, raw_top, ASM), axis=0)
    out = stats + (row * num_chunks + chunk) * 4
    tl.store(out, raw_top)
    tl.store(out + 1, raw_sum)
    tl.store(out + 2, x_top)
    tl.store(out + 3, x_sum)


@triton.jit
def _row_stat(stats, row, num_chunks, offset, CHUNKS: tl.constexpr):
    """Largest number of a row and the sum of exponentials relative to it."""
    chunk = tl.arange(0, CHUNKS)
    at = stats + (row * num_chunks + chunk) * 4 + offset
    live = chunk < num_chunks
    top = tl.load(at, mask=live, other=float("-inf"))
    part = tl.load(at + 1, mask=live, other=0.0)
    best = tl.max(top, axis=0)
    return best, tl.sum(part * tl.exp(top - best), axis=0)


@triton.jit
def _limits(temperature, top_k, top_p, row, size):
    """How many tokens and what share may pass, and whether this filters anything."""
    keep = tl.load(top_k + row).to(tl.int32)
    keep = tl.where((keep > 0) & (keep < size), keep, size)
    share = tl.load(top_p + row).to(tl.float32)
    hot = tl.load(temperature + row) > 0
    return keep, share, hot & ((share < 1.0) | (keep < size))


@triton.jit
def _bound(
    parts, stats, row, num_chunks, size, best, mass, keep, share, CHUNKS: tl.constexpr,
    PARTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The key of a logit below which no token passes; half of its bits are precise enough.

    A bound is valid if `keep` parts reach it with their largest token, and if all tokens below it
    have at most 1 - share of the mass. In a part that reaches it, these are at most all tokens but
    the largest, each below the bound.
    """
    part = tl.arange(0, CHUNKS * PARTS)
    used = part < num_chunks * PARTS
    at = row * num_chunks * PARTS + part
    top = tl.load(parts + at * 2, mask=used, other=float("-inf"))
    own = tl.load(parts + at * 2 + 1, mask=used, other=0.0)
    chunk_top = tl.load(stats + (row * num_chunks + part // PARTS) * 4 + 2, mask=used, other=0.0)
    own = tl.where(used, own * tl.exp(chunk_top - best), 0.0)
    others = tl.maximum(own - tl.exp(top - best), 0.0) + own * 1e-5
    top_key = tl.where(used, ft.order_key(top), tl.zeros_like(part).to(tl.uint32))
    # top-p is a share of what top-k leaves, so with both only the count gives a bound
    alone = (share < 1.0) & (keep >= size)
    spare = tl.where(alone, (1.0 - share) * mass * 0.999, -1.0)
    least = tl.zeros((), tl.uint32)
    digits = tl.arange(0, 4).to(tl.uint32)
    unit = tl.full((), 0x40000000, tl.uint32)
    for _ in tl.range(0, 8):
        trial = least | (digits * unit)
        reaches = top_key[:, None] >= trial[None, :]
        reached = tl.sum(reaches.to(tl.int32), axis=0)
        most = tl.exp(ft.key_value(trial) - best) * (CHUNK // PARTS)
        inside = tl.minimum(others[:, None], most[None, :])
        below = tl.sum(tl.where(reaches, inside, own[:, None]), axis=0)
        holds = (reached >= keep) | (below <= spare)
        least = tl.max(tl.where(holds, trial, least), axis=0)
        unit = (unit >> 2).to(tl.uint32)
    return least


@triton.jit
def _candidates_kernel(
    logits, stats, parts, found, temperature, top_k, top_p, o, size, num_chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, ROOM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The candidates of some chunks, in id order."""
    depend(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    keep, share, filters = _limits(temperature, top_k, top_p, row, size)
    if filters:
        best, mass = _row_stat(stats, row, num_chunks, 2, CHUNKS)
        least = _bound(
            parts, stats, row, num_chunks, size, best, mass, keep, share, CHUNKS, PARTS, CHUNK
        )
        bound = ft.key_value(least)
        # tokens that cannot be drawn are skipped; keys below that of -inf mean no number
        bound = tl.where(bound > -3.4e38, bound, -3.4e38)
        for chunk in tl.range(tl.program_id(1), num_chunks, tl.num_programs(1)):
            total = tl.zeros((), tl.int32)
            if tl.load(stats + (row * num_chunks + chunk) * 4 + 2) >= bound:
                place = chunk * CHUNK + tl.arange(0, CHUNK)
                live = place < size
                at = row * size + place
                raw = tl.load(logits + at, mask=live, other=float("-inf"))
                x = ft.adjusted(raw, row, place, live, size, temperature, o)
                may = (live & (x >= bound)).to(tl.int32)
                order = tl.cumsum(may, axis=0) - 1
                base = (row * num_chunks + chunk) * ROOM
                tl.store(found.logit + base + order, x, mask=(may == 1) & (order < ROOM))
                tl.store(found.ids + base + order, place, mask=(may == 1) & (order < ROOM))
                total = tl.sum(may, axis=0)
            tl.store(found.counts + row * num_chunks + chunk, total)


@triton.jit
def _filter_kernel(
    logits, stats, limits, found, temperature, top_k, top_p, o, size, num_chunks,
    CHUNKS: tl.constexpr, ROOM: tl.constexpr, SOME: tl.constexpr, FEW: tl.constexpr,
    TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`limits` (int64, 2 per row): the key of the last token that passes; its largest id."""
    depend(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    keep, share, filters = _limits(temperature, top_k, top_p, row, size)
    threshold = tl.zeros((), tl.uint32)
    last_id = tl.zeros((), tl.int32) + size
    if filters:
        best, mass = _row_stat(stats, row, num_chunks, 2, CHUNKS)
        chunk = tl.arange(0, CHUNKS)
        held = tl.load(found.counts + row * num_chunks + chunk, mask=chunk < num_chunks, other=0)
        most = tl.max(held, axis=0)
        if (most <= ROOM) & (tl.sum(held, axis=0) <= FEW):
            threshold, last_id = ft.filter_candidates(
                found, row, num_chunks, size, best, mass, keep, share, last_id,
                CHUNKS, ROOM, ROOM, FEW, 4,
            )  # fmt: skip
        elif most <= SOME:
            threshold, last_id = ft.filter_candidates(
                found, row, num_chunks, size, best, mass, keep, share, last_id,
                CHUNKS, ROOM, SOME, CHUNKS * SOME, 1,
            )  # fmt: skip
        elif most <= ROOM:
            threshold, last_id = ft.filter_candidates(
                found, row, num_chunks, size, best, mass, keep, share, last_id,
                CHUNKS, ROOM, ROOM, CHUNKS * ROOM, 1,
            )  # fmt: skip
        else:
            threshold, last_id = ft.filter_row(
                logits, row, best, mass, keep, share, temperature, o, size, TILE
            )
    tl.store(limits + row * 2, threshold.to(tl.int64))
    tl.store(limits + row * 2 + 1, last_id.to(tl.int64))


@triton.jit
def _with_gumbel(x, seed, position, first, CHUNK: tl.constexpr, ASM: tl.constexpr):
    """`x - log(-log2(u))`: Gumbel noise up to a constant that does not affect the result.

    u is number i of the row's stream: word i % 4 of counter (i // 4, position, 0, 0), 23 bits
    and a half.
    """
    w0 = (first // 4 + tl.arange(0, CHUNK // 4)).to(tl.uint32)
    w2, w3 = w0 * 0, w0 * 0
    w1 = w2 + position.to(tl.uint32)
    key0 = seed.to(tl.uint32)
    key1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        # tl.philox multiplies twice; one 64-bit product gives both halves
        a = w0.to(tl.uint64) * 0xD2511F53
        b = w2.to(tl.uint64) * 0xCD9E8D57
        w0 = (b >> 32).to(tl.uint32) ^ w1 ^ key0
        w2 = (a >> 32).to(tl.uint32) ^ w3 ^ key1
        w1, w3 = b.to(tl.uint32), a.to(tl.uint32)
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(CHUNK)
    u = ((words >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 0.999999940395355225
    d = 1.0 - u  # exact, as u is
    # -log2(u); near 1 by a polynomial (to 4e-8), where a logarithm would lose bits
    series = tl.fma(d, 0.49044735401873113, 0.20748625485680564)
    series = tl.fma(d, series, 0.37195638106245643)
    series = tl.fma(d, series, 0.48020793694298664)
    series = tl.fma(d, series, 0.721362740909083)
    series = tl.fma(d, series, 1.442694954897638)
    e = tl.where(d < 0.25, d * series, -ft.log2_fast(u, ASM))
    return tl.fma(ft.log2_fast(e, ASM), -0.6931471805599453, x)


@triton.jit
def _draw_kernel(
    logits, stats, limits, best_value, best_id, temperature, min_p, o, seeds, positions, size,
    num_chunks, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ASM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The best token of a chunk; last chunks first, since they are still in the cache."""
    depend(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    chunk = num_chunks - 1 - tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    live = place < size
    at = row * size + place
    raw = tl.load(logits + at, mask=live, other=float("-inf"), eviction_policy="evict_first")
    x = ft.adjusted(raw, row, place, live, size, temperature, o)
    if tl.load(temperature + row) > 0:
        threshold = ft.key_value(tl.load(limits + row * 2).to(tl.uint32))
        share = tl.load(min_p + row)
        if (threshold > float("-inf")) | (share > 0):
            best, _ = _row_stat(stats, row, num_chunks, 2, CHUNKS)
            least = best + tl.minimum(tl.log(share), 0.0)
            last_id = tl.load(limits + row * 2 + 1).to(tl.int32)
            keep = (x > threshold) | ((x == threshold) & (place <= last_id))
            x = tl.where(keep & (x >= least), x, float("-inf"))
        seed, position = tl.load(seeds + row), tl.load(positions + row)
        x = _with_gumbel(x, seed, position, chunk * CHUNK, CHUNK, ASM)
    top = tl.max(x, axis=0)
    tl.store(best_value + row * num_chunks + chunk, top)
    first = tl.min(tl.where(x == top, place, 2147483647), axis=0)
    tl.store(best_id + row * num_chunks + chunk, first)


@triton.jit
def _best_kernel(
    best_value, best_id, stats, tokens, norms, num_chunks, CHUNKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    depend(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    top, mass = _row_stat(stats, row, num_chunks, 0, CHUNKS)
    norm = top + tl.log(mass)
    tl.store(norms + row, norm)
    chunk = tl.arange(0, CHUNKS)
    live = chunk < num_chunks
    value = tl.load(best_value + row * num_chunks + chunk, mask=live, other=float("-inf"))
    ids = tl.load(best_id + row * num_chunks + chunk, mask=live, other=2147483647)
    top = tl.max(value, axis=0)
    token = tl.min(tl.where(value == top, ids, 2147483647), axis=0)
    tl.store(tokens + row, tl.where(tl.abs(norm) < float("inf"), token, -1).to(tl.int64))


def supports(logits, inputs) -> str | None:
    options = {name: getattr(inputs, name) for name in ("seen", "bias", "mask")}
    for name, tensor in {"logits": logits, **options}.items():
        if tensor is not None and not tensor.is_contiguous():
            return f"{name} has strides {tensor.stride()}, kernels need it contiguous"
    if logits.shape[1] > 1 << 18:
        return f"vocabulary of {logits.shape[1]}, kernels know up to {1 << 18}"
    return device_reason(logits.device)


def run(logits, inputs):
    rows, size = logits.shape
    device = logits.device
    chunks = triton.cdiv(size, CHUNK)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    norms = torch.empty(rows, dtype=torch.float32, device=device)
    stats = workspace(device, "sample_stats", rows * chunks * 4, torch.float32)
    parts = workspace(device, "sample_parts", rows * chunks * PARTS * 2, torch.float32)
    held = rows * chunks * CANDIDATES
    found = ft.Candidates(
        workspace(device, "sample_candidates", held, torch.float32),
        workspace(device, "sample_candidate_ids", held, torch.int32),
        workspace(device, "sample_counts", rows * chunks, torch.int32),
    )
    limits = workspace(device, "sample_limits", rows * 2, torch.int64)
    best_value = workspace(device, "sample_values", rows * chunks, torch.float32)
    best_id = workspace(device, "sample_ids", rows * chunks, torch.int32)
    options = ()
    if inputs.seen is not None:
        options = ft.RowOptions(*(getattr(inputs, name) for name in ft.RowOptions._fields))
    fast = {"ASM": not interpreting()}

    def launched(num_warps):
        return dependent_options(device, num_warps, early=rows <= EARLY_ROWS)

    padded = {"CHUNKS": triton.next_power_of_2(chunks)}
    _stats_kernel[(rows, chunks)](
        logits, stats, parts, inputs.temperature, options, size, chunks,
        CHUNK=CHUNK, PARTS=PARTS, **fast, **launched(WARPS),
    )  # fmt: skip
    filters = (inputs.temperature, inputs.top_k, inputs.top_p, options)
    _candidates_kernel[(rows, min(chunks, max(1, PROGRAMS // rows)))](
        logits, stats, parts, found, *filters, size, chunks,
        CHUNK=CHUNK, PARTS=PARTS, ROOM=CANDIDATES, **padded, **launched(8),
    )  # fmt: skip
    _filter_kernel[(rows,)](
        logits, stats, limits, found, *filters, size, chunks, ROOM=CANDIDATES,
        SOME=SOME_CANDIDATES, FEW=FEW_CANDIDATES, TILE=TILE, **padded, **launched(8),
    )  # fmt: skip
    _draw_kernel[(rows, chunks)](
        logits, stats, limits, best_value, best_id, inputs.temperature, inputs.min_p, options,
        inputs.seeds, inputs.positions, size, chunks,
        CHUNK=CHUNK, **padded, **fast, **launched(WARPS),
    )  # fmt: skip
    _best_kernel[(rows,)](
        best_value, best_id, stats, tokens, norms, chunks, **padded, **launched(1)
    )
    return tokens, norms
