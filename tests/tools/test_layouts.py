"""Layouts over several GPUs: sizes and times computed by hand, records, and a recommendation for
every cluster that people use."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from dsv4.cache.geometry import Geometry
from dsv4.cli import app as cli
from dsv4.cli.bench.parallel import parallel
from dsv4.config import EngineConfig, ModelConfig
from dsv4.errors import OptionError
from dsv4.model.exchange import ShardedRows
from dsv4.parallel.channels import NCCL_BYTES, channel_bytes, exchange_bytes
from dsv4.parallel.layout import RankLayout
from dsv4.runner.ranks.choose_layout import recommend, stage_memory
from dsv4.runner.ranks.cluster import Cluster
from dsv4.runner.ranks.exchange_times import received_bytes
from dsv4.runner.ranks.forecast import ERROR, READ_SHARE, WeightSizes, forecast, layouts, visited
from dsv4.runner.settings import a8_bytes
from dsv4.testing import small_config
from dsv4.tools.plan import planned_model
from dsv4.tools.plan_weights import parameter_bytes, scheme_named
from dsv4.tools.speed.layouts import LayoutPlan, assumptions, measured, plan_layouts

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "records"
FLASH, PRO = ModelConfig.builtin("flash"), ModelConfig.builtin("pro")


@pytest.mark.parametrize(
    ("config", "tp", "rows", "megabytes"),
    [
        (FLASH, 8, 1, 0.20), (PRO, 8, 1, 0.35), (FLASH, 8, 32, 6.4), (PRO, 8, 32, 11.2),
        (FLASH, 2, 8192, 302), (FLASH, 4, 8192, 277), (FLASH, 8, 8192, 220),
        (PRO, 2, 8192, 537), (PRO, 4, 8192, 491), (PRO, 8, 8192, 389), (FLASH, 1, 8192, 0),
    ],
)  # fmt: skip
def test_bytes_that_a_rank_receives_in_a_layer(
    config: ModelConfig, tp: int, rows: int, megabytes: float
) -> None:
    found = received_bytes(config, RankLayout(tp), rows, "symmetric") / 1e6
    assert found == pytest.approx(megabytes, rel=0.015, abs=0.005)


def test_nccl_moves_all_pairs_from_every_rank() -> None:
    """By hand for Flash, as `model/exchange.py` gathers them: six pairs of 4,096 fp32 from each
    of the other ranks, for all rows or for a rank's own; split experts have none."""
    pairs, ranges, row, groups = 6 * 4096 * 4, 8 * 4096 * 4, 4096 * 2, 8 * 1024 * 2
    few = received_bytes(FLASH, RankLayout(8), 1, "nccl")
    assert few == pytest.approx(ranges * 7 / 8 + 7 * pairs)
    many = received_bytes(FLASH, RankLayout(4), 8192, "nccl")
    assert many == pytest.approx(8192 * (2 * row * 3 / 4 + (groups / 4 + pairs) / 4 * 3))
    homes = RankLayout(4, data_attention=True)
    assert received_bytes(FLASH, homes, 1, "nccl") == pytest.approx((row + pairs) * 3 / 4)
    split = RankLayout(8, split_experts=True)
    for rows in (1, 8192):
        found = [received_bytes(FLASH, split, rows, comm) for comm in ("nccl", "symmetric")]
        assert found[0] == found[1]


@pytest.mark.parametrize(("tp", "experts"), [(1, 6), (2, 3.94), (4, 2.78), (8, 2.15)])
def test_the_fullest_rank(tp: int, experts: float) -> None:
    """The expected largest share of six experts, by counting."""
    assert visited(256, 6, 1, tp) == pytest.approx(experts, rel=0.04)


def rows_of(record: str, what: str) -> list[dict]:
    lines = (RECORDS / record).read_text().splitlines()
    rows = [json.loads(line).get("result", {}) for line in lines]
    return [row for row in rows if row.get("what") == what]


