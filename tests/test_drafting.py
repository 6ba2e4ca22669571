"""Drafting changes no bit of any answer: every drafter, every option, every kind of end."""

import functools
import importlib.util
import itertools
import logging
import operator
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import dsv4.model.draft
import dsv4.runner.drafts.device
import dsv4.runner.drafts.verify
from dsv4 import Engine, SamplingParams
from dsv4.cache.pages import SequencePages
from dsv4.chat.dialect import choose_dialect
from dsv4.chat.tokenizer import Tokenizer
from dsv4.checkpoint.names import draft_parameters
from dsv4.config import EngineConfig
from dsv4.errors import OptionError, RequestError
from dsv4.formats.quantized import UnpackedTensor
from dsv4.model.draft import nvfp4_head
from dsv4.model.transformer import Transformer
from dsv4.ops.sample.sample import SampleInputs
from dsv4.request import Completion, Guide, Request, join_outputs
from dsv4.runner.drafts.device import DeviceDrafter, draft_parts
from dsv4.runner.load import LoadedModel, load_model, prepare
from dsv4.runner.plan import DraftPart
from dsv4.runner.runner import Runner
from dsv4.runner.settings import resolve
from dsv4.scheduler.acceptance import Acceptance
from dsv4.scheduler.drafters import Given, Lookup
from dsv4.scheduler.drafts import Drafting, StepTimes, num_worth
from dsv4.scheduler.sequence import SequenceState
from dsv4.server.metrics import EngineMetrics
from dsv4.server.worker.wire import output_from_wire, output_to_wire
from dsv4.testing import _random_tensor, random_weights, write_checkpoint
from dsv4.util.draft_shape import DSparkShape, head_bytes
from tests.models import (
    BYTE_TOKENIZER,
    quick_config,
    spoiled,
    verify_everything,
    write_quick_model,
)

MOST = 7
VOCABULARY = 271
END, MARKER = 257, 258


SPARK = DSparkShape(block=5, noise_id=266, targets=(1, 0), rank=4)
KINDS: dict[str, dict[str, Any]] = {
    "mtp": {"num_draft_layers": 1},
    "dspark": {"num_draft_layers": 2, "draft_kind": "dspark", "dspark": SPARK},
}


@functools.cache
def folder(kind: str = "mtp") -> Path:
    """A quick model with draft blocks of random weights."""
    found, config = Path(tempfile.mkdtemp()), replace(quick_config(), **KINDS[kind])
    generator = torch.Generator().manual_seed(2)
    weights = random_weights(config, 0)
    for name, parameter in draft_parameters(config).items():
        weights[name] = _random_tensor(name, parameter, config, generator)
    write_checkpoint(found, config, weights)
    shutil.copy(BYTE_TOKENIZER, found / "tokenizer.json")
    return found


@pytest.fixture(scope="module", autouse=True)
def _ended() -> Iterator[None]:
    yield
    for draft in ("off", "lookup", "mtp", "dspark"):
        shared_engine(draft).close()


@functools.cache
def loaded(kind: str, **choices: object) -> LoadedModel:
    return load_model(str(folder(kind)), EngineConfig.make(device="cpu", draft=kind, **choices))


def make_engine(draft: str = "off", most: int = MOST, **choices: Any) -> Engine:
    kind = draft if draft in KINDS else "mtp"
    found = loaded(kind, **{"max_sequences": 4, "max_context": 512, **choices})
    most = {"off": 0, "dspark": min(most, SPARK.block)}.get(draft, most)
    settings = replace(found.settings, draft=draft, draft_tokens=most)
    found = replace(found, draft=found.draft if draft in KINDS else None)
    dialect = choose_dialect(has_system_marker=False, folder=folder())
    engine = Engine(replace(found, settings=settings), Tokenizer.from_folder(folder()), dialect)
    if engine._drafting is not None:
        verify_everything(engine._drafting)
    return engine


# --- drafters -----------------------------------------------------------------------------------


class Scripted:
    """Proposes the true continuation, changed by `change(place, token)`."""

    def __init__(self, answer: Sequence[int], change: Callable[[int, int], int]) -> None:
        self.answer, self.change = list(answer), change

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        rest = (self.answer[len(tokens) :] + [5] * most)[:most]
        return [self.change(len(tokens) + i, token) for i, token in enumerate(rest)]


def wrong(token: int) -> int:
    return (token + 1) % VOCABULARY


def broken(place: int, token: int) -> int:
    raise RuntimeError("planted")


CHANGES: dict[str, Callable[[int, int], int]] = {
    "perfect": lambda place, token: token,
    "always wrong": lambda place, token: wrong(token),
    "every third wrong": lambda place, token: wrong(token) if place % 3 == 0 else token,
    "random": lambda place, token: random.Random(place).choice((token, token, wrong(token))),
    "ends": lambda place, token: END if place % 4 == 0 else token,
    "no token": lambda place, token: (-1, VOCABULARY, 10**9, token)[place % 4],
    "raises": broken,
}


