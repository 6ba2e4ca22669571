"""`plan`: sizes agree with the published ones, and what fits really fits."""

import dataclasses
import importlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from dsv4.config import EngineConfig, ModelConfig
from dsv4.errors import CapacityError, OptionError
from dsv4.ops.core.gpu import KNOWN, assume
from dsv4.runner.load import state_memory
from dsv4.runner.ranks.choose_layout import Devices, choose_layout
from dsv4.runner.ranks.cluster import Cluster
from dsv4.runner.ranks.forecast import WeightSizes
from dsv4.runner.settings import (
    SELECTED_ROWS,
    Settings,
    a8_bytes,
    resolve,
    row_bytes,
    score_bytes,
    step_bytes,
)
from dsv4.tools.plan import Plan, make_plan, planned_model
from dsv4.tools.plan_weights import SCHEMES, num_parameters, num_tensors, weight_bytes
from dsv4.tools.speed.layouts import plan_layouts
from dsv4.util.draft_shape import head_bytes
from dsv4.util.sizes import size_text
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
    plan = make_plan(planned_model(model, weights), 150 * 10**9)
    assert plan.checkpoint_bytes == pytest.approx(PUBLISHED[model, weights], rel=0.0005)


def test_official_sizes_are_exact_to_the_byte() -> None:
    for model in ("flash", "pro"):
        assert planned_model(model, None).checkpoint_bytes == PUBLISHED[model, "official"]


def test_sizes_without_the_draft() -> None:
    """2.4 and 2.6: layout (d) has no draft; BF16 through transformers loses it."""
    sizes = {m: planned_model(m, "bf16") for m in ("flash", "pro")}
    assert sum(sizes["flash"].groups.values()) == pytest.approx(568.8e9, rel=0.0005)
    assert sum(sizes["pro"].groups.values()) == pytest.approx(3146e9, rel=0.0005)
    full = sum(planned_model("pro", "nvfp4-all").groups.values())
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


@pytest.mark.parametrize(("weights", "share"), [("official", 17 / 18), ("nvfp4", 1.0)])
def test_experts_of_the_spec(weights: str, share: float) -> None:
    """5.3: all main experts in NVFP4; MXFP4 is kept and has a byte less for 32 weights."""
    for model, total in (("flash", 155.8e9), ("pro", 870.4e9)):
        plan = make_plan(planned_model(model, weights), 10**12)
        assert plan.weight_bytes["routed experts"] == pytest.approx(share * total, rel=5e-4)


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
    plan = make_plan(planned_model(model, None), 10**12, EngineConfig(index_format=index))
    growth = sum(plan.token_bytes.values())
    assert growth == pytest.approx(per_token, rel=1e-4)
    assert growth * 1048576 == pytest.approx(at_million, rel=0.005)
    rows = {"flash": 13.93e6, "pro": 21.17e6}[model]  # with 16 rows for ratio 4
    assert plan.fixed_bytes["compressor rows"] == pytest.approx(rows, rel=0.005)


def test_what_fits_fits_and_one_more_does_not() -> None:
    subject, memory = planned_model("flash", "nvfp4"), 192 * 10**9
    plan = make_plan(subject, memory, contexts=(65536,))
    used = sum(plan.weight_bytes.values()) + plan.step_bytes
    assert plan.free_bytes == memory - used
    most = plan.fits[0].sequences
    assert most > 1

    def start(sequences: int) -> Settings:
        choices = EngineConfig(device="cuda", max_context=65536, max_sequences=sequences)
        return resolve(choices, subject.config, has_gpu=True, memory_bytes=plan.free_bytes)

    assert start(most).max_sequences == most
    with pytest.raises(CapacityError):
        start(most + 1)


