# mypy: ignore-errors
"""Exchanges between ranks in one launch each: store to peers, raise flags, wait, read.

Every launch has PROGRAMS programs, and program q of a rank exchanges the same elements as program q
of its peers: it waits for these alone. A program counts its rounds in device memory, so a replayed
graph goes on counting. A round uses one half of the buffer. No exit barrier: a rank writes round
n + 2 once it has a peer's flag of round n + 1, which the peer raises after it has read round n.

Data is stored, then the flag with a release at system scope; the reader acquires. One writer per
element, sums in a fixed order: results do not depend on timing. A wait is bounded: `error` then
gets 1 + the place of the first missing peer, and the host raises.
"""

import triton
import triton.language as tl

PROGRAMS = 64  # all of them must be resident at once
BLOCK, WARPS = 1024, 8  # elements per program and turn
WIDE_BLOCK, WIDE_WARPS = 4096, 16  # of long exchanges, which need more bytes on their way


@triton.jit
def _begin(rounds):
    """(this program's round, counted from 0, as a 32-bit number that may wrap)."""
    return tl.load(rounds + tl.program_id(0))


@triton.jit
def _half(addresses, place, number, half_bytes, TYPE: tl.constexpr):
    """The half of the buffer at `place` that this round writes."""
    base = tl.load(addresses + place) + (number & 1).to(tl.int64) * half_bytes
    return base.to(tl.pointer_type(TYPE))


@triton.jit
def _flag(addresses, at, source, flags_at, PROGRAMS: tl.constexpr):
    """Flag word at rank `at`: rounds completed by this program on rank `source`."""
    flags = (tl.load(addresses + at) + flags_at).to(tl.pointer_type(tl.int32))
    return flags + source * PROGRAMS + tl.program_id(0)


@triton.jit
def _raise_flag(addresses, peer, place, number, flags_at, PROGRAMS: tl.constexpr):
    tl.debug_barrier()  # all threads are done; the release is cumulative
    flag = _flag(addresses, peer, place, flags_at, PROGRAMS)
    tl.atomic_xchg(flag, number + 1, sem="release", scope="sys")


@triton.jit
def _raise_flags(addresses, number, place, flags_at, TP: tl.constexpr, PROGRAMS: tl.constexpr):
    """Tell the peers that this program's data of round `number` has arrived."""
    for peer in tl.static_range(TP):
        _raise_flag(addresses, peer, place, number, flags_at, PROGRAMS)


