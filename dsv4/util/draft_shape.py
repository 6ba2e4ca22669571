"""The values in config.json that only draft blocks have."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DSparkShape:
    block: int = 5  # rows that are drafted together
    noise_id: int = 128799  # the token of rows whose own is not known
    targets: tuple[int, ...] = (40, 41, 42)  # backbone blocks whose output they read
    rank: int = 256  # the Markov head's
    problem: str = ""  # why config.json does not say what the blocks need


def head_bytes(vocab_size: int, hidden_size: int) -> int:
    """Of the copy of the head in NVFP4 that drafts read on a GPU."""
    return vocab_size * hidden_size * 9 // 16


_NAMES = {
    "block": "dspark_block_size",
    "noise_id": "dspark_noise_token_id",
    "rank": "dspark_markov_rank",
}


def read_drafter(data: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig. Wrong values are refused only where the blocks are used, because
    answers need no drafts."""
    if "dspark_block_size" not in data:
        return {"draft_kind": "mtp"}
    found: dict[str, Any] = {}
    for field, name in _NAMES.items():
        if name in data:
            if type(data[name]) is not int:
                return _unusable(f"{name} is {data[name]!r:.40}, expected an integer")
            found[field] = data[name]
    targets = data.get("dspark_target_layer_ids", [])
    if not isinstance(targets, list) or not all(type(item) is int for item in targets):
        what = f"{targets!r:.80}, expected a list of integers"
        return _unusable(f"dspark_target_layer_ids is {what}")
    if targets:
        found["targets"] = tuple(targets)
    return {"draft_kind": "dspark", "dspark": DSparkShape(**found)}


def _unusable(problem: str) -> dict[str, Any]:
    return {"draft_kind": "dspark", "dspark": DSparkShape(problem=problem)}
