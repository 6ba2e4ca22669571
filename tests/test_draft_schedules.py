"""Random schedules with drafts, over all formats and options: the bits of each request without.

Requests with shared beginnings arrive at random times, some are aborted, pages run short. Drafts
come from lookup, from draft blocks, or from a script that is wrong as often as it likes. Steps
have the shapes of a CPU or those of a GPU, and run ahead or not. A few schedules here, 300
under `make drafts`.
"""

import functools
import importlib.util
import random
from dataclasses import replace

import pytest

import dsv4.runner.drafts.verify
from dsv4 import Engine, SamplingParams
from dsv4.request import Completion, Output, Request, join_outputs
from tests.test_drafting import CHANGES, OPTIONS, make_engine, script

FORMATS = (
    ("float32", "fp32", "fp32"),
    ("bfloat16", "fp8", "fp4"),
    ("float32", "bf16", "bf16"),
    ("bfloat16", "fp8", "fp8"),
    ("float32", "fp8", "fp4"),
)
FEW, MANY = 5, 300
KINDS = 40  # different requests of a format
HAS_GUIDES = importlib.util.find_spec("xgrammar") is not None
USED = [name for name in OPTIONS if "guide" not in name or HAS_GUIDES]
GUIDES = [name for name in USED if "guide" in name]


@functools.cache
def engine_of(formats: tuple[str, str, str], draft: str) -> Engine:
    dtype, kv, index = formats
    return make_engine(
        draft, dtype=dtype, kv_format=kv, index_format=index, max_sequences=3, state_tokens=700
    )


@functools.cache
def request_of(kind: int) -> Request:
    rng = random.Random(kind)
    option = rng.choice(USED)
    if kind < 8 and GUIDES:  # others have them by chance
        option = GUIDES[kind % len(GUIDES)]
    head = random.Random(kind % 3).choices(range(256), k=(0, 128, 100)[kind % 3])
    tail = rng.choices(range(256), k=rng.choice((2, 20, 27, 90)))
    fields = {"max_tokens": rng.choice((5, 20, 33)), "stop_ids": (), "logprobs": rng.randint(0, 3)}
    params = SamplingParams(seed=kind, **{**fields, **OPTIONS[option]})
    return Request(f"kind{kind}", tuple(head + tail), params)


@functools.cache
def plain(formats: tuple[str, str, str], kind: int) -> Completion:
    request, engine, outputs = request_of(kind), engine_of(formats, "off"), list[Output]()
    engine.add(request)
    while engine.num_unfinished:
        outputs += engine.step()
    return join_outputs(request, outputs)


def run(seed: int, patch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    formats, draft = FORMATS[seed % len(FORMATS)], rng.choice(("lookup", "mtp", "dspark"))
    engine = engine_of(formats, draft)
    kinds = rng.sample(range(KINDS), rng.randint(2, 5))
    right = {kind: plain(formats, kind) for kind in kinds}
    known = {(*request_of(k).prompt_ids, k): right[k].token_ids for k in kinds}
    if draft == "lookup":
        script(engine, rng.choice([*CHANGES, "lookup"]), known)
    patch.setattr(dsv4.runner.drafts.verify, "TOGETHER_ON_CPU", rng.random() < 0.5)
    patch.setattr(engine._runner.buffers, "pads", rng.random() < 0.5)
    patch.setattr(engine._pipeline, "runs_ahead", rng.random() < 0.7)
    waiting, outputs = list(kinds), {f"s{seed} {kind}": list[Output]() for kind in kinds}
    aborted = f"s{seed} {kinds[0]}" if rng.random() < 0.2 else ""
    while waiting or engine.num_unfinished:
        if waiting and rng.random() < 0.6:
            kind = waiting.pop()
            engine.add(replace(request_of(kind), id=f"s{seed} {kind}", priority=rng.randint(-1, 1)))
        if aborted in engine._live and rng.random() < 0.1:
            engine.abort(aborted)
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check_integrity()
    for kind in kinds:
        found = outputs[f"s{seed} {kind}"]
        if f"s{seed} {kind}" == aborted and (not found or not found[-1].finished):
            continue
        whole = join_outputs(request_of(kind), found)
        for name in ("token_ids", "logprobs", "text", "finish_reason", "stop_reason"):
            assert getattr(whole, name) == getattr(right[kind], name), (seed, kind, name)


@pytest.mark.parametrize("seed", range(FEW))
def test_a_few_schedules(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run(seed, monkeypatch)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", range(30))
def test_many_schedules(shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(shard * MANY // 30, (shard + 1) * MANY // 30):
        run(seed, monkeypatch)
    engines = [engine_of(formats, draft) for formats in FORMATS for draft in ("lookup", "mtp")]
    assert sum(engine.stats().num_accepted for engine in engines) > 100 * (shard == 29)
