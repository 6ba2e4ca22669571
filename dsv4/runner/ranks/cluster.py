"""GPUs and what connects them, as published or assumed. No torch."""

from dataclasses import dataclass

from dsv4.errors import OptionError


@dataclass(frozen=True)
class GpuRates:
    """Published GB/s and dense bf16 TFLOP/s; `memory_gb` (10^9 bytes) as CUDA reports it."""

    name: str
    memory_gb: float
    read_gbs: float
    tflops: float
    link: str


GPUS = {
    "h200": GpuRates("H200", 150.0, 4800, 989, "nvlink"),
    "h100": GpuRates("H100", 85.0, 3350, 989, "nvlink"),
    "h20": GpuRates("H20", 102.0, 4000, 148, "nvlink"),
    "b200": GpuRates("B200", 191.5, 8000, 2250, "nvlink"),
    "rtx-pro-6000": GpuRates("RTX PRO 6000", 101.9, 1790, 500, "pcie"),
    "spark": GpuRates("DGX Spark", 109.0, 273, 125, "200g"),  # what its system leaves free
}


@dataclass(frozen=True)
class Interconnect:
    """`exchange_us`: of one exchange without its bytes."""

    name: str
    gbs: float
    exchange_us: float
    source: str


LINKS = {
    link.name: link
    for link in (
        Interconnect("nvlink", 360.0, 4.0, "assumed, by stores into peers' memory; NCCL takes 12"),
        Interconnect("pcie", 45.0, 20.0, "assumed, NCCL over PCIe 5 x16"),
        Interconnect("200g", 22.0, 30.0, "assumed, NCCL over a 200 Gb/s network"),
    )
}


@dataclass(frozen=True)
class Cluster:
    """`gpus` in all `nodes` together; `memory`: bytes of one."""

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
        for name, value, known in (("gpu", gpu, GPUS), ("link", link or "nvlink", LINKS)):
            if value not in known:
                raise OptionError(f"{name} is {value!r}, expected one of {', '.join(known)}")
        if gpus < 1 or nodes < 1 or gpus % nodes:
            raise OptionError(
                f"found {gpus} GPUs on {nodes} nodes, expected the same number on each of them"
            )
        rates = GPUS[gpu]
        chosen = LINKS[link or rates.link]
        return cls(rates, gpus, nodes, memory or int(rates.memory_gb * 1e9), chosen)

    @property
    def per_node(self) -> int:
        return self.gpus // self.nodes
