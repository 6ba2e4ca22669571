"""Which modules tolerate activations in few bits: accuracy by skill, measured on a CPU.

    python scripts/measure_activations.py --out activations.jsonl             # 15 workers, 150 s
    python scripts/measure_activations.py --out trial.jsonl --workers 2 --skills facts
    python scripts/measure_activations.py --out some.jsonl --modules "all,attention"
    python scripts/measure_activations.py --out both.jsonl --modules "attention and shared expert"
    python scripts/measure_activations.py --out official.jsonl --model FOLDER --widths a8

The references round activations exactly as block-scaled tensor cores see them, so a CPU can say
what A4 (NVFP4 rows) and A8 (FP8 rows) cost. Each width is tried on all modules and on one group of
them alone. Prompts come in rounds; every variant answers the same ones, and only those that all of
them answered in time count. The record has one JSON object per line; the table for
docs/numerics.md and the default that follows from it are printed. Records are kept in
benchmarks/records under names that begin with DATE_activations_tiny_cpu; a test checks the default
against them, where newer rows replace older ones. `--model`: the embedded model in other formats,
written by `dsv4 convert`.

An answer that ends immediately counts as silent: the embedded model does that when its arithmetic
is wrong.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"  # before torch: workers share the cores

import torch  # noqa: E402

from dsv4.engine import Engine  # noqa: E402
from dsv4.runner.activations import GROUPS  # noqa: E402
from dsv4.tools.quality import measure  # noqa: E402

HOLDERS = {  # module groups: where their weights are in a block
    "attention": ("attention", ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")),
    "shared expert": ("experts", ("shared_w13", "shared_w2")),
    "routed experts": ("experts", ("w13", "w2")),
}
VARIANTS = [("a16", "all"), *((w, g) for w in ("a8", "a4") for g in ("all", *GROUPS))]
TOGETHER = " and "  # between groups that have the same width
DOCUMENTS = ("retrieval 8000", "retrieval 2000", "updates 2000")  # and their lengths in tokens
UPDATES = 4  # per round: each needs its own document
MOST_ROUNDS = 20
MOST_LOST, MOST_SURPRISE = 0.02, 0.01  # what a width may cost and still be the default


@dataclass(frozen=True)
class Job:
    width: str
    group: str
    skill: str
    number: int  # of the batch
    size: int
    model: str = "tiny"

    @property
    def prompts(self) -> tuple[str, int]:
        """The same for every variant."""
        return self.skill, self.number


@dataclass(frozen=True)
class Result:
    job: Job
    right: int
    asked: int
    silent: int
    seconds: float
    perplexity: float | None = None


@lru_cache(maxsize=1)
def engine_for(model: str, width: str, group: str) -> Engine:
    """Fresh for each variant: the prefix cache must not hold another variant's results."""
    engine = Engine.load(model, device="cpu", activations="a4")
    for block in engine._runner.model.blocks:
        for name, (holder, weights) in HOLDERS.items():
            own = width if group == "all" or name in group.split(TOGETHER) else "a16"
            module = block.attention if holder == "attention" else block.ffn.experts
            stored = {key: getattr(module, key) for key in weights}
            # wo_a is never rounded to a8 (runner/activations.py): in FP8 it was read as numbers
            found = {
                key: replace(weight, activations="a16" if (key, own) == ("wo_a", "a8") else own)
                for key, weight in stored.items()
                if not isinstance(weight, torch.Tensor)
            }
            if holder == "attention":
                vars(block.attention).update(found)
            else:
                block.ffn.experts = replace(block.ffn.experts, **found)
    return engine


