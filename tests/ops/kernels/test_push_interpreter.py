"""Exchanges between ranks in Triton's interpreter, and on a GPU: all ranks store, then all read.

This file is both the test and the program it starts (see test_weight_interpreter.py).
"""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from tests.ops.kernels.compiling import interpreted


def test_exchanges_equal_what_the_ranks_add_up_to() -> None:
    interpreted("tests.ops.kernels.test_push_interpreter")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("tp", [2, 8])
def test_long_exchanges_on_a_gpu(tp: int) -> None:
    """Sizes of prompts: the wide blocks."""
    torch.manual_seed(5)
    with torch.device("cuda"):
        channels = ranks(tp, 64 << 20)
        for _ in range(2):
            check_gather(channels, (1025, 4096), torch.bfloat16)
            check_owners(channels, 1500 * tp - 1, 1024)
            check_pairs(channels, 300 * tp - 1, 4096, 1, "owned")
            check_pairs(channels, 300 * tp - 1, 7168, 2, "owned")
            check_pairs(channels, 33, 4096, 2, "last place")


def ranks(tp: int, half_bytes: int) -> list[Any]:
    """Channels whose memory is in this process."""
    from dsv4.ops.comm import symmetric_triton as symmetric

    size = 2 * half_bytes + 4 * tp * symmetric.PROGRAMS
    memory = [torch.full((size,), 255, dtype=torch.uint8) for _ in range(tp)]  # floats are NaN
    for part in memory:
        part[2 * half_bytes :] = 0
    addresses = torch.tensor([part.data_ptr() for part in memory])
    return [
        symmetric.PushChannel(
            place=place,
            addresses=addresses,
            half_bytes=half_bytes,
            rounds=torch.zeros(symmetric.PROGRAMS, dtype=torch.int32),
            error=torch.zeros(1, dtype=torch.int32),
            limit_ns=0,
            memory=memory,
        )
        for place in range(tp)
    ]


def together(channels: list[Any], call: Any) -> list[torch.Tensor]:
    """`call(pushes, place)` on every rank; of each launch all ranks store before any reads."""
    from dsv4.ops.comm.symmetric_triton import SymmetricPushes

    @dataclass(frozen=True)
    class Waiting(type(channels[0])):  # type: ignore[misc]
        launches: list[Any] = field(kw_only=True)

        def launch(self, *arguments: Any, **constants: Any) -> None:
            self.launches.append((arguments, constants))

    waiting = [Waiting(**vars(channel), launches=[]) for channel in channels]
    results = [call(SymmetricPushes(channel), place) for place, channel in enumerate(waiting)]
    for launches in zip(*(channel.launches for channel in waiting), strict=True):
        for phases in ({"PUSH": True, "WAIT": False}, {"PUSH": False, "WAIT": True}):
            for channel, (arguments, constants) in zip(channels, launches, strict=True):
                replace(channel, phases=phases).launch(*arguments, **constants)
    return results


def check_ranges(channels: list[Any], rows: int, size: int, factors: int) -> None:
    from dsv4.ops.gemm.split_k import PartialSums

    tp = len(channels)
    values = torch.randn(tp, 2, rows, size)
    factor = torch.rand(factors) + 0.5 if factors else None
    wanted = PartialSums(values.flatten(0, 1)[None], factor, torch.bfloat16).total()

    def call(pushes: Any, place: int) -> torch.Tensor:
        found: torch.Tensor = pushes.sum_ranges(values[place], factor, torch.bfloat16)
        return found

    for found in together(channels, call):
        assert torch.equal(found, wanted)


