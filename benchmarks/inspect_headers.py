"""How long `inspect` takes on the headers of all 69,187 tensors of V4-Flash.

    python -m benchmarks.inspect_headers [--record FILE]

The files are sparse: real headers, no data. Each run is a fresh process, imports included.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.tools.test_inspect import flash_headers

RUN = """
import json, resource, sys, time
from pathlib import Path
begin = time.perf_counter()
from dsv4.tools.inspect import inspect_checkpoint
found = inspect_checkpoint(Path(sys.argv[1]))
print(json.dumps({
    "seconds": time.perf_counter() - begin,
    "cpu_seconds": time.process_time(),
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "tensors": found.num_tensors,
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flash_headers(Path(folder))
        command = [sys.executable, "-c", RUN, folder]
        runs = [
            json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            for _ in range(args.runs)
        ]
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    seconds = [run["seconds"] for run in runs]
    record = {
        "what": "inspect, headers of V4-Flash",
        "commit": commit,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, 2 cores",
        "command": "python -m benchmarks.inspect_headers",
        "tensors": runs[0]["tensors"],
        "median_s": round(statistics.median(seconds), 2),
        "spread_s": round(max(seconds) - min(seconds), 2),
        "cpu_s": round(statistics.median(run["cpu_seconds"] for run in runs), 2),
        "peak_bytes": max(run["peak_bytes"] for run in runs),
    }
    line = json.dumps(record)
    sys.stdout.write(line + "\n")
    if args.record:
        with args.record.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
