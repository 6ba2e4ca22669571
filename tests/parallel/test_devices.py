"""How GPUs of a machine reach each other: what is chosen, what is refused, what the probe sees."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4.config import EngineConfig
from dsv4.errors import OptionError, RankError
from dsv4.parallel.layout import RankLayout
from dsv4.runner.ranks import devices
from dsv4.runner.ranks.devices import choose_comm, pairs_apart
from dsv4.runner.settings import Settings, resolve
from dsv4.testing import small_config

FOUR = RankLayout(4)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Of four; cuda:3 has no peer access."""
    monkeypatch.delenv(devices.SHARED_GPU, raising=False)
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda a, b: 3 not in (a, b))
    choices = EngineConfig(device="cuda")
    return resolve(choices, small_config(), has_gpu=True, memory_bytes=2**62)


def test_peer_access_decides(gpus: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_comm("auto", gpus, FOUR, 1) == "nccl"
    assert choose_comm("auto", gpus, RankLayout(2), 1) == "symmetric"
    assert pairs_apart(3) == []
    assert pairs_apart(4) == [(0, 3), (1, 3), (2, 3), (3, 0), (3, 1), (3, 2)]
    assert choose_comm("nccl", gpus, RankLayout(2), 1) == "nccl"
    assert choose_comm("auto", replace(gpus, device="cpu"), FOUR, 1) == "gloo"
    monkeypatch.setenv(devices.SHARED_GPU, "1")
    assert choose_comm("auto", gpus, FOUR, 1) == "symmetric"


@pytest.mark.parametrize(
    ("asked", "device", "nodes", "words"),
    [
        ("symmetric", "cuda", 1, "no peer access from cuda:0 to cuda:3 (and 5 more pairs)"),
        ("symmetric", "cuda", 2, "comm is 'symmetric' on 2 nodes, expected auto or nccl"),
        ("gloo", "cuda", 1, "comm is 'gloo' on GPUs, expected auto, symmetric or nccl"),
        ("nccl", "cpu", 1, "comm is 'nccl' on a CPU, expected auto or gloo"),
    ],
)
def test_what_cannot_be(gpus: Settings, asked: str, device: str, nodes: int, words: str) -> None:
    with pytest.raises(OptionError) as error:
        choose_comm(asked, replace(gpus, device=device), FOUR, nodes)
    assert words in str(error.value)


@pytest.mark.parametrize(("version", "warns"), [((2, 28, 9), True), ((2, 30, 4), False)])
def test_an_old_nccl_between_machines(
    gpus: Settings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: tuple[int, ...],
    warns: bool,
) -> None:
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: version)
    with caplog.at_level(logging.WARNING):
        assert choose_comm("auto", gpus, FOUR, 2) == "nccl"
    assert ("NCCL is 2.28.9; before 2.30.4" in caplog.text) == warns


class Peers:
    """Four ranks as rank 1 sees them; `damage` changes what came from rank 2."""

    def __init__(self, damage: int = 0, late: int = 0) -> None:
        self.damage, self.error = damage, torch.tensor([late], dtype=torch.int32)

    def all(self, mine: torch.Tensor) -> torch.Tensor:
        found = torch.stack([mine - 1 + rank for rank in range(4)])
        found[2, 77] += self.damage
        return found


def test_the_probe_at_start() -> None:
    layout, cpu = RankLayout(4, rank=1), torch.device("cpu")

    def run(peers: Any) -> None:
        devices._probe(peers, layout, cpu)

    run(Peers())
    with pytest.raises(RankError, match="what rank 2 stored in its memory did not arrive"):
        run(Peers(damage=1))
    with pytest.raises(RankError, match="what rank 3 stored"):
        run(Peers(late=4))
