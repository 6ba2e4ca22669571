from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.browsing import chromium, visit
from tests.server.support import RAY, Server


@pytest.fixture(scope="session")
def engine_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the scripted engine was asked, one JSON object a line."""
    return tmp_path_factory.mktemp("engine") / "log.jsonl"


@pytest.fixture(scope="session")
def server(engine_log: Path) -> Iterator[Server]:
    """A server whose engine follows a script: what comes out is known."""
    running = Server(*RAY, env={"FAKE_ENGINE_LOG": str(engine_log)}).wait()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="session")
def tiny() -> Iterator[Server]:
    """A server with the embedded model."""
    running = Server(*RAY, fake=False).wait()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with chromium() as made:
        yield made


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    """The page of the scripted engine in a fresh profile."""
    with visit(browser, server.url) as opened:
        yield opened
