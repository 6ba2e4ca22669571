"""Ops of one line whose kernels are right, raise, kill their process or never end; a module of
workers that know them."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dsv4.ops.core.op import AnyOp, Arguments, Case, Kernel, Op
from dsv4.tools.doctor.device import workers


def double(*, x: Tensor) -> Tensor:
    return x * 2


def cases() -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        for size in (0, 2, 3):

            def build(
                generator: torch.Generator, size: int = size, dtype: torch.dtype = dtype
            ) -> Arguments:
                return {"x": torch.randn(size, 4, generator=generator).to(dtype)}

            yield Case(f"{size} {dtype}", build)


class FakeKernel(Kernel):
    """Misbehaves on bfloat16 with 3 rows; refuses no case."""

    def supports(self, arguments: Arguments) -> str | None:
        return "for the other kernel" if self.name == "refusing" else None

    def run(self, arguments: Arguments) -> Any:
        x = arguments["x"]
        if x.dtype == torch.bfloat16 and len(x) == 3:
            if self.name == "raising":
                raise ValueError("too odd")
            if self.name == "crashing":
                os.kill(os.getpid(), signal.SIGSEGV)
            if self.name == "hanging":
                time.sleep(600)
        return double(x=x)


def make(name: str, *kernels: str) -> AnyOp:
    return Op(name, double, cases, tuple(FakeKernel(f"fake.{kernel}") for kernel in kernels))


FAKES = {
    "rms_norm": make("rms_norm", "right"),
    "linear": make("linear", "raising"),
    "rope": make("rope", "crashing"),
    "embed": make("embed", "hanging"),
    "router": make("router", "refusing", "right"),
    "grouped_linear": make("grouped_linear", "refusing"),
}


def main(connection: socket.socket) -> int:
    return workers.main(connection, FAKES)
