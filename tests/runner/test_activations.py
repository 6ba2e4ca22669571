"""The option `activations`: who gets which width, why, and that the references round."""

import logging
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4.checkpoint.reader import Checkpoint, open_checkpoint
from dsv4.config import EngineConfig, ModelConfig
from dsv4.engine import Engine
from dsv4.errors import KernelError, OptionError
from dsv4.formats import nvfp4
from dsv4.formats.quantized import Nvfp4Tensor, UnpackedTensor, activations_of
from dsv4.model.transformer import Transformer
from dsv4.ops.core.context import EngineOps, kernels_only
from dsv4.ops.gemm.grouped_linear import grouped_linear
from dsv4.ops.gemm.linear import linear, linear_multi
from dsv4.ops.gemm.quantize_rows import quantize_a8
from dsv4.ops.gemm.weights.repack import repack
from dsv4.ops.gemm.weights.tiled import TiledNvfp4
from dsv4.ops.moe.experts import Experts, experts_ffn
from dsv4.request import SamplingParams
from dsv4.runner.activations import (
    GROUPS,
    HOPPER_AUTO,
    NATIVE_AUTO,
    GpuFacts,
    are_official,
    choose_activations,
    describe,
    width_of,
)
from dsv4.runner.experts.choose_memory import WeightBytes, choose_experts
from dsv4.runner.load import prepare, tell_activations
from dsv4.runner.settings import Settings, resolve
from dsv4.tools.doctor.examine import examine_model
from dsv4.tools.doctor.subject import open_subject
from dsv4.tools.formulas import as_multiplied, expert
from tests.checkpoint.writers import made, save
from tests.models import spoiled

HOPPER = GpuFacts((9, 0), (3, 6), (13, 0))
BLACKWELL = GpuFacts((10, 0), (3, 6), (13, 0))
STATIONS = {"project", "output", "experts"}  # of products with few bits
MIXED = {
    "layers.1.ffn.experts.": "modelopt-experts",  # NVFP4
    "layers.1.attn.": "plain-official",  # BF16
    "layers.2.ffn.": "plain-official",
}
FIXED = ("compressor", "indexer", "router", "embedding and head")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("modelopt-full", "official", "plain-official")
    files = {name: made(name) for name in names}
    files["mixed"] = made("official")  # FP8 and MXFP4 experts, but others in some layers
    for part, name in MIXED.items():
        kept = {n: v for n, v in files["mixed"].disk.items() if not n.startswith(part)}
        other = made(name).disk.items()
        files["mixed"].disk = kept | {n: v for n, v in other if n.startswith(part)}
    return {name: save(files[name], tmp_path_factory.mktemp(name)) for name in files}


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(folder, ModelConfig.from_folder(folder))


# --- the choice -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "gpu", "width", "why"),
    [
        ("auto", None, "a16", "CPU"),
        ("a16", None, "a16", "chosen"),
        ("a4", None, "a4", "references round"),
        ("auto", HOPPER, "a16", "for experts in the official formats"),
        ("a8", HOPPER, "a8", "chosen"),
        ("a8", replace(HOPPER, driver=(12, 4)), "a8", "chosen"),
        ("auto", GpuFacts((8, 9), (3, 6), (13, 0)), "a16", "sm_89 has no tensor cores"),
        ("a16", BLACKWELL, "a16", "chosen"),
        ("a8", BLACKWELL, "a8", "chosen"),
        ("a8", GpuFacts((12, 0), (3, 9), (13, 0)), "a8", "chosen"),
        ("auto", GpuFacts((12, 0), (3, 9), (13, 0)), "a16", "sm_120"),
    ],
)
def test_the_choice_and_its_reason(asked: str, gpu: GpuFacts | None, width: str, why: str) -> None:
    choice = choose_activations(asked, gpu)
    assert choice.widths == dict.fromkeys(GROUPS, width)
    assert why in choice.why
    assert choice.refused is None


def test_auto_follows_the_table_where_products_are_native() -> None:
    assert choose_activations("auto", BLACKWELL).widths == NATIVE_AUTO
    assert "docs/numerics.md" in choose_activations("auto", BLACKWELL).why
    on_hopper = choose_activations("auto", replace(HOPPER, official=True))
    assert on_hopper.widths == HOPPER_AUTO
    assert "docs/numerics.md" in on_hopper.why
    old = choose_activations("auto", replace(HOPPER, triton=(3, 5), official=True))
    assert set(old.widths.values()) == {"a16"}


