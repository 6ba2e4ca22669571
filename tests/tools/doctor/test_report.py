"""The report of `doctor --ops` on any card: short, nothing private; old and new cards; the
bandwidth that is kept for `plan --gpu here`."""

import json
import re
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from dsv4.cli import app
from dsv4.errors import OptionError
from dsv4.ops.core import gpu
from dsv4.ops.core.gpu import KNOWN, Gpu
from dsv4.runner.ranks.choose_layout import Devices
from dsv4.runner.ranks.cluster import Cluster
from dsv4.tools.bench_ops import Ceilings
from dsv4.tools.doctor.device import machine
from dsv4.tools.doctor.device.machine import Machine, examine_machine
from dsv4.tools.doctor.device.ops import OpResult
from dsv4.tools.doctor.redact import private_words, scrub
from dsv4.tools.doctor.report import DoctorReport
from dsv4.util.measured_gpu import MeasuredGpu, load_measured, measured_file, save_measured

SECRETS = (
    "/home/alice/clients/acme/config.json", "alice", "box-17.acme.example", "box-17", "10.20.30.40",
    "GPU-8f3b2c1d-1111-2222-3333-444455556666", "alice@acme.example", "C:\\Users\\alice\\v4",
)  # fmt: skip
# Every fact about the machine; a new one belongs here once it is known to be harmless.
PUBLIC_FACTS = {
    "python", "dsv4", "torch", "triton", "cuda", "driver", "device", "capability", "memory_gb",
    "bandwidth_gbs", "published_gbs", "best_gbs", "activations", "activations_why", "kernels",
    "gpu", "about_gpu", "notes",
}  # fmt: skip


