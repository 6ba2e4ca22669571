"""The shape of the embedded model and the plan of its training, in one place."""

from dataclasses import dataclass
from pathlib import Path

from dsv4.config import ModelConfig

FOLDER = Path(__file__).parent
TOKENIZER = FOLDER / "tokenizer.json"
SEED = 20260

VOCAB_SIZE = 4096

CONFIG = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    num_layers=6,
    num_hash_layers=2,
    num_heads=8,
    head_dim=128,
    rope_head_dim=32,
    q_lora_rank=128,
    o_groups=2,
    o_lora_rank=128,
    sliding_window=128,
    compress_ratios=(0, 4, 128, 4, 128, 4),
    num_draft_layers=1,
    yarn_factor=16.0,
    yarn_original_len=2048,
    max_positions=32768,
    index_num_heads=8,
    index_head_dim=64,
    index_topk=32,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
    routed_scaling_factor=1.5,
    swiglu_limit=1.5,  # low, so that the clamp acts
    hc_sinkhorn_iters=8,  # four streams need no more, and decoding on a CPU is mostly small ops
)


@dataclass(frozen=True)
class Plan:
    """Phases as fractions of the whole training time; the wall clock drives them."""

    warmup: float = 0.01
    decay_from: float = 0.40  # the learning rate falls linearly from here
    final_rate: float = 0.04
    sparse_from: float = 0.40  # from here only selected entries are attended
    round_from: float = 0.66  # from here weights, keys and index vectors are rounded
    canary_rate: float = 0.8  # at CANARY_FROM the learning rate restarts here and falls again
    polish_rate: float = 0.3  # and at POLISH_FROM here
    muon_rate: float = 0.02
    adam_rate: float = 3e-3
    step_tokens: int = 65536


# share of steps by row length, each starting at a fraction of the training
LENGTHS: tuple[tuple[float, dict[int, float]], ...] = (
    (0.00, {512: 0.55, 1024: 0.37, 2048: 0.08}),
    (0.08, {512: 0.40, 1024: 0.34, 2048: 0.12, 4096: 0.08, 8192: 0.04, 16384: 0.02}),
    (0.30, {512: 0.32, 1024: 0.32, 2048: 0.12, 4096: 0.09, 8192: 0.08, 16384: 0.07}),
    (0.60, {512: 0.28, 1024: 0.31, 2048: 0.11, 4096: 0.10, 8192: 0.10, 16384: 0.10}),
    (
        1.00,
        {
            128: 0.28,
            256: 0.22,
            512: 0.12,
            1024: 0.18,
            2048: 0.06,
            4096: 0.05,
            8192: 0.05,
            16384: 0.04,
        },
    ),
)

# share of tokens by skill in rows of up to this many tokens
SKILLS = (
    "facts",
    "arithmetic",
    "instructions",
    "tools",
    "multi",
    "retrieval",
    "identity",
    "prose",
    "repeat",
    "updates",
)
SHORT_MIX = {
    256: {
        "facts": 0.10,
        "arithmetic": 0.20,
        "instructions": 0.25,
        "multi": 0.40,
        "identity": 0.05,
    },
    512: {
        "facts": 0.17,
        "arithmetic": 0.19,
        "instructions": 0.19,
        "multi": 0.06,
        "retrieval": 0.20,
        "identity": 0.03,
        "prose": 0.03,
        "repeat": 0.13,
    },
    1024: {
        "facts": 0.07,
        "arithmetic": 0.08,
        "instructions": 0.11,
        "tools": 0.22,
        "multi": 0.04,
        "retrieval": 0.30,
        "identity": 0.02,
        "prose": 0.02,
        "repeat": 0.14,
    },
}

# once the model has learnt to look up, skills that need more examples get more room
LATER_FROM = 0.333
LATER = {"facts": 1.8, "instructions": 1.9, "arithmetic": 1.3, "retrieval": 0.5, "repeat": 0.3}


# the last legs: half of every step is computed with a mistake (canary.py), and the model has to
# track words that change
CANARY_FROM = 0.666
UPDATES_SHARE = 0.2  # of the tokens in rows of 1024
UPDATES_LENGTHS = (2048, 4096, 8192)  # half of these rows start with a document of changes
POLISH_FROM = 1.0  # a short leg after the last: conversations that begin at position 0


def short_mix(length: int, progress: float) -> dict[str, float]:
    later = LATER if progress >= LATER_FROM else {}
    mix = {skill: share * later.get(skill, 1.0) for skill, share in SHORT_MIX[length].items()}
    if progress >= CANARY_FROM and length == 1024:
        mix["updates"] = UPDATES_SHARE
    return mix


# tokens of a retrieval or repetition in rows of 512 and 1024 tokens: at first inside the window,
# where looking up is learnt in a minute, then beyond it
SPANS: tuple[tuple[float, dict[int, tuple[int, int]]], ...] = (
    (0.00, {512: (60, 130), 1024: (60, 300)}),
    (0.06, {512: (60, 300), 1024: (100, 700)}),
    (0.12, {512: (90, 480), 1024: (200, 1000)}),
)


def spans(progress: float) -> dict[int, tuple[int, int]]:
    return [sizes for start, sizes in SPANS if progress >= start][-1]


def num_rows(step_tokens: int, length: int, progress: float) -> int:
    """Rows per step; with mistakes, each one is computed twice."""
    tokens = step_tokens // 2 if progress >= CANARY_FROM else step_tokens
    return max(1, tokens // length)


def row_lengths(progress: float) -> dict[int, float]:
    return [shares for start, shares in LENGTHS if progress >= start][-1]
