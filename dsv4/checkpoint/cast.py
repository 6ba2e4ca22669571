"""The pinned MXFP4 -> NVFP4 cast over a stack of experts: exact, nibbles untouched."""

import torch

from dsv4.checkpoint.sources import Source
from dsv4.errors import CheckpointError, KernelError
from dsv4.formats import mxfp4
from dsv4.formats.quantized import Mxfp4Tensor, Nvfp4Tensor
from dsv4.formats.spec import NVFP4_EXACT_SPREAD


def cast_stack(weight: Mxfp4Tensor, source: Source) -> tuple[Nvfp4Tensor, mxfp4.CastReport]:
    """One global per expert where the exponents of both halves fit one window, else per half.

    The packed bytes are passed through unchanged; only blocks outside every window are rewritten,
    in place.
    """
    flat = weight.packed.dim() == 2
    packed, scale = weight.packed, weight.scale
    if flat:
        packed, scale = packed[None], scale[None]
    per_expert = scale.flatten(1)
    spread = int((per_expert.amax(dim=1).int() - per_expert.amin(dim=1).int()).max())
    num_parts = 1 if spread <= NVFP4_EXACT_SPREAD else source.num_parts
    rows = packed.shape[1] // num_parts
    block_scale = torch.empty(
        (*scale.shape[:-1], scale.shape[-1] * 2), dtype=torch.float8_e4m3fn, device=scale.device
    )
    table = torch.empty((packed.shape[0], num_parts), dtype=torch.float32, device=scale.device)
    total = mxfp4.CastReport(0, 0, 0, 0.0)
    for expert in range(packed.shape[0]):
        for part in range(num_parts):
            span = slice(part * rows, (part + 1) * rows)
            try:
                new, part_scale, g, report = mxfp4.to_nvfp4(
                    packed[expert, span], scale[expert, span]
                )
            except KernelError as error:
                raise CheckpointError(
                    f"{source.stored.data.file}: {source.name}, expert {expert}: {error}"
                ) from error
            if not report.exact or new.data_ptr() != packed[expert, span].data_ptr():
                packed[expert, span] = new
            block_scale[expert, span] = part_scale
            table[expert, part] = g
            total = _add(total, report)
    if flat:
        return Nvfp4Tensor(packed[0], block_scale[0], table[0]), total
    return Nvfp4Tensor(packed, block_scale, table), total


def _add(total: mxfp4.CastReport, report: mxfp4.CastReport) -> mxfp4.CastReport:
    blocks = total.blocks + report.blocks
    mean = total.relative_rms**2 * total.blocks + report.relative_rms**2 * report.blocks
    return mxfp4.CastReport(
        blocks,
        total.inexact_blocks + report.inexact_blocks,
        max(total.spread, report.spread),
        (mean / blocks) ** 0.5 if blocks else 0.0,
    )
