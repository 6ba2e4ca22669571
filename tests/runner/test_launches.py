"""How many kernels a layer launches when one token is decoded at the widths of V4-Flash.

Launches are counted, not run: the interpreter's way in is replaced by a list. The interpreter is
chosen when a kernel's module is imported, so this file is both the test and the program.
"""

import json
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4.tools.speed.profile import families_of
from tests.ops.kernels.compiling import interpreted

MOST = {"swa": 14, "csa": 17, "hca": 14, "csa long": 18}


@pytest.fixture(scope="module")
def launches() -> dict[str, list[str]]:
    printed = interpreted("tests.runner.test_launches")
    result: dict[str, list[str]] = json.loads(printed.splitlines()[-1])
    return result


@pytest.mark.parametrize("kind", MOST)
def test_launches_of_a_layer(launches: dict[str, list[str]], kind: str) -> None:
    names = launches[kind]
    assert 8 <= len(names) <= MOST[kind], Counter(names)


def test_launches_around_the_layers(launches: dict[str, list[str]]) -> None:
    """Embedding, head, sampling, the next input; nothing else."""
    names = Counter(launches["rest"])
    assert sum(names.values()) <= 12, names


def test_the_embedded_model_runs_on_kernels_alone(launches: dict[str, list[str]]) -> None:
    """Loaded as for a GPU, every op of a prompt and of decoding takes its arguments."""
    assert len(launches["tiny prompt"]) > 60
    assert len(launches["tiny decode"]) > 60


def test_the_embedded_model_runs_on_block_scaled_products_alone(
    launches: dict[str, list[str]],
) -> None:
    """The same with activations of few bits, as sm_100 would run it."""
    for part in ("prompt", "decode"):
        names = Counter(launches[f"tiny a4 {part}"])
        products = names["_few_rows_kernel"] + names["_many_rows_kernel"]
        assert products == 6 * 8, names  # each layer: attention 4, experts 4
        assert names["_quantize_kernel"] == 6 * 8, names  # two matrices share their rows
        assert not {"_up_kernel", "_down_kernel"} & names.keys()


def test_an_official_model_runs_on_fp8_products_alone(launches: dict[str, list[str]]) -> None:
    """The embedded one in FP8 and MXFP4 with a8 rows, as sm_90 runs it; `wo_a` reads the row
    unrounded."""
    for part in ("prompt", "decode"):
        names = Counter(launches[f"tiny a8 {part}"])
        assert names["_a8_kernel"] == 6 * 8, names  # each layer: attention 4, experts 4
        # wq_a and wkv share their rows, and so do the shared expert and the others
        assert names["_a8_rows_kernel"] == 6 * 6, names
        families = families_of(launches[f"tiny a8 {part}"])
        products = zip(launches[f"tiny a8 {part}"], families, strict=True)
        by_family = Counter(family for name, family in products if name == "_a8_kernel")
        assert by_family == {"linear": 6 * 4, "experts": 6 * 4}  # as `dsv4 bench` reports them
        assert "_activate_kernel" not in names
        assert not {"_up_kernel", "_down_kernel"} & names.keys()
    plan = "; ".join(launches["tiny a8 plan"])
    assert "reference" not in plan
    assert "experts by experts_a8_triton" in plan


def test_the_plan_says_what_serves_what(launches: dict[str, list[str]]) -> None:
    """Fusions stay on while it is recorded, and each op has the kernel that launched."""
    plan = dict(line.split(": ", 1) for line in launches["tiny plan"])
    assert plan.keys() == {"every step", "every decode", "every prompt", "every sampling"}
    assert "embed by embed_triton" in plan["every step"].split("; ")
    state = "rms_norm, kv_store, compress by norm_store_triton"
    assert state in plan["every decode"].split("; ")
    assert "_state_kernel" in launches["tiny decode"]
    assert "kv_store by kv_store_triton" in plan["every prompt"].split("; ")
    assert plan["every sampling"] == "sample by sample_triton; accept by accept_triton"
    assert not any("reference" in line for line in launches["tiny plan"])
    assert any("experts by experts_scaled_triton" in line for line in launches["tiny a4 plan"])


def test_drafts_take_the_launches_of_a_batch(launches: dict[str, list[str]]) -> None:
    """Four rows of one sequence, and four sequences: the same kernels in every kind of layer."""
    for kind in ("swa", "csa", "hca"):
        assert launches[f"{kind} verify"] == launches[f"{kind} batch"]
        assert "_state_kernel" in launches[f"{kind} verify"]


