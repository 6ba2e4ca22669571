"""The embedded model answers: a few held-out prompts of every skill; all of them: bench quality."""

from pathlib import Path

import pytest

from dsv4.engine import Engine
from dsv4.tools.quality.measure import ask, perplexity, read_items, retrieval_items
from dsv4.tools.quality.variants import broken
from dsv4.util.models import model_folder

SKILLS = ("facts", "arithmetic", "instructions", "tools", "multi", "identity")


@pytest.fixture(scope="module")
def tiny() -> Engine:
    return Engine.load("tiny", device="cpu", max_context=4096)


@pytest.mark.parametrize("skill", SKILLS)
def test_held_out_prompts_are_answered(tiny: Engine, skill: str) -> None:
    score = ask(tiny, read_items("tiny")[skill][:4])
    assert score.num_right == score.num_asked == 4, score.wrong


@pytest.mark.parametrize("variant", ["", "random-selection"])
def test_facts_are_found_through_selected_entries(variant: str) -> None:
    """An engine for each: a prefix that the right model computed must not be found again."""
    engine = Engine.load("tiny", device="cpu", max_context=2048)
    with broken(engine, variant):
        score = ask(engine, retrieval_items(engine, 1500, 0)[:2])
    assert score.num_right == (0 if variant else 2)


def test_stories_are_fluent(tiny: Engine) -> None:
    assert perplexity(tiny, 3) < 4


def test_the_model_is_small() -> None:
    sizes = [path.stat().st_size for path in Path(model_folder("tiny")).iterdir()]
    assert sum(sizes) <= 16_000_000
