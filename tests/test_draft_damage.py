"""A checkpoint whose draft tensors or their description are damaged still answers, bit for bit."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import dsv4.runner.load
from dsv4 import Engine
from dsv4.errors import CheckpointError, ConfigError
from dsv4.tools.check import check_checkpoint
from dsv4.tools.convert.convert import convert
from dsv4.tools.inspect import inspect_checkpoint
from tests.test_drafting import check, folder

DRAFT_FILE, BACKBONE_FILE = "model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"


def sharded_copy(target: Path, kind: str = "mtp", *, stray: str = "") -> Path:
    """Draft tensors in a file of their own; `stray`: a tensor of the model beside them."""
    shutil.copytree(folder(kind), target)
    tensors = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    index = {
        name: DRAFT_FILE if name.startswith("mtp.") or name == stray else BACKBONE_FILE
        for name in tensors
    }
    for file in (BACKBONE_FILE, DRAFT_FILE):
        some = {name: tensor for name, tensor in tensors.items() if index[name] == file}
        save_file(some, target / file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return target


def _cut(path: Path, keep: int, head: bytes = b"") -> None:
    path.write_bytes(head + path.read_bytes()[len(head) : keep])


FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (lambda path: path.unlink(), "named by model.safetensors.index.json but missing"),
    "cut off": (lambda path: _cut(path, -100), "cut off"),
    "cut off in the header": (lambda path: _cut(path, 100), "cut off"),
    "empty": (lambda path: _cut(path, 0), "too short"),
    "bad header": (lambda path: _cut(path, 10**9, b"\0" * 16), "header"),
    "huge header": (lambda path: _cut(path, 10**9, b"\xff" * 8), "header"),
}


@pytest.mark.parametrize("damage", FILES)
def test_a_lost_file_of_draft_tensors_alone(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change, says = FILES[damage]
    model = sharded_copy(tmp_path / "model")
    change(model / DRAFT_FILE)
    sizes: dict[str, Any] = {"device": "cpu", "max_context": 512}
    with caplog.at_level(logging.WARNING):
        check(Engine.load(model, draft="off", **sizes), "greedy")
        check(Engine.load(model, draft="lookup", **sizes), "greedy")
        assert not caplog.records
        engine = Engine.load(model, prefix_disk=str(tmp_path / "disk"), **sizes)
    check(engine, "greedy")
    assert engine.settings.draft == "lookup"
    [message] = [r.message for r in caplog.records]
    assert re.search(f"drafts come from lookup: .*{DRAFT_FILE}.*{says}", message, re.S), message
    with pytest.raises(CheckpointError, match=f"draft=mtp: {DRAFT_FILE}: .*{says}"):
        Engine.load(model, draft="mtp", **sizes)
    report = check_checkpoint(model)
    assert not report.ok
    assert any(says in item.line() for item in report.findings)
    assert inspect_checkpoint(model).num_errors == 1
    with pytest.raises(CheckpointError, match=DRAFT_FILE):
        convert(model, tmp_path / "new", "official")


@pytest.mark.parametrize("damage", FILES)
def test_a_lost_file_with_any_other_tensor_is_refused(damage: str, tmp_path: Path) -> None:
    model = sharded_copy(tmp_path / "model", stray="norm.weight")
    FILES[damage][0](model / DRAFT_FILE)
    with pytest.raises(CheckpointError, match=DRAFT_FILE):
        Engine.load(model, device="cpu", draft="off", max_context=512)


def test_a_lost_file_without_an_index_is_refused(tmp_path: Path) -> None:
    model = sharded_copy(tmp_path / "model")
    (model / "model.safetensors.index.json").unlink()
    (model / DRAFT_FILE).unlink()
    with pytest.raises(CheckpointError, match=DRAFT_FILE):
        Engine.load(model, device="cpu", draft="off", max_context=512)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("dspark_block_size", "5", "dspark_block_size is '5', expected an integer"),
        ("dspark_block_size", None, "dspark_block_size is None, expected an integer"),
        ("dspark_markov_rank", 4.0, "dspark_markov_rank is 4.0, expected an integer"),
        ("dspark_noise_token_id", [1], r"dspark_noise_token_id is \[1\], expected an integer"),
        ("dspark_target_layer_ids", "01", "dspark_target_layer_ids is '01', expected a list"),
        ("dspark_target_layer_ids", [0, True], r"_ids is \[0, True\], expected a list of integers"),
    ],
)
def test_a_config_of_the_wrong_form_concerns_draft_blocks_alone(
    name: str, value: object, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder("dspark"), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, name: value}))
    sizes: dict[str, Any] = {"device": "cpu", "max_context": 512}
    with caplog.at_level(logging.WARNING):
        check(Engine.load(model, draft="off", **sizes), "greedy")
        assert not caplog.records
        engine = Engine.load(model, **sizes)
    check(engine, "greedy")
    assert engine.settings.draft == "lookup"
    [message] = [r.message for r in caplog.records]
    assert re.search(f"drafts come from lookup: .*config.json: .*{says}", message), message
    with pytest.raises(ConfigError, match=f"{says}.*, as draft=dspark needs"):
        Engine.load(model, draft="dspark", **sizes)
    [finding] = [item for item in check_checkpoint(model).findings if item.level == "error"]
    assert re.search(says, finding.message)


def test_blocks_that_cannot_be_built_switch_drafting_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*arguments: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(dsv4.runner.load, "draft_model", fails)
    engine = Engine.load(folder(), device="cpu", draft="mtp", max_context=512)
    check(engine, "greedy")
    assert [r.message for r in caplog.records if "draft" in r.message] == [
        "drafting is off: planted"
    ]
