"""How many experts stay on the GPU, and what the others cost. Pure functions, no torch.

Slots hold the resident experts, plus one spare slot for swaps; two staging buffers hold the missing
experts of two layers while a prompt runs. Missing experts are in host memory, plus one spare block.
"""

from dataclasses import dataclass

from dsv4.errors import CapacityError
from dsv4.util.sizes import size_text

STAGED_ROOM = 1.25  # size of a staging buffer, in missing experts of an average layer
MOST_STAGED = 8  # a staging buffer takes at most one block in eight
COPY_GBS = 53.0  # the copy engine reads host memory (H200, PCIe 5 x16)
LOAD_BYTES = 4 * 10**9  # of host memory, while loading


@dataclass(frozen=True)
class ExpertBudget:
    num_layers: int
    num_experts: int  # per layer
    block_bytes: int  # per expert
    slots: int  # resident experts
    staged: int  # experts per staging buffer

    @property
    def total(self) -> int:
        return self.num_layers * self.num_experts

    @property
    def missing(self) -> int:
        return self.total - self.slots

    @property
    def resident_share(self) -> float:
        return self.slots / self.total

    @property
    def gpu_bytes(self) -> int:
        return (self.slots + 1 + 2 * self.staged) * self.block_bytes

    @property
    def host_bytes(self) -> int:
        return (self.missing + 1) * self.block_bytes

    def __str__(self) -> str:
        return (
            f"experts: {self.slots:,} of {self.total:,} ({100 * self.resident_share:.0f} %) stay "
            f"in {size_text(self.gpu_bytes)} of GPU memory, {self.missing:,} in "
            f"{size_text(self.host_bytes)} of host memory"
        )


def fit_experts(
    room: int, num_layers: int, num_experts: int, block_bytes: int, chosen: int
) -> ExpertBudget | None:
    """The most experts that fit in `room` bytes; None if all of them do. `chosen`: experts that a
    token visits per layer, the fewest that must stay."""
    total = num_layers * num_experts
    if total * block_bytes <= room:
        return None
    blocks = room // block_bytes
    most = min(num_experts, max(1, blocks // MOST_STAGED))
    for slots in range(min(total - 1, blocks), 0, -1):
        staged = min(most, -int(-STAGED_ROOM * (total - slots) // num_layers))
        budget = ExpertBudget(num_layers, num_experts, block_bytes, slots, staged)
        if budget.gpu_bytes <= room and slots >= chosen:
            return budget
    least = size_text((chosen + 3) * block_bytes)
    raise CapacityError(
        f"{size_text(room)} of GPU memory for experts hold {blocks}, expected at least the "
        f"{chosen} that a token visits in a layer and three more ({least}); "
        "raise expert_memory, or lower max_context or max_sequences"
    )


def check_host_memory(budget: ExpertBudget, available: int) -> None:
    """Called before anything is read: a clear error instead of a killed process. Nothing is
    `available` where host and GPU share one memory."""
    if not available:
        raise CapacityError(
            f"{budget.missing:,} experts ({size_text(budget.host_bytes)}) do not fit the GPU, and "
            "there is no host memory for them (a GPU that shares the host's has no other); use "
            "several GPUs (tp), smaller weights, or a shorter context"
        )
    needed = budget.host_bytes + LOAD_BYTES
    if needed > available:
        raise CapacityError(
            f"{budget.missing:,} experts do not fit the GPU and need {size_text(needed)} of host "
            f"memory ({size_text(LOAD_BYTES)} of it only while loading), {size_text(available)} "
            "are free; end other programs, use a GPU with more memory, or several GPUs (tp)"
        )
