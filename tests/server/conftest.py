from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.support import Server


@pytest.fixture(scope="session")
def engine_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the scripted engine was asked, one JSON object a line."""
    return tmp_path_factory.mktemp("engine") / "log.jsonl"


@pytest.fixture(scope="session")
def server(engine_log: Path) -> Iterator[Server]:
    """A server whose engine follows a script: what comes out is known."""
    running = Server(env={"FAKE_ENGINE_LOG": str(engine_log)}).wait()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="session")
def tiny() -> Iterator[Server]:
    """A server with the embedded model."""
    running = Server(fake=False).wait()
    yield running
    assert running.stop() == 0
