# mypy: ignore-errors
"""Device code of `sample`: logits as they are drawn from, and the last token that filters pass."""

import triton
import triton.language as tl


@triton.jit
def order_key(x):
    """uint32 in the order of `x`; -0 ties with 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, ~bits, bits | 0x80000000)


@triton.jit
def key_value(key):
    """The number whose `order_key` is `key`; -inf for 0, the key of no number."""
    bits = tl.where(key >= 0x80000000, key ^ 0x80000000, ~key)
    return tl.where(key == 0, float("-inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def exp2_fast(x, ASM: tl.constexpr):
    """2^x to the last bit but one, 0 where that would be denormal; a third of the instructions."""
    if ASM:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def log2_fast(x, ASM: tl.constexpr):
    """To 2^-22, absolute between 1/2 and 2 and relative elsewhere, for normal numbers."""
    if ASM:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(x)


@triton.jit
def adjusted(
    raw, row, at, live, temperature, repetition, presence, frequency, prompt_counts, output_counts,
    bias, COUNTS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Logits after bias, penalties and temperature; -inf stays, so that no logit is none after."""
    x = raw
    if BIAS:
        x = x + tl.load(bias + at, mask=live, other=0.0).to(tl.float32)
    if COUNTS:
        output = tl.load(output_counts + at, mask=live, other=0)
        seen = (tl.load(prompt_counts + at, mask=live, other=0) + output) > 0
        factor = tl.load(repetition + row)
        x = tl.where(seen, tl.where(x > 0, x / factor, x * factor), x)
        x = x - tl.load(frequency + row) * output.to(tl.float32)
        x = x - tl.where(output > 0, tl.load(presence + row), 0.0)
    heat = tl.load(temperature + row)
    return x * (1.0 / tl.where(heat > 0, tl.maximum(heat, 1e-30), 1.0))


@triton.jit
def passes(count, mass, keep, share):
    """Whether a token with `count` tokens of `mass` before it passes; the first always does."""
    share = tl.where(share < 1.0, share, float("inf"))
    return ((count < keep) & (mass < share)) | (count == 0)


@triton.jit
def tie_room(threshold, count, above, best, mass, keep, share):
    """How many of the tokens whose key is the threshold pass."""
    weight = tl.exp(key_value(threshold) - best) / mass
    room = tl.where(share < 1.0, tl.ceil((share - above) / weight), 2147483520.0)
    room = tl.minimum(tl.minimum(room, 2147483520.0).to(tl.int32), keep - count)
    return tl.maximum(room, tl.where(count == 0, 1, 0))


