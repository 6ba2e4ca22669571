# mypy: ignore-errors
"""`index_select` on a GPU: the exact set by bisection over the bits of the scores.

The k-th largest of the scores that a program holds in registers is found two bits at a time: up to
16 sums of three counts each, until exactly k lie above; no sorting. Ties go to the lower index.

A long row takes two launches. The first finds the peaks of 2k interleaved parts of the row: the
k-th largest peak is a bound that the best k reach and few others do. In the second a program keeps
those of its chunk that reach a bound near it, at most k, in ascending order of index; the last one
to finish a row selects among what was kept.
"""

import torch
import triton
import triton.language as tl

from dsv4.ops.device import (
    device_reason,
    launch_options,
    workspace,
)

ONE = 4096  # most scores of a row that one program selects from
CHUNK = 2048  # scores of a program of a long row; with many rows twice as many
FEW_PROGRAMS = 264  # until here chunks are short
CANDIDATES = 4096  # most that the last program holds at a time
MOST = 8192  # of topk


@triton.jit
def sort_key(score):
    """uint32 in the order of the scores; 0 for -inf, so that hidden entries never count."""
    score = tl.where(score == 0.0, 0.0, score)  # -0 ties with 0
    bits = score.to(tl.uint32, bitcast=True)
    flipped = tl.where((bits >> 31) == 1, ~bits, bits | 0x80000000)
    return tl.where(score == float("-inf"), tl.zeros_like(bits), flipped)


@triton.jit
def _first_bit(low, top):
    """Where keys from `low` to `top` begin to differ: what they have in common and, of the two bits
    to be found first, the lower one."""
    differ = ((low ^ top) >> 1).to(tl.float32).to(tl.uint32, bitcast=True) >> 23
    place = tl.minimum(tl.maximum(differ.to(tl.int32) - 126, 1), 31) | 1  # bits come in pairs
    place = place.to(tl.uint32)
    return ((low >> place) >> 1) << place << 1, tl.full((), 1, tl.uint32) << (place - 1)


@triton.jit
def _count(key, low, bit):
    """How many keys reach the three next bounds, in 21 bits each."""
    middle = low | (bit << 1)
    counts = (key >= (low | bit)).to(tl.int64) + ((key >= middle).to(tl.int64) << 21)
    return tl.sum(counts + ((key >= (middle | bit)).to(tl.int64) << 42), axis=0)


@triton.jit
def _raise(counts, low, bit, count, topk):
    """The highest of these bounds that topk keys reach, and how many do."""
    bound = low
    for field in tl.static_range(3):
        found = (counts >> (21 * field)) & 0x1FFFFF
        bound = tl.where(found >= topk, low + (field + 1) * bit, bound)
        count = tl.where(found >= topk, found, count)
    return bound, count


@triton.jit
def _threshold(key, low, bit, count, topk):
    """The topk-th largest key, or one that exactly topk reach. `count` keys reach `low`."""
    while (bit > 0) & (count > topk):
        low, count = _raise(_count(key, low, bit), low, bit, count, topk)
        bit = bit >> 2
    return low


@triton.jit
def _places(key, threshold):
    """How many keys up to each one lie above the threshold (low 16 bits) or on it (high); all."""
    above = key > threshold
    equal = (key == threshold) & (key > 0)
    both = above.to(tl.int32) + (equal.to(tl.int32) << 16)  # two counts in one sum
    return above, equal, tl.cumsum(both, axis=0), tl.sum(both, axis=0)


@triton.jit
def _keep(above, equal, upto, room, topk):
    """Which keys are kept, those on the threshold while there is room, and where."""
    rank = (upto >> 16) & 0xFFFF
    kept = above | (equal & (rank <= room))
    order = (upto & 0xFFFF) + tl.minimum(rank, room) - 1
    return kept & (order < topk), order


@triton.jit
def _fill(out, kept, width, BLOCK: tl.constexpr):
    """-1 where a row has fewer entries than are asked for."""
    lane = tl.arange(0, BLOCK)
    for start in tl.range(kept, width, BLOCK):
        tl.store(out + start + lane, lane.to(tl.int64) * 0 - 1, mask=start + lane < width)


