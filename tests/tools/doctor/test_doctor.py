"""The parts of `doctor`: its formulas, ops, capsule, picture, command."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from dsv4.cli import app
from dsv4.errors import OptionError
from dsv4.ops import OPS
from dsv4.ops.core.op import Arguments, Kernel, Op
from dsv4.testing import random_weights, small_config
from dsv4.tools.doctor.capsule import replay, save_capsule
from dsv4.tools.doctor.check import hand_on
from dsv4.tools.doctor.device.all_ops import check_ops, summarize
from dsv4.tools.doctor.device.machine import examine_machine
from dsv4.tools.doctor.device.sampling import SETTINGS
from dsv4.tools.doctor.examine import ModelReport, examine_model, layers_of
from dsv4.tools.doctor.picture import svg, terminal
from dsv4.tools.doctor.plain import layer as plain_layer
from dsv4.tools.doctor.plain.layer import Taps
from dsv4.tools.doctor.plain.stations import STATIONS, layer_stations
from dsv4.tools.doctor.report import DoctorReport
from dsv4.tools.doctor.subject import Subject
from tests.models import write_fast_model
from tests.oracle.reference import Reference
from tests.oracle.ties import as_indices
from tests.tools.doctor import faults
from tests.tools.doctor.subjects import make_subject, small_subject


@pytest.fixture(scope="module")
def ill() -> tuple[Subject, ModelReport]:
    subject = small_subject()
    with faults.no_inverse_rope(subject):
        return subject, examine_model(subject, only_calls=True)


def plain_logits(subject: Subject, token_ids: Tensor, theirs: list[dict[str, Tensor]]) -> Tensor:
    """The plain model end to end on its own results; at a tie it takes their choice."""
    make_layer, before = layers_of(subject), Taps()
    for number in range(subject.config.num_layers):
        layer, taps = make_layer(number), Taps()
        taps.begin(0, token_ids)
        hand_on(before, taps)
        taps.choices = theirs[number]
        for station in layer_stations(layer):
            taps.new.update(station.run(layer, taps))
        before = taps
    return before.new["logits"]


def test_the_plain_model_is_transformers() -> None:
    """What `doctor` compares with has an oracle of its own."""
    config = small_config(index_num_heads=16)
    subject = make_subject(config, 11, tokens=300)
    ids = torch.tensor(subject.token_ids)
    reference = Reference(config, random_weights(config, 11), [subject.token_ids])
    choices, theirs = iter(reference.choices[0]), []
    for number, ratio in enumerate(config.compress_ratios):
        layer = {"selected": as_indices(next(choices), config.index_topk)} if ratio == 4 else {}
        if number >= config.num_hash_layers:
            layer["experts"] = as_indices(next(choices), config.num_experts_per_tok)
        theirs.append(layer)
    near = max(float(margin.max()) for margin in reference.ties.rounding(0).scores.values())
    with patch.object(plain_layer, "NEAR_TIE", near):
        found = plain_logits(subject, ids, theirs)
    assert float((found - reference.logits[0]).abs().max()) < 2e-4


# --- ops ------------------------------------------------------------------------------------------


class PlantedKernel(Kernel):
    """A kernel in plain torch: the reference, wrong for what `change` touches."""

    def __init__(self, op: Op, change: Any) -> None:
        super().__init__("planted.kernel")
        object.__setattr__(self, "_op", op)
        object.__setattr__(self, "_change", change)

    def supports(self, arguments: Arguments) -> str | None:
        is_float = arguments["x"].dtype == torch.float32
        return None if is_float else "only float32"

    def run(self, arguments: Arguments) -> Any:
        op: Any = self._op  # type: ignore[attr-defined]
        return self._change(op.reference, arguments)  # type: ignore[attr-defined]


def planted(name: str, change: Any) -> dict[str, Op]:
    right = OPS[name]
    return {name: Op(name, right.reference, right.cases, (PlantedKernel(right, change),))}


def test_a_kernel_that_fails_above_500_passes_the_plain_cases_only() -> None:
    def change(reference: Any, a: Arguments) -> Any:
        return reference(**{**a, "x": a["x"].clamp(-500, 500)})

    found = check_ops("cpu", ops=planted("linear", change), kernels=True)
    by_kind = {item.case.rpartition(", ")[2]: set() for item in found}
    for item in found:
        by_kind[item.case.rpartition(", ")[2]].add(item.status)
    assert "wrong" in by_kind["outliers"]
    assert "wrong" not in by_kind["zero row"]
    [row] = summarize(found)
    assert (row["op"], row["status"]) == ("linear", "wrong")
    assert row["where"].startswith("result")
    assert row["unsupported"] > 0


def test_a_right_kernel_passes() -> None:
    ops = planted("router", lambda reference, a: reference(**a))
    found = check_ops("cpu", ops=ops, kernels=True)
    assert {item.status for item in found} == {"ok", "unsupported"}
    own = {case.name for case in OPS["router"].cases()}
    assert all((item.time_us > 0) == (item.case in own) for item in found if item.status == "ok")


def test_a_wrong_choice_is_wrong_at_any_tolerance() -> None:
    def change(reference: Any, a: Arguments) -> Any:
        chosen, weights = reference(**a)
        return chosen.flip(1), weights

    found = check_ops("cpu", ops=planted("router", change), kernels=True)
    assert "wrong" in {item.status for item in found}


def test_references_of_a_cpu_repeat() -> None:
    found = check_ops("cpu", only="router,index_select")
    assert {(item.ran, item.status) for item in found} == {("reference", "ok")}


# --- capsule --------------------------------------------------------------------------------------

CAPSULES = (
    "window one key long",
    "tail state forgotten",
    "key scale dropped",
    "expert weight applied twice",
)


@pytest.mark.parametrize("name", CAPSULES)
def test_capsule_replays_without_the_model(name: str, tmp_path: Path) -> None:
    fault = next(fault for fault in faults.FAULTS if fault.name == name)
    subject = small_subject(nasty=fault.nasty, changes=fault.changes, **fault.choices)
    with fault.plant(subject):
        report = examine_model(subject, only_calls=True)
    assert report.first is not None
    save_capsule(tmp_path / "c", report.first, subject.config, report.settings)
    assert {path.name for path in (tmp_path / "c").iterdir()} == {
        "capsule.json",
        "tensors.safetensors",
    }
    again = replay(tmp_path / "c")
    assert (again.station, again.layer) == (fault.station, fault.layer)
    assert again.found_error > again.limit
    assert again.is_kernel == (fault.kind == "kernel")
    assert not again.is_fixed


def damage_facts(folder: Path, **changes: Any) -> None:
    path = folder / "capsule.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def capsule(ill: tuple[Subject, ModelReport], tmp_path: Path) -> Path:
    subject, report = ill
    assert report.first is not None
    save_capsule(tmp_path / "c", report.first, subject.config, report.settings)
    return tmp_path / "c"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": 2}, "not of version 3"),
        ({"op": "os.system"}, "which this version has not"),
        ({"arguments": {"q": {"type": "Popen", "fields": {}}}}, "do not fit together"),
        ({"arguments": {"q": {"tensor": "missing"}}}, "do not fit together"),
    ],
)
def test_bad_capsules_are_refused(changes: dict[str, Any], says: str, capsule: Path) -> None:
    damage_facts(capsule, **changes)
    with pytest.raises(OptionError, match=says):
        replay(capsule)


def test_torn_capsules_are_refused(capsule: Path) -> None:
    (capsule / "tensors.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(OptionError, match="is no capsule"):
        replay(capsule)
    (capsule / "tensors.safetensors").unlink()
    with pytest.raises(OptionError, match=r"has no tensors\.safetensors"):
        replay(capsule)


# --- picture and command --------------------------------------------------------------------------


def test_picture_frames_the_first_wrong_op(ill: tuple[Subject, ModelReport]) -> None:
    subject, report = ill
    root = ET.fromstring(svg(report, subject.config.compress_ratios))
    texts = [item.text or "" for item in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "random: first wrong op is attention in layer 2" in texts
    assert set(STATIONS) <= set(texts)
    fills = [item.get("fill") for item in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert fills.count("#c62828") == 2  # one cell and the legend
    assert fills.count("none") == 1
    lines = terminal(report).plain.splitlines()
    [row] = [line for line in lines if line.strip().startswith("attention")]
    assert row.split()[1][2] == "X"


def test_report_is_json_and_names_nothing_private(ill: tuple[Subject, ModelReport]) -> None:
    report = DoctorReport(examine_machine("cpu"), [], ill[1])
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["ok"] is False
    assert data["model"]["first_wrong"]["station"] == "attention"
    assert data["machine"]["bandwidth_gbs"] > 0
    assert [row["op"] for row in data["machine"]["kernels"]] == list(OPS)
    text = json.dumps(data)
    assert str(Path.home()) not in text
    assert str(Path.cwd()) not in text


def run(*arguments: str) -> Any:
    few = {name: OPS[name] for name in ("router", "index_select")}
    quick = patch("dsv4.tools.doctor.device.sampling.SETTINGS", SETTINGS[3:5])
    with patch("dsv4.tools.doctor.device.all_ops.OPS", few), quick:
        return CliRunner().invoke(app, ["doctor", *arguments])


def test_command(tmp_path: Path) -> None:
    write_fast_model(tmp_path / "m")
    picture, report = tmp_path / "p.svg", tmp_path / "r.json"
    result = run(
        str(tmp_path / "m"), "--device", "cpu", "--tokens", "24",
        "--picture", str(picture), "--report", str(report), "--save", str(tmp_path / "c"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "nothing is wrong" in result.output
    assert "no capsule to save" in result.output
    assert picture.read_text().startswith("<svg")
    assert json.loads(report.read_text())["ok"] is True


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            "--parallel --ops --tokens 9",
            "--parallel examines only ranks; leave out --ops, --tokens",
        ),
        ("--ops --prompt hi --no-stream", "--ops examines no model; leave out --prompt, --stream"),
        ("--all", "--all is for the cases of --ops"),
    ],
)
def test_options_that_would_mean_nothing_are_errors(options: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        raise run(*options.split()).exception


def test_command_on_a_wrong_build(tmp_path: Path) -> None:
    write_fast_model(tmp_path / "m")
    wrong = faults.kernel("experts", lambda right, a: right(weights=a["weights"].square()))
    capsule = str(tmp_path / "c")
    with wrong:
        result = run(
            str(tmp_path / "m"), "--device", "cpu", "--tokens", "24", "--json", "--save", capsule
        )
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["model"]["first_wrong"]["op"] == "experts"
    assert found["conclusions"][0].startswith("first wrong op: experts in layer 0")
    again = run("replay", capsule)
    assert again.exit_code == 1
    assert "the kernel" in again.output


def test_command_on_ops_alone(tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    result = run("--ops", "--report", str(report), "--device", "cpu")
    assert result.exit_code == 0, result.output
    data = json.loads(report.read_text())
    assert data["model"] is None
    assert {item["op"] for item in data["ops"]} == {"router", "index_select", "sample"}
    assert "issue" in data["next"]
    assert "nothing is wrong: all" in result.output
    assert data["complete"] is True


def test_command_without_time(tmp_path: Path) -> None:
    """Cases left out are counted; nothing is said of them, and the exit code stays 0."""
    report = tmp_path / "r.json"
    arguments = ("--ops", "--report", str(report), "--device", "cpu")
    with patch("dsv4.tools.doctor.device.all_ops.REPORT_SECONDS", 0.0):
        result = run(*arguments)
        whole = run(*arguments[:1], "--all", *arguments[-2:])
    assert result.exit_code == 0, result.output
    assert "nothing is wrong" not in result.output
    last = " ".join(result.output.split("report in")[1].split())
    assert re.search(r"\d+ of \d+ cases of ops checked, nothing wrong among them; --all", last)
    assert re.search(r"cases left out, not checked: router \d+, index_select \d+", result.output)
    assert json.loads(report.read_text())["complete"] is False
    assert "nothing is wrong: all" in whole.output


def test_a_crash_inside_doctor_is_a_finding(tmp_path: Path) -> None:
    folder = write_fast_model(tmp_path)
    with patch.object(faults.compress_op, "rope_reference", side_effect=ValueError("too odd")):
        result = run(str(folder), "--device", "cpu", "--tokens", "140", "--json")
    assert result.exit_code == 1
    assert result.exception is None or isinstance(result.exception, SystemExit)
    report = json.loads(result.stdout)
    assert report["ok"] is False
    assert any("compress" in line and "too odd" in line for line in report["conclusions"])
    [failure] = report["failures"]
    assert "comparing the model" in failure
    assert "compress (entries) in layer" in failure


def test_a_wrong_op_is_named_even_where_its_cause_cannot_be_found() -> None:
    subject = small_subject()
    broken = patch("dsv4.tools.doctor.check.find_cause", side_effect=IndexError("empty"))
    with faults.no_inverse_rope(subject), broken:
        report = examine_model(subject, only_calls=True)
    assert report.first is not None
    assert (report.first.cell.layer, report.first.cell.station) == (2, "attention")
    assert "IndexError('empty')" in report.first.cell.cause.text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("replay",), "needs the folder of a capsule"),
        (("replay", "nowhere"), "has no capsule.json"),
        (("tiny", "extra"), "only replay takes one"),
        (("tiny", "--tokens", "3"), "expected 7 to"),
        (("tiny", "-p", ""), "the prompt is empty"),
        (("nowhere",), "nowhere"),
    ],
)
def test_wrong_use(arguments: tuple[str, ...], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code != 0
    assert says in str(result.exception)
    assert getattr(result.exception, "exit_code", 2) == 2 or "nowhere" in arguments
