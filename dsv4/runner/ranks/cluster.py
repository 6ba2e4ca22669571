"""GPUs and the links between them, as published or assumed. No torch."""

from dataclasses import dataclass, replace

from dsv4.errors import OptionError
from dsv4.util.measured_gpu import MeasuredGpu, load_measured, measured_file

# GB/s at which kernels read host memory: measured on an H200 machine, half of it assumed; of 450
# published beside a Grace CPU two thirds, assumed
PCIE5_GBS, PCIE4_GBS, C2C_GBS = 51.0, 25.5, 300.0


@dataclass(frozen=True)
class GpuRates:
    """Published GB/s and dense TFLOP/s with fp32 accumulation: for bf16, and for FP8 and FP4 where
    the GPU multiplies block-scaled operands. `memory_gb` (10^9 bytes) is what CUDA reports: read on
    an H200, for the others as published by their owners. `bus_gbs`: of host memory; 0 where that
    is the GPU's own memory."""

    name: str
    memory_gb: float
    read_gbs: float
    tflops: float
    link: str
    architecture: int = 0  # 90: sm_90
    tflops8: float = 0.0
    tflops4: float = 0.0
    bus_gbs: float = PCIE5_GBS

    def rate(self, bits: int) -> float:
        """TFLOP/s at this activation width; of bf16 where the GPU lacks it."""
        return {8: self.tflops8, 4: self.tflops4}.get(bits, 0.0) or self.tflops


GPUS = {
    "h200": GpuRates("H200", 150.0, 4800, 989, "nvlink", 90),
    "h100": GpuRates("H100", 85.0, 3350, 989, "nvlink", 90),
    "h20": GpuRates("H20", 102.0, 4000, 148, "nvlink", 90),
    "b200": GpuRates("B200", 191.5, 8000, 2250, "nvlink", 100, 4500, 9000),
    "a100": GpuRates("A100 80 GB", 85.0, 2039, 312, "nvlink", 80, bus_gbs=PCIE4_GBS),
    "rtx-pro-6000": GpuRates("RTX PRO 6000", 101.9, 1790, 500, "pcie", 120, 1000, 2000),
    "rtx-5090": GpuRates("RTX 5090", 33.7, 1792, 210, "pcie", 120, 419, 1676),
    # the part of its 128 GB that its system leaves free
    "spark": GpuRates("DGX Spark", 109.0, 273, 125, "200g", 121, 250, 500, bus_gbs=0),
    "l40s": GpuRates("L40S", 47.7, 864, 362, "pcie4", 89, bus_gbs=PCIE4_GBS),
    "l20": GpuRates("L20", 47.7, 864, 119, "pcie4", 89, bus_gbs=PCIE4_GBS),
    "rtx-4090": GpuRates("RTX 4090", 25.4, 1008, 165, "pcie4", 89, bus_gbs=PCIE4_GBS),
    "a6000": GpuRates("RTX A6000", 51.0, 768, 155, "pcie4", 86, bus_gbs=PCIE4_GBS),
    "rtx-3090": GpuRates("RTX 3090", 25.4, 936, 71, "pcie4", 86, bus_gbs=PCIE4_GBS),
}


HERE = "here"  # the GPU that `doctor` measured on this machine
# measured by `doctor` on an H200, as shares of the published rates that forecasts are fitted to
_READ, _PRODUCTS = 0.955, 0.69


def published_rates(name: str) -> GpuRates | None:
    """Rates of a GPU by the name its driver reports."""
    words = name.lower().replace(" ", "-").replace("gb10", "spark")
    if "laptop" in words:
        return None  # slower than its namesake
    found = next((gpu for key, gpu in GPUS.items() if key in words), None)
    if found is not None and ("gh200" in words or "gb200" in words):
        return replace(found, bus_gbs=C2C_GBS)
    return found


def host_gbs(name: str) -> float:
    """Of host memory, by the name of a GPU's driver; of PCIe 4 if it is not known, as it may be."""
    known = published_rates(name)
    return (known.bus_gbs or known.read_gbs) if known else PCIE4_GBS