@triton.jit
def _select_kernel(scores, out, width, topk, out_width, BLOCK: tl.constexpr):
    """The `topk` best of a row that fits one program."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    score = tl.load(scores + row * width + place, mask=place < width, other=float("-inf"))
    key = sort_key(score)
    bit = tl.full((), 0x40000000, tl.uint32)
    threshold = _threshold(key, bit & 0, bit, tl.full((), BLOCK, tl.int64), topk)
    above, equal, upto, totals = _places(key, threshold)
    num_above = totals & 0xFFFF
    room = topk - num_above
    kept, order = _keep(above, equal, upto, room, topk)
    out += row * out_width
    tl.store(out + order, place.to(tl.int64), mask=kept)
    _fill(out, num_above + tl.minimum((totals >> 16) & 0xFFFF, room), out_width, 64)


@triton.jit
def _peaks_kernel(scores, peaks, width, PARTS: tl.constexpr, COLS: tl.constexpr, BR: tl.constexpr):
    """Largest keys `[rows, PARTS]` of entries PARTS apart, COLS of them in a program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    best = tl.full((BR, COLS), float("-inf"), tl.float32)
    for first in tl.range(0, width, PARTS * BR):
        place = first + tl.arange(0, BR)[:, None] * PARTS + column[None, :]
        score = tl.load(scores + row * width + place, mask=place < width, other=float("-inf"))
        best = tl.maximum(best, score)
    tl.store(peaks + row * PARTS + column, sort_key(tl.max(best, axis=0)).to(tl.int32))