def test_the_plan_is_what_the_engine_decides() -> None:
    """Its settings come from `resolve`, its step from `state_memory`."""
    subject, memory = planned_model("flash", None), 192 * 10**9
    plan = make_plan(subject, memory)
    with patch("torch.cuda.mem_get_info", return_value=(memory, memory)):
        weights = sum(subject.groups.values()) + subject.draft_bytes
        free = state_memory("cuda", subject.config, weights, has_gpu=True)
    assert plan.free_bytes == free
    assert plan.settings == resolve(EngineConfig(), subject.config, has_gpu=True, memory_bytes=free)


def test_draft_blocks_are_counted_where_they_run() -> None:
    """With `auto` only if all weights fit beside them."""
    flash = planned_model("flash", None)
    copied = head_bytes(flash.config.vocab_size, flash.config.hidden_size)
    assert copied == 297_861_120  # the head in 4 bits
    assert flash.draft_bytes - copied == pytest.approx(3.59e9, rel=0.01)  # experts stay MXFP4
    plan = make_plan(flash, 192 * 10**9)
    assert plan.weight_bytes["draft"] == flash.draft_bytes
    assert plan.settings is not None
    assert plan.settings.draft == "mtp"
    off = make_plan(flash, 192 * 10**9, EngineConfig(draft="off"))
    assert off.free_bytes - plan.free_bytes == flash.draft_bytes
    assert off.fits[0].sequence_bytes < plan.fits[0].sequence_bytes  # keys of the block
    tight = int((sum(off.weight_bytes.values()) + 2 * 10**9) / 0.96)  # 4 % are kept for a step
    small = make_plan(flash, tight)
    assert "draft" not in small.weight_bytes
    assert small.settings is not None
    assert small.settings.draft == "lookup"


def test_users_with_a_context() -> None:
    subject = planned_model("flash", None)
    asked = EngineConfig(max_sequences=32, max_context=100_000)
    plan = make_plan(subject, 192 * 10**9, asked, contexts=(100_000,))
    assert plan.settings is not None
    assert (plan.settings.max_sequences, plan.settings.max_context) == (32, 100_000)
    assert plan.state_bytes <= plan.free_bytes
    many = make_plan(subject, 192 * 10**9, replace(asked, max_sequences=500))
    assert not many.possible
    assert "500 sequences of 100,000 tokens" in many.advice[0]
    assert "use fewer sequences" in many.advice


def test_advice_names_only_what_this_version_can_do() -> None:
    plan = make_plan(planned_model("flash", "bf16"), 192 * 10**9)
    assert not plan.possible
    assert "several GPUs can share them: dsv4 plan flash --gpus 2" in plan.advice[0]
    [better] = plan.advice[1:]
    assert "official weights" in better
    assert make_plan(planned_model("flash", "official"), 192 * 10**9).possible
    assert len(make_plan(planned_model("pro", "bf16"), 150 * 10**9).advice) == 1


def test_advice_counts_the_step_that_was_asked_for() -> None:
    for width in ("a16", "a8"):
        choices = EngineConfig(activations=width)
        plan = make_plan(planned_model("flash", "bf16"), 48 * 10**9, choices)
        assert f"miss {size_text(-plan.free_bytes)};" in plan.advice[0]


def test_a_checkpoint_folder(tmp_path) -> None:
    written = writers.made("modelopt-experts")
    subject = planned_model("mine", None, writers.save(written, tmp_path))
    assert subject.weights == "modelopt-experts"
    assert subject.checkpoint_bytes == sum(a.nbytes for _, a in written.disk.values())
    plan: Plan = make_plan(subject, 10**10)
    assert plan.possible
    assert [fit.context for fit in plan.fits] == [4096]  # the model's own limit


@pytest.mark.parametrize(
    "call",
    [
        lambda: planned_model("huge", None),
        lambda: planned_model("flash", "int4"),
        lambda: make_plan(planned_model("flash", None), 5),
        lambda: make_plan(planned_model("flash", None), 10**11, contexts=(0,)),
        lambda: make_plan(planned_model("flash", None), 10**11, EngineConfig(max_context=2**21)),
    ],
)
def test_wrong_options(call) -> None:
    with pytest.raises(OptionError):
        call()


