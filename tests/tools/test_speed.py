"""`bench decode` and `bench prefill` tried out on a CPU with a tiny shape."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from dsv4.checkpoint.names import parameters
from dsv4.cli import app
from dsv4.config import EngineConfig
from dsv4.errors import OptionError
from dsv4.ops.gemm.weights.a8 import A8Fp8, A8Mxfp4
from dsv4.request import SamplingParams
from dsv4.runner.activations import GROUPS
from dsv4.tools.bench_ops import Ceilings
from dsv4.tools.plan_weights import parameter_bytes, scheme_named, weight_bytes
from dsv4.tools.speed.expert_memory import PlacedBench
from dsv4.tools.speed.model import (
    decode_step,
    filled_state,
    official_weight,
    prefill_flops,
    random_model,
    shape_config,
    start_at,
    step_bytes,
)
from dsv4.tools.speed.profile import FAMILIES, family_of
from dsv4.tools.speed.prompts import time_prompt
from dsv4.tools.speed.report import picture, position_picture
from dsv4.tools.speed.serving.serve import random_engine
from dsv4.tools.speed.steps import Bench, StepResult, experts_used

OPS = Path(__file__).parents[2] / "dsv4" / "ops"


def test_decode_and_prefill_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # fixed, and products are slow: more of them raise the floor
    monkeypatch.setattr("dsv4.tools.speed.steps.cpu_ceilings", lambda: Ceilings(100.0, 0.001))
    record, plot = tmp_path / "record.jsonl", tmp_path / "plot.svg"
    trial = ["--shape", "trial", "--device", "cpu", "--layers", "3", "--record", str(record)]
    command = ["bench", "decode", *trial, "--batch", "1", "--context", "200", "--plot", str(plot)]
    result = CliRunner().invoke(app, [*command, "--width", "4", "--draft", "scripted:0.5"])
    assert result.exit_code == 0, result.output
    assert "timing steps (0 of 2 done)" in result.stderr
    assert re.search(r"timing steps \(1 of 2 done, .* left\)", result.stderr)
    assert "width 4, acceptance 0.5: 1.88 tokens a step" in result.output
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert [next(iter(row)) for row in rows] == ["run", "ceilings", "result", "result"]
    assert rows[3]["result"]["what"] == "verify 4"
    first = rows[2]["result"]
    assert (first["batch"], first["context"], first["layers"]) == (1, 200, 3)
    assert set(first["layer_us"]) == {"swa", "csa", "hca"}
    rest = first["rest_us"] / 1e3  # timed alone: may be more than all on a busy machine
    scaled = rest + (first["ms"] - rest) * 4 / 3  # four layers against three
    assert first["full_ms"] == pytest.approx(scaled, abs=1e-3)
    ElementTree.fromstring(plot.read_text())
    command = ["bench", "prefill", *trial, "--tokens", "40", "--position", "0,150"]
    result = CliRunner().invoke(app, [*command, "--weights", "a8", "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    assert "40 tokens after 150, a8" in result.output
    rows = [json.loads(line)["result"] for line in record.read_text().splitlines()[2:]]
    assert [(row["what"], row["position"]) for row in rows] == [("prefill", 0), ("prefill", 150)]
    assert rows[1]["floor_ms"] > rows[0]["floor_ms"] > 0
    texts = [one.text or "" for one in ElementTree.fromstring(plot.read_text()).iter()]
    assert any("trial, a8, chunks of 40" in text for text in texts)


def test_decode_with_experts_in_host_memory(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    trial = ["--shape", "trial", "--device", "cpu", "--layers", "2", "--record", str(record)]
    plot = tmp_path / "plot.svg"
    trial += [
        "--plot",
        str(plot),
        "--expert-memory",
        "0.0001,0.00012",
        "--routing",
        "even,zipf:1.5",
        "--settle",
        "2",
    ]
    command = ["bench", "decode", *trial, "--batch", "1", "--context", "99", "--prompt", "40"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "% resident" in result.output
    rows = [json.loads(line)["result"] for line in record.read_text().splitlines()[1:]]
    timed = [(row["what"], row["routing"]) for row in rows if "what" in row]
    assert timed == [("decode", "even"), ("decode", "zipf:1.5"), ("prompt", "zipf:1.5")] * 2
    ElementTree.fromstring(plot.read_text())
    assert 0 < rows[1]["resident_share"] < 1
    assert rows[1]["missing_mb"] > 0
    assert rows[1]["still_ms"] > 0
    for routing in ("zipf", "zipf:x", "zipf:-1", "odd"):
        result = CliRunner().invoke(app, [*command, "--routing", routing])
        assert isinstance(result.exception, OptionError)


@pytest.mark.parametrize(("tokens", "is_graph"), [(40, True), (70, False)])
def test_prompts_are_replayed_as_in_the_engine(
    tokens: int, is_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All prompts are graphs, but for those ahead of which experts are copied."""
    seen: list[str] = []

    def captured(step: Callable[[], None], _: torch.device) -> Callable[[], None]:
        def replay() -> None:
            seen.append("replay")
            step()

        return replay

    for module in ("prompts", "expert_memory"):
        monkeypatch.setattr(f"dsv4.tools.speed.{module}.captured", captured)
    time_prompt(Bench("trial", 1, "cpu"), tokens, 0)
    assert seen == ["replay"] * 3  # to warm up, timed, and profiled
    bench = PlacedBench("trial", 2, "cpu", "0.0001")
    assert bench.swapper is not None
    bench.swapper.residency.staged_rows = 64
    seen.clear()
    bench.prompt(tokens, "even")
    assert seen == (["replay"] * 4 if is_graph else [])
    bench.swapper.close()