@triton.jit
def _bound(peaks, topk, PARTS: tl.constexpr, PIVOTS: tl.constexpr):
    """A key that at least topk peaks reach, if one in every PARTS / PIVOTS is such, and the top."""
    key = tl.load(peaks + tl.arange(0, PARTS)).to(tl.uint32, bitcast=True)
    pivot = tl.load(peaks + tl.arange(0, PIVOTS) * (PARTS // PIVOTS)).to(tl.uint32, bitcast=True)
    reached = tl.sum((key[None, :] >= pivot[:, None]).to(tl.int32), axis=1)
    low = tl.max(tl.where(reached >= topk, pivot, 0), axis=0)
    return tl.maximum(low, 1).to(tl.uint32), tl.max(key, axis=0)  # 0 is no entry


@triton.constexpr_function
def _halvings(length):
    return length.bit_length() - 1


@triton.jit
def _candidates(keys, indices, ends, total, tile, topk, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """Keys and indices of candidates, from the tile's first on; `ends`: those up to each chunk."""
    place = tile * BLOCK + tl.arange(0, BLOCK)
    chunk = tl.zeros((BLOCK,), tl.int32)
    begin = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(_halvings(CHUNKS)):
        end = tl.gather(ends, chunk + ((CHUNKS >> (i + 1)) - 1), 0)
        begin = tl.where(end <= place, end, begin)
        chunk = tl.where(end <= place, chunk + (CHUNKS >> (i + 1)), chunk)
    at = chunk.to(tl.int64) * topk + place - begin
    live = place < total
    key = tl.load(keys + at, mask=live, other=0, cache_modifier=".cg")
    index = tl.load(indices + at, mask=live, other=0, cache_modifier=".cg")
    return key.to(tl.uint32, bitcast=True), index.to(tl.int64)


@triton.jit
def _finish_row(
    keys, indices, counts, out, low, top, num_chunks, topk, out_width,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Select among the candidates of all chunks: as a rule fewer than BLOCK."""
    chunk = tl.arange(0, CHUNKS)
    found = tl.load(counts + chunk, mask=chunk < num_chunks, other=0, cache_modifier=".cg")
    ends = tl.cumsum(found, axis=0)
    total = tl.sum(found, axis=0)
    tiles = tl.cdiv(total, BLOCK)
    key, index = _candidates(keys, indices, ends, total, 0, topk, CHUNKS, BLOCK)
    low, bit = _first_bit(low, top)
    count = total.to(tl.int64)
    while (bit > 0) & (count > topk):
        reached = _count(key, low, bit)
        for tile in tl.range(1, tiles, num_stages=1):
            other, _ = _candidates(keys, indices, ends, total, tile, topk, CHUNKS, BLOCK)
            reached += _count(other, low, bit)
        low, count = _raise(reached, low, bit, count, topk)
        bit = bit >> 2
    above, equal, upto, totals = _places(key, low)
    num_above = totals & 0xFFFF
    for tile in tl.range(1, tiles, num_stages=1):
        other, _ = _candidates(keys, indices, ends, total, tile, topk, CHUNKS, BLOCK)
        num_above += tl.sum((other > low).to(tl.int32), axis=0)
    room = topk - num_above
    kept, order = _keep(above, equal, upto, room, topk)
    tl.store(out + order, index, mask=kept)
    for tile in tl.range(1, tiles, num_stages=1):
        key, index = _candidates(keys, indices, ends, total, tile, topk, CHUNKS, BLOCK)
        above, equal, upto, more = _places(key, low)
        kept, order = _keep(above, equal, upto + totals, room, topk)
        tl.store(out + order, index, mask=kept)
        totals += more
        # more ties than there is room for need no counting
        totals = (totals & 0xFFFF) | (tl.minimum((totals >> 16) & 0xFFFF, 0x4000) << 16)
    _fill(out, num_above + tl.minimum((totals >> 16) & 0xFFFF, room), out_width, 64)


@triton.jit(do_not_specialize=["num_chunks"])
def _cut_kernel(
    scores, peaks, keys, indices, counts, counters, out, width, topk, out_width, num_chunks,
    PARTS: tl.constexpr, PIVOTS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Keep what reaches the bound, at most `topk` of a chunk; the row's last program selects."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    score = tl.load(scores + row * width + place, mask=place < width, other=float("-inf"))
    low, top = _bound(peaks + row * PARTS, topk, PARTS, PIVOTS)
    key = sort_key(score)
    count = tl.sum((key >= low).to(tl.int32), axis=0).to(tl.int64)
    threshold = low
    if count > topk:
        common, bit = _first_bit(low, top)
        threshold = _threshold(key, common, bit, count, topk)
    above, equal, upto, totals = _places(key, threshold)
    num_above = totals & 0xFFFF
    room = topk - num_above
    kept, order = _keep(above, equal, upto, room, topk)
    keys += row * num_chunks * topk
    indices += row * num_chunks * topk
    counts += row * num_chunks
    at = chunk.to(tl.int64) * topk + order
    tl.store(keys + at, key.to(tl.int32, bitcast=True), mask=kept)
    tl.store(indices + at, place, mask=kept)
    tl.store(counts + chunk, num_above + tl.minimum((totals >> 16) & 0xFFFF, room))
    tl.debug_barrier()  # every thread's candidates are written before the count goes up
    if tl.atomic_add(counters + row, 1, sem="acq_rel") == num_chunks - 1:
        tl.store(counters + row, 0)
        out += row * out_width
        _finish_row(
            keys, indices, counts, out, low, top, num_chunks, topk, out_width, CHUNKS, BLOCK
        )


def choose_config(width: int) -> tuple[int, int]:
    """Block and warps of a row that fits one program: 16 scores a thread, of few 8."""
    block = max(32, triton.next_power_of_2(width))
    return block, max(1, min(32, block // (512 if block > 1024 else 256)))


def supports(scores, topk) -> str | None:
    if scores.dtype != torch.float32 or not scores.is_contiguous():
        return f"scores are {scores.dtype} with strides {scores.stride()}, not contiguous float32"
    if topk > MOST:
        return f"topk is {topk}, kernels select up to {MOST}"
    return device_reason(scores.device)


def _run_long(scores, out, topk) -> None:
    """Peaks of parts of each row, then its candidates and the selection among them."""
    rows, width = scores.shape
    device = scores.device
    parts = 2 * triton.next_power_of_2(topk)
    peaks = workspace(device, "select_peaks", rows * parts, torch.int32)
    columns = 8 if rows < 8 else 32
    per_program = min(256, triton.next_power_of_2(triton.cdiv(width, parts)))
    _peaks_kernel[(rows, parts // columns)](
        scores, peaks, width, PARTS=parts, COLS=columns, BR=per_program, **launch_options(4)
    )
    chunk = CHUNK if rows * triton.cdiv(width, CHUNK) <= FEW_PROGRAMS else 2 * CHUNK
    chunks = triton.cdiv(width, chunk)
    kept = max(rows * chunks, FEW_PROGRAMS) * topk  # fewer rows may have more chunks
    _cut_kernel[(rows, chunks)](
        scores, peaks,
        workspace(device, "select_keys", kept, torch.int32),
        workspace(device, "select_indices", kept, torch.int32),
        workspace(device, "select_counts", kept // topk, torch.int32),
        workspace(device, "select_counters", rows, torch.int32),
        out, width, topk, out.shape[1], chunks,
        PARTS=parts, PIVOTS=max(2, min(32, 32768 // parts)), CHUNK=chunk,
        CHUNKS=triton.next_power_of_2(chunks), BLOCK=min(parts, CANDIDATES),
        **launch_options(8),
    )  # fmt: skip


def run(scores, topk):
    rows, width = scores.shape
    out = torch.empty(rows, min(topk, width), dtype=torch.int64, device=scores.device)
    if width > ONE:
        _run_long(scores, out, topk)
        return out
    block, warps = choose_config(width)
    _select_kernel[(rows,)](
        scores, out, width, topk, out.shape[1], BLOCK=block, **launch_options(warps)
    )
    return out