def test_official_formats_are_those_of_all_experts(folders: dict[str, Path]) -> None:
    found = {
        name: are_official(opened(folder).sources.values()) for name, folder in folders.items()
    }
    assert [name for name, official in found.items() if official] == ["official"]
    assert not are_official([])


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        (HOPPER, "sm_90 has no a4"),
        (replace(BLACKWELL, triton=(3, 5)), "Triton is 3.5, expected 3.6"),
        (replace(BLACKWELL, driver=(12, 6)), "driver for CUDA is 12.6, expected 12.8"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(gpu: GpuFacts, reason: str) -> None:
    choice = choose_activations("a4", gpu)
    assert set(choice.widths.values()) == {"a16"}
    assert choice.refused is not None
    assert "activations=a4" in choice.refused
    assert reason in choice.refused


def test_settings_hold_the_widths() -> None:
    config = ModelConfig.builtin("flash")
    facts: dict[str, Any] = {"has_gpu": True, "memory_bytes": 2**40}
    settings = resolve(EngineConfig(activations="a4"), config, gpu=BLACKWELL, **facts)
    assert set(settings.activations.values()) == {"a4"}
    assert "activations=a4" in str(settings)
    on_cpu = EngineConfig(device="cpu", activations="auto")
    assert resolve(on_cpu, config, gpu=BLACKWELL, **facts).activations_text == "a16"
    mixed = replace(settings, activations={**settings.activations, "attention": "a8"})
    assert "attention a8/shared expert a4" in str(mixed)


def test_experts_in_host_memory_keep_their_rows_by_default() -> None:
    """An H200 holds most of Flash: what it reads by a table has 16-bit rows, and so has the rest.
    With `a8` asked for, only routed experts keep them."""
    config, gpu = ModelConfig.builtin("flash"), replace(HOPPER, official=True)
    facts: dict[str, Any] = {"has_gpu": True, "gpu": gpu}

    def settings(asked: str, free: int) -> Settings:
        choices = EngineConfig.make(activations=asked)
        sizes = WeightBytes(156 * 10**9, 145 * 10**9, frozenset(["mxfp4"]))
        resolved = partial(_resolved, config, facts)
        found = choose_experts(choices, config, sizes, free, free, resolved)
        assert (found.budget is None) == (free > 150 * 10**9)
        return found.settings

    assert settings("auto", 190 * 10**9).activations == HOPPER_AUTO
    assert settings("auto", 140 * 10**9).activations_text == "a16"
    found = settings("a8", 140 * 10**9).activations
    assert found == {"attention": "a8", "shared expert": "a8", "routed experts": "a16"}


def _resolved(
    config: ModelConfig, facts: dict[str, Any], choices: EngineConfig, memory: int
) -> Settings:
    return resolve(choices, config, memory_bytes=memory, **facts)


def test_an_unknown_width_is_refused() -> None:
    with pytest.raises(OptionError, match="activations is 'a5', expected one of auto, a4, a8, a16"):
        EngineConfig.make(activations="a5")


# --- what is said -----------------------------------------------------------------------------


def test_one_line_for_each_group(folders: dict[str, Path]) -> None:
    lines = describe(opened(folders["official"]).sources.values(), choose_activations("a4", None))
    by_group = dict(line.split(": ", 1) for line in lines)
    assert "mxfp4 weights x a4" in by_group["routed experts"]
    assert "fp8 weights x a8" in by_group["attention"]  # the next best
    for group in FIXED:
        assert "a16" in by_group[group]
        assert by_group[group].endswith("(always)")


def test_what_is_prepared_says_what_and_why_and_is_what_runs(folders: dict[str, Path]) -> None:
    prepared = prepare(str(folders["official"]), EngineConfig(device="cpu"))
    engine = Engine.load(prepared)
    assert engine.settings == prepared.settings
    sizes = f"{engine.settings.max_sequences} sequences of {engine.settings.max_context:,} tokens"
    assert sizes in str(prepared)
    on_hopper = str(replace(prepared, gpu=HOPPER))
    assert "activations a16: on sm_90 `auto` is a8 for experts in the official" in on_hopper


def told(checkpoint: Checkpoint, asked: str, gpu: GpuFacts | None, caplog: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "dsv4"):
        tell_activations(checkpoint, asked, gpu)
    return [record.getMessage() for record in caplog.records]


def test_one_warning_names_what_is_not_had(folders: dict[str, Path], caplog: Any) -> None:
    plain = opened(folders["plain-official"])
    [message] = told(plain, "a4", None, caplog)
    assert message == (
        "bf16 weights (attention, routed experts, shared expert) cannot be multiplied with a4 "
        "activations, a16 is used"
    )
    [message] = told(opened(folders["official"]), "a4", None, caplog)
    assert message.startswith("fp8 weights (attention, shared expert)")
    assert message.endswith("a8 is used")
    [message] = told(opened(folders["modelopt-full"]), "a4", HOPPER, caplog)
    assert "sm_90" in message
    assert told(opened(folders["official"]), "a8", HOPPER, caplog) == []
    assert "a16 is used" in message
    for asked in ("auto", "a16"):
        assert told(plain, asked, HOPPER, caplog) == []
    assert told(plain, "auto", BLACKWELL, caplog) == []  # nobody asked for more


def test_strict_mode_raises(folders: dict[str, Path]) -> None:
    with kernels_only(), pytest.raises(KernelError, match=r"bf16 weights.*strict mode forbids"):
        Engine.load(str(folders["plain-official"]), device="cpu", activations="a4")
    with kernels_only(), pytest.raises(KernelError, match=r"sm_90.*strict mode forbids"):
        tell_activations(opened(folders["modelopt-full"]), "a4", HOPPER)


def test_weights_that_would_change_stay_wide_with_one_warning(caplog: Any) -> None:
    packed, scale, factor = nvfp4.quantize(torch.randn(128, 256))
    weight = Nvfp4Tensor(packed, scale, factor.reshape(1), activations="a8")
    with EngineOps().active(), caplog.at_level(logging.WARNING, "dsv4"):
        with kernels_only(), pytest.raises(KernelError, match="powers of two"):
            repack("layers.0.attn.wq_a.weight", weight)
        found = [repack(f"layers.{layer}.attn.wq_a.weight", weight) for layer in range(3)]
    assert {activations_of(each) for each in found} == {"a16"}
    assert [isinstance(each, TiledNvfp4) for each in found] == [True] * 3
    [record] = caplog.records
    assert "layers.0.attn.wq_a.weight and others like it" in record.getMessage()


# --- what is computed -------------------------------------------------------------------------


def test_weights_of_the_groups_know_their_width(folders: dict[str, Path]) -> None:
    engine = Engine.load(str(folders["modelopt-full"]), device="cpu", activations="a4")
    model: Transformer = engine._runner.model
    for block in model.blocks:
        attention, ffn = block.attention, block.ffn
        few = [attention.wq_a, attention.wq_b, attention.wkv, attention.wo_a, attention.wo_b]
        experts = ffn.experts
        few += [experts.w13, experts.w2, experts.shared_w13, experts.shared_w2]
        assert {activations_of(weight) for weight in few} == {"a4"}
        others = [ffn.gate.gate]
        if attention.compressor is not None:
            others += attention.compressor.matrices
        if attention.indexer is not None:
            indexer = attention.indexer
            others += [indexer.wq_b, indexer.weights_proj, *indexer.compressor.matrices]
        assert {activations_of(weight) for weight in others} == {"a16"}
    assert {activations_of(weight) for weight in (model.head, model.embedding)} == {"a16"}


def test_wo_a_reads_unrounded_rows_at_a8(folders: dict[str, Path], caplog: Any) -> None:
    """As the official model does."""
    checkpoint = opened(folders["official"])
    widths = choose_activations("a8", None).widths
    found = {name: width_of(source, widths) for name, source in checkpoint.sources.items()}
    assert found["layers.0.attn.wo_a.weight"] == "a16"
    assert found["layers.0.attn.wo_b.weight"] == found["layers.0.ffn.experts.w13"] == "a8"
    assert told(checkpoint, "a8", None, caplog) == []
    lines = describe(checkpoint.sources.values(), choose_activations("a8", None))
    [line] = [line for line in lines if line.startswith("attention:")]
    assert "fp8 weights x a8, fp8 wo_a weights x a16" in line


def test_a8_rows_are_those_of_the_official_model() -> None:
    """One power of two per 128 columns, as small as 448 allows, never below 1e-4 / 448."""
    x = torch.zeros(5, 256)
    x[0, 3], x[0, 4], x[0, 127], x[0, 128] = 449.0, 1.0, 17.0, 448.0
    x[1, 0], x[1, 255] = 1e-9, -3e4
    x[2, 7], x[3, 200] = float("nan"), float("-inf")
    codes, scales = quantize_a8(x)
    powers = scales.int() - 127
    # 1e-4 / 448 is 2^-22.1
    assert powers[:2].tolist() == [[1, 0], [-22, 7]]
    assert powers[4].tolist() == [-22, -22]
    assert codes[0, [3, 4, 127, 128]].tolist() == [224.0, 0.5, 8.0, 448.0]  # 8.5: ties to even
    assert codes[1, [0, 255]].tolist() == [2.0**-8, -240.0]  # 1e-9 * 2^22, 234.4
    assert codes[2, :128].isnan().all()
    assert codes[3, 128:].isnan().all()
    assert (codes[2, 128:] == 0).all()
    assert (codes[3, :128] == 0).all()
    assert (codes[4] == 0).all()
    row = linear(torch.stack((x[2], x[0])), _weight(torch.Generator(), 6, 256, width="a8"))
    assert row[0].isnan().all()
    assert row[1].isfinite().all()


def test_each_width_gives_its_own_numbers(folders: dict[str, Path]) -> None:
    logits = {}
    for width in ("auto", "a16", "a8", "a4"):
        engine = Engine.load(str(folders["modelopt-full"]), device="cpu", activations=width)
        logits[width] = torch.cat(list(engine.score(range(2, 40))))
    assert torch.equal(logits["auto"], logits["a16"])
    size = logits["a16"].norm()
    a8, a4 = ((logits[width] - logits["a16"]).norm() / size for width in ("a8", "a4"))
    assert 0 < a8 < a4 < 1


@pytest.mark.parametrize(
    ("layout", "width"),
    [("modelopt-full", "a4"), ("modelopt-full", "a8"), ("official", "a4"), ("mixed", "a8")],
)
def test_the_whole_model_equals_the_formulas(
    folders: dict[str, Path], layout: str, width: str
) -> None:
    choices = EngineConfig.make(device="cpu", activations=width)
    subject = open_subject(str(folders[layout]), choices, tokens=132)
    assert f"activations={width}" in subject.summary
    report = examine_model(subject, only_calls=True)
    assert report.ok
    assert not report.judged_end_to_end
    worst = {s: max(c.error.worst for c in report.cells if c.station == s) for s in STATIONS}
    assert max(worst["project"], worst["output"]) < 1e-4
    assert worst["experts"] < 2e-2  # a code between its matrices may fall beyond a border
    unrounded = examine_model(replace(subject, widths={}), only_calls=True)
    assert {cell.station for cell in unrounded.wrong} >= STATIONS


def _weight(generator: torch.Generator, *shape: int, width: Any) -> UnpackedTensor:
    return UnpackedTensor(torch.randn(*shape, generator=generator), activations=width)


def _furthest(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of the rows, relative to their length."""
    lengths = wanted.norm(dim=1).clamp(min=1e-30)
    return float(((found.double() - wanted).norm(dim=1) / lengths).max())


@pytest.mark.parametrize("width", ["a8", "a4"])
def test_references_round_their_input(width: str) -> None:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(5, 96, generator=g) * torch.logspace(-3, 4, 5)[:, None]
    x[2] = 0
    few, plain = _weight(g, 40, 96, width=width), torch.randn(24, 96, generator=g)
    one, two = linear_multi(x, [few, plain])
    wanted = as_multiplied(x.double(), width) @ few.values.double().T
    assert _furthest(one, wanted) < 1e-5
    assert torch.equal(two, linear_multi(x, [plain])[0])  # its neighbour's width is not its own

    grouped, heads = _weight(g, 16, 48, width=width), x.view(5, 2, 48)
    parts = as_multiplied(heads.double(), width)
    matrices = grouped.values.double().view(2, 8, 48)
    wanted = torch.einsum("tgk,grk->tgr", parts, matrices).flatten(1)
    assert _furthest(grouped_linear(heads, grouped), wanted) < 1e-5


@pytest.mark.parametrize("width", ["a8", "a4"])
@pytest.mark.parametrize("group", ["routed", "shared"])
def test_experts_round_before_both_matrices(group: str, width: str) -> None:
    g = torch.Generator().manual_seed(4)
    widths = {"routed": "a16", "shared": "a16", group: width}
    x = torch.randn(6, 64, generator=g)
    x[1], x[2] = x[1] * 1e4, 0
    chosen = torch.tensor([[0, 2]] * 3 + [[1, 2]] * 3)
    weights = torch.rand(6, 2, generator=g)
    w13, w2 = (_weight(g, 3, *s, width=widths["routed"]) for s in ((96, 64), (64, 48)))
    shared = [_weight(g, *s, width=widths["shared"]) for s in ((96, 64), (64, 48))]
    found = experts_ffn(x, chosen, weights, Experts(w13, w2, *shared, 10.0))

    both = widths["shared"], widths["shared"]
    numbers = [weight.values.double() for weight in shared]
    wanted = expert(x.double(), *numbers, torch.ones(6).double(), 10.0, both)
    both = widths["routed"], widths["routed"]
    for number in range(3):
        rows, places = torch.nonzero(chosen == number, as_tuple=True)
        matrices = w13.values[number].double(), w2.values[number].double()
        part = expert(x[rows].double(), *matrices, weights[rows, places].double(), 10.0, both)
        wanted = wanted.index_add(0, rows, part)
    # a code of the inner activation may fall on the other side of a border, in fp32 or in fp64
    assert _furthest(found, wanted) < 2e-3


@pytest.mark.parametrize(
    ("layout", "width"),
    [("modelopt-full", "a4"), ("official", "a8"), ("mixed", "a16"), ("mixed", "a8")],
)
def test_answers_stay_the_same_in_any_batch(
    folders: dict[str, Path], layout: str, width: str
) -> None:
    engine = Engine.load(str(folders[layout]), device="cpu", activations=width, prefix_cache=False)
    prompts = [[0, *range(3, 3 + 4 * number)] for number in (2, 5, 9)]
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=1)
    together = engine.generate(prompts, params)
    alone = [engine.generate([prompt], params)[0] for prompt in prompts]
    assert [a.logprobs for a in together] == [a.logprobs for a in alone]


def test_formats_of_a_layer_get_their_own_width(folders: dict[str, Path]) -> None:
    checkpoint, widths = opened(folders["mixed"]), choose_activations("a8", None).widths
    found = {name: width_of(source, widths) for name, source in checkpoint.sources.items()}
    for part, wanted in (("attn.wq_b.weight", "8 16 8 8"), ("ffn.experts.w13", "8 8 16 8"),
                         ("ffn.shared_experts.w2", "8 8 16 8")):  # fmt: skip
        assert [found[f"layers.{i}.{part}"] for i in range(4)] == [f"a{n}" for n in wanted.split()]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e4, 0.0])
def test_a_token_of_unusual_numbers_concerns_its_request_alone(
    folders: dict[str, Path], value: float
) -> None:
    """In layers of several formats with a8; large numbers and zeros are numbers."""
    engine = Engine.load(str(folders["mixed"]), device="cpu", activations="a8", prefix_cache=False)
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=1, stop_ids=())
    prompts = [[0, *range(3, 30)], [0, 40, 5, 41], [0, *range(7, 11)]]
    usual = engine.generate(prompts, params)
    assert 40 not in {token for answer in usual for token in answer.token_ids}
    with spoiled(engine, 40, value):
        found = engine.generate(prompts, params)
        alone = engine.generate(prompts[1:2], params)[0]
    for number in (0, 2):
        assert found[number].logprobs == usual[number].logprobs
    if math.isfinite(value):
        assert found[1].finish_reason == "length"
        assert found[1].logprobs == alone.logprobs != usual[1].logprobs
    else:
        assert (found[1].finish_reason, found[1].token_ids) == ("error", ())
        assert "gave NaN" in (found[1].error or "")
