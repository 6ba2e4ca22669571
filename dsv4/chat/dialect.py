"""The three dialects of the prompt format, and how to detect a checkpoint's.

All dialects share one encoder and one parser; this table holds their differences.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4.chat import texts
from dsv4.chat.fields import show
from dsv4.errors import OptionError, RequestError

log = logging.getLogger(__name__)

# How a requested effort name is interpreted; None means nothing was requested.
_EFFORT_LEVELS: dict[str | None, str] = {
    "minimal": "low",
    "low": "low",
    "none": "high",  # only reached when thinking was switched on explicitly, which wins over none
    None: "high",
    "medium": "high",
    "high": "high",
    "xhigh": "high",
    "max": "max",
    "ultra": "max",
}
EFFORT_NAMES = tuple(name for name in _EFFORT_LEVELS if name is not None)
_V41_BUDGETS = {"low": 50, "high": 75, "max": 100}


@dataclass(frozen=True)
class Dialect:
    """One prompt format. `effort_texts` is empty where effort is a number (V4.1)."""

    name: str
    block_tag: str
    invoke_tag: str
    parameter_tag: str
    is_v41: bool
    effort_texts: Mapping[str, str]

    def effort_text(self, effort: object) -> str:
        """The prompt text for a reasoning effort; `effort` is a name, a number or None."""
        if isinstance(effort, int) and not isinstance(effort, bool):
            if not self.is_v41:
                raise RequestError(
                    f"reasoning_effort: found the number {show(effort)}, expected one of"
                    f" {', '.join(EFFORT_NAMES)}; only V4.1 models take a number"
                )
            if not 1 <= effort <= 100:
                raise RequestError(
                    f"reasoning_effort: found {show(effort)}, expected a whole number from 1 to 100"
                )
            return texts.EFFORT_V41.replace("{budget}", str(effort))
        if not (effort is None or isinstance(effort, str)) or effort not in _EFFORT_LEVELS:
            numbers = " or a whole number from 1 to 100" if self.is_v41 else ""
            raise RequestError(
                f"reasoning_effort: found {show(effort)}, expected one of"
                f" {', '.join(EFFORT_NAMES)}{numbers}"
            )
        level = _EFFORT_LEVELS[effort]
        if self.is_v41:
            return texts.EFFORT_V41.replace("{budget}", str(_V41_BUDGETS[level]))
        return self.effort_texts[level]


V4_PREVIEW = Dialect(
    name="v4-preview",
    block_tag="tool_calls",
    invoke_tag="invoke",
    parameter_tag="parameter",
    is_v41=False,
    effort_texts={"low": "", "high": "", "max": texts.EFFORT_ABSOLUTE},
)
V4_OFFICIAL = Dialect(
    name="v4-official",
    block_tag="tool_calls",
    invoke_tag="invoke",
    parameter_tag="parameter",
    is_v41=False,
    effort_texts={"low": "", "high": texts.EFFORT_ABSOLUTE, "max": texts.EFFORT_BEYOND},
)
V41 = Dialect(
    name="v4.1",
    block_tag=" calls",
    invoke_tag=" invoke",
    parameter_tag=" parameter",
    is_v41=True,
    effort_texts={},
)
DIALECTS = {dialect.name: dialect for dialect in (V4_PREVIEW, V4_OFFICIAL, V41)}

_MAX_ENCODER_FILE_BYTES = 1 << 20


def choose_dialect(
    option: str | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    has_system_marker: bool = False,
    folder: Path | None = None,
) -> Dialect:
    """Detect the dialect of a checkpoint.

    In this order: the user's `option`; a model type or architecture named V41 in `config`; a
    tokenizer with the system marker (`tokenizer.special.system is not None`); the encoder
    file beside the weights; the folder's name. Never the name under which a model is served:
    users rename models, and the wrong dialect shifts every effort level by one step.
    """
    if option is not None and option not in ("auto", "v4"):
        if option not in DIALECTS:
            raise OptionError(
                f"dialect: found {option!r}, expected auto, v4 or one of {', '.join(DIALECTS)}"
            )
        return DIALECTS[option]
    if option != "v4":
        if _names_v41(config or {}):
            return _chosen(V41, "the model type in config.json")
        if has_system_marker:
            return _chosen(V41, "the system marker in the tokenizer")
    if folder is not None:
        found = _from_encoder_file(folder)
        if found is not None:
            return _chosen(found, "the encoder file in the checkpoint")
        if "0731" in folder.name or "0813" in folder.name:
            return _chosen(V4_OFFICIAL, f"the folder name {folder.name!r}")
    return _chosen(V4_PREVIEW, "no sign of a later release; set the dialect if this is wrong")


def _chosen(dialect: Dialect, reason: str) -> Dialect:
    log.info("chat dialect %s, from %s", dialect.name, reason)
    return dialect


def _names_v41(config: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures")
    names = [config.get("model_type"), *(architectures if isinstance(architectures, list) else [])]
    return any(isinstance(name, str) and "v41" in name.lower() for name in names)


def _from_encoder_file(folder: Path) -> Dialect | None:
    """Read (never run) the publisher's encoder beside the weights, if there is one."""
    encoding = folder / "encoding"
    if not encoding.is_dir():
        return None
    for path in sorted(encoding.glob("*.py")):
        with path.open("rb") as file:
            text = file.read(_MAX_ENCODER_FILE_BYTES).decode("utf-8", "replace")
        if "Beyond maximum" in text:
            return V4_OFFICIAL
        if "Absolute maximum" in text:
            return V4_PREVIEW
    return None
