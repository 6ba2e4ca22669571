"""`attention=dp` with processes over Gloo: whole schedules have the bits of one process, and what
it does not do is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4.config import EngineConfig
from dsv4.engine import Engine
from dsv4.errors import OptionError
from dsv4.request import SamplingParams
from dsv4.runner.load import prepare
from dsv4.runner.ranks.start import check_layout
from dsv4.tools.doctor import parallel as doctor
from tests.parallel.test_lanes import PROMPTS, choices, run


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    return run(Engine.load(folder, **choices()))


@pytest.mark.parametrize(
    ("tp", "pp", "experts"), [(2, 1, "whole"), (4, 1, "split"), (2, 2, "whole")]
)
def test_homes_have_the_bits_of_one_process(
    folder: Path, alone: Any, tp: int, pp: int, experts: str
) -> None:
    """Requests arrive and wait, prompts come in chunks beside decoding sequences of other homes,
    two are aborted, two begin with a cached prefix, a text is scored in between."""
    sizes = {"max_sequences": 2 * tp, "chunk_tokens": 64 * tp}
    engine = Engine.load(folder, **choices(tp=tp, pp=pp, experts=experts, attention="dp", **sizes))
    try:
        tokens, logits = run(engine)
        assert tokens == alone[0]
        assert torch.equal(logits, alone[1])
        assert engine.stats().num_prefix_hit > 0
        fullest, every = engine.stats().expert_pairs
        assert every / tp < fullest <= every if experts == "whole" else every == 0
        fullest, every = engine.stats().home_tokens
        assert every / tp < fullest < every
        assert every > sum(map(len, PROMPTS)) - 2 * len(PROMPTS[1])  # one is aborted, some cached
    finally:
        engine.close()


def test_preempted_sequences_go_on_alike(folder: Path) -> None:
    """A home's sequences outgrow its pages: one is preempted and computed again."""
    params = SamplingParams(max_tokens=30, temperature=0.7, seed=3, stop_ids=())
    prompts = [list(range(first, 120)) for first in range(1, 7)]
    found = []
    for how in ({}, {"tp": 2, "attention": "dp", "max_sequences": 6, "state_tokens": 512}):
        limits: Any = {"max_context": 256, **how}
        engine = Engine.load(folder, device="cpu", draft="off", **limits)
        try:
            answers = engine.generate(prompts, params)
            found.append([answer.token_ids for answer in answers])
            assert (engine.stats().num_preemptions > 0) == bool(how)
            engine.check_integrity()
        finally:
            engine.close()
    assert found[0] == found[1]


def test_state_has_the_room_of_all_ranks(folder: Path) -> None:
    """Each home has its share of sequences, and pages for as long ones as without homes."""
    sizes: Any = {"device": "cpu", "max_context": 512, "max_sequences": 8, "draft": "off"}
    engine = Engine.load(folder, tp=2, attention="dp", **sizes)
    try:
        homes = engine._runner.homes
        assert [home.num_free_slots for home in homes] == [4, 4]
        csa = [home.allocators["csa"].num_pages for home in homes]
        assert csa == [4 * 512 // 128] * 2
        assert engine.stats().pages_total["csa"] == sum(csa)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attention": "heads"}, "attention is 'heads', expected one of tp, dp"),
        ({}, "attention is 'dp' with tp 1, expected several ranks"),
        ({"tp": 1, "pp": 2}, "attention is 'dp' with tp 1, expected several ranks"),
        ({"tp": 3}, "tp is 3, expected a divisor of 8 that divides 8 experts: 1, 2, 4, 8"),
        ({"tp": 2, "max_sequences": 3}, "max_sequences is 3, expected a multiple of tp 2 with"),
        (
            {"tp": 2, "max_context": 256, "state_tokens": 300},
            "state_tokens is 300, expected at least the 256 of one sequence on each of 2 ranks",
        ),
        ({"tp": 2, "draft": "lookup"}, "draft is 'lookup' with attention=dp, expected one stage"),
        ({"tp": 2, "prefix_disk": "."}, "prefix_disk is not possible with attention=dp: rank 0"),
    ],
)
def test_what_is_refused(folder: Path, options: Any, words: str, tmp_path: Path) -> None:
    if "prefix_disk" in options:
        options = {**options, "prefix_disk": str(tmp_path)}
    with pytest.raises(OptionError) as error:
        check_layout(
            prepare(str(folder), EngineConfig(device="cpu", **{"attention": "dp"} | options))
        )
    assert words in str(error.value)


def test_the_doctor_compares_homes_with_one_rank(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "SIZES", (4096,))
    monkeypatch.setattr(doctor, "STEPS", 6)
    monkeypatch.setattr(doctor, "TEXTS", ("ab", "Once upon a time " * 8))
    choices = EngineConfig(device="cpu", tp=2, attention="dp")
    report = doctor.examine_ranks(str(folder), choices, lambda text: None)
    assert report.ok
    assert report.to_json()["attention"] == "dp"
    assert report.num_logits > 271 * 136


def test_more_ranks_than_output_groups() -> None:
    """The embedded model has two output groups, which limit tp; homes have all of them."""
    prepared = prepare("tiny", EngineConfig(device="cpu", tp=4, attention="dp"))
    assert "4 ranks (tp 4, pp 1, attention dp) on cpu" in str(prepared)
    with pytest.raises(OptionError, match="tp is 4, expected a divisor of 2"):
        prepare("tiny", EngineConfig(device="cpu", tp=4))
