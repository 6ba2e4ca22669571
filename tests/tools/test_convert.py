"""`convert`: exact where it can be, honest where not, and never half a result."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import DeepseekV4ForCausalLM

from dsv4.checkpoint.files import writer
from dsv4.checkpoint.reader import open_checkpoint
from dsv4.config import ModelConfig
from dsv4.errors import CheckpointError, ConfigError, OptionError
from dsv4.formats.quantized import Weight
from dsv4.tools.check import check_checkpoint
from dsv4.tools.convert import convert as tool
from dsv4.tools.convert.convert import JOURNAL, Conversion, convert
from dsv4.tools.convert.units import TARGETS
from tests.checkpoint import writers

SHARD = 200_000


def values(weight: Weight) -> torch.Tensor:
    return weight.float() if isinstance(weight, torch.Tensor) else weight.dequantize()


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(folder, ModelConfig.from_folder(folder))
    return {name: values(weight) for name, weight in checkpoint.load().items()}


def run(layout: str, target: str, tmp_path: Path, **options) -> tuple[Path, Path, Conversion]:
    source = writers.save(writers.made(layout), tmp_path / "source")
    out = tmp_path / "out"
    return source, out, convert(source, out, target, shard_bytes=3 * SHARD, **options)


EXACT = [  # conversions without loss
    ("official", "nvfp4"),
    ("official", "official"),
    ("official", "fp8"),
    ("official", "bf16"),
    ("fp8-experts", "bf16"),
    ("fp8-experts", "fp8"),
    ("modelopt-experts", "nvfp4"),
    ("modelopt-full", "nvfp4-all"),
    ("compressed-tensors", "nvfp4"),
    ("plain-transformers", "bf16"),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", list(writers.LAYOUTS))
def test_every_layout_to_every_target(layout: str, target: str, tmp_path) -> None:
    source, out, result = run(layout, target, tmp_path)
    before, after = loaded(source), loaded(out)
    assert before.keys() == after.keys()
    if (layout, target) in EXACT:
        assert result.inexact == {}
        assert all(torch.equal(before[name], after[name]) for name in before)
    # what the report says is what a reader sees: error per group, exactness
    config = ModelConfig.from_folder(out)
    sources = open_checkpoint(out, config).sources
    for group, stats in result.groups.items():
        names = [name for name in after if sources[name].parameter.group == group]
        same = all(torch.equal(before[name], after[name]) for name in names)
        assert same == (group in result.exact) == (stats.exact == stats.matrices), group
        changed = [name for name in names if not torch.equal(before[name], after[name])]
        error = sum(float((after[n].double() - before[n].double()).square().sum()) for n in changed)
        assert stats.error == pytest.approx(error, rel=1e-4)
        assert stats.cosine <= 1 + 1e-9
        limits = {"bf16": 0.003, "fp8": 0.04, "official": 0.13}  # scales of MXFP4 are coarse
        assert stats.relative_rms <= (0.0 if group in result.exact else limits.get(target, 0.11))
    assert check_checkpoint(out, values=True).ok
    assert not (out / JOURNAL).exists()
    assert not list(out.glob(".*"))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == result.nbytes
    assert len(set(index["weight_map"].values())) == result.num_shards > 1


def test_exact_routed_experts_in_full_nvfp4(tmp_path) -> None:
    _, _, result = run("official", "nvfp4-all", tmp_path)
    assert "routed experts" in result.exact
    assert "attention" not in result.exact
    assert all(".ffn.experts." not in name for name in result.inexact)


def test_experts_only_follows_the_modelopt_layout(tmp_path) -> None:
    source, out, _ = run("official", "nvfp4", tmp_path)
    checkpoint = open_checkpoint(out, ModelConfig.from_folder(out))
    assert checkpoint.layout == "modelopt-experts"
    expected = writers.made("modelopt-experts").disk
    found = checkpoint.manifest.scan.tensors
    assert found.keys() == expected.keys()
    for name, (dtype, array) in expected.items():
        assert (found[name].dtype, found[name].shape) == (dtype, array.shape), name
    config = json.loads((out / "config.json").read_text())
    quantization = config["quantization_config"]
    theirs = writers.made("modelopt-experts").quantization
    assert {k: quantization[k] for k in theirs} == theirs
    assert quantization["producer"]["name"]
    assert "mtp.*" in quantization["ignore"]
    hf = json.loads((out / "hf_quant_config.json").read_text())
    assert hf["quantization"]["quantized_layers"] == quantization["quantized_layers"]
    # nibbles untouched, draft handed on byte for byte
    for name in ("layers.1.ffn.experts.2.w3.weight", "mtp.0.ffn.experts.1.w1.scale"):
        assert raw(out, name) == raw(source, name)


def test_official_follows_the_publisher(tmp_path) -> None:
    """From BF16: the tensors of an official checkpoint, their types and shapes, and its config."""
    _, out, _ = run("plain-official", "official", tmp_path)
    checkpoint = open_checkpoint(out, ModelConfig.from_folder(out))
    assert checkpoint.layout == "official"
    official = writers.made("official")
    expected = {n: v for n, v in official.disk.items() if not n.startswith("mtp.")}
    found = checkpoint.manifest.scan.tensors
    assert {n for n in found if not n.startswith("mtp.")} == expected.keys()
    for name, (dtype, array) in expected.items():
        assert (found[name].dtype, found[name].shape) == (dtype, array.shape), name
    config = json.loads((out / "config.json").read_text())
    assert config["expert_dtype"] == "fp4"
    assert config["quantization_config"] == official.quantization


def raw(folder: Path, name: str) -> bytes:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    info = writer.read_header(folder / index["weight_map"][name])[name]
    with open(info.file, "rb") as file:
        file.seek(info.start)
        return file.read(info.nbytes)


def test_full_nvfp4_follows_the_modelopt_layout(tmp_path) -> None:
    _, out, result = run("official", "nvfp4-all", tmp_path)
    checkpoint = open_checkpoint(out, ModelConfig.from_folder(out))
    assert checkpoint.layout == "modelopt-full"
    expected = set(writers.made("modelopt-full").disk)
    scorer = [n for n in expected if "weights_proj." in n and not n.endswith(".weight")]
    assert set(checkpoint.manifest.scan.tensors) == expected - set(scorer)  # kept in BF16
    assert result.dropped > 0
    quantization = json.loads((out / "config.json").read_text())["quantization_config"]
    assert quantization["quant_method"] == "modelopt"
    assert quantization["quant_algo"] == "NVFP4"


def test_w1_and_w3_get_one_global(tmp_path) -> None:
    _, out, _ = run("plain-official", "nvfp4", tmp_path)
    weights = open_checkpoint(out, ModelConfig.from_folder(out)).load()
    assert weights["layers.1.ffn.experts.w13"].global_scale.shape == (4, 1)


def test_activation_scales_are_handed_on_or_said_to_be_missing(tmp_path) -> None:
    source, out, result = run("compressed-tensors", "nvfp4", tmp_path)
    stored = torch.frombuffer(
        bytearray(raw(source, "layers.0.ffn.experts.0.w1.input_global_scale")), dtype=torch.float32
    )
    new = torch.frombuffer(
        bytearray(raw(out, "layers.0.ffn.experts.0.w1.input_scale")), dtype=torch.float32
    )
    assert float(new) == pytest.approx(1 / float(stored))
    assert result.groups["routed experts"].uncalibrated == 0
    _, _, other = run("official", "nvfp4", tmp_path / "other")
    assert other.groups["routed experts"].uncalibrated == 48


@pytest.mark.parametrize("scales", ["four-over-six", "mse"])
def test_better_scales_lose_less(scales: str, tmp_path) -> None:
    _, _, plain = run("plain-official", "nvfp4", tmp_path)
    _, _, better = run("plain-official", "nvfp4", tmp_path / "b", scales=scales)
    group = "routed experts"
    ratio = better.groups[group].relative_rms / plain.groups[group].relative_rms
    assert ratio < {"four-over-six": 0.95, "mse": 0.9}[scales]


def test_the_result_is_read_by_safetensors_and_transformers(tmp_path) -> None:
    _, out, _ = run("official", "bf16", tmp_path)
    for path in out.glob("*.safetensors"):
        with safe_open(path, "pt") as file:  # needs every tensor aligned
            for name in file.keys():  # noqa: SIM118 - not a dict
                file.get_tensor(name)
    config = json.loads((out / "config.json").read_text())
    config |= {"num_nextn_predict_layers": 0, "compress_ratios": config["compress_ratios"][:4]}
    (out / "config.json").write_text(json.dumps(config))
    model, info = DeepseekV4ForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ours = loaded(out)["layers.2.ffn.experts.w13"]
    theirs = model.state_dict()["model.layers.2.mlp.experts.gate_up_proj"]
    assert torch.equal(ours, theirs)


def test_side_files_are_copied(tmp_path) -> None:
    source = writers.save(writers.made("official"), tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    (source / "notes.bin").write_text("x")
    convert(source, tmp_path / "out", "fp8")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out" / "notes.bin").exists()


# --- interruption ---------------------------------------------------------------------------------

CHILD = """
import os, sys, time
from pathlib import Path
from dsv4.checkpoint.files import writer
from dsv4.tools.convert.convert import convert
finish, left = writer.ShardWriter.finish, int(sys.argv[3])
def slow(self):
    global left
    if left == 0:
        print("finishing", flush=True)
        time.sleep(600)  # the parent kills us here, with a shard written but not renamed
    left -= 1
    finish(self)
