"""`bench decode` and `bench prefill` tried out on a CPU with a tiny shape."""

import json
import re
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
from dsv4.request import SamplingParams
from dsv4.tools.plan_weights import parameter_bytes, scheme_named, weight_bytes
from dsv4.tools.speed.model import (
    decode_step,
    filled_state,
    prefill_flops,
    random_model,
    shape_config,
    start_at,
    step_bytes,
)
from dsv4.tools.speed.placed import PlacedBench
from dsv4.tools.speed.profile import FAMILIES, family_of
from dsv4.tools.speed.report import picture
from dsv4.tools.speed.serve import random_engine
from dsv4.tools.speed.steps import StepResult, experts_used

OPS = Path(__file__).parents[2] / "dsv4" / "ops"


def test_decode_and_prefill_without_a_gpu(tmp_path: Path) -> None:
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
    assert first["full_ms"] > first["ms"] > 0  # four layers against three
    ElementTree.fromstring(plot.read_text())
    result = CliRunner().invoke(app, ["bench", "prefill", *trial, "--tokens", "40"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert rows[2]["result"]["what"] == "prefill"


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
    for options, says in (
        (["--batch", "1,x"], "expected numbers"),
        (["--batch", "0"], "above 0"),
        (["--compare", "others"], "transformers"),
        (["--shape", "trial", "--layers", "9"], "layers is 9"),
        (["--width", "1"], "from 2 to 8"),
        (["--routing", "others"], "expected random or same"),
        (["--draft", "mtp"], "like scripted:0.7"),
    ):
        result = CliRunner().invoke(app, ["bench", "decode", "--device", "cpu", *options])
        assert isinstance(result.exception, OptionError), options
        assert says in str(result.exception)


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


def test_picture_marks_floors() -> None:
    result = StepResult(
        "decode", "flash", 36, 1, 4096, 3.0, 0.1, 300.0, 8.9, 2.0, 1.5, 43, 3.4, 500.0,
        family_us={"linear": 900.0, "experts": 1500.0},
        family_floor_us={"linear": 500.0, "head": 250.0, "experts": 800.0},
    )  # fmt: skip
    text = picture(result)
    assert "900 / 750" in text  # the head is a linear op
    assert "1500 / 800" in text
