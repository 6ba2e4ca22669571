"""The values in config.json that only draft blocks have."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsv4.errors import ConfigError


@dataclass(frozen=True)
class DSparkShape:
    block: int = 5  # rows that are drafted together
    noise_id: int = 128799  # the token of rows whose own is not known
    targets: tuple[int, ...] = (40, 41, 42)  # backbone blocks whose output they read
    rank: int = 256  # the Markov head's


def head_bytes(vocab_size: int, hidden_size: int) -> int:
    """Of the copy of the head in NVFP4 that drafts read on a GPU."""
    return vocab_size * hidden_size * 9 // 16


_NAMES = {
    "block": "dspark_block_size",
    "noise_id": "dspark_noise_token_id",
    "rank": "dspark_markov_rank",
}


def read_drafter(data: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig. Impossible values are refused only when the blocks are built, because
    answers need no drafts."""
    if "dspark_block_size" not in data:
        return {"draft_kind": "mtp"}
    found: dict[str, Any] = {}
    for field, name in _NAMES.items():
        if name in data:
            if type(data[name]) is not int:
                raise ConfigError(f"{name} is {str(data[name])[:40]}, expected an integer")
            found[field] = data[name]
    targets = data.get("dspark_target_layer_ids", [])
    if not isinstance(targets, list) or not all(type(item) is int for item in targets):
        said = str(targets)[:80]
        raise ConfigError(f"dspark_target_layer_ids is {said}, expected a list of integers")
    if targets:
        found["targets"] = tuple(targets)
    return {"draft_kind": "dspark", "dspark": DSparkShape(**found)}
