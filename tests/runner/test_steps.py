"""Steps as functions of their buffers, against ordinary ones, bit for bit.

All of it runs on the CPU: the logic of shapes, padding, tables, queued steps and drawing is the
same that graphs replay on a GPU (tests/runner/test_graphs_gpu.py).
"""

import itertools
import random
from unittest.mock import Mock

import pytest
import torch

from dsv4.config import EngineConfig
from dsv4.errors import CapacityError
from dsv4.model.transformer import Transformer
from dsv4.request import SamplingParams
from dsv4.runner.runner import Chunk, Runner
from dsv4.runner.settings import resolve
from dsv4.runner.step.shape import batch_sizes, context_sizes, token_sizes
from dsv4.testing import random_weights, small_config
from tests.runner.driver import OPTIONS, Story, check_alone, make_stories, ordinary_logits, tell

CONFIG = small_config(
    vocab_size=61,
    num_layers=3,
    compress_ratios=(128, 4, 0),
    num_hash_layers=1,
    hidden_size=32,
    num_experts=3,
    num_experts_per_tok=1,
    hc_sinkhorn_iters=2,
)


def make_runner(
    sequences: int = 5, context: int = 1024, *, exact: bool = False, pads: bool = False
) -> Runner:
    dtype, kv, index = ("float32", "fp32", "fp32") if exact else ("bfloat16", "fp8", "fp4")
    choices = EngineConfig(
        device="cpu",
        dtype=dtype,
        kv_format=kv,
        index_format=index,
        max_sequences=sequences,
        max_context=context,
        chunk_tokens=64,
        draft="off",
    )
    settings = resolve(choices, CONFIG, has_gpu=False, memory_bytes=2**32)
    weights = random_weights(CONFIG, 5)
    runner = Runner(Transformer(CONFIG, weights, getattr(torch, dtype)), settings)
    runner.buffers.pads = pads
    return runner


@pytest.mark.parametrize(("pads", "ahead"), [(False, False), (False, True), (True, True)])
def test_sequences_come_and_go(pads: bool, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed steps, joins, ends, all options and context sizes; each as if it were alone."""
    monkeypatch.setattr("dsv4.runner.buffers.context_sizes", lambda most: [128, 192, most])
    rng = random.Random(2 + pads)
    runner = make_runner(exact=ahead, pads=pads)
    stories = make_stories(rng, 9, CONFIG.vocab_size, 150)
    steps = tell(runner, stories, rng, ahead=ahead)
    assert steps < sum(len(story.results) + 20 for story in stories)
    for story in stories:
        check_alone(story, runner, 64)


def test_padding_leaves_no_trace() -> None:
    """The state after padded steps has the bytes of the state after exact ones."""
    runners = [make_runner(pads=pads, sequences=3) for pads in (False, True)]
    for runner in runners:
        held = [runner.pages.open() for _ in range(2)]
        rng = random.Random(5)
        for counts in ((40, 1), (1, 1), (20, 33), (1, 1), (1, 2)):
            runner.submit([
                Chunk(pages, [rng.randrange(61) for _ in range(count)], 1)
                for pages, count in zip(held, counts, strict=True)
            ])  # fmt: skip
    for exact, padded in zip(*(runner.state.layers for runner in runners), strict=True):
        for (name, a), (_, b) in zip(exact.pools(), padded.pools(), strict=True):
            for part, value in a.parts.items():
                same = value.view(torch.uint8) == b.parts[part].view(torch.uint8)
                assert bool(same.all()), (name, part)
        for a, b in zip(exact.carried(), padded.carried(), strict=True):
            assert torch.equal(a, b)


def test_a_prefix_inside_a_chunk_is_kept() -> None:
    """What the compressors carry over a boundary, taken in passing and at a step's end."""
    runner = make_runner(sequences=2, pads=True)
    ids = random.Random(6).choices(range(61), k=160)
    whole, parts = runner.pages.open(), runner.pages.open()
    runner.submit([Chunk(whole, ids[:60], 0)])
    runner.submit([Chunk(whole, ids[60:100], 0)])
    runner.submit([Chunk(whole, ids[100:150], 0, keep_len=128, keep_row=3)])
    runner.submit([Chunk(parts, ids[:64], 0)])
    runner.submit([Chunk(parts, ids[64:128], 0)])
    runner.state.save_rows(parts.slot, 5)
    for layer in runner.state.layers:
        for kept in layer.kept():
            assert torch.equal(kept[3], kept[5])
            assert bool((kept[3] != 0).any())


def test_contexts_and_places_have_their_limits() -> None:
    runner = make_runner(sequences=1, context=70)
    pages = runner.pages.open()
    runner.submit([Chunk(pages, [1] * 64, 1)])
    with pytest.raises(CapacityError, match="the context ends at 70"):
        runner.submit([Chunk(pages, [1] * 7, 1)])
    assert pages.length == 64
    with pytest.raises(CapacityError, match="2 sequences in one step"):
        runner.submit([Chunk(pages, [1], 1), Chunk(pages, [1], 1)])
    runner.pages.close(pages)
    runner.pages.check_integrity()


def test_a_step_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(sequences=2)
    rng = random.Random(7)
    story = Story([rng.randrange(61) for _ in range(70)], OPTIONS[1], 3, 5)
    pages = runner.pages.open()
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_run", Mock(side_effect=RuntimeError("planted")))
        with pytest.raises(RuntimeError, match="planted"):
            runner.submit([Chunk(pages, story.prompt[:64], 0)])
    assert pages.length == 0
    runner.pages.close(pages)
    tell(runner, [story], rng, ahead=True)
    check_alone(story, runner, 64)


def test_sizes() -> None:
    assert batch_sizes(5) == [1, 2, 4, 5]
    assert batch_sizes(130) == [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), 128, 130]
    assert context_sizes(70) == [70]
    assert context_sizes(131072) == [4096, 16384, 65536, 131072]
    sizes = token_sizes(2111)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 16
    assert sizes[-1] == 2111
    assert all(b <= max(a * 2, a + 16) for a, b in itertools.pairwise(sizes))
    assert token_sizes(16) == [16]


def test_logits_of_a_prompt_do_not_depend_on_its_pieces() -> None:
    runner = make_runner(sequences=1)
    ids = random.Random(8).choices(range(61), k=130)
    assert torch.equal(ordinary_logits(runner, ids, 64), ordinary_logits(runner, ids, 13))


def test_settings_of_a_slot_follow_its_sequence() -> None:
    """A slot's next sequence draws by its own settings, counts and biases."""
    runner = make_runner(sequences=1)
    rng = random.Random(9)
    for seed, params in enumerate((*OPTIONS[4:7], SamplingParams(temperature=0.0), OPTIONS[4])):
        story = Story([rng.randrange(61) for _ in range(10)], params, seed, 12)
        tell(runner, [story], rng, ahead=True)
        check_alone(story, runner, 64)
