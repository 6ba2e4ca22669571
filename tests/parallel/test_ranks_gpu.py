"""Ranks on one GPU that they share: real kernels, graphs and exchanges; times mean nothing.

torch lets processes share a GPU's symmetric memory if TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
from dsv4 import Engine, SamplingParams

def main():
    choices = json.loads(sys.argv[1])
    engine = Engine.load(choices.pop("model", "tiny"), device="cuda", max_sequences=8,
                         max_context=2048, chunk_tokens=256, **choices)
    text = "The quick brown fox counts: one two three four five six seven. "
    greedy = SamplingParams(max_tokens=60, temperature=0.0, logprobs=2, stop_ids=())
    drawn = SamplingParams(max_tokens=40, temperature=1.0, seed=7, logprobs=1, stop_ids=())
    answers = engine.generate([text, text * 9, "A"], greedy)
    answers += engine.generate([text * 5], drawn, n=4)
    answers += engine.generate([text * 9 + "And"], SamplingParams(max_tokens=200, stop_ids=(),
                                                                  temperature=0.0, logprobs=1))
    found = [[a.token_ids, [t.logprob for t in a.logprobs]] for a in answers]
    engine.close()
    print("FOUND", json.dumps(found))

if __name__ == "__main__":
    main()
"""


def answers(folder: Path, **choices: Any) -> Any:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(program), json.dumps(choices)]
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    assert "slow reference" not in run.stderr, run.stderr[-6000:]
    line = next(line for line in run.stdout.splitlines() if line.startswith("FOUND "))
    return json.loads(line[6:])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return answers(tmp_path_factory.mktemp("alone"))


LAYOUTS = [
    {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"tp": 2, "experts": "split"},
    {"tp": 2, "attention": "dp"}, {"tp": 2, "draft": "lookup"},
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_have_the_bits_of_one(alone: Any, layout: dict[str, Any], tmp_path: Path) -> None:
    assert answers(tmp_path, **layout) == alone


def test_ranks_without_graphs(alone: Any, tmp_path: Path) -> None:
    assert answers(tmp_path, tp=2, cuda_graphs=False) == alone


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded model in the official formats."""
    folder = tmp_path_factory.mktemp("official") / "tiny"
    command = ["convert", str(ROOT / "dsv4/models/tiny"), str(folder), "--to", "official"]
    subprocess.run([sys.executable, "-m", "dsv4", *command], cwd=ROOT, check=True, timeout=200)
    return str(folder)


@pytest.fixture(scope="module")
def alone_a8(official: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    return {
        width: answers(folder, model=official, activations=width) for width in ("a16", "a8", "auto")
    }


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a Hopper GPU",
)
@pytest.mark.parametrize(
    ("width", "layout"),
    [("auto", {"tp": 2}), ("a8", {"tp": 2}), ("a8", {"pp": 2}),
     ("a8", {"tp": 2, "experts": "split"})],
)  # fmt: skip
def test_ranks_with_a8_rows(
    official: str, alone_a8: dict[str, Any], width: str, layout: dict[str, Any], tmp_path: Path
) -> None:
    """Of all groups, or of the experts alone; nothing falls back to a reference."""
    assert alone_a8["a8"] != alone_a8["auto"] != alone_a8["a16"]
    assert answers(tmp_path, model=official, activations=width, **layout) == alone_a8[width]


NCCL_PROGRAM = """
import os, sys
import torch
import torch.distributed
from dsv4.parallel.layout import RankLayout
from dsv4.parallel.torch_comm import TorchComm

device = torch.device("cuda", 0)
torch.cuda.set_device(device)
store = torch.distributed.FileStore(sys.argv[1], 1)
comm = TorchComm.nccl(RankLayout(), store, device, 30.0)
x = torch.arange(1000, device=device)
out, rows = torch.zeros(1, 1000, dtype=x.dtype, device=device), torch.zeros_like(x)[:, None]
graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
with torch.cuda.stream(stream):
    graph.capture_begin(capture_error_mode="thread_local")
    comm.gather(out, x)
    comm.exchange(rows, x[:, None].contiguous(), [1000], [1000])
    graph.capture_end()
for turn in range(600):
    x.add_(turn)
    graph.replay()
torch.cuda.synchronize()
print("SAME", torch.equal(out[0], x), torch.equal(rows[:, 0], x), flush=True)
os._exit(0)  # a communicator that was captured is abandoned, not destroyed
"""


def test_nccl_is_captured(tmp_path: Path) -> None:
    """One rank: NCCL refuses two on the same GPU, so more are for an owner to confirm."""
    program = tmp_path / "program.py"
    program.write_text(NCCL_PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(program), str(tmp_path / "store")]
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert "SAME True True" in run.stdout, run.stdout + run.stderr[-4000:]


IPC_PROGRAM = """
import json, os, sys, time
from pathlib import Path
import torch
from dsv4.ops.comm.symmetric_triton import PROGRAMS, PushChannel, SymmetricPushes

folder, place, half = Path(sys.argv[1]), int(sys.argv[2]), 1 << 16
device, words = torch.device("cuda", 0), dict(dtype=torch.int32, device="cuda:0")
torch.cuda.set_device(device)
memory = torch.zeros(2 * half + 8 * PROGRAMS, dtype=torch.uint8, device=device)
torch.cuda.synchronize()
told = [part.hex() if isinstance(part, bytes) else part
        for part in memory.untyped_storage()._share_cuda_()]
(folder / f"new {place}").write_text(json.dumps(told))
(folder / f"new {place}").rename(folder / f"rank {place}")
while not (folder / f"rank {1 - place}").exists():
    time.sleep(0.01)
heard = json.loads((folder / f"rank {1 - place}").read_text())
peer = torch.UntypedStorage._new_shared_cuda(
    *(bytes.fromhex(part) if isinstance(part, str) else part for part in heard))
addresses = [memory.data_ptr(), peer.data_ptr()]
pushes = SymmetricPushes(PushChannel(
    place=place, addresses=torch.tensor(addresses[:: 1 - 2 * place], device=device),
    half_bytes=half, rounds=torch.zeros(PROGRAMS, **words), error=torch.zeros(1, **words),
    limit_ns=60 * 10**9, memory=(memory, peer)))
x, out = torch.arange(4000, **words) + place * 10**6, torch.empty(2, 4000, **words)
parts = torch.full((2, 3, 64), place + 1.0, device=device)
wrong = torch.zeros(1, **words)

def step():
    x.add_(1)
    pushes.gather(out, x)
    wrong.add_((out[1 - place] != x + (1 - 2 * place) * 10**6).any())
    wrong.add_((pushes.sum_ranges(parts, None, torch.bfloat16) != 6).any())

step()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()
for _ in range(600):
    graph.replay()
torch.cuda.synchronize()
print("WRONG", int(wrong), int(pushes.channel.error), int(x[0]) - place * 10**6, flush=True)
os._exit(0)  # the peer's memory is mapped here: nothing is given back in order
"""


def test_exchanges_over_cuda_ipc(tmp_path: Path) -> None:
    """Memory that one process maps from another the plain way: every one of 600 replays."""
    program = tmp_path / "program.py"
    program.write_text(IPC_PROGRAM)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(tmp_path), str(place)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for place in range(2)
    ]  # fmt: skip
    try:
        for rank in ranks:
            said, errors = rank.communicate(timeout=120)
            assert "WRONG 0 0 601" in said, said + errors[-4000:]
    finally:
        for rank in ranks:
            rank.kill()
