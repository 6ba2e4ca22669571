"""A checkpoint's draft blocks: whether they are present and complete."""

import logging
from dataclasses import replace
from pathlib import Path

from dsv4.checkpoint.manifest import DRAFT
from dsv4.checkpoint.reader import Checkpoint, open_draft
from dsv4.config import EngineConfig, ModelConfig
from dsv4.errors import CheckpointError, Dsv4Error
from dsv4.runner.settings import DRAFT_TOKENS, NOT_BY_ITSELF, Settings

log = logging.getLogger(__name__)


def find_draft(
    checkpoint: Checkpoint, folder: Path, config: ModelConfig, choices: EngineConfig, *, gpu: bool
) -> tuple[Checkpoint | None, Dsv4Error | None]:
    """The draft blocks if they are asked for, or why they cannot be used."""
    kind = config.draft_kind if config.num_draft_layers else ""
    wanted = (kind,) if gpu and kind == NOT_BY_ITSELF else ("auto", kind)
    if not kind or choices.world > 1 or choices.draft not in wanted:
        return None, None
    if choices.draft == "auto" and DRAFT not in checkpoint.ignored.values():
        return None, CheckpointError(f"config.json names {kind}, but no file has its tensors")
    try:
        return open_draft(folder, config), None
    except CheckpointError as error:
        return None, error


def without_drafts(settings: Settings, error: Dsv4Error) -> Settings:
    """Answers do not need drafts: unusable draft blocks are logged and left out."""
    if settings.draft_auto:
        log.warning("drafts come from lookup: %s", error)
        return replace(settings, draft="lookup", draft_tokens=DRAFT_TOKENS["lookup"])
    log.warning("drafting is off: %s", error)
    return replace(settings, draft="off", draft_tokens=0)
