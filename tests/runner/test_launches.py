"""How many kernels a layer launches when one token is decoded at the widths of V4-Flash.

Launches are counted, not run: the interpreter's way in is replaced by a list. The interpreter is
chosen when a kernel's module is imported, so this file is both the test and the program.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

MOST = {"swa": 14, "csa": 17, "hca": 14}


@pytest.fixture(scope="module")
def launches() -> dict[str, list[str]]:
    pytest.importorskip("triton", reason="the interpreter is absent")
    found = subprocess.run(
        [sys.executable, "-m", "tests.runner.test_launches"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    result: dict[str, list[str]] = json.loads(found.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("kind", MOST)
def test_launches_of_a_layer(launches: dict[str, list[str]], kind: str) -> None:
    names = launches[kind]
    assert 8 <= len(names) <= MOST[kind], Counter(names)


def test_launches_around_the_layers(launches: dict[str, list[str]]) -> None:
    """Embedding, head, sampling, the next input; nothing else."""
    names = Counter(launches["rest"])
    assert sum(names.values()) <= 12, names


def main() -> None:
    from dataclasses import replace

    from triton.runtime.interpreter import InterpretedFunction

    from dsv4.config import ModelConfig
    from dsv4.ops.op import kernels_on_cpu
    from dsv4.runner.buffers import Bucket
    from dsv4.runner.decode import decode_step
    from dsv4.tools.speed.model import filled_state, random_model, start_at

    names: list[str] = []

    def record(self, grid):  # type: ignore[no-untyped-def]
        return lambda *args, **kwargs: names.append(self.fn.__name__)

    InterpretedFunction.__getitem__ = record
    config = replace(
        ModelConfig.builtin("flash"), vocab_size=1000, num_experts=8, num_layers=3,
        compress_ratios=(0, 4, 128), num_hash_layers=0,
    )  # fmt: skip
    cpu = torch.device("cpu")
    model, _ = random_model(config, cpu)
    state = filled_state(config, 1, 4096, cpu)
    start_at(state, 4000)
    counts: dict[str, list[str]] = {}
    blocks, layers = model.blocks, state.layers

    def launched(places: list[int]) -> list[str]:
        names.clear()
        model.blocks = [blocks[place] for place in places]
        chosen = [layers[place] for place in places]
        with kernels_on_cpu():
            decode_step(model, chosen, state.buffers, Bucket(1, 4096, True))
        return list(names)

    for place, kind in enumerate(config.kinds):
        once, twice = launched([place]), launched([place, place])
        counts[str(kind)] = sorted((Counter(twice) - Counter(once)).elements())
        counts["rest"] = sorted((Counter(once) - Counter(counts[str(kind)])).elements())
    sys.stdout.write(json.dumps(counts) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        main()
