"""The embedded model with its small DSpark: a whole checkpoint through the engine."""

from pathlib import Path

import pytest

from dsv4 import Engine, SamplingParams
from dsv4.config import EngineConfig
from dsv4.runner.load import load_model
from tests.models import verify_everything
from training.dspark import SHAPE, assemble

PROMPTS = ["What is 17 + 25?", "What is the capital of France?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return assemble(tmp_path_factory.mktemp("spark"))


def test_drafts_are_mostly_right_and_change_nothing(folder: Path) -> None:
    answers = []
    for draft in ("off", "dspark"):
        engine = Engine.load(folder, device="cpu", draft=draft, max_context=512)
        if engine._drafting is not None:
            verify_everything(engine._drafting)  # not only while that is measured to be faster
        params = SamplingParams(max_tokens=24, temperature=0.0, logprobs=1)
        found = engine.generate(PROMPTS, params)
        found += engine.generate(PROMPTS[:1], SamplingParams(max_tokens=24, seed=5))
        answers.append([(a.token_ids, a.logprobs, a.text) for a in found])
        stats = engine.stats()
    assert answers[0] == answers[1]
    assert stats.accepted_by_place[0] >= 0.6 * stats.num_verified > 5
    assert stats.accepted_by_place[2] > 0
    assert len(stats.accepted_by_place) == SHAPE.block


def test_auto_takes_what_the_checkpoint_has(folder: Path) -> None:
    loaded = load_model(str(folder), EngineConfig.make(device="cpu", max_context=512))
    assert (loaded.settings.draft, loaded.settings.draft_tokens) == ("dspark", 5)
    assert loaded.settings.draft_auto
