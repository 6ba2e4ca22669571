"""All state tensors, at fixed addresses, and the copies that the prefix cache needs."""

import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dsv4.cache.geometry import Geometry, Pool
from dsv4.cache.kinds import KINDS, LayerState, SwaState


class StateTensors:
    """Pages and slots of every layer, and one row of carried values per cached prefix.

    A pipeline stage allocates its own `layers` only; page numbers are global."""

    def __init__(
        self,
        geometry: Geometry,
        num_slots: int,
        num_pages: dict[Pool, int],
        device: str,
        layers: range | None = None,
        *,
        spare: bool = False,
    ) -> None:
        """`spare`: one more slot and window page, for rows that stand for no sequence."""
        kinds = geometry.config.kinds
        self.num_snapshots = geometry.kept_prefixes * num_slots
        num_slots += spare
        num_pages = {**num_pages, "window": num_pages["window"] + spare}
        self.layers: list[LayerState] = [
            KINDS[kinds[layer]].allocate(geometry, num_slots, num_pages, device)
            for layer in (range(len(kinds)) if layers is None else layers)
        ]
        self.drafts = [
            SwaState.allocate(geometry, num_slots, num_pages, device)
            for _ in range(geometry.draft_layers)
        ]
        everything = [*self.layers, *self.drafts]
        self._pools: dict[str, tuple[Pool, Tensor]] = {}
        for number, layer in enumerate(everything):
            for place, (pool, paged) in enumerate(layer.pools()):
                for name, part in paged.parts.items():
                    # raw bytes: copies and files do not depend on the format
                    self._pools[f"{number}.{place}.{name}"] = (pool, part.view(torch.uint8))
        self._slots = [tensor for layer in self.layers for tensor in layer.carried()]
        self._saved = [tensor for layer in self.layers for tensor in layer.kept()]

    @torch.inference_mode()
    def copy_page(self, pool: Pool, source: int, target: int) -> None:
        parts = [part for name, part in self._pools.values() if name == pool]
        _copy([part[target] for part in parts], [part[source] for part in parts])

    @torch.inference_mode()
    def save_rows(self, slot: int, row: int) -> None:
        """Save the rows that a sequence carries over the boundary it has just reached."""
        _copy([t[row] for t in self._saved], [t[slot] for t in self._slots])

    @torch.inference_mode()
    def restore_rows(self, row: int, slot: int) -> None:
        _copy([t[slot] for t in self._slots], [t[row] for t in self._saved])

    @torch.inference_mode()
    def checksum(self, page: int) -> int:
        """Checksum of a window page over all layers. The newest keys depend on everything their
        tokens attended to, so ranks that have diverged soon differ here."""
        total = 0
        for pool, part in self._pools.values():
            if pool == "window":
                total = zlib.crc32(part[page].contiguous().cpu().numpy().tobytes(), total)
        return total

    def warm_up_copies(self) -> None:
        """Run every copy once on unused state to load its kernel."""
        if self.num_snapshots:
            self.save_rows(0, 0)
            self.restore_rows(0, 0)
        for pool in {pool for pool, _ in self._pools.values()}:
            self.copy_page(pool, 0, 0)

    @torch.inference_mode()
    def read(self, pages: dict[Pool, list[int]], row: int) -> dict[str, Tensor]:
        """A prefix in main memory: its pages in order, and its row."""
        tensors = {}
        for name, (pool, part) in self._pools.items():
            index = torch.tensor(pages[pool], dtype=torch.int64, device=part.device)
            tensors[f"pages.{name}"] = part[index].cpu()
        for number, saved in enumerate(self._saved):
            tensors[f"rows.{number}"] = saved[row].cpu()
        return tensors

    @torch.inference_mode()
    def write(self, tensors: dict[str, Tensor], pages: dict[Pool, list[int]], row: int) -> None:
        """Restore what `read` returned into other pages and another row; shapes must match."""
        for name, (pool, part) in self._pools.items():
            index = torch.tensor(pages[pool], dtype=torch.int64, device=part.device)
            part[index] = tensors[f"pages.{name}"].to(part.device)
        for number, saved in enumerate(self._saved):
            saved[row].copy_(tensors[f"rows.{number}"])

    def parts(
        self, tensors: dict[str, Tensor], pages: dict[Pool, list[int]]
    ) -> Iterable[tuple[int, list[int], bytes]]:
        """Split what `read` returned for `write_part` on other ranks: place, pages, bytes."""
        names = [(f"pages.{name}", pages[pool]) for name, (pool, _) in self._pools.items()]
        names += [(f"rows.{number}", [0]) for number in range(len(self._saved))]
        for place, (name, held) in enumerate(names):
            if held:
                raw = tensors[name].contiguous().view(-1).view(torch.uint8)
                yield place, held if name.startswith("pages.") else [], raw.numpy().tobytes()

    @torch.inference_mode()
    def write_part(self, place: int, row: int, pages: Sequence[int], data: bytes) -> None:
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        pools = list(self._pools.values())
        if place < len(pools):
            part = pools[place][1]
            index = torch.tensor(pages, dtype=torch.int64, device=part.device)
            part[index] = raw.view(part.dtype).view(len(pages), *part.shape[1:]).to(part.device)
        else:
            saved = self._saved[place - len(pools)]
            saved[row].copy_(raw.view(saved.dtype).view(saved.shape[1:]))

    def shapes(self, counts: dict[Pool, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each tensor that `read` returns for this many pages."""
        expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, (pool, part) in self._pools.items():
            expected[f"pages.{name}"] = (part.dtype, (counts[pool], *part.shape[1:]))
        for number, saved in enumerate(self._saved):
            expected[f"rows.{number}"] = (saved.dtype, tuple(saved.shape[1:]))
        return expected


def _copy(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Many small copies, batched into few launches on a GPU."""
    targets, sources = list(targets), list(sources)
    if targets:
        torch._foreach_copy_(targets, sources)