def as_official(name: str, weight: Any) -> Any:
    """A quantised weight of the embedded model in the formats of an official checkpoint."""
    from dsv4.formats import fp8, mxfp4
    from dsv4.formats.quantized import Fp8BlockTensor, Mxfp4Tensor

    values = weight.dequantize()
    if ".experts." in name:
        return Mxfp4Tensor(*mxfp4.quantize(values))
    return Fp8BlockTensor(*fp8.quantize_tiles(values), 128)


def tiny_launches(names: list[str], width: str = "a16") -> dict[str, list[str]]:
    from dsv4.checkpoint.reader import open_checkpoint
    from dsv4.config import EngineConfig, ModelConfig
    from dsv4.model.transformer import Transformer
    from dsv4.ops.core.context import kernels_on_cpu
    from dsv4.ops.gemm.weights.repack import repack
    from dsv4.runner.activations import choose_activations, width_of
    from dsv4.runner.plan import StepPlan
    from dsv4.runner.runner import Runner
    from dsv4.runner.settings import resolve
    from dsv4.runner.step.shape import StepShape
    from dsv4.util.models import model_folder

    config = ModelConfig.from_folder(model_folder("tiny"))
    checkpoint = open_checkpoint(model_folder("tiny"), config)
    table = {}
    for name, weight in checkpoint.stream(torch.bfloat16, "cpu", None, True):
        if not isinstance(weight, torch.Tensor):
            asked = width_of(checkpoint.sources[name], choose_activations(width, None).widths)
            weight = as_official(name, weight) if width == "a8" else weight
            weight = replace(weight, activations=asked)
        table[name] = repack(name, weight)
    choices = EngineConfig(
        device="cpu", dtype="bfloat16", kv_format="fp8", index_format="fp8", max_context=512,
        max_sequences=2, chunk_tokens=64, activations=width,
    )  # fmt: skip
    settings = resolve(choices, config, has_gpu=False, memory_bytes=2**32)
    runner = Runner(Transformer(config, table, torch.bfloat16), settings)
    found, label = {}, "tiny" if width == "a16" else f"tiny {width}"
    plan = StepPlan()

    def run(*keys: StepShape | int) -> list[str]:
        names.clear()
        for key in keys:
            with plan.recording(key):
                runner._run_once(key)
        return list(names)

    with kernels_on_cpu():
        found[f"{label} prompt"] = run(StepShape(40, 2, 512, False))
        found[f"{label} decode"] = run(StepShape(2, 2, 512, True), 2)
    found[f"{label} plan"] = plan.summary()
    return found


def main() -> None:
    from triton.runtime.interpreter import InterpretedFunction

    from dsv4.config import ModelConfig
    from dsv4.ops.core.context import kernels_on_cpu
    from dsv4.ops.core.gpu import KNOWN, assume
    from dsv4.tools.speed.model import decode_step, filled_state, random_model, start_at

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
    blocks = model.blocks

    def launched(places: list[int], state: Any = state) -> list[str]:
        names.clear()
        model.blocks = [blocks[place] for place in places]
        chosen = [state.layers[place] for place in places]
        with kernels_on_cpu():
            decode_step(model, chosen, state)
        return list(names)

    for place, kind in enumerate(config.kinds):
        once, twice = launched([place]), launched([place, place])
        counts[str(kind)] = sorted((Counter(twice) - Counter(once)).elements())
        counts["rest"] = sorted((Counter(once) - Counter(counts[str(kind)])).elements())
    batch, drafts = filled_state(config, 4, 4096, cpu), filled_state(config, 1, 4096, cpu, width=4)
    for name, some in (("batch", batch), ("verify", drafts)):
        start_at(some, 4000)
        for place, kind in enumerate(config.kinds):
            once, twice = (launched([place] * count, some) for count in (1, 2))
            counts[f"{kind} {name}"] = sorted((Counter(twice) - Counter(once)).elements())
    long = filled_state(config, 1, 65536, cpu)
    start_at(long, 65000)
    once, twice = (launched(places, long) for places in ([1], [1, 1]))
    counts["csa long"] = sorted((Counter(twice) - Counter(once)).elements())
    tiny = {**tiny_launches(names), **tiny_launches(names, "a4")}
    with assume(KNOWN[90]):
        tiny |= tiny_launches(names, "a8")
    sys.stdout.write(json.dumps({**counts, **tiny}) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        main()
