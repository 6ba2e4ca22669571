"""`dsv4 serve` with the engine of `fake_engine.py`, or another script that `FAKE_ENGINE` names; the
same options, the same processes."""

import functools
import os
import sys
from pathlib import Path
from typing import Any

import dsv4.server.answers
import dsv4.server.middleware
import dsv4.server.run
from dsv4.cli import main

ENGINE = (str(Path(__file__).with_name(os.environ.get("FAKE_ENGINE", "fake_engine.py"))),)
_serve = dsv4.server.run.serve


def serve(*arguments: Any, **options: Any) -> None:
    _serve(*arguments, **options, engine=ENGINE)


if __name__ == "__main__":
    dsv4.server.run.serve = serve  # type: ignore[assignment]
    if "--ray" in sys.argv:
        import dsv4.deploy.ray

        on_ray = functools.partial(dsv4.deploy.ray.serve, engine=ENGINE)
        dsv4.deploy.ray.serve = on_ray  # type: ignore[assignment]
    if "FAKE_HURRY" in os.environ:  # limits of time that a test can wait for
        dsv4.server.run.HEADER_SECONDS = dsv4.server.middleware.BODY_SECONDS = 1.5
        dsv4.server.answers.KEEP_ALIVE_SECONDS = 0.3
    main()