@pytest.mark.parametrize(
    ("record", "config", "context"),
    [("2026-11-17_h200_decode_flash.jsonl", FLASH, 4096),
     ("2026-11-17_h200_decode_pro.jsonl", PRO, 4096)],
)  # fmt: skip
def test_one_gpu_is_predicted_as_it_was_measured(
    record: str, config: ModelConfig, context: int
) -> None:
    """Within 15 %, for weights that are NVFP4 throughout, as in the record."""
    sizes = WeightSizes(config, parameter_bytes(config, scheme_named("nvfp4-all")))
    cluster, geometry = Cluster.of("h200", 1), Geometry(config, "fp8", "fp4", 2048)
    wanted = {
        row["batch"]: row["full_ms"]
        for row in rows_of(record, "decode")
        if row["context"] == context and row["batch"] <= 32
    }
    assert len(wanted) > 1
    found = forecast(sizes, cluster, geometry, 1, 1, tuple(wanted))
    for batch, ms in wanted.items():
        assert found.steps[batch].total == pytest.approx(ms, rel=0.15), batch


def test_a_prompt_is_predicted_as_it_was_measured() -> None:
    sizes = WeightSizes(FLASH, parameter_bytes(FLASH, scheme_named("nvfp4-all")))
    cluster, geometry = Cluster.of("h200", 1), Geometry(FLASH, "fp8", "fp4", 2048)
    [ms] = [
        row["full_ms"]
        for row in rows_of("2026-11-17_h200_prefill.jsonl", "prefill")
        if row["context"] == 8192
    ]
    assert forecast(sizes, cluster, geometry, 1, 1).prompt_ms == pytest.approx(ms, rel=0.15)


def test_a_rank_is_predicted_as_its_slices_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute without the link's time: slices exchange with themselves, and a rank there has an
    even share of the experts, not the fullest rank's."""
    monkeypatch.setattr(
        "dsv4.runner.ranks.forecast.experts_read",
        lambda c, layout, n: visited(c.num_experts, c.num_experts_per_tok, n, 1) / layout.tp,
    )
    record, found = "2026-11-18_h200_slices.jsonl", 0
    for row in rows_of(record, "slices decode") + rows_of(record, "slices prefill"):
        config = {"flash": FLASH, "pro": PRO}[row["shape"]]
        sizes = WeightSizes(config, parameter_bytes(config, scheme_named("nvfp4-all")))
        geometry, batch = Geometry(config, "fp8", "fp4", 2048), row["batch"]
        rank = forecast(sizes, Cluster.of("h200", 8), geometry, row["tp"], 1, (batch,))
        ms = rank.steps[batch].read + rank.steps[batch].layers
        ms = rank.prompt_compute_ms if row["what"] == "slices prefill" else ms
        assert ms == pytest.approx(row["full_ms"], rel=ERROR), row
        found += 1
    assert found == 15


# What people run, and the layouts that make sense there.
SETUPS = [
    ("flash", "h200", 2, 1, {(2, 1)}),
    ("flash", "h200", 4, 1, {(4, 1)}),
    ("flash", "h100", 4, 1, {(4, 1)}),
    ("pro", "h200", 8, 1, {(8, 1)}),
    ("flash", "h200", 8, 1, {(8, 1)}),
    ("flash", "b200", 8, 1, {(8, 1)}),
    ("flash", "b200", 4, 1, {(4, 1)}),
    ("pro", "b200", 8, 1, {(8, 1)}),
    ("flash", "rtx-pro-6000", 2, 1, {(1, 2)}),
    ("flash", "rtx-pro-6000", 4, 1, {(2, 2)}),
    ("flash", "spark", 2, 2, {(2, 1), (1, 2)}),
    ("pro", "h100", 16, 2, {(8, 2)}),
    ("pro", "h20", 16, 2, {(8, 2)}),
    ("flash", "h200", 32, 4, {(8, 1)}),
]


def plan_of(model: str, gpu: str, gpus: int, nodes: int = 1, **choices: object) -> LayoutPlan:
    cluster = Cluster.of(gpu, gpus, nodes)
    return plan_layouts(planned_model(model, None), cluster, EngineConfig.make(**choices))


