"""The embedded model answers: a few held-out prompts of every skill; all of them: bench quality."""

import re
import runpy
from pathlib import Path

import pytest

from dsv4.engine import Engine
from dsv4.tools.quality.measure import ask, perplexity, read_items, retrieval_items
from dsv4.tools.quality.variants import broken
from dsv4.util.models import model_folder

ROOT = Path(__file__).parents[2]
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


def test_make_demo_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """What `make demo` runs; the commands that it suggests exist."""
    main = runpy.run_path(str(ROOT / "scripts" / "demo.py"))["main"]
    main.__globals__["QUESTIONS"] = main.__globals__["QUESTIONS"][::2]  # without the long one
    main()
    out = capsys.readouterr().out
    for word in ("The capital of France is Paris.", "calls get_weather", "tokens, "):
        assert word in out
    suggested = re.findall(r"^  \.venv/bin/dsv4 ((?:bench )?[a-z]+)", out, re.M)
    documented = (ROOT / "docs" / "commands.md").read_text()
    assert len(suggested) >= 5
    assert all(f"dsv4 {name}" in documented for name in suggested)
