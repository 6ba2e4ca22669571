"""In exact mode a quantised checkpoint gives the logits of its dequantised values, bit for bit."""

from pathlib import Path

import pytest
import torch

from dsv4.engine import Engine
from tests.checkpoint import tiny, writers

EXACT = {"dtype": "float32", "kv_format": "fp32", "index_format": "fp32", "device": "cpu"}


def logits(folder: Path) -> torch.Tensor:
    engine = Engine.load(str(folder), max_context=256, max_sequences=1, **EXACT)
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, tiny.CONFIG["vocab_size"], (150,), generator=generator)
    return torch.cat(list(engine.score(ids.tolist())))


@pytest.mark.parametrize("layout", list(writers.LAYOUTS))
def test_logits_equal_those_of_the_dequantised_model(layout: str, tmp_path: Path) -> None:
    written = writers.made(layout)
    writers.save(written, tmp_path / "stored")
    unquantised = writers.plain_official(written.truth, "F32")
    writers.save(unquantised, tmp_path / "plain")
    found, wanted = logits(tmp_path / "stored"), logits(tmp_path / "plain")
    assert found.shape == (150, tiny.CONFIG["vocab_size"])
    assert float(found.std()) > 0.01
    assert torch.equal(found, wanted)


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    """One changed nibble in one expert is seen."""
    written = writers.made("official")
    writers.save(written, tmp_path / "a")
    for expert in range(4):
        name = f"layers.2.ffn.experts.{expert}.w1.weight"
        dtype, packed = written.disk[name]
        changed = packed.copy()
        changed[0, 0] ^= 0x07
        written.disk[name] = (dtype, changed)
    writers.save(written, tmp_path / "b")
    assert not torch.equal(logits(tmp_path / "a"), logits(tmp_path / "b"))
