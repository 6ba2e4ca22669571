"""With several stages as many steps are in flight: the bits of one process, and real overlap."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4.engine import Engine
from dsv4.request import Request, SamplingParams
from dsv4.runner.ranks import start
from dsv4.scheduler import SequenceState
from tests.scheduler.simulator import Simulator

LONG = list(range(1, 180))
PROMPTS = ([7, 8, 9], LONG + [5, 6] * 70, [3], [*LONG, 3], [4] * 30, [*LONG, 8, 9])
ABORTED = {3: "1", 6: "4"}  # turn -> who: in the middle of a prompt, and of an answer


def run(engine: Engine) -> tuple[dict[str, list[Any]], torch.Tensor]:
    """Requests come one by one and wait for slots, two are aborted while steps are in flight, two
    begin with a cached prefix, and a text is scored in between."""
    found: defaultdict[str, list[Any]] = defaultdict(list)
    turn, logits = 0, torch.empty(0)
    while turn < len(PROMPTS) or engine.num_unfinished:
        if turn < len(PROMPTS):
            params = SamplingParams(max_tokens=6, temperature=0.8, seed=turn, logprobs=2)
            engine.add(Request(str(turn), tuple(PROMPTS[turn]), params))
        if turn in ABORTED:
            engine.abort(ABORTED[turn])
        if turn == 5:
            logits = torch.cat(list(engine.score(PROMPTS[3])))
        for output in engine.step():
            found[output.request_id] += zip(output.token_ids, output.logprobs, strict=True)
        turn += 1
    engine.check_integrity()
    return {name: found[name] for name in sorted(found) if name not in ABORTED.values()}, logits


def choices(**more: Any) -> dict[str, Any]:
    return {"device": "cpu", "max_sequences": 4, "chunk_tokens": 128, **more}


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    return run(Engine.load(folder, **choices()))


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (1, 3), (2, 2)])
def test_lanes_have_the_bits_of_one_process(folder: Path, alone: Any, tp: int, pp: int) -> None:
    engine = Engine.load(folder, **choices(tp=tp, pp=pp))
    try:
        tokens, logits = run(engine)
        assert tokens == alone[0]
        assert torch.equal(logits, alone[1])
        assert engine.stats().num_prefix_hit > 0
        # the next request begins with a step of an aborted one still in flight
        engine.add(
            Request("dropped", tuple(PROMPTS[4]), SamplingParams(temperature=0, stop_ids=()))
        )
        engine.step()
        engine.abort("dropped")
        [answer] = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=6, temperature=0))
        [again] = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=6, temperature=0))
        assert answer.token_ids == again.token_ids
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("prompts", "waiting"),
    [
        ([list(range(1, 256)) * 2], 1),  # chunks of one prompt
        ([[5, 6, 7], [8, 9]], 3),  # two sequences that decode
    ],
)
def test_a_stage_begins_a_step_before_the_next_has_ended_the_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]], waiting: int
) -> None:
    """Rank 1 ends that command only when it has the next one, which rank 0 sends as it begins it.
    With one step in flight rank 0 would wait for the logits of the first."""
    monkeypatch.setattr(start, "FOLLOWER", "tests.parallel.faulty")
    fault = f"waits in command {waiting}"
    engine = Engine.load(folder, **choices(pp=2, prefix_cache=False, audit_folder=fault))
    try:
        answers = engine.generate(prompts, SamplingParams(max_tokens=4, stop_ids=()))
        assert [answer.finish_reason for answer in answers] == ["length"] * len(prompts)
    finally:
        engine.close()


def test_lanes_share_the_sequences_that_decode() -> None:
    sim = Simulator(max_sequences=5, lanes=2)
    sequences = [sim.add(name, [1, 2]) for name in "abcde"]
    sim.step()

    def lane() -> str:
        work = sim.scheduler.next_step()
        for item in work:
            item.sequence.num_pending += 1
            _computed(item.sequence, 1)
        return "".join(item.sequence.request.id for item in work)

    def read(names: str) -> None:
        for sequence in sequences:
            if sequence.request.id in names:
                sequence.num_pending -= 1
                sequence.token_ids.append(1)

    assert [lane(), lane(), lane()] == ["abc", "de", ""]
    read("abc")
    assert lane() == "abc"
    sim.scheduler.remove(sequences[3])  # aborted in flight
    read("e")
    assert lane() == "e"


def _computed(sequence: SequenceState, count: int) -> None:
    assert sequence.pages is not None
    sequence.pages.length += count


def test_chunks_of_a_prompt_follow_each_other_until_one_samples() -> None:
    sim = Simulator(max_sequences=1, chunk_tokens=128, lanes=3, prefix=False)
    sequence = sim.add("a", [1] * 300)
    counts = []
    for _ in range(3):
        [item] = sim.scheduler.next_step()
        counts.append((item.num_new, item.samples))
        _computed(sequence, item.num_new)
    sequence.num_pending += 1
    assert counts == [(128, False), (128, False), (44, True)]
    assert sim.scheduler.next_step() == []
