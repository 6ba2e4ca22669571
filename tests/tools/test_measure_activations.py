"""The script that measures activations in few bits: what counts, and which default follows."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dsv4.formats.quantized import activations_of
from dsv4.runner.activations import GROUPS, HOPPER_AUTO, NATIVE_AUTO
from dsv4.tools.quality.measure import read_items

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "benchmarks" / "records").glob("*_activations_tiny_cpu*.jsonl"))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "scripts" / "measure_activations.py"
    spec = importlib.util.spec_from_file_location("measure_activations", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.dict("sys.modules", {spec.name: module}):
        spec.loader.exec_module(module)
        yield module


def rows_with(script: ModuleType, **right: int) -> list[dict[str, Any]]:
    """Every variant answers 50 of 50, but those named `width_group` have so many right."""
    rows = []
    for width, group in script.VARIANTS:
        name = f"{width}_{group.split()[0]}"
        row = {"activations": width, "modules": group, "skill": "facts", "asked": 50, "silent": 0}
        rows.append({**row, "right": right.get(name, 50), "perplexity": 3.0})
    return rows


def test_the_default_is_what_the_table_allows(script: ModuleType) -> None:
    most = dict.fromkeys(GROUPS, "a4")
    assert script.default(rows_with(script)) == most
    # one answer in fifty may be lost, two may not
    assert script.default(rows_with(script, a4_all=49)) == most
    found = script.default(rows_with(script, a4_all=40, a4_attention=48, a4_routed=48))
    assert found == {**most, "attention": "a8", "routed experts": "a8"}
    groups = ("all", "attention", "shared", "routed")
    nothing = {f"{w}_{g}": 0 for w in ("a8", "a4") for g in groups}
    assert set(script.default(rows_with(script, **nothing)).values()) == {"a16"}
    lucky = rows_with(script, a8_all=0, a8_attention=0)
    assert script.default(lucky)["attention"] == "a16"


@pytest.mark.parametrize(("name", "value"), [("silent", 1), ("perplexity", 3.1)])
def test_silence_and_surprise_count_too(script: ModuleType, name: str, value: float) -> None:
    rows = rows_with(script)
    for row in rows:
        if row["activations"] == "a4":
            row[name] = value
    assert set(script.default(rows).values()) == {"a8"}


def test_the_engine_has_the_default_of_the_newest_rows(script: ModuleType) -> None:
    if not RECORDS:  # nothing measured: nothing is rounded unasked
        assert set(NATIVE_AUTO.values()) == {"a16"}
        return
    newest = {}
    for record in RECORDS:  # the newest last
        for line in map(json.loads, record.read_text().splitlines()):
            if row := line.get("result"):
                newest[row["activations"], row["modules"], row["skill"]] = row
    assert {key[:2] for key in newest} == set(script.VARIANTS)
    assert script.default(list(newest.values())) == NATIVE_AUTO


def test_numerics_has_the_table_of_official_formats(script: ModuleType) -> None:
    """And says which groups bear a8: both kinds of experts."""
    record = ROOT / "benchmarks/records/2026-11-18_activations_tiny_official_cpu.jsonl"
    lines = map(json.loads, record.read_text().splitlines())
    rows = [line["result"] for line in lines if "result" in line]
    assert script.table(rows) in (ROOT / "docs" / "numerics.md").read_text()
    found = script.default(rows)
    assert found == HOPPER_AUTO == {**NATIVE_AUTO, "routed experts": "a8"}


def test_only_prompts_that_all_variants_answered_count(script: ModuleType) -> None:
    job, result = script.Job, script.Result
    done = [result(job(*v, "facts", 0, 4), 3, 4, 0, 1.0) for v in script.VARIANTS]
    late = [result(job(*v, "facts", 1, 4), 4, 4, 1, 1.0) for v in script.VARIANTS[:-1]]
    rows = script.summed(script.common([*done, *late], script.VARIANTS))
    assert len(rows) == len(script.VARIANTS)
    assert {(row["right"], row["asked"], row["silent"]) for row in rows} == {(3, 4, 0)}
    assert "| a4 | routed experts | 75.0 | 0 |  |" in script.table(rows)


def test_variants_round_their_own_modules(script: ModuleType) -> None:
    engine = script.engine_for("tiny", "a8", "shared expert")
    block = engine._runner.model.blocks[0]
    experts = block.ffn.experts
    assert activations_of(experts.shared_w13) == activations_of(experts.shared_w2) == "a8"
    others = (experts.w13, experts.w2, block.attention.wq_a, block.attention.wo_b)
    assert {activations_of(weight) for weight in others} == {"a16"}
    before = torch.cat(list(engine.score(range(20, 60))))
    after = torch.cat(list(script.engine_for("tiny", "a16", "all").score(range(20, 60))))
    assert not torch.equal(before, after)


def test_jobs_cover_every_skill_before_more_of_one(script: ModuleType) -> None:
    jobs = list(script.jobs(50, [], script.VARIANTS))
    first = {job.skill for job in jobs if job.number == 0}
    assert first == {"perplexity", *script.DOCUMENTS, *read_items("tiny")}
    assert [job.number for job in jobs] == sorted(job.number for job in jobs)
    assert {(job.width, job.group) for job in jobs} == set(script.VARIANTS)
    assert {job.skill for job in script.jobs(50, ["facts"], script.VARIANTS)} == {"facts"}
    few = {(job.width, job.group) for job in script.jobs(50, [], script.chosen(["attention"], []))}
    assert few == {("a8", "attention"), ("a4", "attention")}