def check_gather(channels: list[Any], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randint(0, 1000, (len(channels), *shape)).to(dtype)

    def call(pushes: Any, place: int) -> torch.Tensor:
        out = torch.empty_like(x)
        pushes.gather(out, x[place])
        return out

    for found in together(channels, call):
        assert torch.equal(found, x)


def check_owners(channels: list[Any], rows: int, width: int) -> None:
    tp = len(channels)
    per_owner = -(-rows // tp)
    x = torch.randn(tp, rows, width).bfloat16()
    found = together(channels, lambda pushes, place: pushes.to_owners(x[place], per_owner))
    for place, own in enumerate(found):
        part = x[:, place * per_owner : (place + 1) * per_owner]
        assert torch.equal(own, part.transpose(0, 1).flatten(1))


def check_pairs(
    channels: list[Any],
    rows: int,
    size: int,
    ranges: int,
    mode: str,
    dtype: torch.dtype = torch.float32,
) -> None:
    """`mode`: where the shared expert's sums are, and whether rows have owners."""
    tp, chosen, count = len(channels), 3, 4
    experts = torch.stack([torch.randperm(tp * count)[:chosen].sort().values for _ in range(rows)])
    values = torch.randn(rows, chosen + 1, ranges, size).to(dtype)
    extra = torch.randn(rows, size).to(dtype)
    per_owner = -(-rows // tp) if mode == "owned" else None
    total = torch.zeros(rows, size)
    for place in range(chosen):
        total = total + values[:, place].float().sum(1)
    last = values[:, chosen].float().sum(1) if mode == "last place" else extra
    wanted = (total + last).bfloat16()
    places = chosen + 1 if mode == "last place" else chosen

    def call(pushes: Any, place: int) -> torch.Tensor:
        local = experts - place * count
        local = torch.where((local >= 0) & (local < count), local, -1)
        parts = values[:, :places].clone()
        parts[:, :chosen][local < 0] = float("nan")  # no other rank may look at these
        shared = None
        if mode != "last place":
            first = 0 if per_owner is None else place * per_owner
            shared = extra[first : rows if per_owner is None else first + per_owner]
        found: torch.Tensor = pushes.sum_pairs(parts, local, shared, per_owner)
        return found

    for place, found in enumerate(together(channels, call)):
        if per_owner is None:
            assert torch.equal(found, wanted)
        else:
            assert torch.equal(found, wanted[place * per_owner : (place + 1) * per_owner])


def check_echo(tp: int) -> None:
    """A rank without peers, for timing: its own part arrives, theirs are random, nothing waits."""
    from dsv4.ops.comm.symmetric_triton import EchoPushes

    pushes = EchoPushes(tp, 1 << 15, 8, torch.device("cpu"))
    x, values = torch.randn(5, 10).bfloat16(), torch.randn(2, 3, 72)
    for _ in range(3):  # both halves of the buffer, and the first one again
        out = torch.full((tp, 5, 10), float("nan")).bfloat16()
        pushes.gather(out, x)
        assert torch.equal(out[0], x)
        assert out[1:].isfinite().all()
        assert out[1:].float().std() > 0.5
    chosen = torch.zeros(tp, 100, 6, dtype=torch.int64)
    pushes.gather(chosen, torch.full((100, 6), 3))
    assert (chosen[0] == 3).all()
    assert chosen[1:].unique().tolist() == list(range(8))  # every expert of every rank
    assert pushes.sum_ranges(values, None, torch.bfloat16).isfinite().all()
    assert int(pushes.error) == 0


def main() -> None:
    import tests.ops.kernels.shim  # noqa: F401
    from dsv4.ops.comm import symmetric_triton as symmetric

    symmetric.PROGRAMS, symmetric.BLOCK, symmetric.WIDE_BLOCK = 3, 64, 128
    torch.manual_seed(5)
    for tp in (2, 4):
        channels = ranks(tp, 1 << 15)
        for _ in range(2):  # both halves of the buffers, and the first one again
            check_ranges(channels, 3, 72, 0)
            check_ranges(channels, 1, 130, 2)
            check_gather(channels, (5, 7), torch.int64)
            check_gather(channels, (9, 66), torch.bfloat16)
            check_owners(channels, 6 * tp - 1, 10)
            check_pairs(channels, 5, 70, 2, "last place")
            check_pairs(channels, 1, 70, 1, "extra")
            check_pairs(channels, 9, 130, 1, "owned")
            check_pairs(channels, 9, 70, 1, "owned", torch.bfloat16)  # of rounded rows
            check_pairs(channels, 3, 130, 1, "extra", torch.bfloat16)
            check_gather(channels, (40, 33), torch.float32)  # from here on wide
            check_owners(channels, 33 * tp - 1, 66)
            check_pairs(channels, 6 * tp - 1, 200, 2, "owned")
            check_pairs(channels, 5, 200, 1, "extra")
        check_echo(tp)
    few = ranks(2, 2048)  # more than a round can carry
    check_gather(few, (40, 33), torch.float32)
    check_owners(few, 21, 66)
    check_pairs(few, 9, 130, 1, "owned")
    assert all(int(channel.error) == 0 for channel in few)


if __name__ == "__main__":
    main()
