"""Steps queued on the guess that the same sequences go on: answers are those of an engine that
waits for every token, whatever joins, ends, is aborted or loses its pages in between."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4 import Engine, SamplingParams
from dsv4.request import Output, Request
from dsv4.runner.buffers import Bucket
from tests.models import write_fast_model


class Replays:
    """Stands for captured graphs: a replay runs the step."""

    def __init__(self, step: Callable[[Bucket], None]) -> None:
        self.step, self.count = step, 0

    def run(self, bucket: Bucket) -> None:
        self.count += 1
        self.step(bucket)


def load(folder: Path, graphs: bool) -> tuple[Engine, Replays]:
    engine = Engine.load(
        folder, max_context=400, max_sequences=4, chunk_tokens=64, state_tokens=900
    )
    replays = Replays(engine._runner._decode_once)
    if graphs:
        engine._runner._graphs = replays  # type: ignore[assignment]
    return engine, replays


def random_requests(rng: random.Random, count: int) -> list[Request]:
    beginning = [rng.randrange(100) for _ in range(260)]
    requests = []
    for number in range(count):
        length = rng.choice((3, 60, 126, 127, 140, 256))
        own = [rng.randrange(100) for _ in range(rng.randrange(1, 9))]
        params = SamplingParams(
            max_tokens=rng.choice((1, 2, 7, 40, 90)),
            temperature=rng.choice((0.0, 0.9)),
            seed=number,
            stop_ids=tuple(range(rng.choice((0, 3, 12)))),  # some end when nobody expects it
            presence_penalty=rng.choice((0.0, 0.0, 0.0, 0.5)),  # not drawn inside the step
        )
        requests.append(Request(f"r{number}", beginning[:length] + own, params))
    return requests


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize("seed", range(2))
def test_answers_are_those_of_an_engine_that_waits(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    folder = write_fast_model(tmp_path)
    requests = random_requests(rng, 7)
    plain, _ = load(folder, graphs=False)
    wanted = {}
    for request in requests:
        [answer] = plain.generate([request.prompt_ids], request.params)
        wanted[request.id] = list(answer.token_ids)
    engine, replays = load(folder, graphs=True)
    found: dict[str, list[Output]] = {request.id: [] for request in requests}
    waiting, aborted = list(requests), set()
    while waiting or engine.num_unfinished:
        if waiting and rng.random() < 0.1:
            engine.add(waiting.pop(0))
        if rng.random() < 0.01 and engine._live:
            aborted.add(name := rng.choice(sorted(engine._live)))
            engine.abort(name)
        for output in engine.step():
            found[output.request_id].append(output)
        engine.check_integrity()
    assert replays.count > 20
    for name, outputs in found.items():
        tokens = tokens_of(outputs)
        assert tokens == wanted[name][: len(tokens)], name
        assert name in aborted or len(tokens) == len(wanted[name]), name


def test_sequences_end_just_when_pages_were_taken_for_them(tmp_path: Path) -> None:
    """A page begins at token 64: the step that was queued ahead holds one that nobody needs."""
    folder = write_fast_model(tmp_path)
    (plain, _), (engine, _) = load(folder, graphs=False), load(folder, graphs=True)
    rng = random.Random(3)
    prompt = [rng.randrange(100) for _ in range(60)]
    params = SamplingParams(max_tokens=70, temperature=0, stop_ids=())
    [companion] = plain.generate([prompt[:40]], params)
    [whole] = plain.generate([prompt], params)
    engine.add(Request("long", prompt[:40], params))
    found: dict[str, list[int]] = {}
    for count in range(1, 9):
        short = SamplingParams(max_tokens=count, temperature=0, stop_ids=())
        engine.add(Request(f"{count}", prompt, short))
        while f"{count}" in engine._live:
            for output in engine.step():
                found.setdefault(output.request_id, []).extend(output.token_ids)
            engine.check_integrity()
        assert found[f"{count}"] == list(whole.token_ids[:count])
    assert found["long"] == list(companion.token_ids[: len(found["long"])])
    engine.abort("long")
    engine.check_integrity()
    for allocator in engine._runner.pages.allocators.values():
        assert allocator.num_available == allocator.num_pages


def test_the_next_step_is_queued_before_tokens_are_read(tmp_path: Path) -> None:
    engine, replays = load(write_fast_model(tmp_path), graphs=True)
    decoder = engine._runner.decoder
    engine.add(Request("a", [1, 2, 3], SamplingParams(max_tokens=20, temperature=0, stop_ids=())))
    engine.step()  # the prompt
    for number in range(1, 10):
        engine.step()
        assert replays.count == number + 1
        assert decoder.num_under_way == 1
    engine.abort("a")
    engine.check_integrity()
