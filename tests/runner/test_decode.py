"""The decode step as a function of its buffers, against the ordinary step, bit for bit.

Both run on the CPU: the logic of places, tables, repeats and queued steps is the same that a
graph replays on a GPU.
"""

import random
from collections.abc import Callable

import pytest
import torch

from dsv4.config import EngineConfig
from dsv4.errors import CapacityError
from dsv4.model.transformer import Transformer
from dsv4.request import SamplingParams, TokenLogprobs
from dsv4.runner.buffers import batch_sizes, context_sizes
from dsv4.runner.decode import AHEAD, Row
from dsv4.runner.runner import Chunk, Runner
from dsv4.runner.settings import resolve
from dsv4.sampling import Draw, sample_batch
from dsv4.testing import random_weights, small_config

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
GREEDY = SamplingParams(temperature=0.0)


def make_runner(sequences: int = 5, context: int = 1024, exact: bool = False) -> Runner:
    dtype, kv, index = ("float32", "fp32", "fp32") if exact else ("bfloat16", "fp8", "fp4")
    choices = EngineConfig(
        device="cpu",
        dtype=dtype,
        kv_format=kv,
        index_format=index,
        max_sequences=sequences,
        max_context=context,
        chunk_tokens=64,
    )
    settings = resolve(choices, CONFIG, has_gpu=False, memory_bytes=2**32)
    weights = random_weights(CONFIG, 5)
    return Runner(Transformer(CONFIG, weights, getattr(torch, dtype)), settings)


class Tale:
    """A sequence as both ways of decoding see it: its pages, its prompt, its tokens so far."""

    def __init__(self, runner: Runner, prompt: list[int], params: SamplingParams, seed: int):
        self.prompt, self.params, self.seed = prompt, params, seed
        self.output: list[int] = []
        self.logprobs: list[float] = []
        self.pages = runner.pages.open()
        for start in range(0, len(prompt), 64):
            part = prompt[start : start + 64]
            logits = runner.step([Chunk(self.pages, part, 1)])
        self.take(sample_batch(logits, [self.draw])[0])

    @property
    def draw(self) -> Draw:
        return Draw(self.params, self.seed, self.prompt, list(self.output))

    @property
    def row(self) -> Row:
        return Row(self.pages, self.output[-1], self.draw)

    def take(self, result: TokenLogprobs) -> None:
        self.output.append(result.token_id)
        self.logprobs.append(result.logprob)


def check_alone(tale: Tale, runner: Runner) -> None:
    """The same tokens read as one prompt by ordinary steps: every draw and its bits again."""
    ids = tale.prompt + tale.output[:-1]
    pages = runner.pages.open()
    parts = [ids[start : start + 64] for start in range(0, len(ids), 64)]
    logits = torch.cat([runner.step([Chunk(pages, part, len(part))]) for part in parts])
    runner.pages.close(pages)
    first = len(tale.prompt)
    draws = [
        Draw(tale.params, tale.seed, tale.prompt, tale.output[:count])
        for count in range(len(tale.output))
    ]
    results = sample_batch(logits[first - 1 :], draws)
    assert [result.token_id for result in results] == tale.output
    assert [result.logprob for result in results] == tale.logprobs


def random_makers(rng: random.Random, count: int) -> list[Callable[[Runner], Tale]]:
    makers = []
    for seed in range(count):
        prompt = [rng.randrange(CONFIG.vocab_size) for _ in range(rng.choice((1, 3, 60, 126)))]
        params = rng.choice(
            (GREEDY, SamplingParams(temperature=0.9, top_p=0.8), SamplingParams(top_k=7, min_p=0.1))
        )
        makers.append(lambda r, p=prompt, q=params, s=seed: Tale(r, p, q, s))
    return makers


