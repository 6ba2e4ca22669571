"""Steps over several homes (`attention=dp`), as a GPU runs them: padded to equal shapes, a spare
slot where a home has no sequence, the next step queued before the last tokens are read.

Each rank is a `Runner` on a thread of its own; rank 0's commands reach the others through queues.
Whatever traffic there is, each sequence gets the tokens and log-probabilities it has alone.
"""

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from queue import Queue
from typing import Any

import pytest
import torch

from dsv4.cache.pages import SequencePages
from dsv4.config import EngineConfig
from dsv4.model.exchange import Exchange
from dsv4.model.transformer import Transformer
from dsv4.parallel.commands import Command
from dsv4.parallel.layout import RankLayout
from dsv4.runner.ranks.follower import Follower
from dsv4.runner.runner import Chunk, Runner
from dsv4.runner.settings import Settings, resolve
from dsv4.runner.step.shape import StepShape
from dsv4.testing import random_weights, small_config
from tests.parallel.threads import ThreadWorld
from tests.runner.driver import check_alone, make_stories, tell

CONFIG = small_config(
    vocab_size=61, num_layers=3, compress_ratios=(128, 4, 0), num_hash_layers=1, hidden_size=32,
    num_experts=8, num_experts_per_tok=2, hc_sinkhorn_iters=2,
)  # fmt: skip
WEIGHTS = random_weights(CONFIG, 5)


class ThreadTeam:
    """Rank 0's end: commands to the threads of the other ranks. Their first error is raised."""

    def __init__(self, inboxes: Sequence["Queue[Command | None]"], tp: int) -> None:
        self._inboxes, self._tp = inboxes, tp
        self.num_commands = 1  # never a multiple of CHECK_COMMANDS
        self.kinds: list[str] = []

    def command(self, kind: str, numbers: Sequence[int] = (), line: bytes = b"") -> None:
        self.command_each(kind, [(numbers, line)])

    def command_each(self, kind: str, parts: Sequence[tuple[Sequence[int], bytes]]) -> None:
        self.kinds.append(kind)
        for rank, inbox in enumerate(self._inboxes, 1):
            numbers, line = parts[rank % self._tp % len(parts)]
            inbox.put(Command(1, kind, tuple(numbers), line))

    def together(self) -> Any:
        return nullcontext()

    def check(self) -> None: ...
    def wait_for(self, kind: str) -> None: ...
    def ready(self) -> None: ...
    def close(self) -> None: ...


class Homes:
    """As one `StatePages`: sequences go to homes at random."""

    def __init__(self, runner: Runner, rng: random.Random) -> None:
        self._homes, self._rng = runner.homes, rng
        self.geometry = runner.homes[0].geometry

    def open(self) -> SequencePages:
        able = [home for home in self._homes if home.num_free_slots]
        return self._rng.choice(able).open()

    def close(self, pages: SequencePages) -> None:
        self._homes[pages.home].close(pages)

    def check_integrity(self) -> None:
        for home in self._homes:
            home.check_integrity()


def settings_of(tp: int) -> Settings:
    choices = EngineConfig(
        device="cpu", dtype="bfloat16", kv_format="fp8", index_format="fp4", max_sequences=8,
        max_context=1024, chunk_tokens=64 * tp, draft="off", tp=tp,
        attention="dp" if tp > 1 else "tp",
    )  # fmt: skip
    return resolve(choices, CONFIG, has_gpu=False, memory_bytes=2**32)


@contextmanager
def started(tp: int, *, pads: bool) -> Iterator[Runner]:
    world, settings = ThreadWorld(tp, 1), settings_of(tp)
    inboxes: list[Queue[Command | None]] = [Queue() for _ in range(tp - 1)]
    team: Any = ThreadTeam(inboxes, tp)
    errors: list[BaseException] = []

    def runner(rank: int) -> Runner:
        layout = RankLayout(tp, rank=rank, data_attention=True)
        held = layout.experts(CONFIG)
        vocab = layout.vocab(CONFIG)
        table = {
            name: weight[held.start : held.stop] if ".ffn.experts." in name else weight
            for name, weight in WEIGHTS.items()
        }
        table["head.weight"] = WEIGHTS["head.weight"][vocab.start : vocab.stop]
        exchange = Exchange(layout, world.rank(layout), CONFIG)
        model = Transformer(CONFIG, table, torch.bfloat16, exchange)
        made = Runner(model, settings, team=None if rank else team)
        made.buffers.pads = pads
        return made

    def follow(rank: int, inbox: "Queue[Command | None]") -> None:
        link: Any = None
        try:
            mine = runner(rank)
            while (command := inbox.get()) is not None:
                Follower(link).execute(mine, command)
        except BaseException as error:
            errors.append(error)
            for meeting in world._meetings:
                meeting.barrier.abort()

    threads = [
        threading.Thread(target=follow, args=(rank, inbox), daemon=True)
        for rank, inbox in enumerate(inboxes, 1)
    ]
    for thread in threads:
        thread.start()
    try:
        yield runner(0)
    finally:
        for inbox in inboxes:
            inbox.put(None)
        for thread in threads:
            thread.join(60)
        if errors:
            raise errors[0]