writer.ShardWriter.finish = slow
convert(Path(sys.argv[1]), Path(sys.argv[2]), "nvfp4", shard_bytes=200_000)
"""


def test_a_killed_conversion_goes_on(tmp_path) -> None:
    shards_before = 3
    source = writers.save(writers.made("official"), tmp_path / "source")
    out = tmp_path / "out"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(source), str(out), str(shards_before)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "finishing\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    done = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(done) == shards_before
    with pytest.raises(ConfigError, match=r"config\.json"):  # what is there does not look complete
        ModelConfig.from_folder(out)
    stamps = {name: (out / name).stat().st_mtime_ns for name in done}
    result = convert(source, out, "nvfp4", shard_bytes=SHARD)
    assert result.resumed == shards_before
    assert stamps == {name: (out / name).stat().st_mtime_ns for name in done}
    whole = convert(source, tmp_path / "whole", "nvfp4", shard_bytes=SHARD)
    assert result.groups == whole.groups
    for path in (tmp_path / "whole").glob("*.safetensors"):
        assert path.read_bytes() == (out / path.name).read_bytes()
    assert not list(out.glob(".*"))


def test_a_full_disk(tmp_path, monkeypatch) -> None:
    source = writers.save(writers.made("official"), tmp_path / "source")
    out = tmp_path / "out"
    write, count = writer.ShardWriter.write, 0

    def full(self, name, data):
        nonlocal count
        count += 1
        if count == 30:
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise writer.write_error(self.partial, error)
        write(self, name, data)

    monkeypatch.setattr(writer.ShardWriter, "write", full)
    with pytest.raises(CheckpointError, match="disk is full"):
        convert(source, out, "fp8", shard_bytes=SHARD)
    assert not (out / "config.json").exists()
    assert not list(out.glob(".*"))
    monkeypatch.undo()
    assert convert(source, out, "fp8", shard_bytes=SHARD).resumed >= 0
    assert check_checkpoint(out).ok


def test_a_really_full_device(tmp_path) -> None:
    """/dev/full answers every write with ENOSPC; nothing is left behind."""
    tensor = writer.OutTensor("a", "U8", (1 << 20,))
    shard = writer.ShardWriter(tmp_path / "a.safetensors", [tensor])
    shard.partial = Path("/dev/full")
    with open("/dev/full", "w+b", buffering=0) as device:
        shard._file = device
        with pytest.raises(CheckpointError, match="disk is full"):
            shard.write("a", torch.zeros(1 << 20, dtype=torch.uint8))
    assert not (tmp_path / "a.safetensors").exists()


def test_too_little_space_is_said_before_writing(tmp_path, monkeypatch) -> None:
    source = writers.save(writers.made("official"), tmp_path / "source")
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(tool.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="free"):
        convert(source, tmp_path / "out", "fp8")
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_a_disk_that_forgets_is_noticed(tmp_path, monkeypatch) -> None:
    source = writers.save(writers.made("official"), tmp_path / "source")
    finish = writer.ShardWriter.finish

    def damaged(self):
        self._file.seek(-1, os.SEEK_END)
        last = self._file.read(1)
        self._file.seek(-1, os.SEEK_END)
        self._file.write(bytes([last[0] ^ 1]))
        finish(self)

    monkeypatch.setattr(writer.ShardWriter, "finish", damaged)
    with pytest.raises(CheckpointError, match="reads back differently"):
        convert(source, tmp_path / "out", "fp8")
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_another_conversion_is_not_mixed_in(tmp_path, monkeypatch) -> None:
    source = writers.save(writers.made("official"), tmp_path / "source")
    out = tmp_path / "out"
    monkeypatch.setattr(tool, "_finish", lambda *arguments: None)
    convert(source, out, "fp8", shard_bytes=SHARD)
    monkeypatch.undo()
    with pytest.raises(OptionError, match="another, unfinished conversion"):
        convert(source, out, "nvfp4", shard_bytes=SHARD)
    (out / "model-00001-of-00012.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="model-00001"):
        convert(source, out, "fp8", shard_bytes=SHARD)
    assert not (out / "config.json").exists()


def test_wrong_use(tmp_path) -> None:
    source = writers.save(writers.made("official"), tmp_path / "source")
    with pytest.raises(OptionError, match="nvfp4-all"):
        convert(source, tmp_path / "out", "int4")
    with pytest.raises(OptionError, match="mse"):
        convert(source, tmp_path / "out", "nvfp4", scales="best")
    with pytest.raises(OptionError, match="itself"):
        convert(source, source, "nvfp4")
    with pytest.raises(OptionError, match="shard size"):
        convert(source, tmp_path / "out", "nvfp4", shard_bytes=0)
    other = writers.save(writers.made("official"), tmp_path / "other")
    with pytest.raises(OptionError, match="already holds"):
        convert(source, other, "nvfp4")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    with pytest.raises(OptionError, match="not empty"):
        convert(source, tmp_path / "full", "nvfp4")


def test_nan_in_the_source_is_named(tmp_path) -> None:
    written = writers.made("plain-official")
    name = "layers.1.ffn.experts.2.w2.weight"
    dtype, array = written.disk[name]
    changed = array.copy()
    changed[3, 4] = 0x7FC0
    written.disk[name] = (dtype, changed)
    source = writers.save(written, tmp_path / "source")
    for target in ("nvfp4", "fp8", "bf16"):
        with pytest.raises(CheckpointError, match=name):
            convert(source, tmp_path / target, target)