def test_an_engine_of_random_weights_places_experts() -> None:
    choices = EngineConfig(
        device="cpu", expert_memory=0.0001, max_context=128, max_sequences=2, cuda_graphs=False
    )
    engine, _ = random_engine("trial", shape_config("trial", 2), choices)
    assert engine._runner.swapper is not None
    [answer] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3, stop_ids=()))
    assert len(answer.token_ids) == 3
    engine.close()


def test_zipf_routing_is_what_it_says() -> None:
    bench = PlacedBench("trial", 1, "cpu", "all")
    shares = {}
    for routing in ("even", "zipf:1"):
        bench.route(routing)
        table = bench.model.blocks[0].ffn.gate.table
        assert table is not None
        assert (table.sort(1).values.diff(dim=1) > 0).all()  # two different experts
        counts = torch.bincount(table.flatten(), minlength=8).double()
        shares[routing] = (counts / counts.sum()).sort(descending=True).values
    assert shares["even"][0] < 0.16
    assert shares["zipf:1"][0] > 0.25  # 0.37 of the first draw


def test_steps_with_placed_experts_run_beside_the_planned_state() -> None:
    """Memory in use can only be compared with the plan if everything planned is there."""
    bench = PlacedBench("trial", 3, "cpu", "all")
    pools = [pool for layer in bench.state.layers for _, pool in layer.pools()]
    held = sum(part.nbytes for pool in pools for part in pool.parts.values())
    weights = sum(parameter_bytes(bench.config, scheme_named("official")).values())
    assert 0.8 * (bench.planned - weights) < held < bench.planned - weights  # rows of slots besides


@torch.inference_mode()
def test_tokens_of_a_random_model_spread_over_its_experts() -> None:
    """Figures of a batch mean little if all its tokens visit the same experts."""
    config = replace(
        shape_config("trial", 3), hidden_size=256, num_experts=64, num_experts_per_tok=4,
        moe_intermediate_size=32,
    )  # fmt: skip
    device = torch.device("cpu")
    model, _ = random_model(config, device)
    state = filled_state(config, 16, 256, device)
    start_at(state, 100)
    used = experts_used(lambda: decode_step(model, state.layers, state), 64)
    assert used > 0.85 * (1 - (1 - 4 / 64) ** 16)