def measured_rates(found: MeasuredGpu) -> GpuRates:
    known = published_rates(found.name)
    return GpuRates(
        found.name, found.memory_bytes / 1e9, found.read_gbs / _READ, found.tflops / _PRODUCTS,
        known.link if known else "pcie", found.architecture,
        known.tflops8 if known else 0.0, known.tflops4 if known else 0.0,
        known.bus_gbs if known else PCIE4_GBS,
    )  # fmt: skip


def gpu_rates(name: str, option: str = "gpu") -> GpuRates:
    """`name`: a key of `GPUS` in any case ("RTX PRO 6000"), or `here`."""
    name = name.lower().replace(" ", "-")
    if name == HERE:
        found = list(load_measured().values())
        if not found:
            raise OptionError(
                f"{option} is {name!r}, but {measured_file()} holds no measured GPU; run dsv4 "
                "doctor --ops on this machine once"
            )
        return measured_rates(found[-1])
    if name not in GPUS:
        raise OptionError(f"{option} is {name!r}, expected one of {', '.join([*GPUS, HERE])}")
    return GPUS[name]


@dataclass(frozen=True)
class Interconnect:
    """Between GPUs. `exchange_us`: fixed time of one exchange by NCCL, without its bytes;
    `store_us`: of one by stores, None where no GPU can write to another's memory."""

    name: str
    gbs: float
    exchange_us: float
    source: str
    store_us: float | None = None

    def fixed_us(self, comm: str) -> float:
        if comm == "symmetric" and self.store_us is not None:
            return self.store_us
        return self.exchange_us

    def with_peers(self, peers: bool | None) -> "Interconnect":
        """As found on a machine, None: not asked. What stores over PCIe take is not known."""
        if peers is None or peers == (self.store_us is not None):
            return self
        return replace(self, store_us=self.exchange_us if peers else None)


def check_comm(comm: str, nodes: int) -> None:
    """Refuse what GPUs cannot use."""
    if comm == "gloo":
        raise OptionError("comm is 'gloo' on GPUs, expected auto, symmetric or nccl")
    if nodes > 1 and comm == "symmetric":
        raise OptionError(f"comm is 'symmetric' on {nodes} nodes, expected auto or nccl")


LINKS = {
    link.name: link
    for link in (
        Interconnect("nvlink", 360.0, 12.0, "assumed: every GPU can write to its peers", 4.0),
        Interconnect("pcie", 45.0, 20.0, "assumed: PCIe 5 x16, no GPU can write to its peers"),
        Interconnect("pcie4", 22.0, 20.0, "assumed: PCIe 4 x16, no GPU can write to its peers"),
        Interconnect("200g", 22.0, 30.0, "assumed: a 200 Gb/s network"),
    )
}


@dataclass(frozen=True)
class Cluster:
    """`gpus`: total over all `nodes`; `memory`: bytes per GPU."""

    gpu: GpuRates
    gpus: int
    nodes: int
    memory: int
    link: Interconnect
    between: Interconnect = LINKS["200g"]

    @classmethod
    def of(
        cls, gpu: str, gpus: int, nodes: int = 1, memory: int | None = None, link: str | None = None
    ) -> "Cluster":
        if link is not None and link not in LINKS:
            raise OptionError(f"link is {link!r}, expected one of {', '.join(LINKS)}")
        if gpus < 1 or nodes < 1 or gpus % nodes:
            raise OptionError(
                f"found {gpus} GPUs on {nodes} nodes, expected the same number on each of them"
            )
        rates = gpu_rates(gpu)
        chosen = LINKS[link or rates.link]
        return cls(rates, gpus, nodes, memory or int(rates.memory_gb * 1e9), chosen)

    def using(self, comm: str) -> "Cluster":
        """As engines with this option exchange."""
        check_comm(comm, self.nodes)
        link = self.link.with_peers({"nccl": False, "symmetric": True}.get(comm))
        if link != self.link:
            link = replace(link, source=f"{link.source}; but comm={comm}")
        return replace(self, link=link)

    @property
    def per_node(self) -> int:
        return self.gpus // self.nodes

    def comm(self, world: int) -> str:
        """The back end that an engine with so many ranks chooses (`choose_comm`)."""
        inside = world <= self.per_node and self.link.store_us is not None
        return "symmetric" if inside else "nccl"