@triton.jit
def filter_row(
    logits, row, best, mass, keep, share, temperature, repetition, presence, frequency,
    prompt_counts, output_counts, bias, size, TILE: tl.constexpr, COUNTS: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Threshold and last id by looking at the whole row again and again."""
    lane = tl.arange(0, TILE)
    threshold = tl.zeros((), tl.uint32)
    bit = tl.full((), 0x80000000, tl.uint32)
    count = tl.zeros((), tl.int32)
    above = tl.zeros((), tl.float32)
    room = tl.zeros((), tl.int32)
    last_id = tl.zeros((), tl.int32) + size
    # 32 rounds for the bits, one strictly above the threshold, one to find the last of its ties
    for step in tl.range(0, 34):
        trial = tl.where(step < 32, threshold | bit, threshold + 1)
        passed = tl.zeros((), tl.int32)
        weight = tl.zeros((), tl.float32)
        ties = tl.zeros((), tl.int32)
        for start in tl.range(0, size, TILE):
            at = row * size + start + lane
            live = start + lane < size
            raw = tl.load(logits + at, mask=live, other=float("-inf"))
            x = adjusted(
                raw, row, at, live, temperature, repetition, presence, frequency,
                prompt_counts, output_counts, bias, COUNTS, BIAS,
            )  # fmt: skip
            key = order_key(x)
            over = live & (key >= trial)
            passed += tl.sum(over.to(tl.int32), axis=0)
            weight += tl.sum(tl.where(over, tl.exp(x - best), 0.0), axis=0)
            if step == 33:
                equal = (live & (key == threshold)).to(tl.int32)
                hit = (equal == 1) & (ties + tl.cumsum(equal, axis=0) == room)
                last_id = tl.minimum(last_id, tl.min(tl.where(hit, start + lane, size), axis=0))
                ties += tl.sum(equal, axis=0)
        count = passed
        above = weight / mass
        ok = passes(count, above, keep, share)
        threshold = tl.where((step < 32) & (ok == 0), trial, threshold)
        room = tie_room(threshold, count, above, best, mass, keep, share)
        bit = bit >> 1
    return threshold, last_id


@triton.jit
def _closed_up(held, PLACES: tl.constexpr):
    """Owner and number at the owner of each place, where the first `held[0]` belong to 0 and so
    on; a place beyond them all belongs to nobody that exists."""
    place = tl.arange(0, PLACES)
    over = place[:, None] >= tl.cumsum(held, axis=0)[None, :]
    start = tl.sum(tl.where(over, held[None, :], 0), axis=1)
    return tl.sum(over.to(tl.int32), axis=1), place - start


@triton.jit
def filter_candidates(
    values, ids, counts, row, num_chunks, best, mass, keep, share, last_id, CHUNKS: tl.constexpr,
    ROOM: tl.constexpr, PLACES: tl.constexpr, DIGIT: tl.constexpr,
):  # fmt: skip
    """Threshold and last id among PLACES candidates at most, DIGIT bits a round."""
    mine = counts + row * num_chunks
    if PLACES < CHUNKS * ROOM:
        chunk = tl.arange(0, CHUNKS)
        held = tl.load(mine + chunk, mask=chunk < num_chunks, other=0)
        owner, index = _closed_up(held, PLACES)
        live = owner < CHUNKS
    else:
        owner, index = tl.arange(0, PLACES) // ROOM, tl.arange(0, PLACES) % ROOM
        live = index < tl.load(mine + owner, mask=owner < num_chunks, other=0)
    at = (row * num_chunks + owner) * ROOM + index
    x = tl.load(values + at, mask=live, other=float("-inf"))
    key = tl.where(live, order_key(x), tl.zeros_like(index).to(tl.uint32))
    # one token and its weight in units of 2^-32 as one number: one exact sum for both
    token = (tl.full((), 1, tl.int64) << 48) + (tl.exp(x - best) * 4294967296.0).to(tl.int64)
    token = tl.where(live, token, tl.zeros_like(token))
    unit = 1.0 / 4294967296.0
    threshold = tl.zeros((), tl.uint32)
    digits = tl.arange(0, 1 << DIGIT).to(tl.uint32)
    unit_of_digit = tl.full((), 1 << (32 - DIGIT), tl.uint32)
    for _ in tl.range(0, 32 // DIGIT):
        if DIGIT == 1:  # digit 0 needs no trial
            trial = threshold | unit_of_digit
            both = tl.sum(tl.where(key >= trial, token, tl.zeros_like(token)), axis=0)
        else:
            trial = threshold | (digits * unit_of_digit)
            over = key[:, None] >= trial[None, :]
            both = tl.sum(tl.where(over, token[:, None], tl.zeros_like(token)[:, None]), axis=0)
        above = (both & 0xFFFFFFFFFFFF).to(tl.float32) * unit / mass
        ok = passes((both >> 48).to(tl.int32), above, keep, share)
        reached = tl.where(ok, threshold, trial)  # the largest that leaves no room
        threshold = reached if DIGIT == 1 else tl.max(reached, axis=0)
        unit_of_digit = (unit_of_digit >> DIGIT).to(tl.uint32)
    both = tl.sum(tl.where(key > threshold, token, tl.zeros_like(token)), axis=0)
    count = (both >> 48).to(tl.int32)
    above = (both & 0xFFFFFFFFFFFF).to(tl.float32) * unit / mass
    room = tie_room(threshold, count, above, best, mass, keep, share)
    equal = (live & (key == threshold)).to(tl.int32)
    hit = (equal == 1) & (tl.cumsum(equal, axis=0) == room)
    last = tl.load(ids + at, mask=hit, other=2147483647)
    return threshold, tl.minimum(last_id, tl.min(last, axis=0))
