"""Facts about this machine: versions, the GPU, which kernel serves which op, memory bandwidth."""

import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass
from importlib import metadata
from typing import Any

import torch

from dsv4 import __version__
from dsv4.formats.quantized import Fp8BlockTensor, Nvfp4Tensor, QuantizedTensor
from dsv4.formats.spec import NVFP4_GROUP
from dsv4.ops import OPS
from dsv4.ops.core.arguments import copied, leaves
from dsv4.ops.core.gpu import Gpu, describe
from dsv4.ops.core.op import AnyOp, Arguments
from dsv4.ops.gemm.weights.a8 import A8Fp8, A8Mxfp4
from dsv4.ops.gemm.weights.scaled import ScaledTensor
from dsv4.ops.kv.pool import PagedPool
from dsv4.runner.activations import choose_activations
from dsv4.runner.load import driver_version, find_gpu
from dsv4.tools.bench_ops import measure_ceilings
from dsv4.util.measured_gpu import MeasuredGpu, load_measured, save_measured

# published GB/s, by a part of the device's name
PUBLISHED_GBS = {
    "GB300": 8000, "B300": 8000, "GB200": 8000, "B200": 8000, "GH200": 4000, "H200": 4800,
    "H100 PCIe": 2000, "H100 NVL": 3900, "H100": 3350, "H20": 4000, "A100-SXM4-40GB": 1555,
    "A100-PCIE-40GB": 1555, "A100": 2039, "L40": 864, "L20": 864, "RTX PRO 6000": 1792,
    "RTX 5090": 1792, "RTX 4090": 1008, "GB10": 273, "A6000": 768, "RTX 3090": 936,
}  # fmt: skip
LEAST_SHARE = 0.75  # of the published figure; less means that something else uses the bandwidth
_COPY_BYTES = 1 << 28


@dataclass(frozen=True)
class Machine:
    python: str
    dsv4: str
    torch: str
    triton: str
    cuda: str
    driver: str
    device: str
    capability: str
    memory_gb: float
    bandwidth_gbs: float
    published_gbs: float
    activations: dict[str, str]  # what `activations=auto` means for each module group here
    activations_why: str
    kernels: list[dict[str, str]]  # op, format, runs, why

    gpu: dict[str, Any] | None = None  # the facts that kernels choose by; see ops/core/gpu.py
    about_gpu: str = ""  # too old, or newer than what kernels were compiled for
    best_gbs: float = 0.0  # the most that doctor has measured on this machine

    @property
    def notes(self) -> list[str]:
        found = [self.about_gpu] if self.about_gpu else []
        expected, whose = self.published_gbs, "published"
        if not expected:
            expected, whose = self.best_gbs, "measured here before"
        if self.bandwidth_gbs < LEAST_SHARE * expected:
            found.append(
                f"memory reads at {self.bandwidth_gbs:.0f} GB/s, {expected:.0f} {whose}: is "
                "something else using the GPU?"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "notes": self.notes}


def examine_machine(device: str) -> Machine:
    on_gpu = device != "cpu"
    name = torch.cuda.get_device_name(device) if on_gpu else platform.processor() or "CPU"
    capability, memory, driver = "", 0.0, ""
    if on_gpu:
        facts = torch.cuda.get_device_properties(device)
        capability, memory = f"sm_{facts.major}{facts.minor}", facts.total_memory / 1e9
        driver = "CUDA {}.{}".format(*driver_version())
    gpu = describe(torch.device(device)) if on_gpu else None
    about = describe(torch.device("cuda")).reason if torch.cuda.is_available() else None
    if gpu is not None:
        about = gpu.note
    rate, best = _bandwidth(name, gpu, facts.total_memory) if gpu else (_copy_gbs(), 0.0)
    choice = choose_activations("auto", find_gpu(device))
    published = published_gbs(name) if on_gpu else 0
    return Machine(
        python=platform.python_version(),
        dsv4=__version__,
        torch=torch.__version__,
        triton=_version("triton"),
        cuda=torch.version.cuda or "none",
        driver=driver,
        device=name,
        capability=capability,
        memory_gb=round(memory, 1),
        bandwidth_gbs=round(rate, 1),
        published_gbs=float(published),
        activations=dict(choice.widths),
        activations_why=choice.why,
        kernels=list(kernel_table(device)),
        gpu=asdict(gpu) if gpu else None,
        about_gpu=about or "",
        best_gbs=round(best, 1),
    )


