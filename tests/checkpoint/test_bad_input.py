"""Every way a checkpoint can be wrong ends in a CheckpointError that names file and tensor."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dsv4.checkpoint.files.header import MAX_HEADER_BYTES, read_header
from dsv4.checkpoint.reader import open_checkpoint
from dsv4.config import ModelConfig
from dsv4.errors import CheckpointError
from dsv4.tools.check import check_checkpoint
from tests.checkpoint import tiny, writers

W1 = "layers.1.ffn.experts.0.w1"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def nvfp4() -> writers.Written:
    return writers.made("modelopt-experts")


def load(folder: Path) -> None:
    open_checkpoint(folder, ModelConfig.from_folder(folder)).load()


def refused(folder: Path, *words: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    for word in words:
        assert word in message, message
    return message


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


# --- files and headers ----------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1, -1000])
def test_truncated_file(keep: int, nvfp4, tmp_path) -> None:
    path = first_shard(writers.save(nvfp4, tmp_path))
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    refused(tmp_path, path.name, "cut off" if keep not in (0, 4, 8) or keep == 8 else "short")


def test_bytes_behind_the_end(nvfp4, tmp_path) -> None:
    path = first_shard(writers.save(nvfp4, tmp_path))
    path.write_bytes(path.read_bytes() + b"more")
    refused(tmp_path, path.name, "followed by other bytes")


def header_file(path: Path, header: object, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def entry(start: int, stop: int, shape: object = None, dtype: object = "U8") -> dict:
    shape = [stop - start] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


BAD_HEADERS: dict[str, tuple[object, str]] = {
    "overlap": ({"a": entry(0, 6), "b": entry(4, 8)}, "overlaps"),
    "same bytes": ({"a": entry(0, 8), "b": entry(0, 8)}, "overlaps"),
    "hole": ({"a": entry(0, 3), "b": entry(4, 8)}, "hole"),
    "past the end": ({"a": entry(0, 800)}, "cut off"),
    "ends early": ({"a": entry(0, 4)}, "other bytes"),
    "negative": ({"a": entry(-8, 0, [8])}, "data_offsets"),
    "reversed": ({"a": entry(8, 0, [8])}, "8 bytes"),
    "overflow": ({"a": entry(0, 8, [2**32, 2**32, 2**32])}, "bytes"),
    "overflow to 8": ({"a": entry(0, 8, [2**61 + 1, 8])}, "bytes"),
    "beyond 64 bits": ({"a": entry(0, 2**64 + 8)}, "whole numbers"),
    "negative shape": ({"a": entry(0, 8, [-8])}, "whole numbers"),
    "float shape": ({"a": entry(0, 8, [8.0])}, "whole numbers"),
    "bool shape": ({"a": entry(0, 8, [True, 8])}, "whole numbers"),
    "deep shape": ({"a": entry(0, 8, [1] * 50 + [8])}, "axes"),
    "dtype": ({"a": entry(0, 8, dtype="Q7")}, "dtype"),
    "dtype list": ({"a": entry(0, 8, dtype=["U8"])}, "dtype"),
    "odd nibbles": ({"a": entry(0, 8, [17], dtype="F4")}, "bytes"),
    "extra key": ({"a": {**entry(0, 8), "code": "x"}}, "header entry"),
    "no entry": ({"a": 5}, "header entry"),
    "array": ([1, 2], "not an object"),
    "no json": (b"{not json", "not valid JSON"),
    "no utf8": (b'{"\xff": 1}', "not valid JSON"),
    "deep json": (b"[" * 100_000, "not valid JSON"),
    "duplicate": (b'{"a":' + json.dumps(entry(0, 8)).encode() + b',"a":{}}', "twice"),
}


@pytest.mark.parametrize("name", list(BAD_HEADERS))
def test_headers_that_lie(name: str, tmp_path) -> None:
    header, words = BAD_HEADERS[name]
    path = header_file(tmp_path / "x.safetensors", header, b"12345678")
    with pytest.raises(CheckpointError, match=words) as caught:
        read_header(path)
    assert "x.safetensors" in str(caught.value)


def test_a_header_of_200_mb_is_not_even_read(tmp_path) -> None:
    path = tmp_path / "x.safetensors"
    with open(path, "wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(210_000_000)  # sparse
    with pytest.raises(CheckpointError, match=str(MAX_HEADER_BYTES)):
        read_header(path)
    path.write_bytes((2**64 - 1).to_bytes(8, "little"))
    with pytest.raises(CheckpointError, match="header length"):
        read_header(path)


@pytest.mark.parametrize("missing", [1, 8, 9])
def test_a_header_ends_inside_its_file(missing: int, tmp_path) -> None:
    """Also where the bytes that are there would do: the header says that there were more."""
    path = tmp_path / "x.safetensors"
    path.write_bytes((2 + missing).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match=f"header needs {10 + missing} bytes, .* has 10;"):
        read_header(path)


def test_good_headers_are_accepted(tmp_path) -> None:
    header = {"__metadata__": {"format": "pt"}, "a": entry(0, 8), "e": entry(8, 8, [0, 3])}
    found = read_header(header_file(tmp_path / "x.safetensors", header, b"12345678"))
    assert found["a"].nbytes == 8
    assert found["e"].shape == (0, 3)


# --- the index and the folder ---------------------------------------------------------------------


def change_index(folder: Path, change: Callable[[dict], None]) -> None:
    path = folder / INDEX
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_missing_shard(nvfp4, tmp_path) -> None:
    path = first_shard(writers.save(nvfp4, tmp_path))
    path.unlink()
    refused(tmp_path, path.name, "missing")


def test_missing_shard_without_an_index(nvfp4, tmp_path) -> None:
    path = first_shard(writers.save(nvfp4, tmp_path, shards=3))
    (tmp_path / INDEX).unlink()
    load(tmp_path)
    path.unlink()
    refused(tmp_path, path.name, "there are 3 files")


def test_index_entry_that_points_nowhere(nvfp4, tmp_path) -> None:
    writers.save(nvfp4, tmp_path)
    change_index(tmp_path, lambda m: m.update({"norm.weight": "model-00009.safetensors"}))
    refused(tmp_path, "model-00009.safetensors", "missing")


def test_index_entry_in_the_wrong_file(nvfp4, tmp_path) -> None:
    writers.save(nvfp4, tmp_path)
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))

    def swap(weight_map: dict) -> None:
        old = weight_map["norm.weight"]
        weight_map["norm.weight"] = names[1 - names.index(old)]

    change_index(tmp_path, swap)
    refused(tmp_path, "norm.weight", INDEX)


def test_tensor_that_the_index_does_not_know(nvfp4, tmp_path) -> None:
    writers.save(nvfp4, tmp_path)
    change_index(tmp_path, lambda m: m.pop("norm.weight"))
    refused(tmp_path, "norm.weight", "not in " + INDEX)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", ".."])
def test_path_traversal(name: str, nvfp4, tmp_path) -> None:
    folder = writers.save(nvfp4, tmp_path / "model")
    writers.save_file(tmp_path / "outside.safetensors", {"norm.weight": ("U8", np.zeros(1, "u1"))})
    change_index(folder, lambda m: m.update({"norm.weight": name}))
    refused(folder, "refused", "plain file name")


def test_symlink_out_of_the_folder(nvfp4, tmp_path) -> None:
    folder = writers.save(nvfp4, tmp_path / "model")
    path = first_shard(folder)
    path.rename(tmp_path / "elsewhere.safetensors")
    path.symlink_to(tmp_path / "elsewhere.safetensors")
    refused(folder, path.name, "link", "refused")


def test_links_of_the_hub_cache_are_followed(nvfp4, tmp_path) -> None:
    folder = writers.save(nvfp4, tmp_path / "models--a--b" / "snapshots" / "abc")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for path in folder.glob("*.safetensors"):
        path.rename(blobs / path.stem)
        path.symlink_to(Path("..") / ".." / "blobs" / path.stem)
    load(folder)


def test_tensor_twice(nvfp4, tmp_path) -> None:
    writers.save(nvfp4, tmp_path)
    (tmp_path / INDEX).unlink()
    extra = {"norm.weight": nvfp4.disk["norm.weight"]}
    writers.save_file(tmp_path / "z.safetensors", extra)
    refused(tmp_path, "norm.weight", "also in")


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'])
def test_broken_index(text: str, nvfp4, tmp_path) -> None:
    writers.save(nvfp4, tmp_path)
    (tmp_path / INDEX).write_text(text)
    refused(tmp_path, INDEX)


def test_index_with_a_key_twice(nvfp4, tmp_path) -> None:
    writers.save(nvfp4, tmp_path)
    path = tmp_path / INDEX
    text = path.read_text().replace(
        '"norm.weight":', '"norm.weight": "x.safetensors", "norm.weight":'
    )
    path.write_text(text)
    refused(tmp_path, INDEX, "norm.weight", "twice")


def test_no_weights(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIG))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refused(tmp_path, "no safetensors", "model.gguf")


def test_unreadable_file(nvfp4, tmp_path) -> None:
    path = first_shard(writers.save(nvfp4, tmp_path))
    path.unlink()
    path.mkdir()
    refused(tmp_path, path.name)


# --- tensors against the config -------------------------------------------------------------------


def test_missing_tensor(nvfp4, tmp_path) -> None:
    written = nvfp4
    del written.disk["layers.1.attn.compressor.ape"]
    refused(writers.save(written, tmp_path), "layers.1.attn.compressor.ape", "missing")


def test_missing_expert(nvfp4, tmp_path) -> None:
    written = nvfp4
    for name in [name for name in written.disk if name.startswith(W1 + ".")]:
        del written.disk[name]
    refused(writers.save(written, tmp_path), W1 + ".weight", "missing")


def test_unexpected_tensor(nvfp4, tmp_path) -> None:
    written = nvfp4
    written.disk["layers.1.attn.wq_c.weight"] = ("U8", np.zeros(4, "u1"))
    message = refused(writers.save(written, tmp_path), "layers.1.attn.wq_c.weight")
    assert "model-0000" in message


def test_many_missing_tensors_are_one_line(nvfp4, tmp_path) -> None:
    written = nvfp4
    written.disk = {n: v for n, v in written.disk.items() if ".experts." not in n}
    message = refused(writers.save(written, tmp_path), "(16 like layers.*.ffn.experts.*.w2.weight)")
    assert message.count("\n") < 6


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("norm.weight", lambda t, a: (t, a[:-1]), ["shape", "norm.weight"]),
        ("norm.weight", lambda t, a: ("I16", a), ["dtype", "I16"]),
        ("layers.0.ffn.gate.tid2eid", lambda t, a: ("F64", a), ["dtype", "F64", "I64"]),
        ("layers.0.attn.wq_a.weight", lambda t, a: (t, a.T), ["swapped", "wq_a"]),
        ("layers.0.attn.wq_a.scale", lambda t, a: (t, a.T), ["transposed", "wq_a.scale"]),
        ("layers.0.attn.wq_a.scale", lambda t, a: ("F16", a.view("u1").repeat(2, 1)), ["dtype"]),
        (f"{W1}.weight", lambda t, a: (t, a.T), ["swapped", W1]),
        (f"{W1}.weight_scale", lambda t, a: (t, a.T), ["transposed", W1]),
        (f"{W1}.weight_scale", lambda t, a: ("F8_E8M0", a), ["F8_E8M0", "F8_E4M3"]),
        (f"{W1}.weight_scale", lambda t, a: (t, a[:, :5]), ["shape", W1]),
        (f"{W1}.weight_scale_2", lambda t, a: (t, np.ones(3, "f4")), ["one number"]),
        (f"{W1}.weight_scale_2", lambda t, a: ("BF16", np.ones((), "u2")), ["dtype", "F32"]),
        ("layers.1.ffn.gate.weight", lambda t, a: ("F8_E4M3", a.view("u1")[:, :160]), ["dtype"]),
    ],
)
def test_wrong_shape_or_dtype(name, change, words, nvfp4, tmp_path) -> None:
    written = nvfp4
    written.disk[name] = change(*written.disk[name])
    refused(writers.save(written, tmp_path), name.rsplit(".", 1)[0], *words)


@pytest.mark.parametrize(
    ("layout", "suffix", "words"),
    [
        ("modelopt-experts", "weight_scale_2", "weight_scale_2 was dropped"),
        ("modelopt-experts", "weight_scale", "weight"),
        ("modelopt-experts", "weight", "without its weight"),
        ("compressed-tensors", "weight_global_scale", "weight_global_scale was dropped"),
        ("official", "scale", "without its scale"),
    ],
)
def test_missing_companion(layout, suffix, words, tmp_path) -> None:
    written = writers.made(layout)
    del written.disk[f"{W1}.{suffix}"]
    refused(writers.save(written, tmp_path), W1, words)


def test_all_globals_dropped_at_once(nvfp4, tmp_path) -> None:
    written = nvfp4
    written.disk = {n: v for n, v in written.disk.items() if not n.endswith("weight_scale_2")}
    message = refused(writers.save(written, tmp_path), "weight_scale_2 was dropped", "2.6e4")
    assert "layers.0.ffn.experts.0.w1.weight" in message
    assert "16 like layers.*.ffn.experts.*.w1.weight" in message


def test_quantised_router_is_refused(nvfp4, tmp_path) -> None:
    written = nvfp4
    written.disk["layers.1.ffn.gate.scale"] = ("F8_E8M0", np.zeros((1, 2), "u1"))
    refused(writers.save(written, tmp_path), "layers.1.ffn.gate.scale", "never quantised")


def test_two_name_families_in_one_folder(tmp_path) -> None:
    written = writers.made("plain-official")
    written.disk |= writers.made("plain-hybrid").disk
    refused(writers.save(written, tmp_path), "hybrid and official", "two checkpoints")


def test_two_layouts_in_one_folder(tmp_path) -> None:
    written = writers.made("official")
    other = writers.made("modelopt-experts")
    for name in [name for name in written.disk if name.startswith(W1 + ".")]:
        del written.disk[name]
    written.disk |= {n: v for n, v in other.disk.items() if n.startswith(W1 + ".")}
    refused(writers.save(written, tmp_path), W1.replace("0.w1", ""), "one format for all experts")


def test_two_checkpoints_side_by_side(nvfp4, tmp_path) -> None:
    writers.save(nvfp4, tmp_path)
    (tmp_path / INDEX).unlink()
    writers.save_file(tmp_path / "model.safetensors", writers.made("plain-official").disk)
    refused(tmp_path, "no index says which is meant")


@pytest.mark.parametrize(
    ("layout", "config", "quantization", "words"),
    [
        ("base", {"expert_dtype": "fp4"}, {}, ["expert_dtype 'fp4'", "fp8"]),
        ("official", {"expert_dtype": "fp8"}, {}, ["expert_dtype 'fp8'", "mxfp4"]),
        ("official", {}, {"moe_quant_algo": "NVFP4"}, ["moe_quant_algo", "mxfp4"]),
        ("official", {}, {"quant_method": "modelopt"}, ["modelopt", "MXFP4"]),
        ("plain-official", {}, {"quant_method": "fp8"}, ["no tensor is quantised"]),
        ("modelopt-experts", {}, {"quant_method": "compressed-tensors"}, ["divide", "multiplies"]),
        ("compressed-tensors", {}, {"quant_method": "modelopt"}, ["multiply", "divides"]),
        (
            "official",
            {},
            {"quantized_layers": {"layers.2.ffn.experts": {"quant_algo": "NVFP4"}}},
            ["quantized_layers", "layer 2"],
        ),
        ("base", {}, {"weight_block_size": [32, 32]}, ["tiles of 128", "32"]),
    ],
)
def test_config_that_contradicts_the_tensors(layout, config, quantization, words, tmp_path) -> None:
    written = writers.made(layout)
    written.config |= config
    written.quantization = {**(written.quantization or {}), **quantization}
    message = refused(writers.save(written, tmp_path), *words)
    assert "layers.0." in message  # and names a tensor


def test_headers_may_be_trusted_over_the_config(tmp_path) -> None:
    written = writers.made("base")
    written.config["expert_dtype"] = "fp4"
    folder = writers.save(written, tmp_path)
    checkpoint = open_checkpoint(folder, ModelConfig.from_folder(folder), trust_headers=True)
    assert "expert_dtype" in str(checkpoint.warnings[0])
    checkpoint.load()


@pytest.mark.parametrize(
    ("quantization", "extra", "words"),
    [
        ({"quant_method": "quark"}, None, "Quark"),
        ({"quant_method": "awq"}, None, "AWQ"),
        ({"quant_method": "fp8", "group_size": 128}, None, "group_size is 128"),
        ({}, "layers.0.attn.wq_a.qweight", "INT4"),
        ({}, "layers.0.attn.wq_a.pre_quant_scale", "SmoothQuant"),
        ({}, f"{W1}.input_scale_2", "Quark"),
        ({}, "layers.0.ffn.gate.bias_vl", "V4.1"),
    ],
)
def test_layouts_that_are_refused_by_name(quantization, extra, words, tmp_path) -> None:
    written = writers.made("official")
    written.quantization |= quantization
    if extra:
        written.disk[extra] = ("F32", np.zeros(4, "f4"))
    refused(writers.save(written, tmp_path), words, "instead")


# --- values ---------------------------------------------------------------------------------------


def poke(array: np.ndarray, value: object, where: object = 0) -> np.ndarray:
    changed = array.copy()
    changed.reshape(-1)[where] = value
    return changed


@pytest.mark.parametrize(
    ("layout", "name", "change", "words"),
    [
        ("plain-official", "norm.weight", lambda a: poke(a, 0x7FC0), ["nan"]),
        ("plain-official", "embed.weight", lambda a: poke(a, 0xFF80, -1), ["-inf", "63, 159"]),
        ("plain-official", f"{W1}.weight", lambda a: poke(a, 0x7F80, 7), ["inf"]),
        ("official", "layers.0.hc_attn_base", lambda a: poke(a, np.nan), ["nan"]),
        ("official", "layers.2.ffn.experts.3.w2.scale", lambda a: poke(a, 255), ["255"]),
        ("official", "layers.2.attn.wkv.scale", lambda a: poke(a, 255), ["255"]),
        ("base", "layers.2.attn.wkv.weight", lambda a: poke(a, 0x7F, 161), ["NaN at [1, 1]"]),
        ("base", f"{W1}.weight", lambda a: poke(a, 0xFF), ["NaN at [0, 0]"]),
        ("base", "layers.2.attn.wkv.scale", lambda a: poke(a, -1.0), ["negative"]),
        ("base", "layers.2.attn.wkv.scale", lambda a: poke(a, np.nan), ["negative"]),
        ("modelopt-experts", f"{W1}.weight_scale", lambda a: poke(a, 0x7F), ["NaN"]),
        ("modelopt-experts", f"{W1}.weight_scale", lambda a: poke(a, 0x81, 3), ["negative", "3"]),
        ("modelopt-experts", f"{W1}.weight_scale_2", lambda a: a * 0, ["positive"]),
        ("modelopt-experts", f"{W1}.weight_scale_2", lambda a: a * np.nan, ["positive"]),
        ("modelopt-experts", f"{W1}.weight_scale_2", lambda a: 1 / a, ["inverted"]),
        ("compressed-tensors", f"{W1}.weight_global_scale", lambda a: 1 / a, ["inverted"]),
        ("official", "layers.0.ffn.gate.tid2eid", lambda a: poke(a, 4, 9), ["expert 4", "0 to 3"]),
        ("official", "layers.0.ffn.gate.tid2eid", lambda a: poke(a, -1), ["expert -1"]),
    ],
)
def test_broken_values(layout, name, change, words, tmp_path) -> None:
    written = writers.made(layout)
    dtype, array = written.disk[name]
    written.disk[name] = (dtype, np.asarray(change(array), dtype=array.dtype))
    message = refused(writers.save(written, tmp_path), name, *words)
    assert ".safetensors" in message


def test_a_file_that_shrinks_after_it_was_opened(nvfp4, tmp_path) -> None:
    folder = writers.save(nvfp4, tmp_path)
    checkpoint = open_checkpoint(folder, ModelConfig.from_folder(folder))
    for path in folder.glob("*.safetensors"):
        os.truncate(path, 5000)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        checkpoint.load()


@pytest.mark.parametrize("shards", ["index", "one file", "numbered"])
def test_a_file_without_tensors_of_a_model_is_left_alone(shards: str, tmp_path) -> None:
    """Such as the logits that `dsv4 score -o` wrote into the same folder."""
    written = writers.made("plain-official")
    folder = writers.save(written, tmp_path, shards=1 if shards == "one file" else 2)
    if shards != "index":
        (folder / "model.safetensors.index.json").unlink()
    if shards == "one file":
        (folder / "model-00001-of-00001.safetensors").rename(folder / "model.safetensors")
    writers.save_file(folder / "logits.safetensors", {"logits": ("F32", np.ones((3, 64), "f4"))})
    checkpoint = open_checkpoint(folder, ModelConfig.from_folder(folder))
    assert "logits" not in checkpoint.manifest.scan.tensors
    report = check_checkpoint(folder)
    assert report.ok
    [note] = report.findings
    assert (note.level, note.file) == ("note", "logits.safetensors")
    assert "left alone" in note.message


@pytest.mark.parametrize("shards", ["one file", "numbered"])
def test_a_second_file_with_tensors_of_a_model_is_not(shards: str, tmp_path) -> None:
    written = writers.made("plain-official")
    folder = writers.save(written, tmp_path, shards=1 if shards == "one file" else 2)
    (folder / "model.safetensors.index.json").unlink()
    if shards == "one file":
        (folder / "model-00001-of-00001.safetensors").rename(folder / "model.safetensors")
    writers.save_file(folder / "z.safetensors", {"norm.weight": written.disk["norm.weight"]})
    refused(folder, "z.safetensors")


def test_a_folder_of_foreign_files_only(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIG))
    writers.save_file(tmp_path / "logits.safetensors", {"logits": ("F32", np.ones(3, "f4"))})
    refused(tmp_path, "no DeepSeek-V4 tensor names", "logits")