def test_index_scores_of_a_long_chunk_are_planned() -> None:
    """2,048 tokens that see a million take 2 GB of scores beyond those of the usual context."""
    flash = planned_model("flash", "official")
    weights = sum(flash.groups.values())
    plan = make_plan(flash, weights + 30 * 10**9, EngineConfig(chunk_tokens=2048, draft="off"))
    most = next(fit for fit in plan.fits if fit.context == 1048576)
    assert most.sequences > 0
    scores = 4 * 2048 * (1048576 - 131072) // 4
    left = plan.free_bytes - most.sequences * most.sequence_bytes
    assert scores <= left < scores + 2 * most.sequence_bytes
    short = next(fit for fit in plan.fits if fit.context == 131072)
    assert plan.free_bytes - short.sequences * short.sequence_bytes < 2 * short.sequence_bytes


def test_pro_has_room_for_a_million_tokens_on_eight_h200() -> None:
    plan = plan_layouts(
        planned_model("pro", "official"),
        Cluster.of("h200", 8),
        EngineConfig(max_context=1048576, max_sequences=2),
    )
    assert plan.settings is not None
    assert plan.settings.max_sequences == 2


@pytest.mark.parametrize(
    ("users", "layout"), [(2, (8, 1)), (3, (8, 1)), (8, (4, 2)), (16, (2, 4)), (30, (1, 8))]
)
def test_pro_takes_the_layout_that_holds_what_is_asked_for(
    users: int, layout: tuple[int, int]
) -> None:
    """Ranks of one stage all hold the state, stages share it. By hand: of the 150 GB of an H200 a
    rank of tp 8 has 121 of weights, 6 for a step, 2 for scores; a million tokens take 5.8."""
    choices = EngineConfig(max_context=1048576, max_sequences=users)
    plan = plan_layouts(planned_model("pro", "official"), Cluster.of("h200", 8), choices)
    assert plan.recommended == plan.shown == layout
    assert plan.settings is not None
    assert plan.settings.max_sequences == users
    fits = {(f.tp, f.pp): n[1048576] for f, n in zip(plan.forecasts, plan.fits, strict=True)}
    assert fits[layout] >= users
    assert fits[8, 1] == 3
    assert fits[2, 4] == 18
    if layout != (8, 1):
        assert f"not tp 8, pp 1: the state of {users} sequences" in plan.reason


def test_an_engine_takes_the_layout_that_holds_what_is_asked_for() -> None:
    pro = planned_model("pro", "official")
    sizes = WeightSizes(pro.config, pro.nbytes)
    devices = Devices(8, "NVIDIA H200", 150 * 10**9)
    few, many, most = (
        EngineConfig(max_context=1048576, max_sequences=n, device="cuda") for n in (2, 16, 200)
    )
    assert choose_layout(few, sizes, devices).tp == 8
    found = choose_layout(many, sizes, devices)
    assert (found.tp, found.pp) == (2, 4)
    with pytest.raises(CapacityError, match=r"no layout has room for that; not tp 8, pp 1"):
        choose_layout(most, sizes, devices)