def work(job: Job) -> Result:
    begin = time.perf_counter()
    engine, silent = engine_for(job.model, job.width, job.group), 0
    generate = Engine.generate.__get__(engine)

    def counted(*given: Any) -> Any:
        nonlocal silent
        answers = generate(*given)
        silent += sum(len(answer.token_ids) <= 1 for answer in answers)
        return answers

    engine.generate = counted  # type: ignore[method-assign]
    skill, _, length = job.skill.partition(" ")
    if skill == "perplexity":
        surprise = measure.perplexity(engine)
        return Result(job, 0, 0, 0, time.perf_counter() - begin, surprise)
    if skill == "retrieval":
        first, *others = measure.retrieval_items(engine, int(length), job.number)
        score = measure.ask(engine, [first]) + measure.ask(engine, others)
    elif skill == "updates":
        items = measure.updates_items(engine, int(length), (job.number + 1) * UPDATES)
        score = measure.ask(engine, items[-UPDATES:])
    else:
        start = job.number * job.size
        score = measure.ask(engine, measure.read_items("tiny")[skill][start : start + job.size])
    seconds = time.perf_counter() - begin
    return Result(job, score.num_right, score.num_asked, silent, seconds)


def jobs(
    batch: int, only: list[str], variants: list[tuple[str, str]], model: str = "tiny"
) -> Iterator[Job]:
    """Round by round: all variants get the same prompts before the next ones come."""
    items = measure.read_items("tiny")
    for number in range(MOST_ROUNDS):
        skills = [skill for skill, held in items.items() if number * batch < len(held)]
        skills = [*skills, *DOCUMENTS]  # the expensive ones last
        if number == 0:
            skills.insert(0, "perplexity")
        for skill in skills:
            if not only or skill in only:
                yield from (Job(*variant, skill, number, batch, model) for variant in variants)


def chosen(modules: list[str], widths: list[str]) -> list[tuple[str, str]]:
    """Variants of these modules and widths, or all if none are named; a16 always."""
    widths = ["a16", *widths] if widths else ["a16", "a8", "a4"]
    several = [(w, g) for w in widths[1:] for g in modules if TOGETHER in g]
    known = [*VARIANTS, *several]
    return [(w, g) for w, g in known if w in widths and (not modules or g in modules)]


def common(results: list[Result], variants: list[tuple[str, str]]) -> list[Result]:
    """Results for prompts that every variant answered."""
    seen: dict[tuple[str, int], int] = defaultdict(int)
    for result in results:
        seen[result.job.prompts] += 1
    return [result for result in results if seen[result.job.prompts] == len(variants)]