@triton.jit
def _wait_for(
    addresses, place, peer, wanted, flags_at, error, limit_ns, PROGRAMS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Until this program of `peer` has told `wanted` rounds; differences may wrap."""
    flag = _flag(addresses, place, peer, flags_at, PROGRAMS)
    begin = tl.zeros((), tl.int64)
    if ASM:
        begin = tl.extra.cuda.globaltimer()
    behind = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - wanted
    while behind < 0:
        behind = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - wanted
        if ASM:  # noqa: SIM102 - a constant, so that the interpreter never sees the timer
            if tl.extra.cuda.globaltimer() - begin > limit_ns:
                tl.store(error, peer + 1)
                behind = 0
    tl.debug_barrier()


@triton.jit
def _wait(
    addresses, number, place, flags_at, rounds, error, limit_ns,
    TP: tl.constexpr, PROGRAMS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Until every peer has raised its flag of this round; then count it."""
    for peer in tl.static_range(TP):
        _wait_for(addresses, place, peer, number + 1, flags_at, error, limit_ns, PROGRAMS, ASM)
    tl.store(rounds + tl.program_id(0), number + 1)


@triton.jit(do_not_specialize=["place"])
def gather_kernel(
    x, out, addresses, rounds, error, place, num, first, last, half_bytes, flags_at, limit_ns,
    TP: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, PUSH: tl.constexpr,
    WAIT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """`out` `[TP, num]` of 32-bit words: every rank's `x`, words `first` to `last` of each."""
    number = _begin(rounds)
    lanes = tl.arange(0, BLOCK)
    span = tl.cast(last - first, tl.int64)
    if PUSH:
        for start in tl.range(tl.program_id(0) * BLOCK, span, PROGRAMS * BLOCK):
            at = start + lanes
            value = tl.load(x + first + at, mask=at < span, other=0)
            for peer in tl.static_range(TP):
                to = _half(addresses, peer, number, half_bytes, tl.int32)
                tl.store(to + place * span + at, value, mask=at < span)
        _raise_flags(addresses, number, place, flags_at, TP, PROGRAMS)
    if WAIT:
        _wait(addresses, number, place, flags_at, rounds, error, limit_ns, TP, PROGRAMS, ASM)
        here = _half(addresses, place, number, half_bytes, tl.int32)
        for start in tl.range(tl.program_id(0) * BLOCK, span, PROGRAMS * BLOCK):
            at = start + lanes
            for peer in tl.static_range(TP):
                value = tl.load(
                    here + peer * span + at, mask=at < span, other=0, cache_modifier=".cg"
                )
                tl.store(out + tl.cast(num, tl.int64) * peer + first + at, value, mask=at < span)


@triton.jit(do_not_specialize=["place", "num_rows", "per_owner", "first_row", "last_row"])
def rows_kernel(
    x, out, addresses, rounds, error, place, num_rows, per_owner, first_row, last_row, width,
    half_bytes, flags_at, limit_ns, TP: tl.constexpr, PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr, PUSH: tl.constexpr, WAIT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Row t of `x` `[num_rows, width]` goes to rank `t // per_owner`; `out` `[own rows, TP *
    width]` has every rank's columns of a row beside each other. 32-bit words. Rows `first_row` to
    `last_row` of each owner take part."""
    number = _begin(rounds)
    lanes = tl.arange(0, BLOCK)
    num = (last_row - first_row) * width  # of an owner; fits half a channel
    base = tl.cast(first_row, tl.int64) * width
    if PUSH:
        for peer in tl.static_range(TP):
            to = _half(addresses, peer, number, half_bytes, tl.int32)
            source = x + base + tl.cast(peer * per_owner, tl.int64) * width
            for start in tl.range(tl.program_id(0) * BLOCK, num, PROGRAMS * BLOCK):
                at = start + lanes
                inside = at // width
                live = (at < num) & (peer * per_owner + first_row + inside < num_rows)
                value = tl.load(source + at, mask=live, other=0)
                tl.store(to + (inside * TP + place) * width + at % width, value, mask=live)
        _raise_flags(addresses, number, place, flags_at, TP, PROGRAMS)
    if WAIT:
        _wait(addresses, number, place, flags_at, rounds, error, limit_ns, TP, PROGRAMS, ASM)
        here = _half(addresses, place, number, half_bytes, tl.int32)
        for start in tl.range(tl.program_id(0) * BLOCK, num, PROGRAMS * BLOCK):
            at = start + lanes
            inside = at // width
            live = (at < num) & (place * per_owner + first_row + inside < num_rows)
            for peer in tl.static_range(TP):
                offset = (inside * TP + peer) * width + at % width
                value = tl.load(here + offset, mask=live, other=0, cache_modifier=".cg")
                tl.store(out + base * TP + offset, value, mask=live)


@triton.jit(do_not_specialize=["place", "num_rows"])
def ranges_kernel(
    own, factor, y, addresses, rounds, error, place, num_rows, size, half_bytes, flags_at,
    limit_ns, TP: tl.constexpr, OWN: tl.constexpr, FACTORS: tl.constexpr,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, PUSH: tl.constexpr, WAIT: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """`own` fp32 `[OWN, num_rows, size]`: this rank's ranges of K; `y` bf16 `[num_rows, size]`: the
    sum of all ranks' ranges, ascending, times the factor of the channel."""
    number = _begin(rounds)
    lanes = tl.arange(0, BLOCK)
    num = num_rows.to(tl.int64) * size
    if PUSH:
        for start in tl.range(tl.program_id(0) * BLOCK, num, PROGRAMS * BLOCK):
            at = start + lanes
            for index in tl.static_range(OWN):
                value = tl.load(own + index * num + at, mask=at < num, other=0.0)
                for peer in tl.static_range(TP):
                    to = _half(addresses, peer, number, half_bytes, tl.float32)
                    tl.store(to + (place * OWN + index) * num + at, value, mask=at < num)
        _raise_flags(addresses, number, place, flags_at, TP, PROGRAMS)
    if WAIT:
        _wait(addresses, number, place, flags_at, rounds, error, limit_ns, TP, PROGRAMS, ASM)
        here = _half(addresses, place, number, half_bytes, tl.float32)
        for start in tl.range(tl.program_id(0) * BLOCK, num, PROGRAMS * BLOCK):
            at = start + lanes
            total = tl.zeros((BLOCK,), tl.float32)
            for index in tl.static_range(TP * OWN):
                total += tl.load(
                    here + index * num + at, mask=at < num, other=0.0, cache_modifier=".cg"
                )
            if FACTORS > 0:
                channel = at % size // (size // FACTORS)
                total = total * tl.load(factor + channel, mask=at < num, other=0.0)
            tl.store(y + at, total.to(tl.bfloat16), mask=at < num)


@triton.jit(do_not_specialize=["place", "num_rows", "per_owner", "first_row", "last_row"])
def pairs_kernel(
    sums, experts, extra, y, addresses, rounds, error, place, num_rows, per_owner, first_row,
    last_row, size, half_bytes, flags_at, limit_ns,
    TP: tl.constexpr, CHOSEN: tl.constexpr, PLACES: tl.constexpr, RANGES: tl.constexpr,
    EXTRA: tl.constexpr, COPIES: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
    PUSH: tl.constexpr, WAIT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Expert sums. `sums` `[num_rows, PLACES, RANGES, size]`, sent as fp32; `experts` `[num_rows,
    CHOSEN]`: negative where the expert is on another rank. A pair goes to every rank (COPIES) or to
    the owner of its row. `y` bf16 of the owned rows: pairs in order, then the shared expert: the
    last place of `sums` (COPIES with PLACES > CHOSEN) or `extra` `[own rows, size]`. Only rows
    `first_row` to `last_row` of each owner take part: the buffer is bounded."""
    number = _begin(rounds)
    lanes = tl.arange(0, BLOCK)
    blocks = tl.cdiv(size, BLOCK)
    owners: tl.constexpr = 1 if COPIES else TP
    span = last_row - first_row
    if PUSH:
        pairs = tl.arange(0, triton.next_power_of_2(CHOSEN))  # of a row, read at once
        for turn in tl.range(tl.program_id(0), owners * span * blocks, PROGRAMS):
            at = turn % blocks * BLOCK + lanes
            inside = turn // blocks % span
            owner = turn // blocks // span
            row = (owner * per_owner + first_row + inside).to(tl.int64)
            if (row < num_rows) & (first_row + inside < per_owner):
                chosen = tl.load(experts + row * CHOSEN + pairs, mask=pairs < CHOSEN, other=-1)
                live = (chosen >= 0)[:, None] & (at < size)[None, :]
                value = tl.zeros(live.shape, tl.float32)
                for index in tl.static_range(RANGES):  # of K, ascending
                    which = ((row * PLACES + pairs) * RANGES + index) * size
                    value += tl.load(sums + which[:, None] + at[None, :], mask=live, other=0.0)
                offset = ((inside * CHOSEN + pairs) * size)[:, None] + at[None, :]
                if COPIES:
                    for peer in tl.static_range(TP):
                        to = _half(addresses, peer, number, half_bytes, tl.float32)
                        tl.store(to + offset, value, mask=live)
                else:
                    to = _half(addresses, owner, number, half_bytes, tl.float32)
                    tl.store(to + offset, value, mask=live)
        _raise_flags(addresses, number, place, flags_at, TP, PROGRAMS)
    if WAIT:
        _wait(addresses, number, place, flags_at, rounds, error, limit_ns, TP, PROGRAMS, ASM)
        here = _half(addresses, place, number, half_bytes, tl.float32)
        owner = place * 0 if COPIES else place
        begin = owner * span * blocks  # turns of the owned rows, by the programs that stored them
        skip = (tl.program_id(0) + PROGRAMS - begin % PROGRAMS) % PROGRAMS
        for turn in tl.range(begin + skip, begin + span * blocks, PROGRAMS):
            at = turn % blocks * BLOCK + lanes
            inside = turn // blocks % span
            own = (first_row + inside).to(tl.int64)
            if (owner * per_owner + own < num_rows) & (own < per_owner):
                total = tl.zeros((BLOCK,), tl.float32)
                for chosen in tl.static_range(CHOSEN):
                    offset = (inside * CHOSEN + chosen) * size + at
                    total += tl.load(here + offset, mask=at < size, other=0.0, cache_modifier=".cg")
                if EXTRA:
                    total += tl.load(extra + own * size + at, mask=at < size, other=0.0)
                elif PLACES > CHOSEN:
                    part = tl.zeros((BLOCK,), tl.float32)
                    for index in tl.static_range(RANGES):
                        which = ((own * PLACES + CHOSEN) * RANGES + index) * size
                        part += tl.load(sums + which + at, mask=at < size, other=0.0)
                    total += part
                tl.store(y + own * size + at, total.to(tl.bfloat16), mask=at < size)


@triton.jit(do_not_specialize=["place"])
def send_kernel(
    x, addresses, rounds, error, place, num, half_bytes, flags_at, limit_ns,
    TP: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Place 0 of a channel of two: once place 1 has read what this half held before, store."""
    number = _begin(rounds)
    lanes = tl.arange(0, BLOCK)
    _wait_for(addresses, 0, 1, number - 1, flags_at, error, limit_ns, PROGRAMS, ASM)
    to = _half(addresses, 1, number, half_bytes, tl.int32)
    for start in tl.range(tl.program_id(0) * BLOCK, num, PROGRAMS * BLOCK):
        at = start + lanes
        tl.store(to + at, tl.load(x + at, mask=at < num, other=0), mask=at < num)
    _raise_flag(addresses, 1, 0, number, flags_at, PROGRAMS)
    tl.store(rounds + tl.program_id(0), number + 1)


@triton.jit(do_not_specialize=["place"])
def receive_kernel(
    out, addresses, rounds, error, place, num, half_bytes, flags_at, limit_ns,
    TP: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Place 1 of a channel of two: wait, copy, tell the sender."""
    number = _begin(rounds)
    lanes = tl.arange(0, BLOCK)
    _wait_for(addresses, 1, 0, number + 1, flags_at, error, limit_ns, PROGRAMS, ASM)
    here = _half(addresses, 1, number, half_bytes, tl.int32)
    for start in tl.range(tl.program_id(0) * BLOCK, num, PROGRAMS * BLOCK):
        at = start + lanes
        value = tl.load(here + at, mask=at < num, other=0, cache_modifier=".cg")
        tl.store(out + at, value, mask=at < num)
    _raise_flag(addresses, 0, 1, number, flags_at, PROGRAMS)
    tl.store(rounds + tl.program_id(0), number + 1)
