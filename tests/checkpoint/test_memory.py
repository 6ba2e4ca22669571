"""Streaming needs memory for one parameter, not for the model; so does converting."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

# a dozen layers in MXFP4: the whole is far larger than what one layer allows
CHILD = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from benchmarks import load
from dsv4.checkpoint.reader import open_checkpoint
from dsv4.config import ModelConfig
from dsv4.tools.convert.convert import convert
torch.set_num_threads(1)
folder = Path(sys.argv[2])
load.SHAPE |= {"hidden_size": 1024, "moe_intermediate_size": 512, "n_routed_experts": 10}
load.write_checkpoint(folder / "source", "mxfp4", 0.1)
checkpoint = open_checkpoint(folder / "source", ModelConfig.from_folder(folder / "source"))
layer = sum(s.nbytes for s in checkpoint.sources.values() if s.layer == 1)
with load.peak_memory() as peak:
    for _ in checkpoint.stream(mxfp4_as_nvfp4=True):
        pass
    streamed = peak()
with load.peak_memory() as peak:
    convert(folder / "source", folder / "out", "nvfp4")
    converted = peak()
with load.peak_memory() as peak:
    weights = checkpoint.load()
    loaded = peak()
print(json.dumps({"total": checkpoint.nbytes, "layer": layer, "streamed": streamed,
                  "converted": converted, "loaded": loaded}))
"""


def test_peak_memory(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(ROOT), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(run.stdout)
    slack = found["total"] // 4  # what an allocator may hold back, more with larger pages
    assert found["total"] > 6 * found["layer"]
    assert found["streamed"] < found["layer"] + slack
    assert found["converted"] < found["layer"] + 2 * slack
    assert found["loaded"] > 0.8 * found["total"]  # the measure sees what is held
