"""The evaluation: reads held-out prompts, judges answers, and switches parts off."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4.chat import Tokenizer
from dsv4.engine import Engine
from dsv4.errors import OptionError
from dsv4.request import SamplingParams
from dsv4.scheduler.drafts import StepTimes
from dsv4.tools.quality import measure as quality
from dsv4.tools.quality.drafts import DraftCounter, SkillDrafts
from dsv4.tools.quality.measure import (
    Item,
    Score,
    ask,
    is_right,
    read_items,
    retrieval_items,
    updates_items,
)
from dsv4.tools.quality.text import is_held_out, retrieval_prompts, story
from dsv4.tools.quality.variants import VARIANTS, broken
from training import export
from training.shape import CONFIG, TOKENIZER
from training.weights import first_weights

SMALL = replace(
    CONFIG,
    hidden_size=64,
    num_layers=3,
    num_hash_layers=1,
    compress_ratios=(0, 4, 128),
    num_heads=2,
    head_dim=64,
    q_lora_rank=32,
    o_lora_rank=32,
    num_experts=3,
    moe_intermediate_size=32,
    hc_sinkhorn_iters=4,
    max_positions=4096,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    weights = first_weights(SMALL, 3)
    for name, weight in weights.items():  # untrained attention is too even to depend on its keys
        if name.endswith(("wq_b.weight", "wo_b.weight", "head.weight")):
            weight *= 20
        if name.endswith("ape"):
            weight += torch.arange(weight.numel()).view(weight.shape) % 3
        if name.endswith("shared_experts.w13"):
            weight *= 3
    export.export(weights, path, SMALL)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.load(folder, device="cpu", max_sequences=2, max_context=2048)


def test_every_skill_has_held_out_prompts(folder: Path) -> None:
    items = read_items(folder)
    assert list(items) == ["facts", "arithmetic", "instructions", "tools", "multi", "identity"]
    for skill in ("facts", "arithmetic", "instructions", "tools", "multi"):
        assert len(items[skill]) == 200
    assert any(item.call for item in items["tools"])
    assert all(len(item.tools) == 3 for item in items["tools"])
    assert all(item.mode == "thinking" for item in items["arithmetic"])


def test_a_model_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="held-out prompts"):
        read_items(tmp_path)


def test_answers_are_judged() -> None:
    fact = Item("facts", [], answer="It is Paris.")
    assert is_right(fact, " It is Paris.\n", [])
    assert not is_right(fact, "It is Rome.", [])
    assert not is_right(fact, "It is Paris.", [("get_time", {})])
    call = Item("tools", [], call=("get_time", {"city": "Lima"}))
    assert is_right(call, "", [("get_time", {"city": "Lima"})])
    assert not is_right(call, "", [("get_time", {"city": "Rome"})])
    assert not is_right(call, "It is late.", [])


def test_an_untrained_model_knows_nothing(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "MOST_TOKENS", 6)
    items = read_items(folder)
    score = ask(engine, [*items["facts"][:2], *items["tools"][:1]], "mixed")
    assert score.num_asked == 3
    assert score.num_right == 0
    assert score.wrong
    assert str(score) == "mixed: 0.0 % of 3"
    assert str(Score("none", 0, 0)) == "none: nan % of 0"


def test_drafts_are_counted_by_skill(folder: Path) -> None:
    """Every draft is verified, also where a step with drafts has been slower than without."""
    engine = Engine.load(folder, device="cpu", max_context=512, draft="lookup", draft_tokens=3)
    counter = DraftCounter(engine)
    params = SamplingParams(max_tokens=24, temperature=0.0, stop_ids=())
    found = []
    for prompt in ((5, 6, 7) * 9, tuple(range(20, 60))):
        assert engine._drafting is not None
        engine._drafting.plain, engine._drafting.times = StepTimes({1: 1.0}), StepTimes({2: 1e3})
        answer = engine.generate([prompt], params)[0]
        found.append(counter.since())
        assert found[-1].num_tokens == len(answer.token_ids) == 24
    assert sum(one.num_verified for one in found) == engine.stats().num_verified > 0
    assert sum(sum(one.by_place) for one in found) == engine.stats().num_accepted
    assert str(SkillDrafts(10, (6, 2, 0), 16)) == (
        "2.00 tokens a step; of 10 verified, accepted: first 6, second 2"
    )
    assert SkillDrafts(10, (6, 2, 0), 16).tokens_a_step == 2.0
    with pytest.raises(OptionError, match="draft is 'off', so no drafts can be counted"):
        DraftCounter(Engine.load(folder, device="cpu", draft="off", max_context=512))


def test_retrieval_prompts_have_the_wanted_length(engine: Engine) -> None:
    item = retrieval_items(engine, 900, 1)[0]
    assert engine.tokenizer is not None
    ids = quality.encode_item(engine, item).ids(engine.tokenizer)
    assert 850 < len(ids) < 950
    tokenizer = Tokenizer.from_file(TOKENIZER)
    made = retrieval_prompts(5, 900, lambda part: len(tokenizer.encode(part)), 3)
    assert len({text.rpartition("\n\n")[0] for text, _ in made}) == 1
    for text, fact in made:
        assert text.endswith(fact.question)
        assert fact.statement in text
        assert is_held_out(f"{fact.name} {fact.word}")


def test_updates_prompts_end_with_another_word(engine: Engine) -> None:
    first, second = updates_items(engine, 900, 2)
    assert first.messages != second.messages
    for item in (first, second):
        assert item.skill == "updates 900"
        assert item.answer is not None
        subject = item.answer.partition(" is ")[0]
        text = item.messages[0]["content"]
        assert text.count(f"{subject} is ") == 46
        assert text.rindex(f"{subject} is ") == text.index(item.answer)
        assert text.endswith(f"What is {subject.replace('The', 'the')} now?")


def test_changed_words_are_measured_with_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "ask", lambda _, items: Score(items[0].skill, 1, len(items)))
    monkeypatch.setattr(
        quality, "ask_about_documents", lambda _, length, count: Score(f"at {length}", 1, count)
    )
    monkeypatch.setattr(
        quality, "updates_items", lambda _, length, count: [Item(f"changed {length}", [])] * count
    )
    asked = quality.measure(object(), {}, 60, (2000, 8000))  # type: ignore[arg-type]
    assert [(s.skill, s.num_asked) for s in asked] == [
        ("at 2000", 60),
        ("at 8000", 60),
        ("changed 2000", quality.MOST_UPDATES),
    ]
    assert len(quality.measure(object(), {}, 60, (8000,))) == 1  # type: ignore[arg-type]


def test_perplexity_of_an_untrained_model_is_high(engine: Engine) -> None:
    assert quality.perplexity(engine, 1) > 500


@pytest.fixture(scope="module")
def scored(engine: Engine) -> tuple[list[int], torch.Tensor]:
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode(story(random.Random(1), 40))[:300]
    return ids, torch.cat(list(engine.score(ids)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_change_the_logits(
    variant: str, engine: Engine, scored: tuple[list[int], torch.Tensor]
) -> None:
    ids, right = scored
    with broken(engine, variant):
        wrong = torch.cat(list(engine.score(ids)))
    assert float((right - wrong).abs().max()) > 1e-4


def test_variants_leave_nothing_behind(
    engine: Engine, scored: tuple[list[int], torch.Tensor]
) -> None:
    ids, right = scored
    torch.testing.assert_close(torch.cat(list(engine.score(ids))), right, atol=0, rtol=0)


def test_tools_in_the_file_are_whole(folder: Path) -> None:
    first = (folder / "quality.jsonl").read_text(encoding="utf-8").splitlines()[0]
    names = [tool["function"]["name"] for tool in json.loads(first)["tools"]]
    assert names == ["get_weather", "calculator", "get_time"]
