# mypy: ignore-errors
"""Device code of `sample`: adjusted logits, and the last token that passes the filters."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class RowOptions(NamedTuple):
    """Inputs of the options that a row's flags enable; kernels take `()` if no slot has any."""

    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    slots: torch.Tensor
    flags: torch.Tensor
    seen: torch.Tensor
    bias: torch.Tensor
    mask: torch.Tensor


class Candidates(NamedTuple):
    """For each chunk of a row: at most ROOM logits with their ids, and how many there are."""

    logit: torch.Tensor
    ids: torch.Tensor
    counts: torch.Tensor


@triton.jit
def order_key(x):
    """uint32 ordered like `x`; -0 ties with 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, ~bits, bits | 0x80000000)


@triton.jit
def key_value(key):
    """The inverse of `order_key`; -inf for 0, which is no number's key."""
    bits = tl.where(key >= 0x80000000, key ^ 0x80000000, ~key)
    return tl.where(key == 0, float("-inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def exp2_fast(x, ASM: tl.constexpr):
    """2^x, accurate to the last bit but one, 0 if denormal; a third of the instructions."""
    if ASM:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def log2_fast(x, ASM: tl.constexpr):
    """log2(x) of normal numbers to 2^-22: absolute between 1/2 and 2, relative elsewhere."""
    if ASM:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(x)


@triton.jit
def adjusted(raw, row, place, live, size, temperature, o):
    """Logits after mask, bias, penalties and temperature; -inf stays -inf, never NaN. A row without
    options reads only its flags."""
    x = raw
    if len(o) > 0:
        options = tl.load(o.flags + row)
        if options != 0:
            slot = tl.maximum(tl.load(o.slots + row), 0)
            at = slot * size + place
            if (options & 4) != 0:
                words = o.mask + slot * tl.cdiv(size, 32)
                bits = tl.load(words + place // 32, mask=live, other=0) >> (place % 32)
                x = tl.where((bits & 1) != 0, x, float("-inf"))
            if (options & 2) != 0:
                x = x + tl.load(o.bias + at, mask=live, other=0.0)
            if (options & 1) != 0:
                both = tl.load(o.seen + at, mask=live, other=0)
                output = both & 0x3FFFFFFF
                factor = tl.load(o.repetition + row)
                x = tl.where(both != 0, tl.where(x > 0, x / factor, x * factor), x)
                x = x - tl.load(o.frequency + row) * output.to(tl.float32)
                x = x - tl.where(output > 0, tl.load(o.presence + row), 0.0)
    heat = tl.load(temperature + row)
    return x * (1.0 / tl.where(heat > 0, tl.maximum(heat, 1e-30), 1.0))


@triton.jit
def passes(count, mass, keep, share):
    """Whether a token preceded by `count` tokens of `mass` passes; the first always does."""
    share = tl.where(share < 1.0, share, float("inf"))
    return ((count < keep) & (mass < share)) | (count == 0)


@triton.jit
def tie_room(threshold, count, above, best, mass, keep, share):
    """How many of the tokens with the threshold key pass."""
    weight = tl.exp(key_value(threshold) - best) / mass
    room = tl.where(share < 1.0, tl.ceil((share - above) / weight), 2147483520.0)
    room = tl.minimum(tl.minimum(room, 2147483520.0).to(tl.int32), keep - count)
    return tl.maximum(room, tl.where(count == 0, 1, 0))


@triton.jit
def _first_bit(low, high):
    """The highest bit in which two keys differ, or one above it; bit 0 if none does."""
    power = (low ^ high).to(tl.float32).to(tl.int32, bitcast=True) >> 23
    return tl.minimum(tl.maximum(power - 127, 0), 31)


@triton.jit
def _units(x, best, mass):
    """A token's share of the mass in units of 2^-31. Integer sums have no rounding order, a whole
    row's sum fits 32 bits, and a warp reduces them in one instruction."""
    return (tl.exp(x - best) * (2147483648.0 / mass) + 0.5).to(tl.uint32)


@triton.jit
def _total(units):
    return tl.sum(units, axis=0).to(tl.float32) * (1.0 / 2147483648.0)


@triton.jit
def _sums(units, over):
    """How many tokens are `over`, and their share of the mass, along the first axis."""
    share = _total(tl.where(over, units, tl.zeros_like(units)))
    return tl.sum(over.to(tl.int32), axis=0), share


@triton.jit
def _top_share(threshold, count, above, ties, best, mass, keep):
    """The mass of the tokens that pass top-k; `count` of them are above the threshold."""
    passed = tl.minimum(tie_room(threshold, count, above, best, mass, keep, 1.0), ties)
    return above + passed.to(tl.float32) * (tl.exp(key_value(threshold) - best) / mass)


@triton.jit
def _row_keys(logits, row, start, size, temperature, o, TILE: tl.constexpr):
    """TILE adjusted logits of a row, their keys, and a mask of those present."""
    place = start + tl.arange(0, TILE)
    live = place < size
    raw = tl.load(logits + row * size + place, mask=live, other=float("-inf"))
    x = adjusted(raw, row, place, live, size, temperature, o)
    return x, order_key(x), live


@triton.jit
def filter_row(logits, row, best, mass, keep, share, temperature, o, size, TILE: tl.constexpr):
    """Threshold and last id, by repeated passes over the whole row."""
    lane = tl.arange(0, TILE)
    threshold = tl.zeros((), tl.uint32)
    count = tl.zeros((), tl.int32)
    above = tl.zeros((), tl.float32)
    # with both filters first top-k alone: top-p is a share of what that leaves
    for phase in tl.range(tl.where((keep < size) & (share < 1.0), 0, 1), 2):
        limit = tl.where(phase == 0, 1.0, share)
        threshold = tl.zeros((), tl.uint32)
        bit = tl.full((), 0x80000000, tl.uint32)
        ties = tl.zeros((), tl.int32)
        # 32 rounds for the bits, one strictly above the threshold
        for step in tl.range(0, 33):
            trial = tl.where(step < 32, threshold | bit, threshold + 1)
            passed = tl.zeros((TILE,), tl.int32)
            equal = tl.zeros((TILE,), tl.int32)
            weight = tl.zeros((TILE,), tl.uint32)
            for start in tl.range(0, size, TILE):
                x, key, live = _row_keys(logits, row, start, size, temperature, o, TILE)
                over = live & (key >= trial)
                passed += over.to(tl.int32)
                equal += (live & (key == threshold)).to(tl.int32)
                units = _units(x, best, mass)
                weight += tl.where(over, units, tl.zeros_like(units))
            count = tl.sum(passed, axis=0)
            ties = tl.sum(equal, axis=0)
            above = _total(weight)
            ok = passes(count, above, keep, limit)
            threshold = tl.where((step < 32) & (ok == 0), trial, threshold)
            bit = bit >> 1
        whole = _top_share(threshold, count, above, ties, best, mass, keep)
        share = tl.where(phase == 0, share * whole, share)
    room = tie_room(threshold, count, above, best, mass, keep, share)
    last_id = tl.zeros((), tl.int32) + size
    ties = tl.zeros((), tl.int32)
    for start in tl.range(0, size, TILE):
        x, key, live = _row_keys(logits, row, start, size, temperature, o, TILE)
        equal = (live & (key == threshold)).to(tl.int32)
        hit = (equal == 1) & (ties + tl.cumsum(equal, axis=0) == room)
        last_id = tl.minimum(last_id, tl.min(tl.where(hit, start + lane, size), axis=0))
        ties += tl.sum(equal, axis=0)
    return threshold, last_id


@triton.jit
def _threshold(units, key, keep, share, DIGIT: tl.constexpr):
    """The key of the last candidate that passes."""
    threshold = tl.zeros((), tl.uint32)
    if DIGIT == 1:
        # all keys agree above some bit; if even all tokens pass, nothing is filtered
        top = tl.max(key, axis=0)
        first = _first_bit(tl.min(tl.where(key > 0, key, top), axis=0), top)
        count, above = _sums(units, key > 0)
        everything = passes(count, above, keep, share)
        threshold = (top >> first >> 1) << first << 1
        bit = tl.full((), 1, tl.uint32) << first.to(tl.uint32)
        for _ in tl.range(0, first + 1):
            trial = threshold | bit
            count, above = _sums(units, key >= trial)
            threshold = tl.where(passes(count, above, keep, share), threshold, trial)
            bit = bit >> 1
        threshold = tl.where(everything, tl.zeros((), tl.uint32), threshold)
    else:
        digits = tl.arange(0, 1 << DIGIT).to(tl.uint32)
        unit = tl.full((), 1 << (32 - DIGIT), tl.uint32)
        for _ in tl.range(0, 32 // DIGIT):
            trial = threshold | (digits * unit)
            over = key[:, None] >= trial[None, :]
            count, above = _sums(units[:, None], over)
            ok = passes(count, above, keep, share)
            threshold = tl.max(tl.where(ok, threshold, trial), axis=0)  # largest without room
            unit = (unit >> DIGIT).to(tl.uint32)
    return threshold


@triton.jit
def _closed_up(held, PLACES: tl.constexpr):
    """Chunk and index in that chunk of each place: the first `held[0]` belong to chunk 0, and so
    on; places past the end belong to no chunk."""
    place = tl.arange(0, PLACES)
    over = place[:, None] >= tl.cumsum(held, axis=0)[None, :]
    start = tl.sum(tl.where(over, held[None, :], 0), axis=1)
    return tl.sum(over.to(tl.int32), axis=1), place - start


@triton.jit
def filter_candidates(
    found, row, num_chunks, size, best, mass, keep, share, last_id, CHUNKS: tl.constexpr,
    ROOM: tl.constexpr, USED: tl.constexpr, PLACES: tl.constexpr, DIGIT: tl.constexpr,
):  # fmt: skip
    """Threshold and last id among PLACES candidates, USED per chunk; DIGIT bits per round."""
    mine = found.counts + row * num_chunks
    if PLACES < CHUNKS * USED:
        chunk = tl.arange(0, CHUNKS)
        held = tl.load(mine + chunk, mask=chunk < num_chunks, other=0)
        owner, index = _closed_up(held, PLACES)
        live = owner < CHUNKS
    else:
        owner, index = tl.arange(0, PLACES) // USED, tl.arange(0, PLACES) % USED
        live = index < tl.load(mine + owner, mask=owner < num_chunks, other=0)
    at = owner * ROOM + index
    base = row * num_chunks * ROOM
    x = tl.load(found.logit + base + at, mask=live, other=float("-inf"))
    key = tl.where(live, order_key(x), tl.zeros_like(index).to(tl.uint32))  # 0: no token
    units = _units(x, best, mass)
    threshold = tl.zeros((), tl.uint32)
    room = tl.zeros((), tl.int32)
    equal = tl.zeros_like(index)
    # with both filters first top-k alone: top-p is a share of what that leaves
    for phase in tl.range(tl.where((keep < size) & (share < 1.0), 0, 1), 2):
        limit = tl.where(phase == 0, 1.0, share)
        threshold = _threshold(units, key, keep, limit, DIGIT)
        count, above = _sums(units, key > threshold)
        equal = ((key > 0) & (key == threshold)).to(tl.int32)
        room = tie_room(threshold, count, above, best, mass, keep, limit)
        whole = _top_share(threshold, count, above, tl.sum(equal, axis=0), best, mass, keep)
        share = tl.where(phase == 0, share * whole, share)
    if tl.sum(equal, axis=0) > room:
        hit = (equal == 1) & (tl.cumsum(equal, axis=0) == room)
        last = tl.load(found.ids + base + at, mask=hit, other=2147483647)
        last_id = tl.minimum(last_id, tl.min(last, axis=0))
    return threshold, last_id
