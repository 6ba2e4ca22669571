"""How fast do weights come into memory, against reading the same bytes with plain safetensors?

    python benchmarks/load.py --record benchmarks/records/DATE_cpu_load.jsonl

A random checkpoint of about `--gigabytes` is written for each format. Each run is a process of its
own, with the files in the page cache; the two readers take turns and medians are compared. Plain
safetensors means `safe_open`, and every tensor copied once: without the copy nothing is read.

`stream` hands one parameter at a time to a consumer that drops it, as loading onto a GPU does:
its peak is the memory the loader itself needs. Peaks are anonymous memory above the start; cached
pages of files are not counted.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from dsv4.checkpoint.files.header import OutTensor
from dsv4.checkpoint.files.writer import ShardWriter, write_json
from dsv4.checkpoint.names import parameters
from dsv4.checkpoint.reader import open_checkpoint
from dsv4.config import ModelConfig

FORMATS = ("bf16", "fp8", "mxfp4", "nvfp4")
READERS = ("safetensors", "load", "stream", "cast")
SHAPE: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 2048,
    "hidden_size": 2048,
    "num_attention_heads": 8,
    "head_dim": 256,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 256,
    "o_groups": 2,
    "o_lora_rank": 256,
    "num_hash_layers": 0,
    "sliding_window": 128,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 1024,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
}
BYTES_PER_WEIGHT = {"bf16": 2.0, "fp8": 1.0, "mxfp4": 0.53125, "nvfp4": 0.5625}


def write_checkpoint(folder: Path, form: str, gigabytes: float) -> None:
    """Routed experts in `form`, everything else BF16 or F32; official names, a file per layer."""
    weights = 3 * SHAPE["hidden_size"] * SHAPE["moe_intermediate_size"] * SHAPE["n_routed_experts"]
    num_layers = max(round(gigabytes * 1e9 / (weights * BYTES_PER_WEIGHT[form])), 2)
    config = {**SHAPE, "num_hidden_layers": num_layers, "compress_ratios": [0] * num_layers}
    write_json(folder / "config.json", config)
    generator = torch.Generator().manual_seed(0)
    groups: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {}
    for name, parameter in parameters(ModelConfig.from_dict(config)).items():
        shard = "-".join(name.split(".")[:2]) if name.startswith("layers.") else "top"
        entries = groups.setdefault(f"model-{shard}.safetensors", [])
        for module, shape in matrices(name, parameter.shape):
            is_float = parameter.kind in ("norm", "fp32")
            stored = "F32" if is_float else form if ".ffn.experts." in name else "bf16"
            entries += [(n, d, s) for n, d, s in tensors(module, shape, stored)]
    for file, entries in groups.items():
        with ShardWriter(folder / file, [OutTensor(*entry) for entry in entries]) as writer:
            for name, dtype, shape in entries:
                writer.write(name, random_bytes(name, dtype, shape, generator))
            writer.finish()


def matrices(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A canonical parameter taken apart into the tensors of the official files."""
    prefix, _, leaf = name.rpartition(".")
    if leaf not in ("w13", "w2"):
        yield name, shape
        return
    parts = ("w1", "w3") if leaf == "w13" else ("w2",)
    experts = range(shape[0]) if len(shape) == 3 else [None]
    for expert in experts:
        for part in parts:
            middle = "" if expert is None else f".{expert}"
            yield f"{prefix}{middle}.{part}.weight", (shape[-2] // len(parts), shape[-1])


def tensors(name: str, shape: tuple[int, ...], stored: str) -> Iterator[tuple[str, str, tuple]]:
    module = name.removesuffix(".weight")
    rows, cols = shape if len(shape) == 2 else (0, 0)
    if stored in ("F32", "bf16"):
        yield name, "F32" if stored == "F32" else "BF16", shape
    elif stored == "fp8":
        yield name, "F8_E4M3", shape
        yield f"{module}.scale", "F8_E8M0", (-(-rows // 128), -(-cols // 128))
    elif stored == "mxfp4":
        yield name, "I8", (rows, cols // 2)
        yield f"{module}.scale", "F8_E8M0", (rows, cols // 32)
    else:
        yield name, "U8", (rows, cols // 2)
        yield f"{module}.weight_scale", "F8_E4M3", (rows, cols // 16)
        yield f"{module}.weight_scale_2", "F32", ()
        yield f"{module}.input_scale", "F32", ()


def random_bytes(name: str, dtype: str, shape: tuple, generator: torch.Generator) -> torch.Tensor:
    if dtype in ("BF16", "F32"):
        kind = torch.bfloat16 if dtype == "BF16" else torch.float32
        if not shape:
            return torch.tensor([1e-4])
        return (torch.randn(shape, generator=generator) * 0.02).to(kind)
    if dtype == "F8_E8M0":
        return torch.randint(115, 121, shape, dtype=torch.uint8, generator=generator)
    if name.endswith("weight_scale"):
        return torch.randint(0x40, 0x78, shape, dtype=torch.uint8, generator=generator)
    high = 0x70 if dtype == "F8_E4M3" else 256
    return torch.randint(0, high, shape, dtype=torch.uint8, generator=generator)


def anonymous_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


@contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """The most anonymous memory above the start, sampled every two milliseconds."""
    start, most, stop = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not stop.wait(0.002):
            most = max(most, anonymous_bytes() - start)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: max(most, anonymous_bytes() - start)
    finally:
        stop.set()
        thread.join()


def read_once(reader: str, folder: Path, watch: bool) -> dict[str, float]:
    """Runs in a process of its own; watching the memory would slow a timed run down."""
    checkpoint = open_checkpoint(folder, ModelConfig.from_folder(folder))
    with peak_memory() if watch else nullcontext(lambda: 0) as peak:
        begin, busy = time.perf_counter(), time.process_time()
        if reader == "safetensors":
            kept = {}
            for path in sorted(folder.glob("*.safetensors")):
                with safe_open(path, "pt") as file:
                    for name in file.keys():  # noqa: SIM118 - not a dict
                        kept[name] = file.get_tensor(name).clone()
        elif reader == "load":
            checkpoint.load()
        else:
            for _ in checkpoint.stream(mxfp4_as_nvfp4=reader == "cast"):
                pass
        seconds, busy = time.perf_counter() - begin, time.process_time() - busy
    return {"seconds": seconds, "cpu_seconds": busy, "peak_bytes": peak()}


def in_child(reader: str, folder: Path, watch: bool) -> dict[str, float]:
    """A forked process starts with untouched memory and costs no second import of torch."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(sink, json.dumps(read_once(reader, folder, watch)).encode())
        finally:
            os._exit(0)
    os.close(sink)
    with open(source) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return dict(json.loads(text))


def measure(folder: Path, form: str, num_runs: int) -> dict[str, Any]:
    readers = READERS if form == "mxfp4" else READERS[:3]
    checkpoint = open_checkpoint(folder, ModelConfig.from_folder(folder))
    layers: Counter[int | None] = Counter()
    for source in checkpoint.sources.values():
        layers[source.layer] += source.nbytes
    gigabytes = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e9
    # the round that looks at memory also fills the page cache
    peaks = {reader: in_child(reader, folder, True)["peak_bytes"] for reader in readers}
    runs: dict[str, list[dict[str, float]]] = {reader: [] for reader in readers}
    for _ in range(num_runs):
        for reader in readers:
            runs[reader].append(in_child(reader, folder, False))
    line: dict[str, Any] = {"format": form, "gigabytes": round(gigabytes, 3)}
    line["layer_gb"] = round(max(layers.values()) / 1e9, 3)
    for reader, found in runs.items():
        rates = [gigabytes / run["seconds"] for run in found]
        line[reader] = {
            "gb_per_s": round(statistics.median(rates), 3),
            "lowest": round(min(rates), 3),
            "highest": round(max(rates), 3),
            "gb_per_cpu_s": round(gigabytes / min(run["cpu_seconds"] for run in found), 3),
            "peak_gb": round(peaks[reader] / 1e9, 3),
        }
    pairs = zip(runs["load"], runs["safetensors"], strict=True)
    ratios = [plain["seconds"] / ours["seconds"] for ours, plain in pairs]
    line["load_over_safetensors"] = round(statistics.median(ratios), 3)
    fastest = line["load"]["gb_per_cpu_s"] / line["safetensors"]["gb_per_cpu_s"]
    line["load_over_safetensors_cpu"] = round(fastest, 3)
    return line


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    context = {
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "command": f"python benchmarks/load.py --gigabytes {arguments.gigabytes:g} "
        f"--runs {arguments.runs}",
    }
    lines = []
    for form in FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(Path(folder), form, arguments.gigabytes)
            line = {**measure(Path(folder), form, arguments.runs), **context}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        lines.append(line)
    if arguments.record:
        arguments.record.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
