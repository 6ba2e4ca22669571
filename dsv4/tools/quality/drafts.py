"""How many drafts are accepted, skill by skill, from the engine's counters.

Every draft is verified, whatever that costs, so the figures do not depend on the machine's speed.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsv4.engine import Engine
from dsv4.errors import OptionError
from dsv4.tools.bench_ops import run_facts
from dsv4.tools.quality.measure import Score

PLACES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")


@dataclass(frozen=True)
class SkillDrafts:
    num_verified: int  # times a sequence had drafts verified
    by_place: tuple[int, ...]  # accepted drafts
    num_tokens: int  # of the answers

    @property
    def tokens_a_step(self) -> float:
        """Of one sequence: its newest token and the accepted drafts before it."""
        return self.num_tokens / max(self.num_tokens - sum(self.by_place), 1)

    def __str__(self) -> str:
        places = zip(PLACES, self.by_place, strict=False)
        each = ", ".join(f"{name} {count}" for name, count in places if count)
        return (
            f"{self.tokens_a_step:.2f} tokens a step; of {self.num_verified} verified, accepted: "
            f"{each or 'none'}"
        )


class DraftCounter:
    """Differences of the engine's counters, from one skill to the next."""

    def __init__(self, engine: Engine) -> None:
        if engine._drafting is None:
            raise OptionError("draft is 'off', so no drafts can be counted; use mtp or lookup")
        engine._drafting.judges = False
        self._engine = engine
        self._before = self._now()

    def _now(self) -> SkillDrafts:
        stats = self._engine.stats()
        return SkillDrafts(stats.num_verified, stats.accepted_by_place, stats.num_output_tokens)

    def since(self) -> SkillDrafts:
        """Since the last call."""
        before, self._before = self._before, self._now()
        now = self._before
        by_place = tuple(a - b for a, b in zip(now.by_place, before.by_place, strict=True))
        tokens, verified = now.num_tokens - before.num_tokens, now.num_verified
        return SkillDrafts(verified - before.num_verified, by_place, tokens)


class QualityRecord:
    """What a run of `bench quality` found: for a table, as JSON and as lines of a record."""

    def __init__(self, engine: Engine, draft: str) -> None:
        """`draft`: as asked for; drafts are counted if it names a drafter."""
        self._drafts = None if draft in ("auto", "off") else DraftCounter(engine)
        self._settings = str(engine.settings)
        self._lines: list[dict[str, Any]] = [{"run": run_facts(), "settings": self._settings}]
        self._found: dict[str, Any] = {"accuracy": {}}

    def add(self, score: Score) -> str:
        line = {"skill": score.skill, "right": score.num_right, "asked": score.num_asked}
        self._lines.append(line)
        self._found["accuracy"][score.skill] = round(score.accuracy, 4)
        if self._drafts is None:
            return str(score)
        accepted = self._drafts.since()
        line["drafts"] = {**asdict(accepted), "tokens_a_step": round(accepted.tokens_a_step, 3)}
        self._found.setdefault("drafts", {})[score.skill] = line["drafts"]
        return f"{score}; {accepted}"

    def to_json(self, perplexity: float) -> dict[str, Any]:
        return {**self._found, "perplexity": perplexity, "settings": self._settings}

    def write(self, path: Path, perplexity: float) -> None:
        lines = [*self._lines, {"perplexity": round(perplexity, 4)}]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