@pytest.fixture
def known_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "box-17.acme.example")
    for name, value in {"USER": "alice", "LOGNAME": "alice", "HOME": "/home/alice"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("known_words")
def test_a_report_holds_nothing_private(tmp_path: Path) -> None:
    """Texts of errors bring paths and names; what they say stays."""
    error = "failed: OSError('disk full') in " + ", ".join(SECRETS)
    wrong = OpResult("linear", "3x64", "linear_triton", "wrong", detail=error)
    found = DoctorReport(examine_machine("cpu"), [wrong], failures=[f"broke off: {error}"])
    found.write(tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text()
    assert not [secret for secret in SECRETS if secret in text or json.dumps(secret)[1:-1] in text]
    assert not re.search(r"alice|acme|box-17|/home", text)
    report = json.loads(text)
    assert "OSError('disk full')" in report["failures"][0]
    assert ".../config.json" in report["failures"][0]
    assert report["machine"].keys() == PUBLIC_FACTS
    assert report["machine"]["torch"] == torch.__version__
    assert report["ops"][0]["ran"] == "linear_triton"


@pytest.mark.usefixtures("known_words")
def test_what_is_not_private_stays() -> None:
    words = private_words()
    for text in (
        "a8/a16, 3/4 of GB/s", "2.11.0+cu130", "1.2e-3 at [0, 5]", "dsv4/ops/gemm/linear.py",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "CUDA 13.0", "NVIDIA H100 80GB HBM3",
    ):  # fmt: skip
        assert scrub(text, words) == text
    assert scrub({"alice": ["/tmp/x.py:3", 4.0, None]}, words) == {"...": [".../x.py:3", 4.0, None]}


def test_facts_of_a_machine_are_listed() -> None:
    assert {*Machine.__dataclass_fields__, "notes"} == PUBLIC_FACTS


class Card:
    """A GPU that is not there, behind torch's functions."""

    def __init__(self, found: Gpu, monkeypatch: pytest.MonkeyPatch, name: str = "Card 1") -> None:
        self.rates = Ceilings(800.0, 100.0)
        facts = SimpleNamespace(
            major=found.architecture // 10, minor=found.architecture % 10, total_memory=48 * 10**9
        )
        monkeypatch.setattr(gpu, "describe", lambda device: found)
        monkeypatch.setattr(machine, "describe", lambda device: found)
        monkeypatch.setattr(machine, "measure_ceilings", lambda: self.rates)
        monkeypatch.setattr(machine, "driver_version", lambda: (13, 0))
        monkeypatch.setattr(machine, "find_gpu", lambda device: None)
        monkeypatch.setattr(machine, "kernel_table", lambda device: [])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "dsv4" / "gpus.json"


def test_an_old_card_gets_a_sentence_and_the_cpu(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Card(replace(KNOWN[80], architecture=75), monkeypatch)
    assert gpu.usable_device("auto") == "cpu"
    assert "sm_75 has no bf16 products" in caplog.text
    found = examine_machine("cpu")
    assert "sm_75 has no bf16 products; kernels need sm_80" in found.notes[0]
    assert not cache.exists()
    result = CliRunner().invoke(app, ["doctor", "--ops", "--device", "cuda"])
    assert isinstance(result.exception, OptionError)
    assert "sm_75" in str(result.exception)


@pytest.mark.parametrize("architecture", [110, 130])
def test_a_new_card_is_told_once(
    architecture: int, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Card(replace(KNOWN[100], architecture=architecture), monkeypatch)
    found = examine_machine("cuda")
    [note] = found.notes
    assert f"sm_{architecture}" in note
    assert "portable variants" in note
    assert found.capability == f"sm_{architecture}"


def test_bandwidth_is_kept_for_plans(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured_file() == cache
    with pytest.raises(OptionError, match="run dsv4 doctor --ops"):
        Cluster.of("here", 1)
    card = Card(KNOWN[89], monkeypatch)
    assert examine_machine("cuda").bandwidth_gbs == 800.0
    assert load_measured() == {"Card 1": MeasuredGpu("Card 1", 89, 48 * 10**9, 800.0, 100.0)}
    card.rates = Ceilings(300.0, 120.0)  # something else reads
    busy = examine_machine("cuda")
    assert (busy.bandwidth_gbs, busy.best_gbs) == (300.0, 800.0)
    assert "300 GB/s, 800 measured here before" in busy.notes[0]
    here = Cluster.of("here", 2)
    assert here.memory == 48 * 10**9
    assert here.gpu.architecture == 89
    assert here.gpu.read_gbs == pytest.approx(800 / 0.955)
    assert here.gpu.tflops == pytest.approx(120 / 0.69)
    assert Devices(2, "Card 1", 40 * 10**9).cluster(1).gpu == here.gpu
    assert Devices(2, "NVIDIA H200", 40 * 10**9).cluster(1).gpu.read_gbs == 4800
    assert Devices(2, "Card 2", 40 * 10**9).cluster(1).gpu.name == "unknown GPU"
    for name, link in (("A100 80GB PCIe", "pcie4"), ("H100 PCIe", "pcie"), ("H100", "nvlink")):
        assert Devices(2, f"NVIDIA {name}", 10**10).cluster(1).link.name == link


@pytest.mark.parametrize(
    ("name", "gbs"),
    [
        ("NVIDIA H200", 4800), ("NVIDIA GH200 480GB", 4000), ("NVIDIA H20", 4000),
        ("NVIDIA A100-PCIE-40GB", 1555), ("NVIDIA A100 80GB PCIe", 2039), ("NVIDIA GB10", 273),
        ("NVIDIA GeForce RTX 4090", 1008), ("NVIDIA GeForce RTX 4090 Laptop GPU", 0),
    ],
)  # fmt: skip
def test_the_bandwidth_that_a_card_should_have(name: str, gbs: int) -> None:
    """A wrong one would say that something else uses the GPU."""
    assert machine.published_gbs(name) == gbs


def test_a_damaged_cache_is_named_and_written_anew(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for text in ("{", "[3]", '[{"name": "x"}]', '{"a": 1}'):
        cache.parent.mkdir(exist_ok=True)
        cache.write_text(text)
        caplog.clear()
        assert load_measured() == {}
        assert str(cache) in caplog.text
    kept = MeasuredGpu("Card 1", 89, 48 * 10**9, 800.0, 100.0)
    save_measured(kept)
    assert load_measured() == {"Card 1": kept}


def test_a_cache_that_cannot_be_written_is_no_error(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.write_text("a file where a folder should be")
    save_measured(MeasuredGpu("Card 1", 89, 48 * 10**9, 800.0, 100.0))
    assert "not kept" in caplog.text