@pytest.fixture(scope="module")
def alone() -> Runner:
    return Runner(Transformer(CONFIG, WEIGHTS, torch.bfloat16), settings_of(1))


@pytest.mark.parametrize(
    ("tp", "pads", "ahead"), [(2, True, True), (4, True, True), (2, False, False)]
)
def test_sequences_come_and_go(
    tp: int, pads: bool, ahead: bool, alone: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixed steps, joins, ends, homes without work, every sampling option."""
    monkeypatch.setattr("dsv4.runner.buffers.context_sizes", lambda most: [128, 192, most])
    monkeypatch.setattr(Runner, "runs_ahead", property(lambda self: ahead))
    rng, seen = random.Random(tp + pads), list[tuple[StepShape, list[int]]]()
    send = Runner._send

    def spy(self: Runner, shapes: list[StepShape], chunks: list[Chunk], *rest: Any) -> None:
        seen.append((shapes[0], [len(own) for own in self._by_home(chunks)]))
        send(self, shapes, chunks, *rest)

    monkeypatch.setattr(Runner, "_send", spy)
    with started(tp, pads=pads) as runner:
        monkeypatch.setattr(runner, "pages", Homes(runner, rng))
        stories = make_stories(rng, 6 if tp == 2 else 4, CONFIG.vocab_size, 150)
        tell(runner, stories, rng, ahead=ahead)
    assert {shape.kind for shape, counts in seen if 0 in counts} == {"decode", "prompt"}
    if pads:  # every home has the same shape
        assert all(set(shape.homes) == {(shape.tokens, shape.sequences)} for shape, _ in seen)
    for story in stories:
        check_alone(story, alone, 64)


def test_scores(alone: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every logit of a chunk, at whichever home it is, in any order of chunks; and as a graph."""
    rng = random.Random(1)
    ids = [rng.choices(range(61), k=count) for count in (40, 7, 21)]
    with started(2, pads=True) as runner:
        held = [runner.homes[home].open() for home in (1, 0, 1)]
        chunks = [Chunk(pages, part, len(part)) for pages, part in zip(held, ids, strict=True)]
        found = runner.step([replace(chunks[0], num_logits=3), *chunks[1:]])
        again = runner.homes[1].open()
        monkeypatch.setattr(runner, "_graphs", {})
        scored = runner.step([Chunk(again, ids[0], len(ids[0]))])
    others = [alone.pages.open() for _ in ids]
    wanted = alone.step([
        Chunk(pages, part, len(part)) for pages, part in zip(others, ids, strict=True)
    ])  # fmt: skip
    for pages in others:
        alone.pages.close(pages)
    assert torch.equal(found, wanted[37:])
    assert torch.equal(scored, wanted[:40])


def test_a_failing_step_changes_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """One home has too few pages: the other's are given back, too."""
    with started(2, pads=False) as runner:
        held = [home.open() for home in runner.homes]
        free = [home.allocators["csa"].num_free for home in runner.homes]
        monkeypatch.setattr(runner.homes[1], "take", _refuse)
        with pytest.raises(RuntimeError, match="no pages"):
            runner.submit([Chunk(pages, [1] * 40, 1) for pages in held])
        assert [home.allocators["csa"].num_free for home in runner.homes] == free
        assert [pages.length for pages in held] == [0, 0]
        assert not [kind for kind in runner.team.kinds if kind.endswith("step")]  # type: ignore[union-attr]


def _refuse(*args: Any) -> None:
    raise RuntimeError("no pages")