@pytest.mark.parametrize(("model", "gpu", "gpus", "nodes", "sensible"), SETUPS)
def test_every_setup_gets_a_layout(
    model: str, gpu: str, gpus: int, nodes: int, sensible: set[tuple[int, int]]
) -> None:
    plan = plan_of(model, gpu, gpus, nodes)
    assert plan.recommended in sensible
    assert plan.shown == plan.recommended
    assert plan.settings is not None
    assert plan.state_bytes <= min(stage.free_bytes for stage in plan.stages)
    best = next(f for f in plan.forecasts if (f.tp, f.pp) == plan.recommended)
    assert best.kv_tokens > 100_000
    assert ("router" in plan.reason) == (gpus == 32)  # more than one engine
    assert len(plan.commands) == (nodes if gpus != 32 else 1)


def test_the_commands_of_a_layout() -> None:
    two = plan_of("pro", "h100", 16, 2)
    assert two.commands == [
        "dsv4 serve MODEL --tp 8 --pp 2 --nodes 2 --head HOST:PORT",
        "dsv4 join HOST:PORT --node 1",
    ]
    assert two.to_json()["commands"] == two.commands
    assert plan_of("flash", "h200", 2).commands == ["dsv4 serve MODEL --tp 2"]
    homes = plan_of("flash", "h200", 8, tp=8, attention="dp")
    assert homes.commands == ["dsv4 serve MODEL --tp 8 --attention dp"]


def test_forecasts_use_the_back_end_of_the_engine() -> None:
    """NCCL between nodes and on cards that cannot write to each other; stores elsewhere, also
    in an engine that one of several nodes runs alone."""
    one, two = RankLayout(8), RankLayout(8, 2, 0, (range(30), range(30, 61)))
    h100 = Cluster.of("h100", 16, 2)
    assert (h100.comm(one.world), h100.comm(two.world)) == ("symmetric", "nccl")
    assert Cluster.of("rtx-pro-6000", 8).comm(one.world) == "nccl"
    assert Cluster.of("h200", 8).comm(one.world) == "symmetric"
    assert Cluster.of("h200", 8, link="200g").comm(one.world) == "nccl"
    stored, over_nccl = h100.link.fixed_us("symmetric"), h100.link.fixed_us("nccl")
    assert (stored, over_nccl) == (4.0, 12.0)
    by = {(f.tp, f.pp): f for f in plan_of("pro", "h100", 16, 2).forecasts}
    assert by[8, 2].layer_mb[8192] == received_bytes(PRO, two, 8192, "nccl") / 1e6
    for gpu, text in (
        ("h200", "nvlink: 360 GB/s, 4 us an exchange by stores into peers' memory (assumed: every"),
        ("rtx-pro-6000", "pcie: 45 GB/s, 20 us an exchange by NCCL (assumed: PCIe 5 x16, no GPU"),
    ):
        assert any(line.startswith(text) for line in assumptions(Cluster.of(gpu, 2)))
    assert "; NCCL, between nodes, takes 12" in assumptions(h100)[2]


def test_stages_hold_the_model_between_them() -> None:
    plan = plan_of("pro", "h100", 16, 2)
    whole = sum(parameter_bytes(PRO, scheme_named("official")).values())
    first, last = plan.stages
    assert (first.layers[0], first.layers[1], last.layers[1]) == (0, last.layers[0], 61)
    for stage in plan.stages:
        held = sum(stage.weight_bytes.values())
        used = held + stage.exchange_bytes + stage.step_bytes
        assert stage.free_bytes == plan.cluster.memory - used
    shared = sum(stage.shared_bytes for stage in plan.stages)
    each = sum(sum(stage.weight_bytes.values()) for stage in plan.stages) - shared
    assert 8 * shared + each == pytest.approx(whole, rel=1e-6)
    one = Geometry(PRO, "fp8", "fp8", 2048)
    assert sum(stage.token_bytes for stage in plan.stages) == pytest.approx(
        sum(one.bytes_per_token(pool) for pool in ("csa", "hca"))
    )


