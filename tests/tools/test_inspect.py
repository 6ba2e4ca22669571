"""`inspect`: what is in a folder, fast, from headers alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4.config import ModelConfig
from dsv4.errors import CheckpointError, ConfigError
from dsv4.tools.inspect import inspect_checkpoint
from dsv4.util.models import model_folder
from tests.checkpoint import tiny, writers


def test_formats_by_group(tmp_path) -> None:
    summary = inspect_checkpoint(writers.save(writers.made("modelopt-experts"), tmp_path))
    formats = {group.name: set(group.formats) for group in summary.groups}
    assert formats["routed experts"] == {"nvfp4"}
    assert formats["shared expert"] == {"fp8"}
    assert formats["attention"] == {"fp8", "bf16", "fp32"}
    assert formats["router"] == {"bf16", "fp32", "i64"}
    assert summary.layout == "modelopt-experts"
    assert summary.draft.kind == "mtp"
    assert summary.draft.expert_dtype == "I8"  # the draft stays MXFP4: judged on its own
    assert summary.names == "official"
    assert sum(summary.ignored.values()) == summary.draft.num_tensors + 48
    assert not summary.findings
    assert summary.kinds == [
        "layers 0: 1 x window only; routed by token id",
        "layers 1-3: 2 x ratio 4, 1 x ratio 128; scored router",
    ]
    json.dumps(summary.to_json())


def test_dspark_draft(tmp_path) -> None:
    written = writers.made("official")
    written.disk["mtp.0.markov_head.markov_w1.weight"] = written.disk.pop("mtp.0.enorm.weight")
    assert inspect_checkpoint(writers.save(written, tmp_path)).draft.kind == "dspark"


def test_a_broken_checkpoint_is_described_not_raised(tmp_path) -> None:
    written = writers.made("official")
    del written.disk["norm.weight"]
    summary = inspect_checkpoint(writers.save(written, tmp_path))
    assert len(summary.findings) == 1
    assert "norm.weight" in summary.findings[0]


def test_folders() -> None:
    assert (model_folder("tiny") / "config.json").is_file()
    with pytest.raises(CheckpointError, match="neither a folder"):
        model_folder("no/such/folder")


def test_no_config(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        inspect_checkpoint(tmp_path)


def flash_headers(folder: Path) -> int:
    """The 69,187 tensors of Flash as sparse files: headers are real, data are holes."""
    config = dict(tiny.CONFIG, vocab_size=129280, hidden_size=4096, num_hidden_layers=43)
    config |= {"num_attention_heads": 64, "head_dim": 512, "qk_rope_head_dim": 64}
    config |= {"q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "num_hash_layers": 3}
    config |= {"index_n_heads": 64, "index_head_dim": 128, "n_routed_experts": 256}
    config |= {"num_experts_per_tok": 6, "moe_intermediate_size": 2048, "sliding_window": 128}
    config["compress_ratios"] = [0, 0, *([4, 128] * 20), 4, 0]
    config["expert_dtype"] = "fp4"
    config["quantization_config"] = writers.FP8_CONFIG
    (folder / "config.json").write_text(json.dumps(config))
    shards: dict[str, dict[str, tuple[str, list[int]]]] = {}
    for name, dtype, shape in official_tensors(ModelConfig.from_dict(config)):
        shard = name.split(".")[1] if name.startswith("layers.") else "rest"
        shards.setdefault(f"model-{shard}.safetensors", {})[name] = (dtype, shape)
    weight_map = {}
    for file, tensors in shards.items():
        header, offset = {}, 0
        for name, (dtype, shape) in tensors.items():
            size = {"BF16": 2, "F32": 4, "I64": 8}.get(dtype, 1)
            for n in shape:
                size *= n
            offsets = [offset, offset + size]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            offset += size
        raw = json.dumps(header).encode()
        with open(folder / file, "wb") as out:
            out.write(len(raw).to_bytes(8, "little") + raw)
            out.truncate(8 + len(raw) + offset)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return len(weight_map)


def official_tensors(c: ModelConfig):
    """(name, dtype, shape) of the official Flash files, from the spec's tables."""
    d, v = c.hidden_size, c.vocab_size
    yield from (("embed.weight", "BF16", [v, d]), ("head.weight", "BF16", [v, d]))
    yield "norm.weight", "BF16", [d]
    yield from _head_mix("", d)
    for layer in range(c.num_layers):
        yield from _block(c, f"layers.{layer}.", c.compress_ratios[layer], layer < 3)
    yield from _block(c, "mtp.0.", 0, False)
    for name in ("e_proj", "h_proj"):
        yield from _fp8(f"mtp.0.{name}", d, d)
    for name in ("enorm", "hnorm", "norm"):
        yield f"mtp.0.{name}.weight", "BF16", [d]
    yield from _head_mix("mtp.0.", d)


