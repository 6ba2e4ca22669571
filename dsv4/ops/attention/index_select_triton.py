# mypy: ignore-errors
"""`index_select` on a GPU: the exact set by bisection over the bits of the scores.

A program finds the k-th largest of the scores in its registers three bits at a time: up to 11 sums
of seven counts each, until exactly k lie above; no sorting. Ties go to the lower index.

A long row takes two launches. The first finds the peaks of 2k or more parts of the row: the k-th
largest peak is a bound that the best k reach and few others do. In the second, each program keeps
the candidates of its chunk that reach a bound near it, at most k, in ascending index order; the
last program to finish a row selects among the candidates. Prompts have a kernel of their own
(variants/prompt_select_triton.py).
"""

from importlib import import_module

import torch
import triton
import triton.language as tl

from dsv4.ops.core.gpu import describe
from dsv4.ops.core.helpers_device import depend
from dsv4.ops.core.launch import dependent_options, device_reason, launch_options
from dsv4.ops.core.workspace import workspace

ONE = 4096  # longest row that one program handles
FEW_ROWS = 8  # more that start early crowd onto the multiprocessors with room: 17 us, not 5
CHUNK = 2048  # scores per program of a long row; doubled if not all run concurrently
CANDIDATES = 4096  # most that the last program holds at once
MOST = 8192  # largest topk
MANY_ROWS = 257  # from which on each row has one program, however long it is


@triton.jit
def sort_key(score):
    """uint32 ordered like the scores; 0 for -inf, so hidden entries never count."""
    score = tl.where(score == 0.0, 0.0, score)  # -0 ties with 0
    bits = score.to(tl.uint32, bitcast=True)
    flipped = tl.where((bits >> 31) == 1, ~bits, bits | 0x80000000)
    return tl.where(score == float("-inf"), tl.zeros_like(bits), flipped)


@triton.jit
def eighth(low, top):
    """A power of two such that eight of them reach from `low` past `top`; at least one."""
    exponent = ((top - low) >> 1).to(tl.float32).to(tl.uint32, bitcast=True) >> 23
    place = tl.minimum(tl.maximum(exponent.to(tl.int32) - 128, 0), 29)
    return tl.full((), 1, tl.uint32) << place.to(tl.uint32)


@triton.jit
def _two(beyond, bit, FIRST: tl.constexpr):
    reached = (beyond >= FIRST * bit).to(tl.int32)
    return reached + ((beyond >= (FIRST + 1) * bit).to(tl.int32) << 16)


@triton.jit
def count_reaching(key, low, bit):
    """How many keys reach low + bit, low + 2 bit, ...: int32 `[2, 2]`, two counts in each."""
    beyond = tl.where(key >= low, key - low, 0)
    first = tl.join(_two(beyond, bit, 1), _two(beyond, bit, 5))
    second = tl.join(_two(beyond, bit, 3), (beyond >= 7 * bit).to(tl.int32))
    return tl.sum(tl.join(first, second), axis=0)


