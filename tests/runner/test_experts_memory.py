"""Memory of experts that do not all fit: what stays, what the host needs, what loading takes."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.checkpoint import reader
from dsv4.checkpoint.files.tensors import TensorFiles
from dsv4.config import EngineConfig, ModelConfig
from dsv4.engine import Engine
from dsv4.errors import CapacityError, CheckpointError, OptionError
from dsv4.runner import load
from dsv4.runner.experts import host_memory
from dsv4.runner.experts.budget import ExpertBudget, check_host_memory, fit_experts
from dsv4.runner.experts.choose_memory import ExpertChoice
from dsv4.runner.experts.residency import Residency
from dsv4.testing import random_weights, small_config, write_checkpoint
from tests.models import write_fast_model

GB = 3e-4  # 12 of the model's 18 experts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fast_model(tmp_path_factory.mktemp("experts"))


def test_as_many_stay_as_fit() -> None:
    budget = fit_experts(131 * 10**9, 43, 256, 13_369_344, 6)
    assert budget is not None
    assert budget.gpu_bytes <= 131 * 10**9 < budget.gpu_bytes + 2 * budget.block_bytes
    assert budget.slots + budget.missing == 43 * 256
    assert budget.staged * 43 >= 1.25 * budget.missing
    assert fit_experts(148 * 10**9, 43, 256, 13_369_344, 6) is None
    with pytest.raises(CapacityError, match="hold 7, expected at least the 6"):
        fit_experts(10**8, 43, 256, 13_369_344, 6)
    check_host_memory(budget, budget.host_bytes + 4 * 10**9)
    with pytest.raises(CapacityError, match="of host memory"):
        check_host_memory(budget, budget.host_bytes + 3 * 10**9)


@pytest.mark.parametrize("value", ["some", "0", "-3", "nan", "inf", None, "1e30"])
def test_expert_memory_is_checked(folder: Path, value: Any) -> None:
    with pytest.raises(OptionError, match="expected auto, all or GB"):
        Engine.load(folder, expert_memory=value)


def test_too_little_host_memory_ends_before_loading(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "free_host_memory", lambda: 10**9)
    monkeypatch.setattr(TensorFiles, "tensor", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(CapacityError, match="of host memory"):
        Engine.load(folder, expert_memory=GB)


@pytest.mark.parametrize("is_integrated", [0, 1])
def test_a_gpu_that_shares_host_memory_keeps_no_experts_there(
    is_integrated: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DGX Spark: the same bytes would be counted twice, and the machine would run out of them."""
    facts = SimpleNamespace(is_integrated=is_integrated)
    monkeypatch.setattr(load.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(load.torch.cuda, "mem_get_info", lambda device: (10**11, 10**11))
    monkeypatch.setattr(load.torch.cuda, "get_device_properties", lambda device: facts)
    budget = fit_experts(131 * 10**9, 43, 256, 13_369_344, 6)
    monkeypatch.setattr(load, "choose_experts", lambda *_: ExpertChoice(None, budget))
    monkeypatch.setattr(load, "free_host_memory", lambda: 10**12)
    config = ModelConfig.from_folder(folder)
    given = EngineConfig(), config, reader.open_checkpoint(folder, config), 0, None
    if is_integrated:
        with pytest.raises(CapacityError, match="shares the host's"):
            load._choose_experts(*given)
    else:
        assert load._choose_experts(*given).budget is budget


def test_a_container_limits_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "CONTAINER", tmp_path)
    monkeypatch.setattr(host_memory, "available_memory", lambda: 1000)
    assert host_memory.free_host_memory() == 1000
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 150\nactive_file 250\n")
    for text, free in (("900", 600), ("max", 1000), ("5000", 1000)):
        (tmp_path / "memory.max").write_text(f"{text}\n")
        assert host_memory.free_host_memory() == free  # pages of files give way


@pytest.mark.parametrize("failing", [0, 3])
def test_pinned_memory_is_given_back(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """All of it when it is closed or dropped, and when pinning fails half-way: a full host, or a
    limit of locked memory."""
    pinned: set[int] = set()
    calls = 0

    class Runtime:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            nonlocal calls
            calls += 1
            if calls == failing:
                return 2
            assert nbytes > 0
            assert flags == 3
            pinned.add(address)
            return 0

        def cudaHostUnregister(self, address: int) -> None:
            pinned.remove(address)

    monkeypatch.setattr(host_memory, "_runtime", Runtime)
    monkeypatch.setattr(host_memory, "AREA_BYTES", 8192)
    if failing:
        with pytest.raises(CapacityError, match="CUDA error 2 while pinning"):
            host_memory.HostMemory(7, 4096, pinned=True)
        assert not pinned
        return
    held = host_memory.HostMemory(7, 4096, pinned=True)
    assert len(held.blocks) == 7
    assert len(pinned) == 4
    held.close()
    assert not pinned
    held = host_memory.HostMemory(3, 4096, pinned=True)
    assert len(pinned) == 2
    del held
    assert not pinned


def test_a_file_that_cannot_be_read_gives_memory_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Residency] = []
    real_close, real_read, count = Residency.close, os.preadv, 0

    def failing(*args: Any) -> int:
        nonlocal count
        count += 1
        if count > 60:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real_read(*args)

    def close(self: Residency) -> None:
        closed.append(self)
        real_close(self)

    monkeypatch.setattr(os, "preadv", failing)
    monkeypatch.setattr(Residency, "close", close)
    with pytest.raises(
        CheckpointError, match=r"tensor 'layers.* at byte \d+ \(Input/output error\)"
    ):
        Engine.load(folder, expert_memory=GB)
    assert len(closed) == 1
    assert not closed[0].host.blocks


