"""Real clients against a live server: `make clients`.

    run.py CLIENT_PYTHON [NODE_FOLDER] [-- PYTEST ARGUMENTS]

Starts `dsv4 serve tiny` on a free port with this interpreter, then runs the Python clients with
CLIENT_PYTHON and, if there is a NODE_FOLDER with installed packages, the Node clients.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
START_SECONDS = 300.0
SERVE = ("serve", "tiny", "--port", "0")


def main(arguments: list[str]) -> int:
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    python, *folders = [str(Path(name).absolute()) for name in arguments[:cut]]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            [sys.executable, "-c", "from dsv4.cli import main; main()", *SERVE], stderr=log
        )
        try:
            url = wait_for_url(server, log.fileno())
            codes = [run_python(python, url, arguments[cut + 1 :])]
            codes += [run_node(folder, url) for folder in folders]
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
        errors = re.findall(r".*(?:Traceback|failed|the engine ended).*", read(log.fileno()))
    for line in errors:
        print("server:", line)  # noqa: T201
    return max([*codes, bool(errors)])


def wait_for_url(server: "subprocess.Popen[bytes]", log: int) -> str:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        found = re.search(r"ready: (http\S+)", read(log))
        if found:
            return found.group(1)
        time.sleep(0.1)
    raise SystemExit(f"the server did not become ready:\n{read(log)}")


def read(file: int) -> str:
    return os.pread(file, 1 << 24, 0).decode("utf-8", "replace")


def run_python(python: str, url: str, extra: list[str]) -> int:
    command = [python, "-m", "pytest", "-q", "-ra", "--durations=5", *(extra or ["."])]
    return subprocess.run(command, cwd=HERE, env={**os.environ, "DSV4_URL": url}).returncode


def run_node(folder: str, url: str) -> int:
    """The scripts are copied beside the packages, where imports are looked for."""
    for script in sorted((HERE / "node").glob("*.mjs")):
        (Path(folder) / script.name).write_text(script.read_text())
    scripts = [script.name for script in sorted((HERE / "node").glob("*.mjs"))]
    command = ["node", "--test", *scripts]
    return subprocess.run(command, cwd=folder, env={**os.environ, "DSV4_URL": url}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