def _head_mix(p: str, d: int):
    yield from ((f"{p}hc_head_fn", "F32", [4, 4 * d]), (f"{p}hc_head_base", "F32", [4]))
    yield f"{p}hc_head_scale", "F32", [1]


def _fp8(module: str, rows: int, cols: int):
    yield f"{module}.weight", "F8_E4M3", [rows, cols]
    yield f"{module}.scale", "F8_E8M0", [-(-rows // 128), -(-cols // 128)]


def _block(c: ModelConfig, p: str, ratio: int, hashed: bool):
    d, inter = c.hidden_size, c.moe_intermediate_size
    for name, rows, cols in (
        ("wq_a", 1024, d),
        ("wq_b", 32768, 1024),
        ("wkv", 512, d),
        ("wo_a", 8192, 4096),
        ("wo_b", d, 8192),
    ):
        yield from _fp8(f"{p}attn.{name}", rows, cols)
    for name, size in (("q_norm", 1024), ("kv_norm", 512)):
        yield f"{p}attn.{name}.weight", "BF16", [size]
    yield f"{p}attn.attn_sink", "F32", [64]
    for name in ("attn_norm", "ffn_norm"):
        yield f"{p}{name}.weight", "BF16", [d]
    for half in ("hc_attn", "hc_ffn"):
        yield f"{p}{half}_fn", "F32", [24, 4 * d]
        yield f"{p}{half}_base", "F32", [24]
        yield f"{p}{half}_scale", "F32", [3]
    yield f"{p}ffn.gate.weight", "BF16", [256, d]
    if hashed:
        yield f"{p}ffn.gate.tid2eid", "I64", [c.vocab_size, 6]
    else:
        yield f"{p}ffn.gate.bias", "F32", [256]
    for e in range(256):
        for name, rows, cols in (("w1", inter, d), ("w3", inter, d), ("w2", d, inter)):
            yield f"{p}ffn.experts.{e}.{name}.weight", "I8", [rows, cols // 2]
            yield f"{p}ffn.experts.{e}.{name}.scale", "F8_E8M0", [rows, cols // 32]
    for name, rows, cols in (("w1", inter, d), ("w3", inter, d), ("w2", d, inter)):
        yield from _fp8(f"{p}ffn.shared_experts.{name}", rows, cols)
    if ratio:
        yield from _compressor(f"{p}attn.compressor.", 512, d, ratio)
    if ratio == 4:
        yield from _fp8(f"{p}attn.indexer.wq_b", 8192, 1024)
        yield f"{p}attn.indexer.weights_proj.weight", "BF16", [64, d]
        yield from _compressor(f"{p}attn.indexer.compressor.", 128, d, ratio)


def _compressor(p: str, width: int, d: int, ratio: int):
    wide = width * (2 if ratio == 4 else 1)
    yield f"{p}ape", "F32", [ratio, wide]
    yield f"{p}wkv.weight", "BF16", [wide, d]
    yield f"{p}wgate.weight", "BF16", [wide, d]
    yield f"{p}norm.weight", "BF16", [width]


MEASURE = """
import json, sys
from pathlib import Path
from dsv4.tools.inspect import inspect_checkpoint
summary = inspect_checkpoint(Path(sys.argv[1]))
# not ru_maxrss: that one begins with what the parent process held
status = Path("/proc/self/status").read_text().split()
print(json.dumps({
    "bytes": int(status[status.index("VmHWM:") + 1]) * 1024,
    "torch": "torch" in sys.modules,
    "tensors": summary.num_tensors,
    "size": summary.nbytes,
    "findings": summary.findings,
    "layout": summary.layout,
}))
"""


def test_flash_is_inspected_without_torch_in_little_memory(tmp_path) -> None:
    """The whole of Flash by its real names and shapes: nothing missing, nothing left over."""
    assert flash_headers(tmp_path) == 69187
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True
    )
    found = json.loads(run.stdout)
    assert found["findings"] == []
    assert found["tensors"] == 69187
    assert found["size"] == 159_609_485_896
    assert found["layout"] == "official"
    assert not found["torch"]
    assert found["bytes"] < 2**30