CUT_OFF = """
import os, shutil, sys
from pathlib import Path
from dsv4.checkpoint.files.tensors import TensorFiles
from dsv4.engine import Engine
from dsv4.errors import CheckpointError

real = TensorFiles.tensor

def tensor(self, info, *args):
    global count
    count += 1
    found = real(self, info, *args)
    if count == 60:  # while its file is open
        os.truncate(info.file, info.start + info.nbytes // 2)
        real(self, info, *args)
    return found

TensorFiles.tensor = tensor
for number, choices in enumerate(({}, {"expert_memory": 3e-4})):
    folder, count = Path(sys.argv[2], str(number)), 0
    shutil.copytree(sys.argv[1], folder)
    try:
        Engine.load(folder, **choices)
    except CheckpointError as error:
        print(error)
"""


def test_a_file_that_is_cut_off_while_it_is_read_is_named(folder: Path, tmp_path: Path) -> None:
    """A mapped file would end the process instead: SIGBUS, without a message."""
    command = [sys.executable, "-c", CUT_OFF, str(folder), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 2
    for number, line in enumerate(lines):
        assert line.startswith(str(tmp_path / str(number)))
        assert "tensor 'layers." in line
        assert "changed while it was read, fetch it again" in line


def test_experts_are_read_some_at_a_time(folder: Path) -> None:
    most, seen = 0, []
    fill = Residency.fill

    def filled(self: Residency, layer: int, which: int, first: int, stack: Any) -> int:
        nonlocal most
        most = max(most, stack.shape[0])
        return fill(self, layer, which, first, stack)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Residency, "fill", filled)
        patch.setattr(reader, "PIECE_BYTES", 40_000)
        engine = Engine.load(folder, expert_memory=GB, progress=lambda *at: seen.append(at))
    assert 1 <= most < 6
    assert seen[-1][0] == seen[-1][1]
    whole = Engine.load(folder)
    for ours, other in zip(engine._runner.model.blocks, whole._runner.model.blocks, strict=True):
        for name in ("w13", "w2"):
            found, wanted = (getattr(b.ffn.experts, name) for b in (ours, other))
            assert torch.equal(found.dequantize(), wanted)
    engine.close()


MEASURE = """
import sys
from pathlib import Path
from dsv4.checkpoint import reader
from dsv4.engine import Engine
from dsv4.runner.experts.choose_memory import ExpertChoice
from dsv4.runner.experts.residency import Residency

def anonymous():  # without pages of mapped files, which the kernel reclaims
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("RssAnon:") + 1]) * 1024

def filled(self, *args):
    global most
    most = max(most, anonymous() - before)
    return fill(self, *args)

folder, small, piece = sys.argv[1:]
Engine.load(small, expert_memory=3e-4).close()  # modules, threads
reader.PIECE_BYTES = int(piece)
fill, Residency.fill, most, before = Residency.fill, filled, 0, anonymous()
engine = Engine.load(folder, expert_memory=0.03, max_context=128)
residency = engine._runner.swapper.residency
print(most, residency.pool.nbytes + residency.budget.host_bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_loading_needs_little_besides_the_experts(tmp_path: Path, folder: Path) -> None:
    """Resident memory while experts are read: their places, and a few pieces at any time."""
    config = small_config(
        num_layers=2, num_hash_layers=1, compress_ratios=(0, 4), num_experts=32,
        moe_intermediate_size=1024,
    )  # fmt: skip
    write_checkpoint(tmp_path, config, random_weights(config, 0))
    more = []
    for piece in (10**6, 10**9):  # the second: a layer at a time
        command = [sys.executable, "-c", MEASURE, str(tmp_path), str(folder), str(piece)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        most, placed = map(int, run.stdout.split())
        assert placed > 50_000_000
        more.append(most - placed)
    assert more[0] < 6_000_000
    assert more[1] > more[0] + 8_000_000  # the measure sees a layer's matrix


def test_the_plan_of_experts_is_one_line() -> None:
    line = str(ExpertBudget(43, 256, 13_369_344, 9000, 59))
    assert line.startswith("experts: 9,000 of 11,008 (82 %) stay in 121.9")
    assert "\n" not in line
