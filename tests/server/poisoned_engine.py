"""The real engine process with a damaged model: the embedding of token POISONED is NaN."""

import math
import os
import sys

from dsv4.server.worker import main

_run = main.Worker.run


def run(worker: main.Worker) -> None:
    worker._engine._runner.model.embedding[int(os.environ["POISONED"])].fill_(math.nan)
    _run(worker)


if __name__ == "__main__":
    main.Worker.run = run  # type: ignore[method-assign]
    sys.exit(main.main(sys.argv))