def test_rows_of_a8_are_kept_free_on_every_rank() -> None:
    """On GPUs so small that a step needs more than its share of them."""
    cluster, more = Cluster.of("h200", 8, memory=48 * 10**9), a8_bytes(FLASH, 2048)
    asked = [EngineConfig(activations=width) for width in ("a16", "a8")]
    plain, wide = (plan_layouts(planned_model("flash", None), cluster, each) for each in asked)
    for one, other in zip(plain.stages, wide.stages, strict=True):
        assert other.step_bytes - one.step_bytes == more
        assert one.free_bytes - other.free_bytes == more
    for before, after in zip(plain.forecasts, wide.forecasts, strict=True):
        for few, many in zip(before.stages, after.stages, strict=True):
            assert few.free_bytes - many.free_bytes == more
    assert sum(n[131072] for n in wide.fits) < sum(n[131072] for n in plain.fits)
    sizes = WeightSizes(FLASH, parameter_bytes(FLASH, scheme_named("official")))
    room = [stage_memory(sizes, sizes.layout(8, 1), cluster, each)[0][1] for each in asked]
    assert room[0] - room[1] == more


def test_stages_work_at_the_same_time() -> None:
    """Four chunks through two stages take two and a half times one chunk through both; of two
    sequences each stage has one."""
    sizes = WeightSizes(FLASH, parameter_bytes(FLASH, scheme_named("official")))
    cluster, geometry = Cluster.of("b200", 2), Geometry(FLASH, "fp8", "fp8", 2048)
    one, two = (forecast(sizes, cluster, geometry, 1, pp, (1, 2)) for pp in (1, 2))
    assert two.prompt_compute_ms == pytest.approx(one.prompt_compute_ms * 2.5 / 4)
    assert two.steps[1].read == pytest.approx(one.steps[1].read)
    assert one.steps[1].read <= two.steps[2].read < one.steps[2].read


def test_split_experts_read_less_at_batch_1() -> None:
    """Each of 8 ranks reads an eighth of six experts, not the fullest rank's two; a token's inner
    sizes travel, then its row."""
    sizes = WeightSizes(FLASH, parameter_bytes(FLASH, scheme_named("official")))
    cluster, geometry = Cluster.of("h200", 8), Geometry(FLASH, "fp8", "fp8", 2048)
    whole, split = (
        forecast(sizes, cluster, geometry, 8, 1, how=EngineConfig(experts=experts))
        for experts in ("whole", "split")
    )
    assert split.fullest[1] == 6 / 8
    expert = sum(n for name, n in sizes.nbytes.items() if ".ffn.experts." in name) / 256
    rate = cluster.gpu.read_gbs * READ_SHARE * 1e6
    saved = (whole.fullest[1] - 0.75) * expert / rate
    assert whole.steps[1].read - split.steps[1].read == pytest.approx(saved)
    assert split.stages[0].weight_bytes == pytest.approx(whole.stages[0].weight_bytes, rel=1e-6)
    each = 8 * 4096 * 4 + 6 * 2048 * 2 + 4096 * 2
    assert split.layer_mb[1] == pytest.approx(each * 7 / 8 / 1e6)


def test_homes_hold_other_sequences_and_all_heads() -> None:
    """By hand for 8 ranks of Flash: all attention weights, an eighth of the experts; seven times
    the state; a row travels to the experts and comes back as partial sums."""
    sizes = WeightSizes(FLASH, parameter_bytes(FLASH, scheme_named("official")))
    cluster, geometry = Cluster.of("h200", 8), Geometry(FLASH, "fp8", "fp8", 2048)
    heads, homes = (
        forecast(sizes, cluster, geometry, 8, 1, how=EngineConfig(attention=attention))
        for attention in ("tp", "dp")
    )
    spread = ("attn.wq_b.weight", "attn.wo_a.weight", "attn.attn_sink")
    divided = sum(n for name, n in sizes.nbytes.items() if name.endswith(spread))
    more = homes.stages[0].weight_bytes - heads.stages[0].weight_bytes
    assert more == pytest.approx(divided * 7 / 8, rel=1e-6)
    rate = cluster.gpu.read_gbs * READ_SHARE * 1e6
    read = divided + sum(n for name, n in sizes.nbytes.items() if name.endswith("attn.wo_b.weight"))
    assert homes.steps[1].read - heads.steps[1].read == pytest.approx(read * 7 / 8 / rate)
    for rows in (1, 8192):
        each = 4096 * 2 + 6 * 4096 * 4 / 8
        assert homes.layer_mb[rows] == pytest.approx(rows * each * 7 / 8 / 1e6)
    assert homes.prompt_ms > heads.prompt_ms  # one prompt alone keeps one home busy
    assert homes.job_s == pytest.approx(heads.job_s, rel=0.5)
    plans = [plan_of("flash", "h200", 8, tp=8, attention=attention) for attention in ("tp", "dp")]
    fits = [plan.fits[[f.tp for f in plan.forecasts].index(8)] for plan in plans]
    assert 7.5 < fits[1][131072] / fits[0][131072] < 8
    assert plans[1].settings is not None
    assert plans[1].settings.homes == 8
    assert plans[1].state_bytes < plans[0].state_bytes / 6


