"""The real engine process, in which rank 0 never gets its first exchange of a request."""

import logging
import sys
import threading
from typing import Any

from dsv4.parallel.torch_comm import TorchComm
from dsv4.server.worker import main

_run = main.Worker.run


def wait_for_ever(*arguments: Any) -> None:
    logging.error("rank 0 waits for ever")
    threading.Event().wait()


def run(worker: main.Worker) -> None:
    TorchComm.gather = wait_for_ever  # type: ignore[method-assign]  # from here on: it has warmed up
    _run(worker)


if __name__ == "__main__":
    main.Worker.run = run  # type: ignore[method-assign]
    sys.exit(main.main(sys.argv))