def summed(results: list[Result]) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for result in results:
        job = result.job
        key = {"activations": job.width, "modules": job.group, "skill": job.skill}
        row = rows.setdefault(
            (job.width, job.group, job.skill), {**key, "right": 0, "asked": 0, "silent": 0}
        )
        for name in ("right", "asked", "silent"):
            row[name] += getattr(result, name)
        if result.perplexity is not None:
            row["perplexity"] = round(result.perplexity, 4)
    return list(rows.values())


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line for each variant, a column for each skill, percent right."""
    by = {(row["activations"], row["modules"], row["skill"]): row for row in rows}
    skills = list(dict.fromkeys(row["skill"] for row in rows if row["asked"]))
    counts = [next(r["asked"] for r in rows if r["skill"] == skill) for skill in skills]
    lines = [
        "| activations | modules | "
        + " | ".join(f"{s} ({n})" for s, n in zip(skills, counts, strict=True))
        + " | silent | perplexity |",
        "|" + "---|" * (len(skills) + 4),
    ]
    for width, group in VARIANTS:
        own = [by[width, group, skill] for skill in skills if (width, group, skill) in by]
        if not own:
            continue
        cells = [f"{100 * row['right'] / row['asked']:.1f}" for row in own]
        surprise = by.get((width, group, "perplexity"), {}).get("perplexity", "")
        silent = sum(row["silent"] for row in own)
        lines.append(f"| {width} | {group} | {' | '.join(cells)} | {silent} | {surprise} |")
    return "\n".join(lines)


def share_right(row: dict[str, Any]) -> float:
    """Rounded to keep a borderline loss on the border; records may ask different numbers."""
    return round(row["right"] / row["asked"], 9)


def tolerates(rows: list[dict[str, Any]], width: str, group: str) -> bool:
    """Whether a variant is as good as a16: no skill loses more than MOST_LOST of its answers,
    no more of them are silent, perplexity rises by at most MOST_SURPRISE."""
    plain = {r["skill"]: r for r in rows if (r["activations"], r["modules"]) == ("a16", "all")}
    own = [r for r in rows if (r["activations"], r["modules"]) == (width, group)]
    for row in own:
        base = plain[row["skill"]]
        if row["asked"] and share_right(row) < share_right(base) - MOST_LOST:
            return False
        if row["silent"] > base["silent"]:
            return False
        if row.get("perplexity", 0) > base.get("perplexity", 0) * (1 + MOST_SURPRISE):
            return False
    return bool(own)


def default(rows: list[dict[str, Any]]) -> dict[str, str]:
    """For each group the coarsest width that all groups tolerate together, or that it tolerates
    alone; a group that does not tolerate a8 does not get a4, even if it passed by luck."""
    widths = dict.fromkeys(GROUPS, "a16")
    for finer, width in (("a16", "a8"), ("a8", "a4")):
        for group in GROUPS:
            good = tolerates(rows, width, "all") or tolerates(rows, width, group)
            if good and widths[group] == finer:
                widths[group] = width
    return widths


def run_facts(arguments: argparse.Namespace, finished: int, seconds: float) -> dict[str, Any]:
    from dsv4.tools.bench_ops import run_facts as facts

    return {
        **facts(),
        "gpu": "none: references on a CPU",
        "workers": arguments.workers,
        "batch": arguments.batch,
        "jobs": finished,
        "seconds": round(seconds, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the record, JSON lines")
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=150.0, help="then it ends")
    parser.add_argument("--batch", type=int, default=20, help="prompts of one job")
    parser.add_argument("--skills", default="", help="only these, separated by commas")
    parser.add_argument("--modules", default="", help="only these groups, or all, by commas")
    parser.add_argument("--widths", default="", help="only a16 and these, by commas")
    parser.add_argument("--model", default="tiny", help="the embedded model in other formats")
    arguments = parser.parse_args()
    skills, modules, widths = (
        list(filter(None, text.split(",")))
        for text in (arguments.skills, arguments.modules, arguments.widths)
    )
    variants = chosen(modules, widths)
    wanted = jobs(arguments.batch, skills, variants, arguments.model)
    begin, results = time.perf_counter(), []
    pool = multiprocessing.get_context("spawn").Pool(arguments.workers)
    answers = pool.imap_unordered(work, wanted, chunksize=1)
    failed = 0
    while True:
        try:
            left = arguments.seconds - (time.perf_counter() - begin)
            results.append(answers.next(timeout=max(left, 0.001)))
        except (multiprocessing.TimeoutError, StopIteration):
            break
        except Exception as error:  # one job failed: the others' results are kept
            failed += 1
            sys.stderr.write(f"a job failed: {error!r}\n")
    pool.terminate()
    seconds = time.perf_counter() - begin
    kept = common(results, variants)
    rows = summed(kept)
    lines = [{"run": run_facts(arguments, len(results), seconds)}]
    lines += [{"result": row} for row in rows]
    lines += [{"job": {**asdict(item.job), "seconds": round(item.seconds, 1)}} for item in results]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    sys.stdout.write(f"{len(kept)} of {len(results)} jobs count, {seconds:.0f} s\n")
    if not rows:
        sys.stdout.write("no prompts were answered by all variants; give more --seconds\n")
        return 1
    sys.stdout.write(table(rows) + "\n")
    if any((row["activations"], row["modules"]) == ("a16", "all") for row in rows):
        found = ", ".join(f"{group} {width}" for group, width in default(rows).items())
        sys.stdout.write(f"NATIVE_AUTO in dsv4/runner/activations.py by this table: {found}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