def test_buffers_of_exchanges_follow_the_model() -> None:
    """By hand for a tp 2 rank of Flash: pairs of half a chunk do not fit a half of 64 MiB, so they
    go in rounds; a small model needs less than its weights."""
    flash = channel_bytes(FLASH, RankLayout(2), 2048, 32)
    assert flash.tensor == 64 << 20
    assert flash.held(RankLayout(2)) == 2 * ((64 << 20) + 2 * (256 << 10))
    stages = (range(20), range(20, 43))
    last = RankLayout(1, 2, 1, stages)
    logits, streams = 32 * 129280 * 4, 64 << 20
    found = channel_bytes(FLASH, last, 2048, 32)
    assert found.held(last) == 2 * (2 * (256 << 10) + streams + logits)
    small = channel_bytes(small_config(), RankLayout(2), 256, 4)
    assert small.tensor < 1 << 20


def test_what_nccl_needs_is_counted_instead() -> None:
    """By hand for Flash: communicators of all ranks, of a stage and for logits; and of a chunk's
    rows six pairs of fp32 to send, received, and in order."""

    def found(layout: RankLayout) -> int:
        return exchange_bytes(FLASH, layout, 2048, 32, "nccl")

    assert found(RankLayout(1)) == 0
    assert found(RankLayout(2)) == 2 * NCCL_BYTES + 3 * 2079 * 6 * 4096 * 4
    stages = (range(15), range(15, 30), range(30, 43))
    one_each = [found(RankLayout(1, 3, rank, stages)) for rank in range(3)]
    assert one_each == [2 * NCCL_BYTES, NCCL_BYTES, 2 * NCCL_BYTES]  # the ends send logits
    split = RankLayout(4, split_experts=True)  # less than the rows of groups
    assert found(split) == 2 * NCCL_BYTES + 3 * 2079 * (8 * 1024 // 4) * 2
    by = {
        comm: plan_of("flash", "h200", 2, tp=2, comm=comm).stages[0]
        for comm in ("auto", "symmetric", "nccl")
    }
    assert by["symmetric"] == by["auto"]
    assert by["auto"].exchange_bytes == channel_bytes(FLASH, RankLayout(2), 2048, 32).held(
        RankLayout(2)
    )
    assert by["nccl"].exchange_bytes == found(RankLayout(2))
    more = by["nccl"].exchange_bytes - by["auto"].exchange_bytes
    assert by["nccl"].free_bytes == by["auto"].free_bytes - more


def test_the_tensors_that_nccl_moves() -> None:
    """Pairs of 66 rows, of which rank 0 owns 33."""
    config, layout, moved = small_config(), RankLayout(2), []

    class Stub:
        pushes = None

        def exchange(self, out: Tensor, x: Tensor, sent: list[int], received: list[int]) -> None:
            moved.extend([out, x])

    width = config.num_experts_per_tok * config.hidden_size
    ends: Any = layout, Stub(), config
    ordered = ShardedRows(*ends, [33, 33]).to_owners(torch.zeros(66, width))
    held = sum(x.nbytes for x in [*moved, ordered])
    assert exchange_bytes(config, layout, 65, 2, "nccl") == 2 * NCCL_BYTES + held


def test_the_plan_takes_the_exchange_that_serve_takes() -> None:
    plan = plan_of("flash", "h200", 2, tp=2, comm="nccl")
    assert plan.cluster.comm(2) == "nccl"
    assert plan.commands == ["dsv4 serve MODEL --tp 2 --comm nccl"]
    assert (
        "12 us an exchange by NCCL (assumed: every GPU can write to its peers; but comm="
        in (assumptions(plan.cluster)[2])
    )
    assert plan_of("flash", "rtx-pro-6000", 2, comm="symmetric").cluster.comm(2) == "symmetric"
    for comm, nodes, words in (
        ("symmetric", 2, "comm is 'symmetric' on 2 nodes, expected auto or nccl"),
        ("gloo", 1, "comm is 'gloo' on GPUs, expected auto, symmetric or nccl"),
    ):
        with pytest.raises(OptionError, match=words):
            plan_of("flash", "h200", 2 * nodes, nodes, comm=comm)
    asked = ["plan", "flash", "--gpus", "2", "--tp", "2", "--comm", "nccl", "--json"]
    found = json.loads(CliRunner().invoke(cli, asked).stdout)
    assert found["stages"][0]["exchange_bytes"] == plan.stages[0].exchange_bytes


def test_more_exchange_time_makes_stages_better() -> None:
    """Where an exchange takes a millisecond, ranks that exchange in every layer are slow."""
    sizes = WeightSizes(FLASH, parameter_bytes(FLASH, scheme_named("official")))
    cluster, geometry = Cluster.of("h200", 4), Geometry(FLASH, "fp8", "fp8", 2048)
    slow = Cluster(
        cluster.gpu, 4, 1, cluster.memory, type(cluster.link)("slow", 1.0, 1e3, "for this test")
    )
    best = [
        recommend([forecast(sizes, m, geometry, *pair) for pair in layouts(FLASH, m)], m)[0]
        for m in (cluster, slow)
    ]
    assert [(f.tp, f.pp) for f in best if f] == [(4, 1), (1, 2)]


def test_fewer_stages_unless_more_are_surely_faster() -> None:
    """Within the error of forecasts; the faster layout is named, also if one stream wants it."""
    plan = plan_of("flash", "h200", 2)
    by = {(f.tp, f.pp): f for f in plan.forecasts}
    assert by[1, 2].job_s < by[2, 1].job_s < by[1, 2].job_s * (1 + ERROR)
    assert plan.recommended == (2, 1)
    assert f"of the least (tp 1, pp 2: {by[1, 2].job_s:.1f} s) the one with the few" in plan.reason
    ms = {pair: found.steps[1].total for pair, found in by.items()}
    said = f"for one stream alone tp 1, pp 2: {ms[1, 2]:.1f} ms a token instead of {ms[2, 1]:.1f}"
    assert said in plan.reason
    assert "one stream alone" not in plan_of("flash", "h100", 4).reason  # tp 4 is best for both
    sure = plan_of("flash", "b200", 2)
    slower = next(f.job_s for f in sure.forecasts if (f.tp, f.pp) == (2, 1))
    least = min(f.job_s for f in sure.forecasts)
    assert sure.recommended == (1, 2)
    assert slower > least * (1 + ERROR)
    for needs_one_stage in ({"prefix_disk": "folder"}, {"draft": "lookup"}):
        assert plan_of("flash", "b200", 2, **needs_one_stage).recommended == (2, 1)


def test_what_does_not_fit_says_so() -> None:
    plan = plan_of("pro", "h100", 8)
    assert (plan.recommended, plan.settings) == (None, None)
    assert "no layout fits" in plan.reason
    assert "a GPU has 85.00 GB" in plan.reason
    with pytest.raises(OptionError, match=r"tp 8 x pp 2 needs 16 GPUs, found 8"):
        plan_of("pro", "h100", 8, tp=8, pp=2)
    with pytest.raises(OptionError, match="tp is 3, expected a divisor of 8"):
        plan_of("flash", "h100", 8, tp=3)
    with pytest.raises(OptionError, match="3 GPUs on 2 nodes"):
        Cluster.of("h100", 3, 2)
    with pytest.raises(OptionError, match="gpu is 'h300', expected one of h200"):
        Cluster.of("h300", 2)


def test_records_of_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `scripts/make_docs.py` writes them and the command reads them."""
    script = runpy.run_path(str(ROOT / "scripts" / "make_docs.py"))
    written = tmp_path / "measured.json"
    monkeypatch.setattr("dsv4.tools.speed.layouts.MEASURED", written)
    written.write_text(script["measured_layouts"](tmp_path))
    assert measured("flash", "h200", 8, 1) is None
    row = {"what": "parallel", "shape": "flash", "tp": 8, "pp": 1, "batch": 1, "ms": 3.0}
    for day in (2, 1):
        name = f"2026-12-0{day}_h200_parallel.jsonl"
        (tmp_path / name).write_text(json.dumps({"result": row}) + "\n")
    row = {"what": "decode", "shape": "pro", "layers": 4, "full_layers": 61}
    (tmp_path / "2026-12-01_b200_decode.jsonl").write_text(json.dumps({"result": row}) + "\n")
    written.write_text(script["measured_layouts"](tmp_path))
    assert measured("flash", "h200", 8, 1) == "2026-12-02_h200_parallel.jsonl"
    assert measured("flash", "h200", 8, 1, "dp") is None
    assert measured("pro", "b200", 1, 1) == "2026-12-01_b200_decode.jsonl (fewer layers)"
    assert measured("pro", "h200", 8, 1) is None


def test_slices_of_a_rank(tmp_path: Path) -> None:
    """Through the references: the tool on any machine, no measurement."""
    record = tmp_path / "slices.jsonl"
    asked = ["parallel", "--slices", "trial", "--device", "cpu", "--tp", "1,2", "--layers", "3"]
    asked += ["--batch", "1,3", "--prompt", "70", "--record", str(record)]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line).get("result") for line in record.read_text().splitlines()][1:]
    assert [(row["tp"], row["what"], row["batch"]) for row in rows] == [
        (tp, what, batch)
        for tp in (1, 2)
        for what, batch in (("slices decode", 1), ("slices decode", 3), ("slices prefill", 1))
    ]
    for row in rows:  # four layers from three; embedding, head and sampling once
        layers_ms = row["ms"] - row["rest_ms"]
        assert row["full_ms"] == pytest.approx(row["rest_ms"] + layers_ms * 4 / 3, abs=1e-3)
    assert rows[3]["weight_bytes"] < rows[0]["weight_bytes"]
    assert "tp 2  prompt 70" in result.output
    again = [*asked[:-1], str(tmp_path / "split.jsonl"), "--experts", "split", "--tp", "2"]
    again[again.index("--batch") + 1] = "1"
    assert CliRunner().invoke(app, again).exit_code == 0
    row = json.loads((tmp_path / "split.jsonl").read_text().splitlines()[1])["result"]
    assert (row["tp"], row["experts"]) == (2, "split")


app = typer.Typer()
app.command("parallel")(parallel)
app.command("other")(lambda: None)


def test_the_command_predicts() -> None:
    asked = ["parallel", "--predict", "flash", "--tp", "2,8", "--pp", "1,2", "--batch", "1,32"]
    text = CliRunner().invoke(app, asked).stdout
    for words in ("tp 8, pp 2: ", "predicted, not run", "nvlink: 360 GB/s", "not measured"):
        assert words in text
    given = [*asked, "--exchange-us", "12", "--link-gbs", "100", "--json"]
    found = json.loads(CliRunner().invoke(app, given).stdout)
    assert [(row["tp"], row["pp"]) for row in found["layouts"]] == [(2, 1), (8, 1), (2, 2), (8, 2)]
    assert "100 GB/s, 12 us an exchange by stores" in found["assumptions"][2]
    step = found["layouts"][0]["steps"]["1"]
    assert step["exchange_ms"] > 86 * 0.012  # two exchanges in each of 43 layers
    assert found["layouts"][0]["weight_bytes"] == pytest.approx(80.5e9, rel=0.001)
    result = CliRunner().invoke(app, ["parallel"])
    assert isinstance(result.exception, OptionError)
    assert "dsv4 doctor --parallel" in str(result.exception)
