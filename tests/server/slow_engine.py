"""The real engine process, which loads for a minute and tells its progress."""

import sys
import time
from typing import Any

from dsv4.engine import Engine
from dsv4.server.worker import main

_load = Engine.load


def load(prepared: Any, progress: Any, **others: Any) -> Engine:
    for done in range(600):
        progress(done, 600)
        time.sleep(0.1)
    return _load(prepared, progress=progress, **others)


if __name__ == "__main__":
    Engine.load = load  # type: ignore[method-assign,assignment]
    sys.exit(main.main(sys.argv))
