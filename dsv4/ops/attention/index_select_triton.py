# mypy: ignore-errors
"""`index_select` on a GPU: the exact set by bisection over the bits of the scores.

A chunk of a row stays in registers. Its k-th largest score is found two bits at a time: up to 16
sums of three counts each, until exactly k scores lie above; no sorting, no atomics. Ties go to the
lower index. A long row is cut into chunks that each pass on their k best, in ascending order of
index, until one is left.
"""

import torch
import triton
import triton.language as tl

from dsv4.ops.device import (
    device_reason,
    launch_options,
    workspace,
)

CHUNK = 4096  # scores of a program while several chunks remain
LAST = 32768  # most candidates of the last program


@triton.jit
def sort_key(score):
    """uint32 in the order of the scores; 0 for -inf, so that hidden entries never count."""
    score = tl.where(score == 0.0, 0.0, score)  # -0 ties with 0
    bits = score.to(tl.uint32, bitcast=True)
    flipped = tl.where((bits >> 31) == 1, ~bits, bits | 0x80000000)
    return tl.where(score == float("-inf"), tl.zeros_like(bits), flipped)


@triton.jit(do_not_specialize=["num_chunks"])
def _select_kernel(
    scores, indices, out_scores, out_indices, width, topk, out_width, num_chunks,
    FIRST: tl.constexpr, FINAL: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Keep the `topk` best of a chunk. FIRST: a candidate's index is its place in the row."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    lane = tl.arange(0, CHUNK)
    place = chunk * CHUNK + lane
    live = place < width
    score = tl.load(scores + row * width + place, mask=live, other=float("-inf"))
    if FIRST:
        index = place.to(tl.int64)
    else:
        index = tl.load(indices + row * width + place, mask=live, other=-1).to(tl.int64)
    key = sort_key(score)
    threshold = tl.zeros((), tl.uint32)
    bit = tl.full((), 0x40000000, tl.uint32)
    count = tl.full((), CHUNK, tl.int64)  # of the keys from the threshold on
    while (bit > 0) & (count != topk):
        low = threshold | bit
        middle = threshold | (bit << 1)
        high = middle | bit
        reached = (key >= low).to(tl.int64) + ((key >= middle).to(tl.int64) << 20)
        counts = tl.sum(reached + ((key >= high).to(tl.int64) << 40), axis=0)
        for field in tl.static_range(3):
            found = (counts >> (20 * field)) & 0xFFFFF
            trial = low if field == 0 else (middle if field == 1 else high)
            threshold = tl.where(found >= topk, trial, threshold)
            count = tl.where(found >= topk, found, count)
        bit = bit >> 2
    above = key > threshold
    equal = (key == threshold) & (key > 0)
    both = above.to(tl.int32) + (equal.to(tl.int32) << 16)  # two counts in one sum
    totals = tl.sum(both, axis=0)
    upto = tl.cumsum(both, axis=0)
    room = topk - (totals & 0xFFFF)
    rank = (upto >> 16) & 0xFFFF
    kept = above | (equal & (rank <= room))
    order = (upto & 0xFFFF) + tl.minimum(rank, room) - 1
    num_kept = (totals & 0xFFFF) + tl.minimum((totals >> 16) & 0xFFFF, room)
    base = (row * num_chunks + chunk) * out_width
    tl.store(out_indices + base + order, index, mask=kept)
    if not FINAL:
        tl.store(out_scores + base + order, score, mask=kept)
    hidden = tl.full((CHUNK,), float("-inf"), tl.float32)
    for start in tl.range(num_kept, out_width, CHUNK):
        rest = start + lane
        tl.store(out_indices + base + rest, lane.to(tl.int64) * 0 - 1, mask=rest < out_width)
        if not FINAL:
            tl.store(out_scores + base + rest, hidden, mask=rest < out_width)


def choose_config(width: int, topk: int) -> tuple[int, int]:
    """Chunk length and warps: 16 scores a thread in long chunks, 8 in short ones."""
    chunk = triton.next_power_of_2(width) if width <= CHUNK else CHUNK
    if width > CHUNK and 2 * topk > CHUNK:  # chunks that keep most would never end
        chunk = LAST
    chunk = max(chunk, 32)
    return chunk, max(1, min(32, chunk // (512 if chunk > 1024 else 256)))


def supports(scores, topk) -> str | None:
    if scores.dtype != torch.float32 or not scores.is_contiguous():
        return f"scores are {scores.dtype} with strides {scores.stride()}, not contiguous float32"
    if topk > LAST // 4:
        return f"topk is {topk}, kernels select up to {LAST // 4}"
    return device_reason(scores.device)


def run(scores, topk):
    rows, width = scores.shape
    out_width = min(topk, width)
    out = torch.empty(rows, out_width, dtype=torch.int64, device=scores.device)
    indices, level = out, 0
    while True:
        chunk, warps = choose_config(width, topk)
        chunks = triton.cdiv(width, chunk)
        final = chunks == 1
        size = rows * chunks * out_width
        names = (f"select_scores{level % 2}", f"select_indices{level % 2}")
        next_scores = scores if final else workspace(scores.device, names[0], size, torch.float32)
        next_indices = out if final else workspace(scores.device, names[1], size, torch.int64)
        _select_kernel[(rows, chunks)](
            scores,
            indices,
            next_scores,
            next_indices,
            width,
            topk,
            out_width,
            chunks,
            FIRST=level == 0,
            FINAL=final,
            CHUNK=chunk,
            **launch_options(warps),
        )
        if final:
            return out
        scores, indices, width, level = next_scores, next_indices, chunks * out_width, level + 1