def script(engine: Engine, kind: str, answers: dict[tuple[int, ...], Sequence[int]]) -> None:
    """Let an engine's drafts come from known answers, by prompt; "lookup" is left as it is."""
    assert engine._drafting is not None
    engine._drafting.is_off = False
    if kind == "lookup":
        engine._drafting._make = Lookup
        return

    def make(sequence: SequenceState) -> Scripted:
        prompt = sequence.request.prompt_ids
        key = (*prompt, sequence.seed)
        return Scripted([*prompt, *answers.get(key, ())], CHANGES[kind])

    engine._drafting._make = make  # type: ignore[assignment]
    verify_everything(engine._drafting)


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "logprobs": 0},
    "filters": {"temperature": 0.8, "top_p": 0.8, "top_k": 20, "min_p": 0.02, "logprobs": 5},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2,
                  "logprobs": 1},
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.4},
    "bias": {"logit_bias": {7: 4.0, 8: 3.5, 11: -100.0}, "logprobs": 2},
    "stop strings": {"temperature": 0.0, "stop": ("a", "zz", "\x11"), "logprobs": 0},
    "model's own end": {"logit_bias": {END: 5.0}, "stop_ids": None},
    "late ends": {"logit_bias": {END: 6.0}, "stop_ids": None, "min_tokens": 9},
    "guide": {"guide": Guide("regex", "[a-f]{2,30}x"), "stop_ids": None},
    "guide after a marker": {
        "guide": Guide("regex", "(ab|cd){3,9}", after_id=MARKER), "stop_ids": None,
        "logit_bias": {END: 4.0, MARKER: 2.0}, "max_tokens": 60,
    },
    **{f"{n} tokens": {"temperature": 0.0, "max_tokens": n} for n in (1, 2, 3, 9)},
}  # fmt: skip


def requests_of(option: str, count: int = 2) -> list[Request]:
    fields = {"max_tokens": 20, "stop_ids": (), **OPTIONS[option]}
    found = []
    for number in range(count):
        rng = random.Random(f"{option}{number}")
        prompt = rng.choices(range(256), k=rng.choice((3, 118, 124, 125)))
        params = SamplingParams(seed=number, **fields)
        found.append(Request(f"{option} {number}", tuple(prompt), params))
    return found