def published_gbs(name: str) -> int:
    """0 if unknown; a laptop's GPU is slower than its namesake."""
    found = (gbs for part, gbs in PUBLISHED_GBS.items() if part in name)
    return 0 if "Laptop" in name else next(found, 0)


def _bandwidth(name: str, gpu: Gpu, memory_bytes: int) -> tuple[float, float]:
    """GB/s now, and the most measured here so far; saved for `plan --gpu here`."""
    found, known = measure_ceilings(), load_measured().get(name)
    read, tflops = found.read_gbs, found.matrix_tflops
    if known is not None and known.memory_bytes == memory_bytes:
        read, tflops = max(read, known.read_gbs), max(tflops, known.tflops)
    save_measured(MeasuredGpu(name, gpu.architecture, memory_bytes, read, tflops))
    return found.read_gbs, read


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _copy_gbs() -> float:
    """Copy bandwidth of a buffer larger than any cache."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source).copy_(source)
    begin = time.perf_counter()
    target.copy_(source)
    return 2 * _COPY_BYTES / (time.perf_counter() - begin) / 1e9


def kernel_table(device: str) -> Iterator[dict[str, str]]:
    """What serves each op and number format on this device, and why: the registry, queried with the
    first case of each format."""
    for op in OPS.values():
        if device == "cpu":
            why = "a CPU runs references"
            yield {"op": op.name, "format": "all", "runs": "reference", "why": why}
            continue
        seen: set[str] = set()
        for case in op.cases():
            drawn = case.build(torch.Generator().manual_seed(1))
            label = format_of(drawn)
            if label not in seen and all(tensor.numel() for _, tensor in leaves(drawn)):
                seen.add(label)
                arguments = copied(drawn, lambda tensor: tensor.to(device))
                runs, why = choice_for(op, arguments)
                yield {"op": op.name, "format": label, "runs": runs, "why": why}


def choice_for(op: AnyOp, arguments: Arguments) -> tuple[str, str]:
    """The first kernel that supports the arguments, or the reference with each kernel's reason."""
    reasons: list[str] = []
    for kernel in op.kernels:
        name = kernel.module.rpartition(".")[2]
        reason = kernel.supports(arguments)
        if reason is None:
            return name, "; ".join(reasons) or "first choice"
        reasons.append(f"not {name}: {reason}")
    return "reference", "; ".join(reasons) or "no kernel is written yet"


def format_of(value: Any) -> str:
    """Number formats in an op's arguments: weights with their activations, pools, else dtypes."""
    found = list(dict.fromkeys(_formats(value)))
    if not found:
        kinds = [tensor.dtype for _, tensor in leaves(value) if tensor.is_floating_point()]
        found = [str(kinds[0]).removeprefix("torch.")] if kinds else ["integers"]
    return ", ".join(found)


def _stored(weight: QuantizedTensor | ScaledTensor | A8Fp8 | A8Mxfp4) -> str:
    if isinstance(weight, ScaledTensor):
        four = "nvfp4" if weight.group == NVFP4_GROUP else "mxfp4"
        return four if weight.element_bits == 4 else "fp8"
    if isinstance(weight, Nvfp4Tensor):
        return "nvfp4"
    return "fp8" if isinstance(weight, Fp8BlockTensor | A8Fp8) else "mxfp4"


def _formats(value: Any) -> Iterator[str]:
    if isinstance(value, QuantizedTensor | ScaledTensor | A8Fp8 | A8Mxfp4):
        yield f"{_stored(value)} x {value.activations}"
    elif isinstance(value, PagedPool):
        yield f"{value.format} entries"
    elif is_dataclass(value):
        for item in fields(value):
            yield from _formats(getattr(value, item.name))
    elif isinstance(value, dict):
        for part in value.values():
            yield from _formats(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _formats(part)
