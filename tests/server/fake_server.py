"""`dsv4 serve` with the engine of `fake_engine.py`; the same options, the same processes."""

from pathlib import Path
from typing import Any

import dsv4.server.run
from dsv4.cli import main

ENGINE = (str(Path(__file__).with_name("fake_engine.py")),)
_serve = dsv4.server.run.serve


def serve(*arguments: Any, **options: Any) -> None:
    _serve(*arguments, **options, engine=ENGINE)


if __name__ == "__main__":
    dsv4.server.run.serve = serve
    main()
