"""`check` passes what is sound and names the cause of what is not."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dsv4.checkpoint.findings import Finding
from dsv4.tools.check import CheckReport, check_checkpoint
from dsv4.util.models import model_folder
from tests.checkpoint import writers

W1 = "layers.1.ffn.experts.0.w1"


def checked(written: writers.Written, folder: Path, values: bool = True) -> CheckReport:
    return check_checkpoint(writers.save(written, folder), values=values)


def status(report: CheckReport, name: str) -> str:
    return next(item.status for item in report.checks if item.name == name)


def change(written: writers.Written, suffix: str, how: Callable, only: str = "") -> None:
    """Changes every tensor with this suffix, or those whose name begins with `only`."""
    for name, (dtype, array) in written.disk.items():
        if name.endswith("." + suffix) and name.startswith(only):
            written.disk[name] = (dtype, np.asarray(how(name, array), dtype=array.dtype))


@pytest.mark.parametrize("layout", list(writers.LAYOUTS))
def test_every_layout_passes(layout: str, tmp_path) -> None:
    report = checked(writers.made(layout), tmp_path)
    assert report.findings == []
    assert report.ok
    assert {item.status for item in report.checks} == {"pass"}


def test_without_values_the_value_checks_are_not_decided(tmp_path) -> None:
    report = checked(writers.made("official"), tmp_path, values=False)
    assert report.ok
    assert status(report, "nan") == status(report, "magnitude") == "not decided"
    assert status(report, "shape") == "pass"


# --- the three mistakes with weight_scale_2 -------------------------------------------------------


@pytest.mark.parametrize("layout", ["modelopt-experts", "modelopt-full"])
def test_dropped_global_tensors(layout: str, tmp_path) -> None:
    written = writers.made(layout)
    written.disk = {n: v for n, v in written.disk.items() if not n.endswith("weight_scale_2")}
    report = checked(written, tmp_path, values=False)
    assert not report.ok
    assert status(report, "pairing") == "fail"
    assert all("weight_scale_2 was dropped" in str(item) for item in report.findings)


def causes(report: CheckReport) -> list[Finding]:
    assert not report.ok
    assert all(item.tensor and item.file and item.cause for item in report.findings)
    return report.findings


@pytest.mark.parametrize("layout", ["modelopt-experts", "modelopt-full"])
@pytest.mark.parametrize("only_one", [False, True])
def test_globals_replaced_by_one(layout: str, only_one: bool, tmp_path) -> None:
    written = writers.made(layout)
    only = _one(layout) if only_one else ""
    change(written, "weight_scale_2", lambda n, a: np.ones_like(a), only)
    found = causes(checked(written, tmp_path))
    assert all("left out or replaced by 1" in str(item.cause) for item in found)
    assert {item.check for item in found} == {"magnitude"}


@pytest.mark.parametrize("layout", ["modelopt-experts", "modelopt-full"])
@pytest.mark.parametrize("only_one", [False, True])
def test_inverted_globals(layout: str, only_one: bool, tmp_path) -> None:
    written = writers.made(layout)
    change(written, "weight_scale_2", lambda n, a: 1 / a, _one(layout) if only_one else "")
    report = checked(written, tmp_path)
    assert all("inverted" in str(item.cause) for item in causes(report))
    assert status(report, "global") == "fail"


@pytest.mark.parametrize("layout", ["modelopt-experts", "modelopt-full"])
@pytest.mark.parametrize("only_one", [False, True])
def test_globals_multiplied_by_the_activation_scale(layout, only_one, tmp_path) -> None:
    written = writers.made(layout)
    # expected: the size that ModelOpt files show for down_proj; others are smaller still
    change(
        written,
        "weight_scale_2",
        lambda n, a: a * written.disk[n.replace("weight_scale_2", "input_scale")][1],
        _one(layout) if only_one else "",
    )
    found = causes(checked(written, tmp_path))
    assert all("multiplied by input_scale" in str(item.cause) for item in found)
    assert {item.check for item in found} == {"magnitude"}


def _one(layout: str) -> str:
    if layout == "modelopt-full":
        return "model.layers.1.mlp.experts.0.gate_proj"
    return W1


def test_inverted_compressed_tensors_globals(tmp_path) -> None:
    written = writers.made("compressed-tensors")
    change(written, "weight_global_scale", lambda n, a: 1 / a)
    assert all("inverted" in str(item.cause) for item in causes(checked(written, tmp_path)))


# --- other values ---------------------------------------------------------------------------------


def poke(array: np.ndarray, value: object, where: object = 0) -> np.ndarray:
    changed = array.copy()
    changed.reshape(-1)[where] = value
    return changed


def kept_blocks(array: np.ndarray) -> np.ndarray:
    """False for every tenth block of 16 (8 bytes), scattered over all rows."""
    return (np.arange(array.shape[1]) // 8 % 10 != 0)[None, :]


@pytest.mark.parametrize(
    ("layout", "name", "how", "check"),
    [
        ("plain-official", "norm.weight", lambda a: poke(a, 0x7FC0), "nan"),
        ("base", f"{W1}.weight", lambda a: poke(a, 0xFF), "nan"),
        ("official", f"{W1}.scale", lambda a: poke(a, 255), "scale"),
        ("modelopt-experts", f"{W1}.weight_scale", lambda a: poke(a, 0xFF), "scale"),
        ("modelopt-experts", f"{W1}.weight_scale_2", lambda a: -a, "global"),
        ("modelopt-experts", f"{W1}.input_scale", lambda a: a * 0, "input"),
        ("modelopt-experts", f"{W1}.input_scale", lambda a: a * np.nan, "input"),
        ("official", f"{W1}.weight", lambda a: poke(a, 0, slice(a.size // 2, None)), "zero"),
        ("modelopt-experts", f"{W1}.weight", lambda a: np.where(kept_blocks(a), a, 0), "zero"),
        ("plain-official", f"{W1}.weight", lambda a: poke(a, 0, slice(a.size // 2)), "zero"),
        ("base", "layers.0.attn.wkv.weight", lambda a: poke(a, 0, slice(a.size // 2)), "zero"),
        ("official", f"{W1}.scale", lambda a: a - 6, "magnitude"),
        ("official", "layers.2.attn.wq_a.scale", lambda a: a + 6, "magnitude"),
        ("official", "layers.0.ffn.gate.tid2eid", lambda a: poke(a, 77), "table"),
        ("official", "layers.0.ffn.gate.tid2eid", lambda a: poke(a, a[0, 1]), "table"),
    ],
)
def test_broken_values_are_named(layout, name, how, check, tmp_path) -> None:
    written = writers.made(layout)
    dtype, array = written.disk[name]
    written.disk[name] = (dtype, np.asarray(how(array), dtype=array.dtype))
    report = checked(written, tmp_path)
    assert [item.check for item in report.findings] == [check]
    found = report.findings[0]
    assert (found.tensor or "").startswith(name.rsplit(".", 1)[0])
    assert (found.file or "").endswith(".safetensors")
    assert status(report, check) == "fail"


def test_uncalibrated_activation_scales_are_a_note(tmp_path) -> None:
    written = writers.made("modelopt-experts")
    change(written, "input_scale", lambda n, a: np.ones_like(a))
    report = checked(written, tmp_path)
    assert report.ok
    assert [item.level for item in report.findings] == ["note"]
    assert "never calibrated" in report.findings[0].message


def test_incomplete_draft(tmp_path) -> None:
    written = writers.made("official")
    del written.disk["mtp.0.ffn.experts.2.w2.weight"]
    report = checked(written, tmp_path, values=False)
    assert status(report, "draft") == "fail"
    assert report.findings[0].tensor == "mtp.0.ffn.experts.2.w2.weight"


def test_unreadable_names_leave_later_checks_undecided(tmp_path) -> None:
    written = writers.made("plain-official")
    written.disk = {f"transformer.{n}": v for n, v in written.disk.items()}
    report = checked(written, tmp_path)
    assert status(report, "names") == "fail"
    assert status(report, "missing") == status(report, "nan") == "not decided"


def test_progress_reaches_the_end(tmp_path) -> None:
    seen: list[tuple[int, int]] = []
    folder = writers.save(writers.made("official"), tmp_path)
    check_checkpoint(folder, values=True, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0


def test_the_embedded_model_passes() -> None:
    """Trained weights: 3.5 times the size of fresh ones, and only index weights unquantised."""
    report = check_checkpoint(model_folder("tiny"), values=True)
    assert report.findings == []
    assert {item.status for item in report.checks} == {"pass"}


@pytest.mark.parametrize("shards", [1, 2])
def test_what_was_never_read_is_not_decided(shards: int, tmp_path) -> None:
    folder = writers.save(writers.made("modelopt-experts"), tmp_path, shards=shards)
    cut = folder / f"model-00001-of-{shards:05d}.safetensors"
    with open(cut, "r+b") as file:
        file.truncate(cut.stat().st_size - 100)
    report = check_checkpoint(folder, values=True)
    found = {item.name: item.status for item in report.checks}
    assert (found.pop("header"), found.pop("files")) == ("fail", "pass")
    assert set(found.values()) == {"not decided"}
    # what the cut file holds is not called missing
    assert [item.check for item in report.findings] == ["header"]