def test_hundreds_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over block closes, window wraps, page borders and context sizes; three places of four.
    (On a GPU 600 steps: tests/runner/test_graphs_gpu.py.)"""
    monkeypatch.setattr("dsv4.runner.buffers.context_sizes", lambda most: [256, 512, most])
    runner, steps = make_runner(exact=True), 270
    makers = random_makers(random.Random(1), 3)
    tales = [make(runner) for make in makers]
    decoder = runner.decoder
    decoder.place([tale.row for tale in tales])
    for step in range(steps + AHEAD - 1):  # tokens are read three steps behind
        if step < steps:
            decoder.submit()
        if step >= AHEAD - 1:
            for tale, result in zip(tales, decoder.read(), strict=True):
                tale.take(result)
    for tale in tales:
        assert tale.pages.length == len(tale.prompt) + steps
        check_alone(tale, runner)
        runner.pages.close(tale.pages)
    runner.pages.check_integrity()


def test_sequences_come_and_go() -> None:
    """Random joins, ends and new places, ordinary steps in between; each as if it were alone."""
    rng = random.Random(2)
    runner = make_runner()
    makers = random_makers(rng, 8)
    waiting, live, done = list(range(len(makers))), {}, {}
    while waiting or live:
        if waiting and len(live) < 5 and rng.random() < 0.6:
            number = waiting.pop(0)
            live[number] = makers[number](runner)
        if not live:
            continue
        chosen = rng.sample(sorted(live), len(live))
        rows = [live[number] for number in chosen]
        if rng.random() < 0.3:  # an ordinary step, in which pages are taken as well
            chunks = [Chunk(tale.pages, [tale.output[-1]], 1) for tale in rows]
            results = sample_batch(runner.step(chunks), [tale.draw for tale in rows])
            for tale, result in zip(rows, results, strict=True):
                tale.take(result)
        else:
            runner.decoder.place([tale.row for tale in rows])
            count = rng.randint(1, AHEAD)
            for _ in range(count):
                runner.decoder.submit()
            for _ in range(count):
                for tale, result in zip(rows, runner.decoder.read(), strict=True):
                    tale.take(result)
        for number in chosen:
            if len(live[number].output) > 16 or rng.random() < 0.02:
                done[number] = live.pop(number)
                runner.pages.close(done[number].pages)
    for tale in done.values():
        check_alone(tale, runner)
    runner.pages.check_integrity()


def test_repeated_places_leave_no_trace() -> None:
    """A step of three sequences in a bucket of four leaves the state of a step of three."""
    states = []
    for padded in (True, False):
        runner = make_runner(sequences=4 if padded else 3)
        tales = [make(runner) for make in random_makers(random.Random(3), 3)]
        runner.decoder.place([tale.row for tale in tales])
        for _ in range(9):
            runner.decoder.submit()
            runner.decoder.read()
        assert runner.decoder.buffers.batches[-1] == (4 if padded else 3)
        held = [
            part[tale.pages.columns[pool][column]].clone()
            for tale in tales
            for layer in runner.state.layers
            for pool, paged in layer.pools()
            for part in (part.view(torch.uint8) for part in paged.parts.values())
            for column in sorted(tale.pages.columns[pool])
        ]
        # what no sequence holds was never written
        for layer in runner.state.layers:
            for pool, paged in layer.pools():
                owned = {page for tale in tales for page in tale.pages.columns[pool].values()}
                free = sorted(set(range(paged.data.shape[0])) - owned)
                if pool != "window":  # window pages come and go
                    assert (paged.data[free].view(torch.uint8) == 255).all()
        states.append(held)
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_logits_through_the_buffers() -> None:
    runner = make_runner()
    tales = [make(runner) for make in random_makers(random.Random(4), 3)]
    for _ in range(7):
        rows = [Row(tale.pages, tale.output[-1]) for tale in reversed(tales)]
        lengths = [tale.pages.length for tale in tales]
        runner.decoder.place(rows)
        runner.decoder.submit()
        found = runner.decoder.logits().clone()
        for tale, length in zip(tales, lengths, strict=True):
            tale.pages.length = length  # the same token once more, by an ordinary step
        again = runner.step([Chunk(t.pages, [t.output[-1]], 1) for t in reversed(tales)])
        assert torch.equal(found, again)
        for tale, row in zip(reversed(tales), again, strict=True):
            tale.take(sample_batch(row.unsqueeze(0), [tale.draw])[0])


def test_too_many_sequences() -> None:
    runner = make_runner(sequences=2)
    tales = [make(runner) for make in random_makers(random.Random(5), 2)]
    with pytest.raises(CapacityError, match="expected 1 to 2"):
        runner.decoder.place([tales[0].row, tales[1].row, tales[0].row])


def test_the_end_of_the_context_changes_nothing() -> None:
    runner = make_runner(sequences=1, context=70)
    tale = Tale(runner, [1] * 68, GREEDY, 0)
    runner.decoder.place([tale.row])
    runner.decoder.submit()
    runner.decoder.submit()
    before = tale.pages.length
    with pytest.raises(CapacityError, match="context ends at 70"):
        runner.decoder.submit()
    assert tale.pages.length == before == 70
    runner.pages.check_integrity()


def test_pages_run_out_and_nothing_changes() -> None:
    runner = make_runner(sequences=2, context=512)
    tales = [make(runner) for make in random_makers(random.Random(6), 2)]
    runner.decoder.place([tale.row for tale in tales])
    taken = runner.pages.allocators["csa"].take(runner.pages.allocators["csa"].num_free)
    positions = runner.decoder.buffers.positions.clone()
    reached: list[list[TokenLogprobs]] = []

    def on_and_on() -> None:
        while len(reached) < 300:
            runner.decoder.submit()
            reached.append(runner.decoder.read())

    with pytest.raises(CapacityError, match="csa pages"):
        on_and_on()
    moved = runner.decoder.buffers.positions - positions
    assert moved.tolist() == [len(reached)] * 2
    lengths = [tale.pages.length for tale in tales]
    runner.pages.allocators["csa"].release(taken)
    runner.decoder.submit()  # and on it goes
    assert [tale.pages.length for tale in tales] == [length + 1 for length in lengths]


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (3, [1, 2, 3]), (33, [1, 2, 4, 8, 16, 24, 32, 33])]
)
def test_batch_sizes(most: int, sizes: list[int]) -> None:
    assert batch_sizes(most) == sizes
    assert batch_sizes(300)[-3:] == [256, 288, 300]


def test_context_sizes() -> None:
    assert context_sizes(70) == [70]
    assert context_sizes(4096) == [4096]
    assert context_sizes(2**20) == [4096, 16384, 65536, 262144, 2**20]
