"""The short form of `make chaos`: the embedded model, its engine killed, stopped and starved."""

import json
from pathlib import Path

import pytest

from benchmarks import serve_chaos


@pytest.mark.timeout(900)
def test_every_request_is_answered_or_fails_cleanly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """How many of each is up to the machine; that none hangs and none is lost is not."""
    path = tmp_path / "record.json"
    code = serve_chaos.main(["--seconds", "12", "--patience", "240", "-o", str(path)])
    record = json.loads(path.read_text())
    assert record["problems"] == []
    assert code == 0
    outcomes = record["outcomes"]
    assert (outcomes["hung"], outcomes["lost"]) == (0, 0)
    assert outcomes["answered"] > 0
    assert sum(record["faults"].values()) > 0
