"""A checkpoint's draft blocks: whether they are present and complete."""

import logging
from dataclasses import replace
from pathlib import Path

from dsv4.checkpoint.findings import raise_errors
from dsv4.checkpoint.manifest import DRAFT
from dsv4.checkpoint.reader import Checkpoint, open_draft
from dsv4.config import EngineConfig, ModelConfig
from dsv4.errors import CheckpointError, ConfigError
from dsv4.runner.settings import DRAFT_TOKENS, Settings

log = logging.getLogger(__name__)


def find_draft(
    checkpoint: Checkpoint, folder: Path, config: ModelConfig, choices: EngineConfig
) -> tuple[Checkpoint | None, Exception | None]:
    """The draft blocks if they are asked for, or why they cannot be used. If they are asked for by
    name, a lost or broken file and a config.json of the wrong form are errors."""
    kind = config.draft_kind if config.num_draft_layers else ""
    if not kind or choices.world > 1 or choices.draft not in ("auto", kind):
        return None, None
    problem = config.dspark.problem and f"{folder / 'config.json'}: {config.dspark.problem}"
    if problem and choices.draft == kind:
        raise ConfigError(f"{problem}, as draft={kind} needs")
    if problem:
        return None, ConfigError(problem)
    lost = checkpoint.manifest.scan.draft_findings
    if choices.draft == kind:
        raise_errors(lost, f"{folder}, asked for draft={kind}")
    elif not lost and DRAFT not in checkpoint.ignored.values():
        return None, CheckpointError(f"config.json names {kind}, but no file has its tensors")
    try:
        return open_draft(folder, config), None
    except CheckpointError as error:
        return None, error


def without_drafts(settings: Settings, error: Exception) -> Settings:
    """Answers do not need drafts: unusable draft blocks are logged and left out."""
    if settings.draft_auto:
        log.warning("drafts come from lookup: %s", error)
        return replace(settings, draft="lookup", draft_tokens=DRAFT_TOKENS["lookup"])
    log.warning("drafting is off: %s", error)
    return replace(settings, draft="off", draft_tokens=0)
