"""`plan`: sizes agree with the published ones, and what fits really fits."""

import dataclasses

import pytest

from dsv4.cache.geometry import Geometry
from dsv4.config import ModelConfig
from dsv4.errors import OptionError
from dsv4.tools.plan import Machine, Plan, make_plan, subject_of
from dsv4.tools.plan_weights import SCHEMES, num_parameters, num_tensors, weight_bytes
from tests.checkpoint import writers

# spec/checkpoints.md, sections 0 and 2: bytes on disk, draft included unless noted
PUBLISHED = {
    ("flash", "official"): 159_609_485_896,
    ("pro", "official"): 864_704_792_696,
    ("flash", "nvfp4"): 168.27e9,
    ("pro", "nvfp4"): 913.06e9,
    ("flash", "fp8"): 292.50e9,
    ("pro", "fp8"): 1602.03e9,
    ("flash", "base"): 292.6e9,
    ("pro", "base"): 1602.3e9,
    ("flash", "bf16"): 582.0e9,
    ("pro", "bf16"): 3198e9,
}
COUNTS = {
    ("flash", "official"): 69187,
    ("pro", "official"): 145116,
    ("flash", "nvfp4"): 135235,
    ("pro", "nvfp4"): 285660,
}


@pytest.mark.parametrize(("model", "weights"), list(PUBLISHED))
def test_published_sizes(model: str, weights: str) -> None:
    plan = make_plan(subject_of(model, weights), Machine(8, 141 * 10**9))
    assert plan.checkpoint_bytes == pytest.approx(PUBLISHED[model, weights], rel=0.0005)


def test_official_sizes_are_exact_to_the_byte() -> None:
    for model in ("flash", "pro"):
        assert subject_of(model, None).checkpoint_bytes == PUBLISHED[model, "official"]


def test_sizes_without_the_draft() -> None:
    """2.4 and 2.6: layout (d) has no draft; BF16 through transformers loses it."""
    sizes = {m: subject_of(m, "bf16") for m in ("flash", "pro")}
    assert sum(sizes["flash"].groups.values()) == pytest.approx(568.8e9, rel=0.0005)
    assert sum(sizes["pro"].groups.values()) == pytest.approx(3146e9, rel=0.0005)
    full = sum(subject_of("pro", "nvfp4-all").groups.values())
    assert full == pytest.approx(888.6e9, rel=0.005)


@pytest.mark.parametrize(("model", "weights"), list(COUNTS))
def test_tensor_counts(model: str, weights: str) -> None:
    assert num_tensors(ModelConfig.builtin(model), SCHEMES[weights]) == COUNTS[model, weights]


def test_dspark_releases() -> None:
    flash = dataclasses.replace(
        ModelConfig.builtin("flash"), num_draft_layers=3, draft_kind="dspark"
    )
    pro = dataclasses.replace(ModelConfig.builtin("pro"), num_draft_layers=3, draft_kind="dspark")
    official = SCHEMES["official"]
    assert num_tensors(flash, official) == 72317
    assert num_tensors(pro, official) == 149782
    assert sum(weight_bytes(flash, official, draft=True).values()) == 166_878_536_440
    assert sum(weight_bytes(pro, official, draft=True).values()) == 892_595_197_672


def test_parameter_counts() -> None:
    flash, pro = ModelConfig.builtin("flash"), ModelConfig.builtin("pro")
    assert num_parameters(flash) == pytest.approx(284.33e9, rel=1e-4)
    assert num_parameters(flash, draft=True) == pytest.approx(290.94e9, rel=1e-4)
    assert num_parameters(pro) == pytest.approx(1572.99e9, rel=1e-4)
    assert num_parameters(pro, draft=True) == pytest.approx(1598.84e9, rel=1e-4)


def test_experts_of_the_spec() -> None:
    """5.3: all main experts in NVFP4, and a rank's share of eight."""
    for model, total, rank in (("flash", 155.8e9, 19.5e9), ("pro", 870.4e9, 108.8e9)):
        plan = make_plan(subject_of(model, "nvfp4"), Machine(8, 10**12))
        assert plan.weight_bytes["routed experts"] == pytest.approx(rank, rel=0.005)
        assert subject_of(model, "nvfp4").groups["routed experts"] == pytest.approx(total, rel=5e-4)


@pytest.mark.parametrize(
    ("model", "index", "per_token", "at_million"),
    [
        ("flash", "fp4", 3514.25, 3.69e9),
        ("pro", "fp4", 5031.4, 5.28e9),
        ("flash", "fp8", 3850.25, 4.04e9),
        ("pro", "fp8", 5511.4, 5.78e9),
    ],
)
def test_state_sizes_of_the_model_spec(model, index, per_token, at_million) -> None:
    plan = make_plan(subject_of(model, None), Machine(8, 10**12), index_format=index)
    growth = sum(plan.token_bytes.values())
    assert growth == pytest.approx(per_token, rel=1e-4)
    assert growth * 1048576 == pytest.approx(at_million, rel=0.005)
    rows = {"flash": 12.2e6, "pro": 18.7e6}[model]
    assert plan.fixed_bytes["compressor rows"] == pytest.approx(rows, rel=0.005)


def test_what_fits_fits_and_one_more_does_not() -> None:
    subject = subject_of("flash", "nvfp4")
    machine = Machine(4, 80 * 10**9)
    plan = make_plan(subject, machine, chunk_tokens=2048, contexts=(65536,))
    geometry = Geometry(subject.config, "fp8", "fp8", 2048)
    one = geometry.sequence_bytes(65536)
    each = plan.fits[0].sequences // 4
    used = sum(plan.weight_bytes.values()) + sum(plan.buffer_bytes.values())
    assert used + each * one <= machine.gpu_bytes < used + (each + 1) * one
    assert plan.free_bytes == machine.gpu_bytes - used


def test_advice_when_nothing_fits() -> None:
    plan = make_plan(subject_of("pro", "bf16"), Machine(8, 141 * 10**9))
    assert not plan.possible
    assert any("nvfp4" in line or "official" in line for line in plan.advice)
    count = next(line for line in plan.advice if "GPUs" in line)
    more = make_plan(subject_of("pro", "bf16"), Machine(int(count.split()[1]), 141 * 10**9))
    assert more.possible


def test_a_checkpoint_folder(tmp_path) -> None:
    written = writers.made("modelopt-experts")
    subject = subject_of("mine", None, writers.save(written, tmp_path))
    assert subject.weights == "modelopt-experts"
    assert subject.checkpoint_bytes == sum(a.nbytes for _, a in written.disk.values())
    plan: Plan = make_plan(subject, Machine(1, 10**10))
    assert plan.possible
    assert [fit.context for fit in plan.fits] == [4096]  # the model's own limit


@pytest.mark.parametrize(
    "call",
    [
        lambda: subject_of("huge", None),
        lambda: subject_of("flash", "int4"),
        lambda: Machine(0, 10**10),
        lambda: Machine(1, 5),
        lambda: make_plan(subject_of("flash", None), Machine(8, 10**11), kv_format="fp4"),
        lambda: make_plan(subject_of("flash", None), Machine(8, 10**11), index_format="x"),
        lambda: make_plan(subject_of("flash", None), Machine(8, 10**11), chunk_tokens=0),
        lambda: make_plan(subject_of("flash", None), Machine(8, 10**11), contexts=(0,)),
    ],
)
def test_wrong_options(call) -> None:
    with pytest.raises(OptionError):
        call()