def test_wrong_use() -> None:
    placed = ["--shape", "trial", "--expert-memory", "auto"]
    for options, says in (
        (["--batch", "1,x"], "expected numbers"),
        (["--batch", "0"], "of 1 or more"),
        (["--weights", "int8"], "expected nvfp4, official, a8"),
        (["--compare", "others"], "transformers"),
        (["--shape", "trial", "--layers", "9"], "layers is 9"),
        (["--width", "1"], "from 2 to 8"),
        (["--routing", "others"], "expected random or same"),
        (["--draft", "mtp"], "like scripted:0.7"),
        (["--prompt", "40"], "prompt is '40', expected none without --expert-memory"),
        ([*placed, "--weights", "int8"], "weights is 'int8', expected none with --expert-memory"),
        ([*placed, "--weights", "a8"], "weights is 'a8', expected none with"),
        ([*placed, "--timeline", "x.svg"], "timeline is 'x.svg', expected none"),
        ([*placed, "--compare", "transformers"], "compare is 'transformers', expected none"),
        ([*placed, "--width", "2"], "width is '2', expected none"),
        ([*placed, "--draft", "scripted:0.7"], "draft is 'scripted:0.7', expected none"),
    ):
        result = CliRunner().invoke(app, ["bench", "decode", "--device", "cpu", *options])
        assert isinstance(result.exception, OptionError), options
        assert says in str(result.exception)


def test_a_chunk_ends_within_the_positions_of_the_model() -> None:
    trial = ["bench", "prefill", "--shape", "trial", "--device", "cpu"]
    for more in (["--position", "20000"], ["--tokens", "64,4096", "--position", "0,4097"]):
        result = CliRunner().invoke(app, [*trial, *more])
        assert isinstance(result.exception, OptionError), more
        assert "expected at most the 8192 positions of trial" in str(result.exception)