@triton.jit
def raise_bound(counts, low, bit, count, topk):
    """The highest of these bounds that at least topk keys reach, and how many do."""
    start = low
    for pair in tl.static_range(4):
        half = tl.split(tl.split(counts)[pair % 2])[pair // 2]
        for field in tl.static_range(2):
            found = (half >> (16 * field)) & 0xFFFF
            low = tl.where(found >= topk, start + (2 * pair + field + 1) * bit, low)
            count = tl.where(found >= topk, found, count)
    return low, count, tl.where(bit > 1, tl.maximum(bit >> 3, 1), 0).to(tl.uint32)


@triton.jit
def find_threshold(key, low, bit, count, topk, most):
    """The topk-th largest key, or a bound that topk to `most` keys reach. `count` reach `low`."""
    while (bit > 0) & (count > most):
        low, count, bit = raise_bound(count_reaching(key, low, bit), low, bit, count, topk)
    return low, count


@triton.jit
def find_places(key, threshold):
    """Prefix counts of keys above the threshold (low 16 bits) and equal to it (high); totals."""
    above = key > threshold
    equal = (key == threshold) & (key > 0)
    both = above.to(tl.int32) + (equal.to(tl.int32) << 16)  # two counts in one sum
    return above, equal, tl.cumsum(both, axis=0), tl.sum(both, axis=0)


@triton.jit
def saturated(counts):
    """Saturate both packed counters at topk to avoid overflow."""
    return tl.minimum(counts & 0xFFFF, 0x4000) | (tl.minimum((counts >> 16) & 0xFFFF, 0x4000) << 16)


@triton.jit
def keep(above, equal, upto, room, topk):
    """Which keys are kept and where; those equal to the threshold while there is room. With NaN
    more than topk may lie above it: the first are kept."""
    rank = (upto >> 16) & 0xFFFF
    room = tl.maximum(room, 0)
    kept = above | (equal & (rank <= room))
    order = (upto & 0xFFFF) + tl.minimum(rank, room) - 1
    return kept & (order < topk), order


@triton.jit
def fill(out, kept, width, BLOCK: tl.constexpr):
    """Pad with -1 where a row has fewer entries than requested."""
    lane = tl.arange(0, BLOCK)
    for start in tl.range(kept, width, BLOCK):
        tl.store(out + start + lane, lane.to(tl.int64) * 0 - 1, mask=start + lane < width)


@triton.jit
def _select_kernel(
    scores, out, width, topk, out_width, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """The `topk` best of a row that fits one program."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    depend(DEPENDENT)
    score = tl.load(scores + row * width + place, mask=place < width, other=float("-inf"))
    key = sort_key(score)
    bit = tl.full((), 0x20000000, tl.uint32)
    threshold, _ = find_threshold(key, bit & 0, bit, tl.full((), BLOCK, tl.int32), topk, topk)
    above, equal, upto, totals = find_places(key, threshold)
    num_above = totals & 0xFFFF
    room = topk - num_above
    kept, order = keep(above, equal, upto, room, topk)
    out += row * out_width
    tl.store(out + order, place.to(tl.int64), mask=kept)
    fill(out, num_above + tl.minimum((totals >> 16) & 0xFFFF, room), out_width, 64)


@triton.jit
def _peaks_kernel(scores, peaks, width, PARTS: tl.constexpr, COLS: tl.constexpr, BR: tl.constexpr):
    """Largest keys `[rows, PARTS]` over entries PARTS apart, COLS of them per program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    best = tl.full((BR, COLS), float("-inf"), tl.float32)
    for first in tl.range(0, width, PARTS * BR):
        place = first + tl.arange(0, BR)[:, None] * PARTS + column[None, :]
        score = tl.load(scores + row * width + place, mask=place < width, other=float("-inf"))
        best = tl.maximum(best, score)
    tl.store(peaks + row * PARTS + column, sort_key(tl.max(best, axis=0)).to(tl.int32))


@triton.jit
def find_ends(key):
    """The highest key, and the lowest one of an entry (not of none, which is 0)."""
    ends = tl.max(tl.join(key, tl.where(key > 0, ~key, 0)), axis=0)
    top, lowest = tl.split(ends)
    return top, ~lowest


@triton.jit
def find_bound(peak, topk):
    """A bound that topk peaks reach, and few more; also the highest peak."""
    top, lowest = find_ends(peak)
    unknown = tl.full((), 0x7FFF, tl.int32)
    low, count = find_threshold(
        peak, lowest, eighth(lowest, top), unknown, topk, topk + (topk >> 4)
    )  # fmt: skip
    return tl.where(count < unknown, low, 1).to(tl.uint32), top  # 0 means no entry


@triton.jit
def _bound(peaks, num_parts, topk, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    key = tl.load(peaks + part, mask=part < num_parts, other=0)
    return find_bound(key.to(tl.uint32, bitcast=True), topk)


@triton.constexpr_function
def _halvings(length):
    return length.bit_length() - 1


@triton.jit
def load_kept(kept, at, live):
    """Keys and indices of candidates, as stored."""
    both = tl.load(kept + at, mask=live, other=0, cache_modifier=".cg")
    return (both >> 32).to(tl.uint32), both & 0xFFFFFFFF


@triton.jit
def _candidates(kept, ends, tile, room, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """Keys and indices of candidates from the tile's first on; `ends`: cumulative per chunk."""
    place = tile * BLOCK + tl.arange(0, BLOCK)
    chunk = tl.zeros((BLOCK,), tl.int32)
    begin = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(_halvings(CHUNKS)):
        end = tl.gather(ends, chunk + ((CHUNKS >> (i + 1)) - 1), 0)
        begin = tl.where(end <= place, end, begin)
        chunk = tl.where(end <= place, chunk + (CHUNKS >> (i + 1)), chunk)
    total = tl.max(ends, axis=0)
    return load_kept(kept, chunk.to(tl.int64) * room + place - begin, place < total)


@triton.jit
def _finish_row(
    kept, counts, out, low, top, num_chunks, is_crowded, room, topk, out_width,
    CHUNKS: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Select among the candidates: usually the FIRST of each chunk are all of them."""
    place = tl.arange(0, BLOCK)
    chunk = place // FIRST
    key, index = load_kept(kept, chunk.to(tl.int64) * room + place % FIRST, chunk < num_chunks)
    ends = tl.zeros((CHUNKS,), tl.int32)
    tiles = tl.full((), 1, tl.int32)
    if is_crowded:
        every = tl.arange(0, CHUNKS)
        found = tl.load(counts + every, mask=every < num_chunks, other=0, cache_modifier=".cg")
        ends = tl.cumsum(found, axis=0)
        tiles = tl.cdiv(tl.sum(found, axis=0), BLOCK)
        key, index = _candidates(kept, ends, 0, room, CHUNKS, BLOCK)
    bit = eighth(low, top)
    count = tl.full((), 0x7FFF, tl.int32)
    while (bit > 0) & (count > topk):
        reached = count_reaching(key, low, bit)
        for tile in tl.range(1, tiles, num_stages=1):
            other, _ = _candidates(kept, ends, tile, room, CHUNKS, BLOCK)
            reached = saturated(reached + count_reaching(other, low, bit))
        low, count, bit = raise_bound(reached, low, bit, count, topk)
    above, equal, upto, totals = find_places(key, low)
    num_above = totals & 0xFFFF
    for tile in tl.range(1, tiles, num_stages=1):
        other, _ = _candidates(kept, ends, tile, room, CHUNKS, BLOCK)
        num_above += tl.sum((other > low).to(tl.int32), axis=0)
    space = topk - num_above
    chosen, order = keep(above, equal, upto, space, topk)
    tl.store(out + order, index, mask=chosen)
    for tile in tl.range(1, tiles, num_stages=1):
        key, index = _candidates(kept, ends, tile, room, CHUNKS, BLOCK)
        above, equal, upto, more = find_places(key, low)
        chosen, order = keep(above, equal, upto + totals, space, topk)
        tl.store(out + order, index, mask=chosen)
        totals = saturated(totals + more)
    fill(out, num_above + tl.minimum((totals >> 16) & 0xFFFF, space), out_width, 64)


@triton.jit(do_not_specialize=["num_chunks", "num_parts"])
def _select_chunk_kernel(
    scores, peaks, kept, counts, counters, out, width, topk, room, out_width, num_chunks, num_parts,
    PARTS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, FIRST: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Keep keys that reach the bound, at most `topk` per chunk; the row's last program selects."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    depend(DEPENDENT)
    score = tl.load(scores + row * width + place, mask=place < width, other=float("-inf"))
    low, top = _bound(peaks + row * num_parts, num_parts, topk, PARTS)
    key = sort_key(score)
    threshold = low - 1  # usually all keys that reach the bound are above this and fit
    above, equal, upto, totals = find_places(key, threshold)
    if totals & 0xFFFF > topk:
        threshold, _ = find_threshold(key, low, eighth(low, top), totals & 0xFFFF, topk, topk)
        above, equal, upto, totals = find_places(key, threshold)
    found = tl.minimum((totals & 0xFFFF) + ((totals >> 16) & 0xFFFF), topk)
    live, order = keep(above, equal, upto, topk - (totals & 0xFFFF), topk)
    kept += row * num_chunks * room
    counts += row * num_chunks
    both = (key.to(tl.int64) << 32) | place
    first = tl.arange(0, FIRST)
    tl.store(kept + chunk.to(tl.int64) * room + order, both, mask=live)
    tl.store(kept + chunk.to(tl.int64) * room + first, first.to(tl.int64) * 0, mask=first >= found)
    tl.store(counts + chunk, found)
    tl.debug_barrier()  # all threads have stored their candidates before the count
    # low half: programs; high half: those with more candidates than are read first
    own = 1 + ((found > FIRST).to(tl.int32) << 16)
    arrived = tl.atomic_add(counters + row, own, sem="acq_rel") + own
    if arrived & 0xFFFF == num_chunks:
        tl.store(counters + row, 0)
        _finish_row(
            kept, counts, out + row * out_width, low, top, num_chunks, arrived >= 0x10000, room,
            topk, out_width, CHUNKS, FIRST, BLOCK,
        )  # fmt: skip


def choose_config(width: int) -> tuple[int, int]:
    """Block and warps of a row that fits one program: 16 scores per thread, 8 for short rows."""
    block = max(32, triton.next_power_of_2(width))
    return block, max(1, min(32, block // (512 if block > 1024 else 256)))


def choose_chunk(rows: int, width: int, at_once: int) -> tuple[int, int]:
    """Scores and warps per program of a long row: 8 scores per thread, 16 in batches."""
    programs = rows * triton.cdiv(width, CHUNK)
    return (CHUNK if programs <= at_once else 2 * CHUNK), 8


def supports(scores, topk) -> str | None:
    if scores.dtype != torch.float32 or not scores.is_contiguous():
        return f"scores are {scores.dtype} with strides {scores.stride()}, not contiguous float32"
    if topk > MOST:
        return f"topk is {topk}, kernels select up to {MOST}"
    return device_reason(scores.device)


def _find_peaks(scores, topk) -> tuple[torch.Tensor, int]:
    rows, width = scores.shape
    parts = 2 * triton.next_power_of_2(topk)
    peaks = workspace(scores.device, "select_peaks", rows * parts, torch.int32)
    columns = min(parts, 8 if rows < 8 else 32)
    per_program = min(256, triton.next_power_of_2(triton.cdiv(width, parts)))
    _peaks_kernel[(rows, parts // columns)](
        scores, peaks, width, PARTS=parts, COLS=columns, BR=per_program, **launch_options(4)
    )
    return peaks, parts


def select_long(scores, topk, peaks, num_parts, out) -> None:
    """Find each row's candidates from the peaks of its parts, then select among them."""
    rows, width = scores.shape
    device = scores.device
    at_once = describe(device).multiprocessors
    chunk, warps = choose_chunk(rows, width, at_once)
    chunks = triton.cdiv(width, chunk)
    across = triton.next_power_of_2(chunks)
    first = triton.next_power_of_2(triton.cdiv(3 * topk, chunks))  # twice the usual number
    first = max(1, min(first, CANDIDATES // across))
    room = max(first, topk)
    most = max(rows * chunks, at_once)  # fewer rows can have more chunks
    _select_chunk_kernel[(rows, chunks)](
        scores, peaks,
        workspace(device, "select_kept", most * room, torch.int64),
        workspace(device, "select_counts", most, torch.int32),
        workspace(device, "select_counters", rows, torch.int32),
        out, width, topk, room, out.shape[1], chunks, num_parts,
        PARTS=triton.next_power_of_2(num_parts), CHUNK=chunk, CHUNKS=across, FIRST=first,
        BLOCK=triton.next_power_of_2(chunks * first), **dependent_options(device, warps),
    )  # fmt: skip


def run(scores, topk):
    rows, width = scores.shape
    out = torch.empty(rows, min(topk, width), dtype=torch.int64, device=scores.device)
    if rows >= MANY_ROWS:
        import_module("dsv4.ops.attention.variants.prompt_select_triton").select(scores, topk, out)
        return out
    if width > ONE:
        select_long(scores, topk, *_find_peaks(scores, topk), out)
        return out
    block, warps = choose_config(width)
    options = dependent_options(scores.device, warps, early=rows <= FEW_ROWS)
    _select_kernel[(rows,)](scores, out, width, topk, out.shape[1], BLOCK=block, **options)
    return out