def answer(engine: Engine, requests: Sequence[Request]) -> dict[str, Completion]:
    outputs: dict[str, list[Any]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.num_unfinished:
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check_integrity()
    return {request.id: join_outputs(request, outputs[request.id]) for request in requests}


@functools.cache
def shared_engine(draft: str) -> Engine:
    return make_engine(draft)


@functools.cache
def plain(option: str) -> dict[str, Completion]:
    found = answer(shared_engine("off"), requests_of(option))
    return {name: replace(one, num_cached=0) for name, one in found.items()}


def check(engine: Engine, option: str) -> None:
    found = answer(engine, requests_of(option))
    assert {name: replace(one, num_cached=0) for name, one in found.items()} == plain(option)


def known(option: str) -> dict[tuple[int, ...], Sequence[int]]:
    return {
        (*request.prompt_ids, request.params.seed or 0): plain(option)[request.id].token_ids
        for request in requests_of(option)
    }


@pytest.mark.parametrize("option", OPTIONS)
def test_every_drafter_gives_the_same_answers(option: str) -> None:
    if "guide" in option and importlib.util.find_spec("xgrammar") is None:
        pytest.skip("needs xgrammar")
    first = list(OPTIONS).index(option)
    kinds = list(itertools.islice(itertools.cycle(CHANGES), 2 * first, 2 * first + 3))
    for kind in ("lookup", *kinds):
        engine = shared_engine("lookup")
        script(engine, kind, known(option))
        check(engine, option)
    check(shared_engine("mtp"), option)
    check(shared_engine("dspark"), option)


@pytest.mark.parametrize("option", ["seeded", "filters", "bias", "stop strings", "penalties"])
def test_rows_drawn_together_on_padded_steps(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: steps of few shapes, every row drawn at once and counted on the device."""
    monkeypatch.setattr(dsv4.runner.drafts.verify, "TOGETHER_ON_CPU", True)
    engine = make_engine("lookup")
    engine._runner.buffers.pads = True
    for kind in ("perfect", "random", "always wrong"):
        script(engine, kind, known(option))
        check(engine, option)
    stats = engine.stats()
    assert stats.num_drafted > stats.num_accepted > 0


class WholeSteps:
    """In place of graphs: whole verify steps run like these, other parts as without graphs."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.num_runs = runner, 0

    def __contains__(self, key: object) -> bool:
        return isinstance(key, DraftPart) and key.kind == "whole step"

    def run(self, key: DraftPart) -> None:
        self.num_runs += 1
        self.runner._run_once(key)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_do_not_depend_on_where_rows_are_drawn(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row by row by the host, at once on padded steps as on a GPU, or there as whole steps before
    the host knows any token: the same drafts follow."""
    given: list[list[tuple[int, list[int]]]] = []
    for how in ("rows", "parts", "whole"):
        monkeypatch.setattr(dsv4.runner.drafts.verify, "TOGETHER_ON_CPU", how != "rows")
        engine = make_engine(kind, 2)
        engine._runner.buffers.pads = how != "rows"
        whole = WholeSteps(engine._runner)
        if how == "whole":
            monkeypatch.setattr(engine._runner, "_graphs", whole)
            monkeypatch.setattr(engine._pipeline, "runs_ahead", True)
        given.append([])

        class Noted(Given):
            def give(self, length: int, drafts: list[int], chances: Sequence[float] = ()) -> None:
                given[-1].append((length, drafts))
                super().give(length, drafts, chances)

        assert engine._drafting is not None
        engine._drafting._make = Noted
        for option in ("seeded", "penalties"):
            check(engine, option)
        assert engine.stats().num_drafted > 0
        # without chances of drafts: with them the host chooses
        assert (whole.num_runs > 0) == (how == "whole" and kind == "mtp")
    assert given[0] == given[1]
    # steps ahead of the host end elsewhere, so fewer drafts are told
    assert len(given[2]) > len(given[0]) // 2
    assert all(drafts in given[0] for drafts in given[2])


@pytest.mark.parametrize(
    ("kind", "drawn"), [("mtp", -1), ("dspark", -1), ("dspark", VOCABULARY), ("dspark", 2**40)]
)
def test_draft_blocks_read_no_row_that_a_table_lacks(
    kind: str, drawn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token drawn from NaN is -1. While a warm-up only compiles kernels, any number is found in
    its place: MTP's rows are read by kernels, DSpark's by torch. On a GPU a row beyond a table ends
    every request."""
    runner = shared_engine(kind)._runner
    drafter = runner.drafter
    assert drafter is not None

    def draw(logits: torch.Tensor, by: SampleInputs) -> torch.Tensor:
        return torch.full((len(logits),), drawn)

    monkeypatch.setattr(drafter, "_draw", draw)
    follows = runner.buffers.verify.follows  # type: ignore[union-attr]
    before = follows.clone()
    follows[2].fill_(-1)
    with runner.ops.active(), torch.inference_mode():
        drafter.tokens(drafter.shape(2, 3))
    follows.copy_(before)
    assert drafter.drafts[0, 1] == drawn


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("draft", ["lookup", "mtp", "dspark"])
def test_nan_ends_one_request_with_drafts(
    draft: str,
    together: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Between drafts that are right, and with the next step in flight: the tokens before it stay,
    and the other answer keeps its bits and its drafts: NaN in those of the failing one is not the
    drafter's fault."""
    monkeypatch.setattr(dsv4.runner.drafts.verify, "TOGETHER_ON_CPU", together)
    sound, failing = requests_of("seeded")
    whole = plain("seeded")
    tokens, others = whole[failing.id].token_ids, {*whole[sound.id].token_ids, *sound.prompt_ids}
    bad = next(t for t in tokens[3:] if t not in {*others, *failing.prompt_ids})
    engine = make_engine(draft, 3)
    monkeypatch.setattr(engine._pipeline, "runs_ahead", together)
    if draft == "lookup":
        script(engine, "perfect", known("seeded"))
    with spoiled(engine, bad):
        found = answer(engine, [sound, failing])
    assert replace(found[sound.id], num_cached=0) == whole[sound.id]
    failed = found[failing.id]
    assert (failed.finish_reason, failed.token_ids) == ("error", tokens[: tokens.index(bad) + 1])
    assert "gave NaN" in (failed.error or "")
    assert [r.message for r in caplog.records if "drafting is off" in r.message] == []
    before = engine.stats().num_drafted
    assert before > 0
    check(engine, "seeded")
    assert engine.stats().num_drafted > before


class Eager:
    """In place of graphs: verify steps with their drafts, as a whole."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.ran = runner, list[DraftPart]()

    def __contains__(self, key: object) -> bool:
        assert self.runner.drafter is not None
        return key in self.runner.drafter.whole_steps()

    def run(self, key: DraftPart) -> None:
        self.ran.append(key)
        self.runner._run_once(key)


AHEAD = {"greedy": 7, "seeded": 3, "bias": 2, "stop strings": 1, "late ends": 3, "penalties": 3}


@pytest.mark.parametrize("option", AHEAD)
def test_steps_with_drafts_run_ahead(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next verify step is submitted before the tokens of the last one are read, across ends,
    boundaries and a request that comes late; not if the host must draw."""
    monkeypatch.setattr(dsv4.runner.drafts.verify, "TOGETHER_ON_CPU", True)
    fields = {"max_tokens": 60, "stop_ids": (), **OPTIONS[option], "logprobs": 0}
    requests = [
        Request(f"{option} {n}", tuple(range(n, n + 9 + 50 * n)), SamplingParams(seed=n, **fields))
        for n in range(3)
    ]
    engine, followed = make_engine("mtp", AHEAD[option]), list[bool]()
    monkeypatch.setattr(engine._pipeline, "runs_ahead", True)
    monkeypatch.setattr(engine._runner.buffers, "pads", option == "seeded")
    graphs = Eager(engine._runner)
    if option == "seeded":
        monkeypatch.setattr(engine._runner, "_graphs", graphs)
    real = engine._pipeline._follow

    def noted(*arguments: Any) -> Any:
        found = real(*arguments)
        followed.append(found is not None)
        return found

    monkeypatch.setattr(engine._pipeline, "_follow", noted)
    outputs: dict[str, list[Any]] = {request.id: [] for request in requests}
    waiting, steps = list(requests), 0
    while engine.num_unfinished or waiting:
        if steps in (0, 1, 12):
            engine.add(waiting.pop(0))
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check_integrity()
        steps += 1
    right = answer(shared_engine("off"), requests)
    for request in requests:
        found = join_outputs(request, outputs[request.id])
        assert replace(found, num_cached=0) == replace(right[request.id], num_cached=0)
    if option == "penalties":
        assert not any(followed)
        return
    assert sum(followed) > 3
    assert (len(graphs.ran) > 3) == (option == "seeded")
    stats = engine.stats()
    assert stats.num_drafted > stats.num_accepted > 0


def test_a_prefix_is_kept_while_the_next_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verify step ends on a boundary, and the host learns of it with the next one in flight: what
    is kept then still has the bits of the boundary."""
    monkeypatch.setattr(dsv4.runner.drafts.verify, "TOGETHER_ON_CPU", True)
    engine, beyond = make_engine("mtp", MOST, prefix_cache=True), list[int]()
    monkeypatch.setattr(engine._pipeline, "runs_ahead", True)
    [cache] = engine._prefixes
    real = cache.keep

    def noted(pages: SequencePages, key: bytes, length: int, **how: Any) -> bool:
        beyond.append(pages.length - length)
        return real(pages, key, length, **how)

    monkeypatch.setattr(cache, "keep", noted)
    params = SamplingParams(max_tokens=30, seed=1, stop_ids=(), logprobs=0)
    for number in range(2):
        first = Request(f"first {number}", tuple(range(number, 110 + 130 * (number % 2))), params)
        tokens = [*first.prompt_ids, *answer(engine, [first])[first.id].token_ids]
        end = len(tokens) // 128 * 128
        answer(engine, [Request("stranger", tuple(range(40)), params)])  # overwrites the slot
        again = Request(f"again {number}", (*tokens[: end + 1], 7, 8, 9), params)
        found = answer(engine, [again])[again.id]
        right = answer(shared_engine("off"), [again])[again.id]
        assert found.num_cached == end
        assert replace(found, num_cached=0) == replace(right, num_cached=0)
    assert max(beyond) > 4


@pytest.mark.parametrize("kind", ["mtp", "random"])
def test_several_answers_cached_prefixes_and_preemption(kind: str) -> None:
    """`n`, the prefix cache and too few pages, with drafts and without: the same answers."""
    limits = {"state_tokens": 512, "prefix_cache": True}
    params = SamplingParams(max_tokens=16, seed=3, stop_ids=(), logprobs=0)
    prompts = [tuple(random.Random(n % 2).choices(range(256), k=248 + n)) for n in range(2)]
    found, stats = [], []
    for draft in ("off", "mtp" if kind == "mtp" else "lookup"):
        engine = make_engine(draft, 3, **limits)
        if kind == "random" and draft != "off":
            answers = {
                (*prompt, 3 + i): found[0][0][2 * p + i][0]
                for p, prompt in enumerate(prompts)
                for i in range(2)
            }
            script(engine, kind, answers)
        rounds = [engine.generate(prompts, params, n=2) for _ in range(2)]
        engine.check_integrity()
        found.append([[(a.token_ids, a.logprobs, a.text) for a in some] for some in rounds])
        stats.append(engine.stats())
        assert any(answer.num_cached >= 128 for some in rounds for answer in some)
    assert found[0] == found[1]
    assert found[0][0][0] != found[0][0][1]  # seeds differ
    assert stats[1].num_drafted > stats[1].num_accepted > 0
    assert stats[1].num_preemptions > 0


def test_right_drafts_save_steps() -> None:
    engine = make_engine("lookup")
    script(engine, "perfect", known("greedy"))
    answer(engine, requests_of("greedy"))
    stats = engine.stats()
    assert stats.num_accepted == stats.num_drafted > 25
    assert stats.num_steps < 14  # 20 tokens, and the prompts
    assert stats.accepted_by_place[0] >= stats.accepted_by_place[3] > 0


def test_a_drafter_that_raises_is_named_once_and_switched_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine("lookup")
    script(engine, "raises", known("greedy"))
    check(engine, "greedy")
    check(engine, "seeded")
    assert [r.message for r in caplog.records if "drafting is off" in r.message] == [
        "drafting is off: planted"
    ]
    assert engine.stats().num_drafted == 0
    assert engine._drafting is not None
    assert engine._drafting.stats.num_failures == 1


def test_a_guide_that_raises_leaves_other_requests_their_drafts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine("lookup")
    script(engine, "perfect", known("greedy"))
    first = requests_of("greedy")[0]

    def allow(sequence: SequenceState, drafts: list[int]) -> list[int]:
        if sequence.request.id == first.id:
            raise RuntimeError("planted")
        return drafts

    assert engine._drafting is not None
    engine._drafting._allow = allow
    check(engine, "greedy")
    assert [r.message for r in caplog.records if "drafting is off" in r.message] == [
        f"drafting is off for request {first.id!r}: planted"
    ]
    assert engine.stats().num_accepted > 10


def test_a_request_can_leave_drafts_out() -> None:
    engine = make_engine("lookup")
    script(engine, "perfect", known("greedy"))
    [request] = requests_of("greedy", 1)
    bare = replace(request, params=replace(request.params, draft=False))
    assert answer(engine, [bare])[request.id].token_ids == plain("greedy")[request.id].token_ids
    assert engine.stats().num_drafted == 0
    with pytest.raises(RequestError, match="draft is 1, expected True or False"):
        SamplingParams(draft=1)  # type: ignore[arg-type]


def test_the_audit_runs_without_drafts(tmp_path: Path) -> None:
    engine = make_engine("lookup", audit_share=1.0, audit_folder=str(tmp_path))
    script(engine, "random", known("penalties"))
    answer(engine, requests_of("penalties"))
    while engine.num_unfinished:
        engine.step()
    stats = engine.stats()
    assert (stats.num_audited, stats.num_differences) == (2, 0)
    assert stats.num_drafted > 0


def test_counts_reach_usage_and_metrics() -> None:
    engine = make_engine("lookup")
    script(engine, "every third wrong", known("greedy"))
    last = []
    for request in requests_of("greedy"):
        engine.add(request)
    while engine.num_unfinished:
        last += [output for output in engine.step() if output.finished]
    stats = engine.stats()
    assert sum(output.num_drafted for output in last) == stats.num_drafted > 0
    assert sum(output.num_accepted for output in last) == stats.num_accepted > 0
    for output in last:
        assert output_from_wire(output_to_wire(output)) == output
    link = Mock(stats=asdict(stats), is_healthy=True, num_restarts=0, facts={})
    metrics = {m.name: m for m in EngineMetrics({"model_name": "m"}, link).collect()}
    for name, value in (("drafts", stats.num_verified), ("draft_tokens", stats.num_drafted),
                        ("accepted_tokens", stats.num_accepted)):  # fmt: skip
        assert metrics[f"dsv4:spec_decode_num_{name}"].samples[0].value == value
    places = metrics["dsv4:spec_decode_num_accepted_tokens_per_pos"].samples
    assert [sample.value for sample in places] == list(stats.accepted_by_place)


# --- MTP ----------------------------------------------------------------------------------------


def test_the_embedded_model_drafts_for_itself() -> None:
    """Nine of ten first drafts are right; drawn with the target's noise, also at temperature 1."""
    answers = []
    for draft in ("off", "mtp"):
        engine = Engine.load("tiny", device="cpu", draft=draft, max_context=512)
        if engine._drafting is not None:
            verify_everything(engine._drafting)  # not only while that is measured to be faster
        for params in (SamplingParams(max_tokens=24, temperature=0.0, logprobs=1),
                       SamplingParams(max_tokens=24, seed=5, logprobs=1)):  # fmt: skip
            found = engine.generate(["What is 17 + 25?", "What is the capital of France?"], params)
            answers.append([(a.token_ids, a.logprobs, a.text) for a in found])
        stats = engine.stats()
    assert answers[:2] == answers[2:]
    assert stats.accepted_by_place[0] >= 0.85 * stats.num_verified > 10


def test_a_head_in_four_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As drafts read it on a GPU: the embedded model's first drafts stay right nearly as often."""
    monkeypatch.setattr(dsv4.model.draft, "HEAD_ROWS", 128)
    head = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
    packed = nvfp4_head(head)
    assert not isinstance(packed, torch.Tensor)
    assert packed.shape == head.shape
    assert packed.nbytes < head_bytes(384, 128) + 8  # whole tiles
    assert (packed.dequantize() - head).norm() < 0.12 * head.norm()
    head[200, 3] = float("nan")
    assert nvfp4_head(head) is head
    monkeypatch.undo()

    def in_four_bits(model: Transformer) -> Any:
        assert isinstance(model.head, torch.Tensor)
        return UnpackedTensor(nvfp4_head(model.head).dequantize())  # type: ignore[union-attr]

    monkeypatch.setattr(dsv4.model.draft, "draft_head", in_four_bits)
    engine = Engine.load("tiny", device="cpu", draft="mtp", max_context=512)
    assert engine._drafting is not None
    verify_everything(engine._drafting)
    prompts = ["What is 17 + 25?", "What is the capital of France?"]
    engine.generate(prompts, SamplingParams(max_tokens=24, temperature=0.0))
    stats = engine.stats()
    assert stats.accepted_by_place[0] >= 0.8 * stats.num_verified > 5


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_drafting_run_before_the_first_step(kind: str) -> None:
    """As the warm-up of a GPU runs them: on buffers that nothing was sent to."""
    runner = make_engine(kind, 2)._runner
    runner.buffers.pads = True
    parts = draft_parts(runner.buffers, runner.drafter)
    assert {part.kind for part in parts} == {"verify sampling", "draft keys", "drafts"}
    with torch.inference_mode():
        for part in parts:
            runner._run_once(part)


def test_draft_blocks_that_fail_in_the_warm_up_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def warm_up(runner: Runner, progress: object) -> None:
        calls.append(runner.drafter is not None)
        if calls[-1]:
            raise RuntimeError("planted")

    monkeypatch.setattr(Runner, "warm_up", warm_up)
    found = loaded("mtp", max_sequences=4, max_context=512)
    found = replace(found, settings=replace(found.settings, cuda_graphs=True))
    dialect = choose_dialect(has_system_marker=False, folder=folder())
    engine = Engine(found, Tokenizer.from_folder(folder()), dialect)
    assert calls == [True, False]
    assert "draft blocks are left out, they do not run here: planted" in caplog.text
    check(engine, "greedy")


@pytest.mark.parametrize("kind", KINDS)
def test_noise_of_the_target_hits_more_often_than_other_noise(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random blocks know nothing of the model, but at temperature 1 both follow the noise."""
    real, shares = DeviceDrafter._draw, []

    def other_noise(self: DeviceDrafter, logits: torch.Tensor, by: SampleInputs) -> torch.Tensor:
        return real(self, logits, replace(by, positions=by.positions + 100_000))

    for draw in (real, other_noise):
        monkeypatch.setattr(DeviceDrafter, "_draw", draw)
        engine = make_engine(kind, 1)
        params = SamplingParams(max_tokens=30, temperature=1.0, stop_ids=())
        for seed in range(4):
            engine.add(Request(str(seed), (1, 2, 3), replace(params, seed=seed)))
        while engine.num_unfinished:
            engine.step()
        stats = engine.stats()
        shares.append(stats.accepted_by_place[0] / stats.num_verified)
    assert shares[0] > shares[1] + 0.1


def changed_copy(tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    target = tmp_path / "model"
    shutil.copytree(folder(), target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


DAMAGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": (lambda t: t.pop("mtp.0.e_proj.weight"), "mtp.0.e_proj.weight.*is missing"),
    "shape": (
        lambda t: t.update({"mtp.0.hnorm.weight": torch.ones(7)}),
        r"mtp.0.hnorm.weight.*shape \[7\], expected \[32\]",
    ),
    "format": (
        lambda t: t.update({"mtp.0.hc_head_base": torch.zeros(2, dtype=torch.int8)}),
        "mtp.0.hc_head_base.*dtype I8",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_draft_block_switches_drafting_off(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change, says = DAMAGES[damage]
    with caplog.at_level(logging.WARNING):
        engine = Engine.load(
            changed_copy(tmp_path, change), device="cpu", draft="mtp", max_context=512
        )
    [message] = [r.message for r in caplog.records if "drafting is off" in r.message]
    assert re.search(says, message, re.S), message
    check(engine, "greedy")
    assert engine.stats().num_drafted == 0


def test_numbers_that_are_none_switch_drafting_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["mtp.0.norm.weight"][3] = float("nan")

    engine = Engine.load(changed_copy(tmp_path, change), device="cpu", draft="mtp", max_context=512)
    check(engine, "penalties")
    assert engine.stats().num_drafted == 0
    assert len([r for r in caplog.records if "drafting is off" in r.message]) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_are_none_on_a_gpu_switch_drafting_off(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There no draw raises: it gives no token, and a norm that is NaN. Steps run ahead."""
    real, num_drawn = dsv4.runner.drafts.device.sample, 0

    def drawn(logits: torch.Tensor, inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal num_drawn
        num_drawn += 1
        tokens, norms = real(logits, inputs)
        return (tokens, norms) if num_drawn < 12 else (tokens * 0 - 1, norms * float("nan"))

    monkeypatch.setattr(dsv4.runner.drafts.device, "sample", drawn)
    monkeypatch.setattr(dsv4.runner.drafts.verify, "TOGETHER_ON_CPU", True)
    engine = make_engine(kind, 2)
    monkeypatch.setattr(engine._pipeline, "runs_ahead", True)
    monkeypatch.setattr(engine._runner.buffers, "pads", True)
    check(engine, "greedy")
    check(engine, "seeded")
    assert [r.message for r in caplog.records if "drafting" in r.message] == [
        "drafting is off: the draft blocks' logits are no numbers (NaN)"
    ]
    assert num_drawn < 60


def test_a_prefix_from_a_rest_switches_nothing_off() -> None:
    """Draft blocks store no keys in a long rest, so a prefix cached then has none: unwritten pages
    are NaN. That costs the request that starts from it its drafts, and at most another rest."""
    engine = make_engine("mtp", 3, prefix_cache=True)
    assert engine._drafting is not None
    engine._drafting._rest = 4000
    prompt = tuple(random.Random(1).choices(range(256), k=120))
    params = SamplingParams(max_tokens=150, temperature=0.0, stop_ids=())
    first = answer(engine, [Request("first", prompt, params)])["first"]
    engine._drafting._rest = 0
    longer = prompt + first.token_ids[:138]  # the window of 16 holds cached tokens
    second = answer(engine, [Request("second", longer, replace(params, max_tokens=40))])["second"]
    assert second.num_cached == 256
    assert engine.stats().num_drafted == 0
    assert not engine._drafting.is_off
    engine._drafting._rest = 0
    check(engine, "greedy")
    assert engine.stats().num_drafted > 0


def test_a_block_that_fails_switches_drafting_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine("mtp")
    calls = []

    def fails(*arguments: object) -> None:
        calls.append(arguments)
        raise RuntimeError("planted")

    monkeypatch.setattr(engine._runner, "queue_drafts", fails)
    check(engine, "greedy")
    assert len(calls) == 1
    assert [r.message for r in caplog.records if "drafting" in r.message] == [
        "drafting is off: planted"
    ]


# --- lookup, costs, options -----------------------------------------------------------------------


def brute_force(tokens: Sequence[int], most: int) -> list[int]:
    for n in (4, 3, 2):
        if len(tokens) < n:
            continue
        for place in range(len(tokens) - 1, n - 1, -1):
            if list(tokens[place - n : place]) == list(tokens[-n:]):
                found = list(tokens)
                for at in range(place, place + most):
                    found.append(found[at])
                return found[len(tokens) :]
    return []


def test_lookup_against_a_search() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        tokens = rng.choices(range(rng.choice((2, 4, 9))), k=60)
        lookup = Lookup(None)  # type: ignore[arg-type]
        for end in sorted({1, 2, *rng.sample(range(1, 61), 30)}):
            most = rng.randint(1, 7)
            assert lookup.propose(tokens[:end], most) == brute_force(tokens[:end], most)


def test_a_long_prompt_is_indexed_in_pieces() -> None:
    tokens = [*range(5000), 1, 2, 3]
    lookup = Lookup(None)  # type: ignore[arg-type]
    assert [lookup.propose(tokens, 2) for _ in range(3)] == [[], [], [4, 5]]


def linear(rows: int) -> float:
    return 4.0 + rows


def test_drafts_are_verified_while_they_pay() -> None:
    assert num_worth([[0.9, 0.8, 0.7]], linear) == [3]
    assert num_worth([[0.9, 0.5, 0.1]], linear) == [2]
    assert num_worth([[0.1, 0.05]], linear) == [0]
    assert num_worth([[0.9, 0.85], [0.2], []], linear) == [2, 0, 0]
    assert num_worth([[0.9, 0.8]], lambda rows: 1.0 if rows == 1 else 9.0) == [0]
    assert num_worth([[0.1, 0.1], [0.9]], lambda rows: None) == [1, 1]  # to learn what they cost
    known = {1: 4.0, 2: 5.0}
    assert num_worth([[0.9, 0.8, 0.7]], known.get) == [2]  # one more than pays
    assert num_worth([[0.1, 0.1, 0.1]], known.get) == [0]
    # a step that costs the same with 3 rows more, but not with fewer
    assert num_worth([[0.9, 0.5, 0.4]], lambda rows: {1: 1.0, 2: 2.0, 3: 3.0, 4: 1.5}[rows]) == [3]


def test_no_choice_is_predicted_to_be_slower_than_plain_steps() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        count, base, row = rng.randint(1, 9), rng.uniform(1, 9), rng.choice((0.0, 0.05, 0.5, 3.0))
        plain = base * rng.uniform(0.7, 1.0)

        def cost(
            rows: int, n: int = count, p: float = plain, b: float = base, r: float = row
        ) -> float:
            return p if rows == n else b + r * (rows - n)

        chances = [
            list(
                itertools.accumulate((rng.random() for _ in range(rng.randint(0, 7))), operator.mul)
            )
            for _ in range(count)
        ]
        taken = num_worth(chances, cost)
        tokens = count + sum(sum(some[:n]) for some, n in zip(chances, taken, strict=True))
        assert tokens / cost(count + sum(taken)) >= count / plain - 1e-12


def simulate(
    hit: float, plain_ms: float, draft_ms: float, row_ms: float, tokens: int, slow: int = 0,
    count: int = 1,
) -> float:  # fmt: skip
    """Time of `count` answers against plain decoding, by drafters that are right with a chance. The
    first `slow` steps with drafts take five times as long."""
    rng, drafting = random.Random(1), Drafting(5, 100, learns=True, make=Given)
    params = SamplingParams(max_tokens=tokens)
    every = [SequenceState(Request(str(n), (1, 2, 3), params), n) for n in range(count)]
    total, made = 0.0, 0
    while made < count * tokens:
        found = drafting.propose([(sequence, 7) for sequence in every])
        plain, num_drafts, before = drafting.rests, sum(map(len, found)), made
        for sequence, drafts in zip(every, found, strict=True):
            accepted = next((i for i in range(len(drafts)) if rng.random() >= hit), len(drafts))
            sequence.token_ids += [1] * (accepted + 1)
            made += accepted + 1
            drafting.observe(sequence, len(drafts), accepted)
        ms = plain_ms if plain else plain_ms + draft_ms + row_ms * num_drafts
        ms *= rng.uniform(0.95, 1.05)
        if not plain and slow:
            ms, slow = 5 * ms, slow - 1
        drafting.time_step(every, count + num_drafts, made - before, ms, plain=plain)
        if plain:
            drafting.pass_step(every)
        else:
            for sequence in every:
                drafting.give(sequence, [1] * 5, ())
        total += ms
    return total * count / (made * plain_ms)


@pytest.mark.parametrize("costs", [(4.7, 0.8, 0.9), (11.5, 0.4, 2.5), (26.7, 1.0, 0.5)])
def test_drafts_that_never_hit_cost_little(costs: tuple[float, float, float]) -> None:
    assert simulate(0.0, *costs, tokens=6_000) < 1.01
    assert simulate(0.0, *costs, tokens=800) < 1.015  # the first trial of all
    assert simulate(0.0, *costs, tokens=384) < 1.02
    for hit in (0.3, 0.5):
        assert simulate(hit, *costs, tokens=6_000) < 1.015


@pytest.mark.parametrize(("count", "costs"), [(8, (10.9, 0.6, 0.25)), (32, (27.7, 1.5, 0.3))])
def test_many_sequences_learn_from_each_other(
    count: int, costs: tuple[float, float, float]
) -> None:
    assert simulate(0.0, *costs, tokens=192, count=count) < 1.01
    assert simulate(0.9, *costs, tokens=192, count=count) < 0.95


def test_drafts_that_hit_pay() -> None:
    assert simulate(0.8, 4.7, 0.8, 0.7, tokens=4_000) < 0.65  # five drafts: 0.66 at most
    assert simulate(0.6, 4.7, 0.4, 0.7, tokens=4_000) < 0.85
    # neither the step that only makes drafts nor the first that verifies them decides
    assert simulate(0.8, 4.7, 0.8, 0.7, tokens=2_000, slow=2) < 0.65


def test_more_rows_than_were_measured_are_tried() -> None:
    """By the rows before, a fifth would not pay; it does, as it shares experts with them."""
    times, chances = StepTimes({1: 4.15, 2: 5.8, 3: 6.2, 4: 7.25}), [[0.8**n for n in range(1, 6)]]
    assert num_worth(chances, times.at) == [4]
    for _ in range(2):
        times.observe(5, 7.8)
    assert num_worth(chances, times.at) == [5]  # and one more
    for _ in range(2):
        times.observe(6, 9.9)
    assert num_worth(chances, times.at) == [4]


def test_a_single_sequence_leaves_no_row_unused() -> None:
    """Three rows take as long as four there, which looks bad after two: more are never tried."""
    times, chances = StepTimes({1: 4.15, 2: 5.8, 3: 7.1}), [[0.57**n for n in range(1, 6)]]
    assert num_worth(chances, times.at) == [1]
    assert num_worth(chances, times.at, [1, 3, 5]) == [3]
    assert num_worth([chances[0][:2]], times.at, [1, 3, 5]) == [1]  # the host has no more


def test_a_drafters_own_chances_are_scaled_by_what_came_true() -> None:
    acceptance = Acceptance(2)
    for _ in range(60):  # says 0.9, is right every third time
        for right in (1, 0, 0):
            acceptance.survival(1, [0.9])
            acceptance.observe(1, right)
    assert 0.2 < acceptance.survival(1, [0.9])[0] < 0.5
    assert acceptance.survival(1, [0.3])[0] < 0.2


def test_blocks_make_no_more_drafts_than_are_worth_verifying() -> None:
    drafting = Drafting(5, 100, learns=True)
    sequence = SequenceState(Request("a", (1, 2, 3), SamplingParams()), 0)
    assert drafting.num_wanted([sequence]) == 0  # the cost of plain steps comes first
    drafting.plain = StepTimes({1: 5.0})
    assert drafting.num_wanted([sequence]) == 1  # to learn what one costs
    drafting.times = StepTimes({2: 6.0, 6: 10.0})
    acceptance = drafting._acceptance(sequence)
    acceptance._rates = [0.9, 0.9, 0.1, 0.9, 0.9]
    assert drafting.num_wanted([sequence]) == 2
    acceptance._rates = [0.1] * 5
    assert drafting.num_wanted([sequence]) == 0
    other = SequenceState(Request("b", (1, 2, 3), SamplingParams()), 0)
    drafting._acceptance(other)._rates = [0.99] * 5
    drafting.plain = StepTimes({2: 5.0})
    assert drafting.num_wanted([sequence, other]) == 5
    other.may_draft = False
    assert drafting.num_wanted([sequence, other]) == 0
    other.may_draft = True
    drafting._room = lambda num_sequences: [1, 3]
    assert drafting.num_wanted([sequence, other]) == 3
    drafting._rest = 1
    assert drafting.num_wanted([sequence, other]) == 0


def test_lookup_waits_for_something_to_propose() -> None:
    drafting = Drafting(4, 100, peeks=True)
    sequence = SequenceState(Request("a", tuple(range(20)), SamplingParams()), 0)
    for _ in range(5):
        assert drafting.propose([(sequence, 7)]) == [[]]
    assert drafting.rests
    drafting.pass_step([sequence])
    assert drafting.rests
    sequence.token_ids += [4, 5, 6]
    drafting.pass_step([sequence])
    assert not drafting.rests
    drafting.times = StepTimes({1: 1.0, 64: 1.0})
    assert drafting.propose([(sequence, 7)]) == [[7, 8, 9, 10]]


def test_times_of_steps() -> None:
    times = StepTimes()
    assert times.at(1) is None
    times.observe(1, 10.0)
    assert times.at(1) is None  # once is chance
    times.observe(1, 10.0)
    assert times.at(1) == 10.0
    assert times.at(2) is None
    times.observe(5, 18.0)
    assert times.at(3) == 14.0
    assert times.at(7) is None  # further rows may cost less than the last
    times.observe(1, 10000.0)  # something else held it up
    assert times.at(1) == 11.0
    times.observe(1, 9.0)
    assert times.at(1) == 10.0


def test_times_of_steps_near_those_measured() -> None:
    times = StepTimes({6: 8.0, 7: 9.0})
    assert [times.near(rows) for rows in (2, 3, 5, 6, 8, 14, 15)] == [
        None, 8.0, 7.0, 8.0, 9.0, 9.0, None
    ]  # fmt: skip
    assert StepTimes({3: 9.0}).near(4) == 9.0
    assert StepTimes({2: 8.0, 8: 14.0}).near(4) == 10.0
    once = StepTimes()
    once.observe(5, 7.0)
    assert (once.near(5), once.near(6), once.near(11)) == (7.0, 7.0, None)


def test_a_batch_larger_than_those_measured_is_judged() -> None:
    """With plain steps of two and three sequences known, four need none of their own."""
    four = [SequenceState(Request(str(n), (1, 2, 3), SamplingParams()), n) for n in range(4)]
    for known in ({3: 9.0}, {2: 8.0, 3: 9.0}):
        drafting = Drafting(4, 100, lambda *_: [], lambda _: Given(), learns=True)
        drafting.plain = StepTimes(known)
        drafting.propose([(sequence, 4) for sequence in four])
        assert not drafting.rests
        drafting.time_step(four, 8, 4, 18.0, plain=False)
        assert drafting._gain < 1


def test_auto_takes_the_checkpoints_own_blocks() -> None:
    for kind in KINDS:
        config = replace(quick_config(), num_draft_layers=3, draft_kind=kind)
        for draft, device in itertools.product(("auto", kind), ("cpu", "cuda")):
            choices = EngineConfig(draft=draft, device=device)
            found = resolve(choices, config, has_gpu=device == "cuda", memory_bytes=2**34)
            assert found.draft == kind, (draft, device)


def test_options() -> None:
    with pytest.raises(OptionError, match="draft is 'eagle', expected one of auto, off, lookup"):
        EngineConfig(draft="eagle")
    with pytest.raises(OptionError, match="draft_tokens is 8, expected 1 to 7"):
        EngineConfig(draft_tokens=8)
    with pytest.raises(
        OptionError, match="'dspark', but this checkpoint has mtp, 1 blocks; use mtp"
    ):
        Engine.load(folder(), device="cpu", draft="dspark")
    spark = replace(quick_config(), num_draft_layers=3, draft_kind="dspark")
    with pytest.raises(OptionError, match="but this checkpoint has dspark, 3 blocks"):
        resolve(EngineConfig(draft="mtp"), spark, has_gpu=False, memory_bytes=2**30)
    choices = EngineConfig(draft="dspark", draft_tokens=6)
    with pytest.raises(OptionError, match=r"draft_tokens is 6, but .* trained for blocks of 5"):
        resolve(choices, spark, has_gpu=False, memory_bytes=2**30)
    plain_folder = write_quick_model(Path(tempfile.mkdtemp()))
    with pytest.raises(OptionError, match="draft is 'mtp', but this checkpoint has no draft"):
        Engine.load(plain_folder, device="cpu", draft="mtp")
    with pytest.raises(OptionError, match="draft is 'mtp', which runs on one rank only; use off"):
        Engine.load(folder(), device="cpu", draft="mtp", pp=2)
    with pytest.raises(OptionError, match="'mtp', which runs on one rank only; use lookup or off"):
        Engine.load("tiny", device="cpu", draft="mtp", tp=2)
    with pytest.raises(OptionError, match="'dspark', which runs on one rank only; use lookup or"):
        resolve(EngineConfig(draft="dspark", tp=2), spark, has_gpu=False, memory_bytes=2**30)
    prepared = prepare("tiny", EngineConfig(device="cpu", tp=2))
    assert (prepared.settings.draft, prepared.settings.draft_tokens) == ("off", 0)
    assert "draft off: `auto` drafts on one rank only" in str(prepared)
    with pytest.raises(OptionError, match="draft is 'lookup' with pp 2, expected one stage"):
        Engine.load(folder(), device="cpu", draft="lookup", pp=2)