@pytest.mark.parametrize("model", ["flash", "pro"])
def test_the_plan_knows_what_selecting_keeps(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' own buffers at a million tokens, with a program per row and with several."""
    pytest.importorskip("triton", reason="the buffers are sized in the kernels' modules")
    kernel = importlib.import_module("dsv4.ops.attention.index_select_triton")
    shared = importlib.import_module("dsv4.ops.attention.variants.prompt_select_triton")
    config, held = ModelConfig.builtin(model), {}

    def room(device: torch.device, name: str, count: int, dtype: torch.dtype) -> None:
        held[name] = count * dtype.itemsize

    class Launch:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **options: None

    for module, launched in (
        (kernel, "_select_chunk_kernel"), (kernel, "_peaks_kernel"), (shared, "_select_row_kernel")
    ):  # fmt: skip
        monkeypatch.setattr(module, "workspace", room)
        monkeypatch.setattr(module, launched, Launch())
    sizes = {}
    for context in (131072, 1048576):
        for rows in (kernel.MANY_ROWS - 1, 2048):
            with assume(KNOWN[90]):
                kernel.run(torch.empty(rows, context // 4, device="meta"), config.index_topk)
        sizes[context] = 4 * 2048 * context // 4 + held["select_kept"]
        assert held["select_rows"] < 2**26
    assert kernel.MANY_ROWS == SELECTED_ROWS
    grown = sizes[1048576] - sizes[131072]
    assert score_bytes(config, 2048, 1048576) == pytest.approx(grown, rel=0.01)


def test_the_plan_knows_what_rows_quantised_to_a8_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's widest row, the shared expert's, and a row for each chosen expert."""
    pytest.importorskip("triton", reason="the kernel's module allocates")
    kernel = importlib.import_module("dsv4.ops.gemm.a8.fp8_rows_triton")
    prompts = importlib.import_module("dsv4.ops.gemm.a8.fp8_prompt_experts_gluon")
    group = importlib.import_module("dsv4.ops.moe.group_by_expert_triton")
    config, tokens = ModelConfig.builtin("flash"), 8192
    held: dict[str, int] = {}

    def room(device, name, count, dtype) -> torch.Tensor:
        held[name] = max(held.get(name, 0), count * dtype.itemsize)
        return torch.empty(count, dtype=dtype, device="meta")

    class Launch:
        def __getitem__(self, grid):
            return lambda *arguments, **options: None

    monkeypatch.setattr(kernel, "workspace", room)
    monkeypatch.setattr(kernel, "_a8_rows_kernel", Launch())
    inner, hidden, chosen = config.moe_intermediate_size, config.hidden_size, 6
    with assume(KNOWN[90]):
        for columns in (hidden, config.q_lora_rank, config.o_groups * config.o_lora_rank):
            kernel.make_a8_rows(torch.empty(tokens, columns, device="meta"), "a8_rows")
        x, h = (torch.empty(tokens, n, device="meta") for n in (hidden, 2 * inner))
        kernel.make_a8_rows(h, "a8_shared", limit=10.0)
        count = group.num_expert_tiles(chosen * tokens, config.num_experts, prompts.MANY.rows)
        tiles = SimpleNamespace(num_tiles=count, groups=SimpleNamespace(places=None, slots=None))
        kernel.make_token_rows(x, "a8_rows", "a8_pairs", tiles, prompts.MANY.rows, chosen)
        z = torch.empty(chosen * tokens, inner, device="meta")
        kernel.make_pair_rows(z, "a8_pairs", tiles, prompts.MANY.rows)
    assert sum(held.values()) == a8_bytes(config, tokens)
    wide, narrow = (step_bytes(24 * 10**9, config, tokens, asked) for asked in ("a8", "auto"))
    assert wide - narrow == a8_bytes(config, tokens)


def test_the_plan_knows_what_rows_of_a_step_take() -> None:
    """What a prompt step allocates with kernels that launch and do nothing."""
    pytest.importorskip("triton", reason="kernels' modules allocate")
    command = [sys.executable, "-m", "tests.runner.step_memory", "512", "2048"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    peaks = [int(line.split()[2]) for line in found.stdout.splitlines() if "peak" in line]
    config = ModelConfig.builtin("flash")
    assert (peaks[1] - peaks[0]) / 1536 == pytest.approx(row_bytes(config), rel=0.15)
    assert step_bytes(24 * 10**9, config, 2048) > peaks[1] + 10**9  # beside CUDA and graphs
    grown = step_bytes(24 * 10**9, config, 4096) - step_bytes(24 * 10**9, config, 2048)
    assert grown > peaks[1] - peaks[0]
    assert step_bytes(150 * 10**9, config, 2048) == 6 * 10**9
