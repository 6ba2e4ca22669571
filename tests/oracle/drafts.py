"""Drafts of the engine after a prompt, for comparison with the mathematics."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.config import EngineConfig, ModelConfig
from dsv4.model.draft import draft_model
from dsv4.model.transformer import Transformer
from dsv4.request import SamplingParams
from dsv4.runner.drafts.device import Drafted
from dsv4.runner.runner import Chunk, Runner
from dsv4.runner.settings import resolve
from dsv4.sampling import SamplingRow


def engine_drafts(
    config: ModelConfig,
    weights: dict[str, Tensor],
    drafts: dict[str, Tensor],
    ids: Sequence[int],
    chunk: int,
    num_drafts: int,
) -> Drafted:
    """Drafts behind the last of `ids`, which is not in the state yet; the others are read in
    chunks."""
    length = len(ids) - 1
    choices = EngineConfig(
        device="cpu", max_sequences=2, max_context=512, chunk_tokens=256, draft=config.draft_kind,
        draft_tokens=num_drafts,
    )  # fmt: skip
    settings = resolve(choices, config, has_gpu=False, memory_bytes=2**32)
    model = Transformer(config, weights, torch.float32)
    runner = Runner(model, settings, draft=draft_model(model, drafts))
    runner.pages.open()  # so that the sequence is not in the first slot
    pages = runner.pages.open()
    row = SamplingRow(SamplingParams(temperature=0.0), 0, list(ids[:length]), length)
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        is_last = end == length
        part = Chunk(pages, ids[start:end], int(is_last))
        if not is_last:
            part.next_id = ids[end]
        step = runner.submit([part])
        runner.sample(step, [row] * is_last)
        if is_last:
            runner.buffers.newest[pages.slot] = ids[length]  # as if it had been drawn
        runner.queue_drafts(step, [0] * is_last, num_drafts)
    assert step.drafts is not None
    return step.drafts.wait()[0]


def difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))
