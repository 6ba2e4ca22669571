"""`plan` of a model whose experts do not all fit one GPU."""

import random
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from dsv4.cli import app
from dsv4.config import EngineConfig
from dsv4.errors import OptionError
from dsv4.tools.plan import make_plan, planned_model
from dsv4.tools.plan_experts import lines_of, missing_bytes, visit_chances

GB = 10**9
ROOMY = EngineConfig(max_sequences=4, max_context=131072)


@pytest.mark.parametrize(
    ("model", "gpu", "memory", "least", "most", "bus"),
    [
        ("flash", "h200", 150, 0.88, 0.96, 51),
        ("flash", "h100", 85, 0.40, 0.50, 51),
        ("flash", "a100", 85, 0.40, 0.50, 25.5),
        ("flash", "rtx-pro-6000", 101.9, 0.54, 0.64, 51),
        ("pro", "h200", 150, 0.08, 0.16, 51),
        ("pro", "b200", 191.5, 0.12, 0.20, 51),
    ],
)
def test_cards_that_are_too_small(
    model: str, gpu: str, memory: float, least: float, most: float, bus: float
) -> None:
    """Memory adds up to the GPU's, and times to what the bus takes."""
    subject, size = planned_model(model, None), int(memory * GB)
    plan = make_plan(subject, size, ROOMY, gpu=gpu, host_bytes=1000 * GB)
    experts = plan.experts
    assert experts is not None
    assert least < experts.resident_share < most
    used = sum(plan.weight_bytes.values()) + plan.step_bytes + plan.state_bytes
    assert used <= size < used + 4 * experts.budget.block_bytes
    whole = sum(subject.groups.values()) - subject.groups["routed experts"]
    both = experts.gpu_bytes + experts.host_bytes + whole
    assert both > sum(subject.groups.values())
    even, skewed = (ms[1] for ms in experts.step_ms.values())
    assert experts.all_resident_ms[1] < skewed < even
    layers, chosen = subject.config.num_layers, subject.config.num_experts_per_tok
    missing = layers * chosen * (1 - experts.resident_share) * experts.budget.block_bytes
    assert even - experts.all_resident_ms[1] == pytest.approx(missing / bus / 1e6, rel=1e-3)
    assert experts.prompt_ms >= experts.all_resident_prompt_ms
    assert all("\n" not in line for line in lines_of(experts))
    assert f"from {bus:g} GB/s" in lines_of(experts)[-1]


def test_a_card_that_shares_host_memory_has_no_other() -> None:
    """A DGX Spark: what does not fit its GPU does not fit its host either."""
    plan = make_plan(planned_model("flash", None), 109 * GB, gpu="spark", host_bytes=1000 * GB)
    assert not plan.possible
    [advice] = plan.advice
    assert "shares the host's" in advice
    assert "several GPUs" in advice


@pytest.mark.parametrize("memory", [180, 191.5])
def test_cards_that_hold_all_experts(memory: float) -> None:
    plan = make_plan(planned_model("flash", None), int(memory * GB), ROOMY, gpu="b200")
    assert plan.possible
    assert plan.experts is None
    assert plan.times is not None
    assert plan.times.step_ms[1] == pytest.approx(4.2, abs=0.05)  # as docs/one-gpu.md says
    assert plan.times.prompt_ms == pytest.approx(250, abs=5)
    lines = [
        *(
            "a token of one sequence: 4.2 ms",
            "a step of 32 sequences: ",
            "a prompt of 8,192 tokens",
        ),
        "times are predicted, not run",
    ]
    for line, start in zip(lines_of(plan.times), lines, strict=True):
        assert line.startswith(start)
    arguments = ["plan", "flash", "--gpu", "b200", "--memory", str(memory)]
    shown = CliRunner().invoke(app, [*arguments, "--users", "4", "--context", "131072"])
    assert lines[0] in shown.output
    assert shown.exit_code == 0
    assert make_plan(planned_model("flash", None), 10 * GB, gpu="b200").times is None


def test_a_long_context_takes_room_from_experts() -> None:
    long = EngineConfig(max_sequences=8, max_context=1048576)
    plan = make_plan(planned_model("flash", None), 180 * GB, long, gpu="b200")
    assert plan.experts is not None
    assert plan.settings is not None
    assert (plan.settings.max_sequences, plan.settings.max_context) == (8, 1048576)


def test_what_cannot_start_says_why() -> None:
    flash = planned_model("flash", None)
    few = make_plan(flash, 85 * GB, gpu="h100", host_bytes=64 * GB)
    assert not few.possible
    assert "of host memory" in few.advice[0]
    whole = make_plan(flash, 150 * GB, EngineConfig(expert_memory="all"))
    assert not whole.possible
    tiny = make_plan(flash, 150 * GB, EngineConfig(expert_memory=0.05))
    assert "hold 3, expected at least the 6" in tiny.advice[0]
    for much, left in ((200, " 0 B are free"), (134.3, " 47.34 MB are free")):
        found = make_plan(flash, 150 * GB, EngineConfig(expert_memory=much)).advice[0]
        assert f"expert_memory is {much:.2f} GB, but the GPU has 134.35 GB for" in found
        assert "lower it, or use auto" in found
        assert left in found
    plain = make_plan(planned_model("flash", "fp8"), 150 * GB, EngineConfig(expert_memory=100))
    assert "experts are stored as fp8" in plain.advice[0]


def test_asked_for_so_many_gigabytes() -> None:
    plan = make_plan(planned_model("flash", None), 150 * GB, EngineConfig(expert_memory=100))
    assert plan.experts is not None
    assert 99 * GB < plan.experts.gpu_bytes <= 100 * GB


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_chances_of_visits(exponent: float) -> None:
    """Against draws without return."""
    rng, draws, count, chosen = random.Random(0), 4000, 16, 3
    weights = [rank**-exponent for rank in range(1, count + 1)]
    seen = [0] * count
    for _ in range(draws):
        left = dict(enumerate(weights))
        for _ in range(chosen):
            expert = rng.choices(list(left), list(left.values()))[0]
            seen[expert] += 1
            del left[expert]
    found = visit_chances(count, chosen, exponent)
    assert sum(found) == pytest.approx(chosen)
    for share, chance in zip(seen, found, strict=True):
        assert chance == pytest.approx(share / draws, abs=0.06)


def test_more_sequences_miss_more_but_each_expert_once() -> None:
    plan = make_plan(planned_model("flash", None), 150 * GB, ROOMY)
    assert plan.experts is not None
    budget, config = plan.experts.budget, planned_model("flash", None).config
    one, many, all_ = (missing_bytes(budget, config, n, 0.0) for n in (1, 32, 10**5))
    assert one < many < 32 * one
    assert all_ == pytest.approx(budget.missing * budget.block_bytes)


def test_on_the_command_line() -> None:
    with patch.dict("os.environ", {"COLUMNS": "200"}):
        result = CliRunner().invoke(app, ["plan", "flash", "--gpu", "h200", "--zipf", "1.2"])
    assert result.exit_code == 0, result.output
    assert "of host memory" in result.output
    assert "(zipf 1.2)" in result.output
    result = CliRunner().invoke(app, ["plan", "flash", "--gpu", "h200", "--host-memory", "8"])
    assert result.exit_code == 1
    result = CliRunner().invoke(app, ["plan", "flash", "--expert-memory", "much"])
    assert isinstance(result.exception, OptionError)
