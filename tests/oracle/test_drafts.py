"""Rejected drafts leave nothing behind: logits have the bits of a run that never saw them.

A verify chunk holds the newest token and some drafts, of which the first few are right. After it
the sequence is as long as what was accepted, and nothing is undone. Two things make that harmless:
16 rows in the state of a ratio-4 compressor, and no verify chunk across a multiple of 128.
"""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4.cache.geometry import PAGE_ENTRIES, TOKENS_PER_ENTRY, Pool
from dsv4.cache.kinds import CsaState, HcaState
from dsv4.cache.pages import SequencePages
from dsv4.config import EngineConfig
from dsv4.model.transformer import Transformer
from dsv4.runner.runner import Chunk, Runner
from dsv4.runner.settings import resolve
from dsv4.testing import random_weights, small_config

CONFIG = small_config(num_layers=4, compress_ratios=(128, 4, 0, 4), num_hash_layers=1)
MOST_DRAFTS = 7
BLOCK = 128


def make_runner(dtype: str = "float32", kv: str = "fp32", index: str = "fp32") -> Runner:
    choices = EngineConfig(
        device="cpu", dtype=dtype, kv_format=kv, index_format=index, max_sequences=2,
        max_context=512, chunk_tokens=256,
    )  # fmt: skip
    settings = resolve(choices, CONFIG, has_gpu=False, memory_bytes=2**32)
    weights = random_weights(CONFIG, 99)
    return Runner(Transformer(CONFIG, weights, getattr(torch, dtype)), settings)


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(CONFIG.vocab_size) for _ in range(count)]


def plain_logits(runner: Runner, ids: list[int]) -> Tensor:
    """As one-token steps give them; `test_invariance` says that chunks give the same."""
    pages = runner.pages.open()
    parts = [runner.step([Chunk(pages, ids[at : at + 200], len(ids[at : at + 200]))])
             for at in range(0, len(ids), 200)]  # fmt: skip
    runner.pages.close(pages)
    return torch.cat(parts)


def drafted_logits(
    runner: Runner,
    ids: list[int],
    start: int,
    rng: random.Random,
    *,
    all_wrong: bool = False,
    across: bool = False,
    after: Callable[[SequencePages], None] = lambda pages: None,
) -> Tensor:
    """Logits from `start` on, by verify chunks with a random number of right drafts."""
    pages = runner.pages.open()
    runner.step([Chunk(pages, ids[:start], 1)])
    parts = []
    while pages.length < len(ids):
        length = pages.length
        most = min(MOST_DRAFTS, len(ids) - length - 1)
        if not across:
            most = min(most, BLOCK - 1 - length % BLOCK)
        k = most if all_wrong else rng.randint(0, most)
        right = 0 if all_wrong else rng.randint(0, k)
        drafts = ids[length + 1 : length + 1 + right]
        if right < k:  # the first wrong one differs, those behind it are anything
            wrong = (ids[length + 1 + right] + 1 + rng.randrange(200)) % CONFIG.vocab_size
            drafts += [wrong, *tokens(rng, k - right - 1)]
        chunk = Chunk(pages, [ids[length], *drafts], k + 1, num_drafts=k)
        parts.append(runner.step([chunk])[: right + 1].clone())
        runner.pages.retract(pages, k - right)
        assert pages.length == length + 1 + right
        after(pages)
        runner.pages.check_integrity()
    runner.pages.close(pages)
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("dtype", "kv", "index"),
    [("float32", "fp32", "fp32"), ("bfloat16", "fp8", "fp4"), ("bfloat16", "fp8", "fp8"),
     ("float32", "bf16", "bf16")],
)  # fmt: skip
def test_rejected_drafts_change_no_bit(dtype: str, kv: str, index: str) -> None:
    rng = random.Random(kv + index)
    runner = make_runner(dtype, kv, index)
    ids = tokens(rng, 290)
    wanted = plain_logits(runner, ids)
    for start in (3, 105, 240):
        found = drafted_logits(runner, ids[: start + 50], start, rng)
        assert torch.equal(found, wanted[start : start + 50])


def test_the_bits_do_change_with_eight_rows_or_across_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(7)
    ids = tokens(rng, 135)
    runner = make_runner()
    wanted = plain_logits(runner, ids)
    assert torch.equal(drafted_logits(runner, ids, 118, rng, all_wrong=True), wanted[118:])
    found = drafted_logits(runner, ids, 118, rng, all_wrong=True, across=True)
    assert not torch.equal(found, wanted[118:])
    monkeypatch.setattr("dsv4.ops.kv.compress.CSA_ROWS", 8)
    found = drafted_logits(make_runner(), ids, 118, rng, all_wrong=True)
    assert not torch.equal(found, wanted[118:])


def poison(runner: Runner, pages: SequencePages) -> None:
    """NaN wherever something of a position from the sequence's length on may lie, and in rows of
    compressors that no later token reads."""
    length, nan = pages.length, float("nan")
    for layer in runner.state.layers:
        for pool, paged in layer.pools():
            each = TOKENS_PER_ENTRY[pool]
            for column, page in pages.columns[pool].items():
                first = length // each - column * PAGE_ENTRIES[pool]
                for part in paged.parts.values():
                    part[page, max(first, 0) :] = nan
        if isinstance(layer, CsaState):
            needed = {p % 16 for p in range(max(length // 4 * 4 - 4, 0), length)}
            for state in (layer.compressor, layer.index_compressor):
                _poison_rows(state.values[pages.slot], needed)
                _poison_rows(state.gates[pages.slot], needed)
        if isinstance(layer, HcaState):
            needed = {p % BLOCK for p in range(length // BLOCK * BLOCK, length)}
            _poison_rows(layer.compressor.values[pages.slot], needed)
            _poison_rows(layer.compressor.gates[pages.slot], needed)


def _poison_rows(rows: Tensor, needed: set[int]) -> None:
    rows[[row for row in range(rows.shape[0]) if row not in needed]] = float("nan")


def test_nothing_of_a_rejected_position_is_read() -> None:
    rng = random.Random(3)
    runner = make_runner()
    ids = tokens(rng, 270)
    wanted = plain_logits(runner, ids)
    found = drafted_logits(runner, ids, 110, rng, after=lambda pages: poison(runner, pages))
    assert torch.equal(found, wanted[110:])


def test_window_pages_stay_until_the_shortest_length_needs_them_no_more() -> None:
    runner = make_runner()
    state, window, page = runner.pages, CONFIG.sliding_window, PAGE_ENTRIES["window"]
    pool: Pool = "window"
    pages = state.open()
    length = page + window - 3  # after the next token one more reads the first page
    state.apply(state.prepare([pages], [length]))
    state.apply(state.prepare([pages], [6], [1]))
    state.retract(pages, 5)
    assert 0 in pages.columns[pool]
    assert pages.length == length + 1
    state.apply(state.prepare([pages], [1]))
    assert 0 not in pages.columns[pool]
    state.close(pages)
    state.check_integrity()
