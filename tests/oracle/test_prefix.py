"""Promise 2 on a prefix-cache hit: what a sequence begins with has the bits it would compute.

Every test compares with an engine that has no prefix cache and one slot.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4 import Engine, SamplingParams
from dsv4.cache.geometry import PAGE_ENTRIES, SHARED_TOKENS
from dsv4.cache.state import StateTensors
from dsv4.request import Completion, Request
from tests.models import write_quick_model

PARAMS = SamplingParams(max_tokens=3, temperature=1.0, seed=7, logprobs=3, stop_ids=())
FORMATS = ({}, {"dtype": "bfloat16", "kv_format": "fp8", "index_format": "fp4"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quick_model(tmp_path_factory.mktemp("model"))


def make(folder: Path, **choices: Any) -> Engine:
    return Engine.load(folder, device="cpu", **{"max_context": 1500, "max_sequences": 3, **choices})


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


def same(found: Completion, expected: Completion) -> None:
    assert found.token_ids == expected.token_ids
    assert found.logprobs == expected.logprobs  # floats, compared bit for bit
    assert found.finish_reason == expected.finish_reason


@pytest.mark.parametrize(
    ("formats", "chunk_tokens"), [(FORMATS[0], 256), (FORMATS[0], 48), (FORMATS[1], 256)]
)
def test_a_hit_equals_a_cold_run(folder: Path, formats: dict[str, str], chunk_tokens: int) -> None:
    cold = make(folder, prefix_cache=False, max_sequences=1, **formats)
    warm = make(folder, chunk_tokens=chunk_tokens, **formats)
    for length in (1, 128, 129, 300):
        prompt = tokens(length, length)
        [expected] = cold.generate([prompt], PARAMS)
        boundary = (length - 1) // SHARED_TOKENS * SHARED_TOKENS
        for attempt in range(2):
            [found] = warm.generate([prompt], PARAMS)
            same(found, expected)
            assert found.num_cached == (boundary if attempt else 0)
        warm.check_integrity()


def test_the_hca_page_is_copied_not_shared(folder: Path) -> None:
    """Two continuations of one prefix write their own entries behind the shared ones."""
    cold = make(folder, prefix_cache=False, max_sequences=1)
    warm = make(folder)
    prefix = tokens(1, 4 * SHARED_TOKENS)
    prompts = [prefix + tokens(10 + i, 300) for i in range(3)]
    warm.generate([[*prefix, 1]], PARAMS)
    expected = [cold.generate([prompt], PARAMS)[0] for prompt in prompts]
    for found, right in zip(warm.generate(prompts, PARAMS), expected, strict=True):
        same(found, right)
        assert found.num_cached == len(prefix)
    for prompt, right in zip(prompts, expected, strict=True):  # and once more from their own ends
        [found] = warm.generate([prompt], PARAMS)
        same(found, right)
        assert found.num_cached == (len(prompt) - 1) // SHARED_TOKENS * SHARED_TOKENS


@pytest.mark.parametrize("forgotten", ["save_rows", "restore_rows", "copy_page"])
def test_a_forgotten_copy_would_be_seen(
    folder: Path, forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StateTensors, forgotten, lambda *args: None)
    warm = make(folder)
    prompts = [tokens(90 + i, 150) for i in range(4)]  # not each of them looks at every entry
    cold, hit = (warm.generate(prompts, PARAMS) for _ in range(2))
    assert [answer.num_cached for answer in hit] == [128] * 4
    assert [answer.logprobs for answer in hit] != [answer.logprobs for answer in cold]


def test_beyond_one_hca_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes that end below, at and above the border of an hca page, here of 4 entries."""
    monkeypatch.setitem(PAGE_ENTRIES, "hca", 4)
    cold = make(folder, prefix_cache=False, max_sequences=1)
    warm = make(folder)
    long = tokens(2, 4 * SHARED_TOKENS + 300)
    warm.generate([long], PARAMS)
    for length in (3 * SHARED_TOKENS, 4 * SHARED_TOKENS + 1, len(long)):
        [expected] = cold.generate([long[:length]], PARAMS)
        [found] = warm.generate([long[:length]], PARAMS)
        same(found, expected)
        assert found.num_cached == (length - 1) // 256 * 256
    warm.check_integrity()


def test_where_prompts_part_is_kept_the_second_time(folder: Path) -> None:
    """Chunk ends that found no room are not kept; a beginning seen twice is."""
    warm = make(folder, max_sequences=1, chunk_tokens=1024)
    shared = tokens(3, 3 * SHARED_TOKENS)
    cached = []
    for i in range(3):
        [found] = warm.generate([shared + tokens(30 + i, 2 * SHARED_TOKENS)], PARAMS)
        cached.append(found.num_cached)
    assert cached == [0, 0, len(shared)]


def test_an_answer_becomes_a_prefix(folder: Path) -> None:
    """The next turn of a conversation begins with the last boundary of the answer before."""
    cold = make(folder, prefix_cache=False, max_sequences=1)
    warm = make(folder)
    prompt = tokens(4, 100)
    params = replace(PARAMS, max_tokens=40)
    [first] = warm.generate([prompt], params)
    turn = prompt + list(first.token_ids) + tokens(5, 20)
    [found] = warm.generate([turn], PARAMS)
    assert found.num_cached == 128
    same(found, cold.generate([turn], PARAMS)[0])


def test_salts_keep_tenants_apart(folder: Path) -> None:
    warm = make(folder)
    prompt = tuple(tokens(6, 200))

    def cached(salt: str) -> int:
        warm.add(Request("r", prompt, PARAMS, cache_salt=salt))
        while True:
            for output in warm.step():
                if output.finished:
                    assert output.num_cached is not None
                    return output.num_cached

    assert [cached("a"), cached("a"), cached("b"), cached("")] == [0, 128, 0, 0]


def test_eviction_is_least_recently_used_first(folder: Path) -> None:
    warm = make(folder, max_sequences=1, chunk_tokens=128)  # room for four
    prompts = [tokens(40 + i, 130) for i in range(5)]
    for prompt in (*prompts[:4], prompts[0], prompts[4]):
        warm.generate([prompt], PARAMS)
    cached = [warm.generate([prompts[i]], PARAMS)[0].num_cached for i in (0, 2, 3, 4, 1)]
    assert cached == [128, 128, 128, 128, 0]
    warm.check_integrity()


def test_counters(folder: Path) -> None:
    warm = make(folder)
    prompt = tokens(8, 300)
    for _ in range(2):
        warm.generate([prompt], PARAMS)
    stats = warm.stats()
    assert (stats.num_prefix_asked, stats.num_prefix_hit) == (600, 256)
    assert stats.pages_used == {"window": 0, "csa": 0, "hca": 0}
    assert stats.pages_cached["csa"] > 0
    off = make(folder, prefix_cache=False)
    assert off.generate([prompt] * 2, PARAMS)[1].num_cached == 0
    assert sum(off.stats().pages_cached.values()) == 0