def test_a_comparison_has_the_weights_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4.tools.speed.compare.transformers_ms", lambda config, device: 1.0)
    command = ["bench", "decode", "--shape", "trial", "--device", "cpu", "--weights", "a8"]
    command += ["--batch", "1", "--context", "99", "--layers", "1", "--compare", "transformers"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    found = re.findall(r"^(decode [a-z]*).* layers, 1 x \d+, (\w+):", result.output, re.M)
    assert found == [("decode trial", "a8"), ("decode ours", "a8"), ("decode transformers", "bf16")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_no_gpu() -> None:
    result = CliRunner().invoke(app, ["bench", "decode"])
    assert "no CUDA device" in str(result.exception)


@pytest.mark.parametrize("command", ["decode", "prefill"])
def test_a_shape_that_does_not_exist_is_named_on_any_machine(command: str) -> None:
    result = CliRunner().invoke(app, ["bench", command, "--shape", "huge"])
    assert "'huge'" in str(result.exception)


def test_every_kernel_has_a_family() -> None:
    """A new kernel must not vanish among the others."""
    launched = set()
    for path in OPS.rglob("*.py"):
        launched |= set(
            re.findall(r"^ *(?:\w+\.)?(\w*_(?:kernel|stream))\[", path.read_text(), re.M)
        )
        launched |= set(re.findall(r"push_triton\.(\w*_kernel)", path.read_text()))
    missing = {name for name in launched if family_of(name) == "other"} - {
        "_rope_kernel",
        "_read_kernel",
    }
    assert not missing, "add them to FAMILIES"
    assert {name for names in FAMILIES.values() for name in names} <= launched


def test_bytes_of_a_flash_step() -> None:
    """About 8.9 GB for one token where compressors are bf16; here they are NVFP4 too."""
    config = shape_config("flash", None)
    by_group = weight_bytes(config, scheme_named("nvfp4-all"))
    total = sum(by_group.values())
    routed = by_group["routed experts"]
    sizes = dict.fromkeys(parameters(config), 0)
    sizes["layers.0.ffn.experts.w13"] = routed
    sizes["head.weight"] = total - routed - by_group["embedding and head"] // 2
    found = step_bytes(config, sizes, 1, 4096, 6 / 256)
    weights = found["experts"] + found["head"]
    assert weights == pytest.approx(8.9e9, rel=0.06)
    many = step_bytes(config, sizes, 128, 4096, 0.95)
    assert found["experts"] < many["experts"] < routed
    assert many["attention"] == 128 * found["attention"]
    assert step_bytes(config, sizes, 1, 2**20, 6 / 256)["index"] > 200 * found["index"]


def test_prefill_operations() -> None:
    """302 ms at 790 TFLOP/s for 8192 tokens, says the issue."""
    flops = prefill_flops(shape_config("flash", None), 8192)
    assert flops / 790e12 * 1e3 == pytest.approx(302, rel=0.1)


def test_tokens_before_a_chunk_add_attention_and_scores() -> None:
    """By hand, where every window is full and selection has all it takes; with a8 the same."""
    c, tokens, far = shape_config("flash", None), 512, 100_000
    for a8 in ((), GROUPS):
        near, late = (prefill_flops(c, tokens, far * n, a8=a8) for n in (1, 2))
        scores = c.num_layers_of("csa") * far / 4 * c.index_num_heads * c.index_head_dim * 2
        entries = c.num_layers_of("hca") * far / 128 * c.num_heads * c.head_dim * 4
        assert late - near == pytest.approx(tokens * (scores + entries))
        assert prefill_flops(c, tokens, a8=a8) < near


def test_a8_halves_products_of_the_matrices_that_become_fp8() -> None:
    """Those that the engine rounds rows for, no others."""
    c, tokens, half = shape_config("flash", 4), 512, 0.0
    fp8 = set()
    for name, parameter in parameters(c).items():
        weight = official_weight(name, parameter, c, torch.device("meta"), GROUPS)
        if isinstance(weight, A8Fp8 | A8Mxfp4):
            routed = c.num_experts_per_tok if ".ffn.experts." in name else 1
            half += tokens * routed * math.prod(parameter.shape[-2:])
            fp8.add(name.split(".", 2)[2])
    saved = prefill_flops(c, tokens) - prefill_flops(c, tokens, a8=GROUPS)
    assert saved == pytest.approx(half)
    assert fp8 == {
        "attn.wq_a.weight", "attn.wq_b.weight", "attn.wkv.weight", "attn.wo_b.weight",
        "ffn.experts.w13", "ffn.experts.w2", "ffn.shared_experts.w13", "ffn.shared_experts.w2",
    }  # fmt: skip


def test_picture_marks_floors() -> None:
    result = StepResult(
        "decode", "flash", 36, 1, 4096, 3.0, 0.1, 300.0, 8.9, 2.0, 1.5, 43, 3.4, 500.0,
        family_us={"linear": 900.0, "experts": 1500.0},
        family_floor_us={"linear": 500.0, "head": 250.0, "experts": 800.0},
    )  # fmt: skip
    text = picture(result)
    assert "900 / 750" in text  # the head is a linear op
    assert "1500 / 800" in text


def test_a_picture_has_every_curve() -> None:
    one = StepResult("prefill", "flash", 36, 1, 512, 3.0, 0.1, 300.0, 8.9, 2.0, 1.5, 43, 3.4, 500.0)
    sizes = [64 * n for n in range(1, 9)]
    rows = [replace(one, context=n, position=p) for n in sizes for p in (0, 100_000)]
    root = ElementTree.fromstring(position_picture(rows))
    assert sum(each.tag.endswith("polyline") for each in root.iter()) == 8
    texts = " ".join(each.text or "" for each in root.iter())
    assert all(f"chunks of {n}" in texts for n in sizes)
