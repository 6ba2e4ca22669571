"""One random model written in every layout comes back with exactly the values written."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dsv4.checkpoint.rank_slices import Selection
from dsv4.checkpoint.reader import Checkpoint, LoadReport, open_checkpoint
from dsv4.config import ModelConfig
from dsv4.errors import CheckpointError, OptionError
from dsv4.formats.quantized import Fp8BlockTensor, Mxfp4Tensor, Nvfp4Tensor, Weight
from tests.checkpoint import tiny, writers

EXPERT_TYPES = {
    "official": Mxfp4Tensor,
    "base": Fp8BlockTensor,
    "fp8-experts": Fp8BlockTensor,
    "modelopt-experts": Nvfp4Tensor,
    "modelopt-full": Nvfp4Tensor,
    "compressed-tensors": Nvfp4Tensor,
    "transformers-fp8": Fp8BlockTensor,
}
LAYOUT_NAMES = {
    "official": "official",
    "base": "official-fp8",
    "fp8-experts": "official-fp8",
    "modelopt-experts": "modelopt-experts",
    "modelopt-full": "modelopt-full",
    "compressed-tensors": "compressed-tensors",
    "transformers-fp8": "transformers-fp8",
    "plain-official": "plain",
    "plain-transformers": "plain",
    "plain-hybrid": "plain",
}


@pytest.fixture(scope="module")
def model() -> tiny.Model:
    return tiny.random_model()


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(folder, ModelConfig.from_folder(folder))


def values(weight: Weight) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return weight if weight.dtype == torch.int64 else weight.float()
    return weight.dequantize()


def assert_equal(loaded: dict[str, Weight], truth: tiny.Model) -> None:
    expected = writers.canonical(truth)
    assert loaded.keys() == expected.keys()
    for name, weight in loaded.items():
        found = values(weight).numpy()
        assert found.shape == expected[name].shape, name
        assert np.array_equal(found, expected[name]), name


@pytest.mark.parametrize("layout", list(writers.LAYOUTS))
def test_every_layout_loads_with_its_exact_values(layout, model, tmp_path) -> None:
    written = writers.LAYOUTS[layout](model)
    checkpoint = opened(writers.save(written, tmp_path))
    assert checkpoint.layout == LAYOUT_NAMES[layout]
    seen: list[tuple[int, int]] = []
    loaded = checkpoint.load(progress=lambda done, total: seen.append((done, total)))
    assert_equal(loaded, written.truth)
    expert = EXPERT_TYPES.get(layout, torch.Tensor)
    assert isinstance(loaded["layers.1.ffn.experts.w13"], expert)
    assert seen[-1] == (checkpoint.nbytes, checkpoint.nbytes)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    unused = set(written.disk) - set(checkpoint.ignored)
    used = {
        t.name for s in checkpoint.sources.values() for c in s.matrices for t in c.stored.tensors
    }
    assert unused == used
    assert loaded["norm.weight"].dtype == torch.float32
    assert loaded["layers.0.ffn.gate.tid2eid"].dtype == torch.int64


@pytest.mark.parametrize("family", ["official", "transformers", "hybrid"])
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_plain_weights_keep_their_dtype_unless_asked(family, dtype, model, tmp_path) -> None:
    write = getattr(writers, f"plain_{family}")
    checkpoint = opened(writers.save(write(model, dtype), tmp_path, shards=1))
    stored = {"BF16": torch.bfloat16, "F32": torch.float32}[dtype]
    loaded = checkpoint.load()
    wide = checkpoint.load(dtype=torch.float32)
    for name in ("embed.weight", "layers.1.attn.wq_a.weight", "layers.2.ffn.experts.w2"):
        assert loaded[name].dtype == stored
        assert wide[name].dtype == torch.float32
        assert torch.equal(loaded[name].float(), wide[name])


def test_drafts_and_activation_scales_are_ignored_by_name(model, tmp_path) -> None:
    written = writers.modelopt_experts(model)
    ignored = opened(writers.save(written, tmp_path)).ignored
    expected = {n for n in written.disk if n.startswith("mtp.") or n.endswith("input_scale")}
    assert set(ignored) == expected
    assert "draft" in ignored["mtp.0.enorm.weight"]
    assert "activation" in ignored["layers.0.ffn.experts.0.w1.input_scale"]


def test_globals_that_differ_are_kept_exactly(model, tmp_path) -> None:
    written = writers.modelopt_experts(model, shared_global=False)
    loaded = opened(writers.save(written, tmp_path)).load()
    stack = loaded["layers.1.ffn.experts.w13"]
    assert isinstance(stack, Nvfp4Tensor)
    assert stack.global_scale.shape == (4, 2)
    assert_equal(loaded, written.truth)


def test_scales_of_a_stack_must_end_with_the_gate(model, tmp_path) -> None:
    """Tiles of 64 over 2 x 96 rows: the second lies across gate and up."""
    written = writers.transformers_fp8(model)
    written.quantization["weight_block_size"] = [64, 64]
    name = "model.layers.1.ffn.experts.gate_up_proj_scale_inv"
    written.disk[name] = ("F32", np.ones((4, 3, 3), np.float32))
    with pytest.raises(CheckpointError, match=r"tiles of 64 lie across the gate's.*96 rows"):
        opened(writers.save(written, tmp_path))


def test_a_stack_and_its_parts_are_one_too_many(model, tmp_path) -> None:
    written = writers.transformers_fp8(model)
    name = "model.layers.1.ffn.experts.2.w1.weight_scale_inv"
    written.disk[name] = ("F32", np.ones((3, 5), np.float32))
    with pytest.raises(CheckpointError, match=r"fills the same parameter as .*2\.w1"):
        opened(writers.save(written, tmp_path))


def test_globals_that_agree_become_one(model, tmp_path) -> None:
    loaded = opened(writers.save(writers.modelopt_experts(model), tmp_path)).load()
    stack = loaded["layers.1.ffn.experts.w13"]
    assert isinstance(stack, Nvfp4Tensor)
    assert stack.global_scale.shape == (4, 1)


def test_scalars_of_shape_one_are_accepted(model, tmp_path) -> None:
    written = writers.modelopt_experts(model)
    for name, (dtype, array) in written.disk.items():
        if name.endswith(("weight_scale_2", "input_scale")):
            written.disk[name] = (dtype, array.reshape(1))
    assert_equal(opened(writers.save(written, tmp_path)).load(), written.truth)


def test_activation_scales_may_be_absent(model, tmp_path) -> None:
    written = writers.modelopt_experts(model)
    written.disk = {n: v for n, v in written.disk.items() if not n.endswith("input_scale")}
    assert_equal(opened(writers.save(written, tmp_path)).load(), written.truth)


def test_mxfp4_becomes_nvfp4_while_loading_bit_for_bit(model, tmp_path) -> None:
    written = writers.official(model)
    checkpoint = opened(writers.save(written, tmp_path))
    report = LoadReport()
    loaded = checkpoint.load(mxfp4_as_nvfp4=True, report=report)
    assert isinstance(loaded["layers.0.ffn.experts.w2"], Nvfp4Tensor)
    assert_equal(loaded, written.truth)
    assert len(report.casts) == 8
    assert not report.inexact
    source = checkpoint.load()["layers.1.ffn.experts.w13"]
    assert torch.equal(source.packed, loaded["layers.1.ffn.experts.w13"].packed)


def test_a_wide_spread_is_cast_per_half_and_reported(model, tmp_path) -> None:
    written = writers.official(model)
    name = "layers.1.ffn.experts.2.w3.scale"
    dtype, scale = written.disk[name]
    written.disk[name] = (dtype, scale - 16)  # far below w1: both halves fit their own window
    lone = "layers.1.ffn.experts.1.w2.scale"
    wide = written.disk[lone][1].copy()
    wide[0, 0] -= 30  # and one block below any window
    written.disk[lone] = (dtype, wide)
    checkpoint = opened(writers.save(written, tmp_path))
    report = LoadReport()
    cast = checkpoint.load(mxfp4_as_nvfp4=True, report=report)
    same = checkpoint.load()
    halves = "layers.1.ffn.experts.w13"
    assert cast[halves].global_scale.shape == (4, 2)
    assert torch.equal(cast[halves].dequantize(), same[halves].dequantize())
    assert report.inexact == ["layers.1.ffn.experts.w2"]
    assert report.casts["layers.1.ffn.experts.w2"].inexact_blocks == 1


@pytest.mark.parametrize("layout", ["official", "modelopt-experts", "plain-transformers"])
def test_a_rank_gets_its_slice(layout, model, tmp_path) -> None:
    checkpoint = opened(writers.save(writers.LAYOUTS[layout](model), tmp_path))
    whole = {name: values(w) for name, w in checkpoint.load().items()}
    share = Selection(layers=range(1, 3), experts=range(1, 3), heads=range(2, 4))
    part = checkpoint.load(select=share)
    assert {n.split(".")[1] for n in part} == {"1", "2"}
    for name, weight in part.items():
        full, found = whole[name], values(weight)
        rest = name.split(".", 2)[2]
        if rest.startswith("ffn.experts."):
            full = full[1:3]
        elif rest == "attn.wq_b.weight":
            full = full[64:128]
        elif rest == "attn.attn_sink":
            full = full[2:4]
        elif rest == "attn.wo_a.weight":
            full = full[32:64]
        elif rest == "attn.wo_b.weight":
            full = full[:, 32:64]
        assert torch.equal(full, found), name


def test_layers_bring_embedding_and_head(model, tmp_path) -> None:
    checkpoint = opened(writers.save(writers.plain_official(model), tmp_path))
    assert "embed.weight" in checkpoint.load(layers=range(0, 1))
    last = checkpoint.load(layers=range(3, 4))
    assert {"head.weight", "norm.weight", "hc_head_fn"} <= last.keys()
    assert "embed.weight" not in last


@pytest.mark.parametrize(
    "share",
    [
        Selection(layers=range(3, 9)),
        Selection(experts=range(2, 2)),
        Selection(heads=range(1, 3)),
        Selection(heads=range(0, 4, 2)),
    ],
)
def test_impossible_slices_are_refused(share, model, tmp_path) -> None:
    checkpoint = opened(writers.save(writers.plain_official(model), tmp_path))
    with pytest.raises(OptionError):
        checkpoint.load(select=share)
