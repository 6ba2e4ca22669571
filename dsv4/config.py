"""ModelConfig: facts about a checkpoint. EngineConfig: the user's choices. Long because of tables.

Both are frozen. `util/config_json.py` reads the three spellings of `config.json`.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, get_args, get_origin

from dsv4.errors import ConfigError, OptionError
from dsv4.util.config_json import read_fields
from dsv4.util.draft_shape import DSparkShape

LayerKind = Literal["swa", "csa", "hca"]
KIND_OF_RATIO: dict[int, LayerKind] = {0: "swa", 4: "csa", 128: "hca"}


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a DeepSeek-V4 backbone; defaults are V4-Flash's published values."""

    vocab_size: int = 129280
    hidden_size: int = 4096
    num_layers: int = 43
    num_hash_layers: int = 3
    num_heads: int = 64
    head_dim: int = 512
    rope_head_dim: int = 64
    q_lora_rank: int = 1024
    o_groups: int = 8
    o_lora_rank: int = 1024
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = (0, 0, *([4, 128] * 20), 4)  # one per backbone block
    num_draft_layers: int = 1
    draft_kind: Literal["mtp", "dspark"] = "mtp"
    dspark: DSparkShape = DSparkShape()  # noqa: RUF009  # frozen
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn_factor: float = 16.0
    yarn_original_len: int = 65536
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    max_positions: int = 1048576
    index_num_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    num_experts: int = 256
    num_experts_per_tok: int = 6
    moe_intermediate_size: int = 2048
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    bos_id: int = 0
    eos_ids: tuple[int, ...] = (1,)  # any of them ends an answer

    def __post_init__(self) -> None:
        _check_model(self)

    @property
    def nope_head_dim(self) -> int:
        """Channels of a head without rotation; they come first."""
        return self.head_dim - self.rope_head_dim

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        return tuple(KIND_OF_RATIO[ratio] for ratio in self.compress_ratios)

    @property
    def mix_rows(self) -> int:
        """Rows of an mHC projection: pre, post and the stream-to-stream matrix."""
        return (2 + self.hc_mult) * self.hc_mult

    def num_layers_of(self, kind: LayerKind) -> int:
        return self.kinds.count(kind)

    @classmethod
    def builtin(cls, name: str) -> "ModelConfig":
        if name == "flash":
            return cls()
        if name == "pro":
            return cls(
                hidden_size=7168,
                num_layers=61,
                num_heads=128,
                q_lora_rank=1536,
                o_groups=16,
                compress_ratios=(128, 128, *([4, 128] * 29), 4),
                index_topk=1024,
                num_experts=384,
                moe_intermediate_size=3072,
                routed_scaling_factor=2.5,
            )
        raise OptionError(f"no built-in shape named {name!r}; expected flash, pro, in bench trial")

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        path = folder / "config.json"
        try:
            if not folder.is_dir():
                raise ConfigError(
                    f"{folder} is not a folder; expected one with config.json and safetensors files"
                )
            if not path.is_file():
                raise ConfigError(
                    f"{folder} has no config.json; is this the checkpoint's own folder?"
                )
            with path.open("rb") as file:
                text = file.read(MAX_CONFIG_BYTES + 1)
            if len(text) > MAX_CONFIG_BYTES:
                raise ConfigError(f"{path} has more than {MAX_CONFIG_BYTES} bytes; fetch it again")
            data = json.loads(text.decode())
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        except (ValueError, RecursionError) as error:  # also bad UTF-8 and overlong numbers
            raise ConfigError(
                f"{path} is not valid JSON ({error}); fetch the file again"
            ) from error
        if not isinstance(data, dict):
            raise ConfigError(f"{path} holds a {type(data).__name__}, expected a JSON object")
        try:
            return cls.from_dict(data)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ModelConfig":
        return cls(**read_fields(data))


# Far above any real model: a damaged or hostile file must not cost hours or all memory.
MAX_CONFIG_BYTES = 16 << 20
MAX_EXPERTS = 1 << 18  # over all layers
_LIMITS = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 17,
    "num_layers": 1000,
    "num_hash_layers": 1000,
    "num_heads": 1 << 12,
    "head_dim": 1 << 13,
    "rope_head_dim": 1 << 13,
    "q_lora_rank": 1 << 17,
    "o_groups": 1 << 12,
    "o_lora_rank": 1 << 17,
    "sliding_window": 1 << 20,
    "num_draft_layers": 100,
    "yarn_original_len": 1 << 30,
    "max_positions": 1 << 30,
    "index_num_heads": 1 << 12,
    "index_head_dim": 1 << 13,
    "index_topk": 1 << 20,
    "num_experts": 1 << 14,
    "num_experts_per_tok": 1 << 10,
    "moe_intermediate_size": 1 << 17,
    "hc_mult": 64,
    "hc_sinkhorn_iters": 1000,
    "bos_id": 1 << 22,
}
_MAY_BE_ZERO = ("num_hash_layers", "num_draft_layers", "bos_id")


def _check_model(c: ModelConfig) -> None:
    def need(condition: bool, message: str) -> None:
        if not condition:
            raise ConfigError(message)

    for item in fields(c):
        value = getattr(c, item.name)
        if item.type in (int, float):
            limit = _LIMITS[item.name] if item.type is int else 1e30
            need(value <= limit, f"{item.name} is {str(value)[:40]}, expected at most {limit:.6g}")
            positive = value > 0 or item.name in _MAY_BE_ZERO
            need(positive, f"{item.name} is {value}, expected it above 0")
    need(
        c.num_layers * c.num_experts <= MAX_EXPERTS,
        f"{c.num_layers} layers of {c.num_experts} experts, expected at most {MAX_EXPERTS} experts",
    )
    need(
        len(c.compress_ratios) == c.num_layers,
        f"compress_ratios has {len(c.compress_ratios)} entries for {c.num_layers} layers",
    )
    for index, ratio in enumerate(c.compress_ratios):
        need(ratio in KIND_OF_RATIO, f"compress_ratios[{index}] is {ratio}, expected 0, 4 or 128")
    need(
        0 <= c.num_hash_layers <= c.num_layers,
        f"num_hash_layers is {c.num_hash_layers}, expected 0 to {c.num_layers}",
    )
    need(c.num_draft_layers >= 0, f"num_nextn_predict_layers is {c.num_draft_layers}")
    need(
        c.rope_head_dim % 2 == 0 and c.rope_head_dim <= c.head_dim,
        f"qk_rope_head_dim is {c.rope_head_dim}, expected an even number up to head_dim "
        f"({c.head_dim})",
    )
    need(
        c.rope_head_dim <= c.index_head_dim,
        f"index_head_dim is {c.index_head_dim}, below qk_rope_head_dim ({c.rope_head_dim})",
    )
    need(
        c.index_head_dim & (c.index_head_dim - 1) == 0,
        f"index_head_dim is {c.index_head_dim}; the Hadamard rotation needs a power of two",
    )
    need(
        c.num_heads % c.o_groups == 0,
        f"num_attention_heads ({c.num_heads}) is not divisible by o_groups ({c.o_groups})",
    )
    need(
        c.num_experts_per_tok <= c.num_experts,
        f"num_experts_per_tok ({c.num_experts_per_tok}) exceeds n_routed_experts ({c.num_experts})",
    )
    for name, theta in (
        ("rope_theta", c.rope_theta),
        ("compress_rope_theta", c.compress_rope_theta),
    ):
        need(theta > 1, f"{name} is {theta}, expected it above 1")
    need(c.yarn_factor >= 1, f"rope_scaling.factor is {c.yarn_factor}, expected at least 1")
    for name, ids in (("bos_token_id", (c.bos_id,)), ("eos_token_id", c.eos_ids)):
        for number in ids:
            inside = 0 <= number < c.vocab_size
            need(inside, f"{name} {number} is outside the vocabulary ({c.vocab_size})")


DtypeChoice = Literal["auto", "bfloat16", "float32"]
KvChoice = Literal["auto", "fp8", "bf16", "fp32"]
IndexChoice = Literal["auto", "fp4", "fp8", "bf16", "fp32"]
ActivationsChoice = Literal["auto", "a4", "a8", "a16"]
DraftChoice = Literal["auto", "off", "lookup", "mtp", "dspark"]
ExpertsChoice = Literal["whole", "split"]
AttentionChoice = Literal["tp", "dp"]
CommChoice = Literal["auto", "symmetric", "nccl", "gloo"]


class EngineOptions(TypedDict, total=False):
    """EngineConfig's fields as keyword arguments, for editors; tests/test_package.py compares."""

    device: str
    dtype: DtypeChoice
    kv_format: KvChoice
    index_format: IndexChoice
    activations: ActivationsChoice
    max_context: int | None
    max_sequences: int | None
    state_tokens: int | None
    chunk_tokens: int | None
    max_gap_ms: float
    prefix_cache: bool
    prefix_disk: str | None
    audit_share: float
    audit_folder: str
    draft: DraftChoice
    draft_tokens: int | None
    expert_memory: str | float
    expert_profile: str | None
    tp: int | Literal["auto"]
    pp: int
    experts: ExpertsChoice
    attention: AttentionChoice
    comm: CommChoice
    nodes: int
    head: str | None
    join_timeout: float
    cuda_graphs: bool
    ops: str
    step_timeout: float


MAX_DRAFT_TOKENS = 7


@dataclass(frozen=True)
class EngineConfig:
    """The user's choices, under the same names on the command line, in Python and the server."""

    device: str = field(default="auto", metadata={"help": "auto, cpu, cuda or cuda:N"})
    dtype: DtypeChoice = field(
        default="auto", metadata={"help": "activations: auto, bfloat16, float32"}
    )
    kv_format: KvChoice = field(default="auto", metadata={"help": "auto, fp8, bf16 or fp32"})
    index_format: IndexChoice = field(
        default="auto", metadata={"help": "auto, fp4, fp8, bf16 or fp32"}
    )
    activations: ActivationsChoice = field(
        default="auto", metadata={"help": "where they meet weights: auto, a4, a8 or a16"}
    )
    max_context: int | None = field(default=None, metadata={"help": "tokens of one sequence"})
    max_sequences: int | None = field(default=None, metadata={"help": "sequences at once"})
    state_tokens: int | None = field(
        default=None, metadata={"help": "tokens of all sequences together; default: all full"}
    )
    chunk_tokens: int | None = field(default=None, metadata={"help": "prompt tokens in a step"})
    max_gap_ms: float = field(
        default=60.0, metadata={"help": "longest gap in a stream that prompts may cause; 0: any"}
    )
    prefix_cache: bool = field(default=True, metadata={"help": "share equal prompt beginnings"})
    prefix_disk: str | None = field(
        default=None, metadata={"help": "folder for cold prefixes, kept over a restart"}
    )
    audit_share: float = field(default=0.0, metadata={"help": "share of requests run again cold"})
    audit_folder: str = field(
        default="audit", metadata={"help": "folder for what the audit finds to differ"}
    )
    draft: DraftChoice = field(
        default="auto", metadata={"help": "auto, off, lookup, mtp or dspark"}
    )
    draft_tokens: int | None = field(
        default=None, metadata={"help": "most drafts of a sequence in a step: 1 to 7"}
    )
    expert_memory: str | float = field(
        default="auto", metadata={"help": "experts kept on the GPU: auto (what fits), all, or GB"}
    )
    expert_profile: str | None = field(
        default=None, metadata={"help": "file that keeps which experts are used most"}
    )
    tp: int | Literal["auto"] = field(
        default="auto",
        metadata={"help": "ranks that share each layer: 1, 2, 4, 8; auto: as plan recommends"},
    )
    pp: int = field(default=1, metadata={"help": "pipeline stages, each with some of the layers"})
    experts: ExpertsChoice = field(
        default="whole", metadata={"help": "whole on a rank, or split over all"}
    )
    attention: AttentionChoice = field(
        default="tp", metadata={"help": "divide heads (tp) or sequences (dp)"}
    )
    comm: CommChoice = field(
        default="auto", metadata={"help": "between ranks: auto, symmetric, nccl or gloo"}
    )
    nodes: int = field(default=1, metadata={"help": "machines; others run dsv4 join HOST:PORT"})
    head: str | None = field(
        default=None, metadata={"help": "HOST:PORT of this machine that other nodes reach"}
    )
    join_timeout: float = field(default=600.0, metadata={"help": "seconds to wait for nodes"})
    cuda_graphs: bool = field(default=True, metadata={"help": "replay steps as CUDA graphs"})
    ops: str = field(default="auto", metadata={"help": "auto, reference, or op names"})
    step_timeout: float = field(
        default=60.0, metadata={"help": "seconds without progress after which a server restarts it"}
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            allowed, value = get_args(item.type), getattr(self, item.name)
            if get_origin(item.type) is Literal and value not in allowed:
                raise OptionError(f"{item.name} is {value!r}, expected one of {', '.join(allowed)}")
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", str(self.device)):
            raise OptionError(f"device is {self.device!r}, expected auto, cpu, cuda or cuda:N")
        for name in ("max_context", "max_sequences", "state_tokens", "chunk_tokens"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise OptionError(f"{name} is {value!r}, expected a whole number above 0")
        most = self.draft_tokens
        if most is not None and (type(most) is not int or not 1 <= most <= MAX_DRAFT_TOKENS):
            raise OptionError(f"draft_tokens is {most!r}, expected 1 to {MAX_DRAFT_TOKENS}")
        if self.expert_memory not in ("auto", "all") and not 0 < self.expert_bytes < 1 << 62:
            raise OptionError(f"expert_memory is {self.expert_memory!r}, expected auto, all or GB")
        for name in ("tp", "pp", "nodes"):
            value = getattr(self, name)
            if (type(value) is not int or value < 1) and (name, value) != ("tp", "auto"):
                raise OptionError(f"{name} is {value!r}, expected a whole number above 0")
        for name in ("prefix_cache", "cuda_graphs"):
            if type(getattr(self, name)) is not bool:
                raise OptionError(f"{name} is {getattr(self, name)!r}, expected True or False")
        gap = self.max_gap_ms
        if type(gap) not in (int, float) or not 0 <= gap <= 1e6:
            raise OptionError(f"max_gap_ms is {gap!r}, expected milliseconds from 0 (no bound) on")
        share = self.audit_share
        if type(share) not in (int, float) or not 0 <= share <= 1:
            raise OptionError(f"audit_share is {share!r}, expected a number from 0 to 1")
        if not isinstance(self.audit_folder, str):
            raise OptionError(f"audit_folder is {self.audit_folder!r}, expected a folder's path")
        for name, kind in (("prefix_disk", "folder"), ("expert_profile", "file")):
            path = getattr(self, name)
            if path is not None and not isinstance(path, str):
                raise OptionError(f"{name} is {path!r}, expected a {kind}'s path")
        for name in ("step_timeout", "join_timeout"):
            limit = getattr(self, name)
            if type(limit) not in (int, float) or not 0 < limit < math.inf:
                raise OptionError(f"{name} is {limit!r}, expected seconds above 0")
        if self.nodes > 1 and not isinstance(self.head, str):
            raise OptionError(
                f"nodes is {self.nodes}, head is {self.head!r}; expected the HOST:PORT of this "
                "machine that the other nodes reach"
            )
        if not isinstance(self.ops, str):
            raise OptionError(f"ops is {self.ops!r}, expected auto, reference, or op names")

    @property
    def world(self) -> int:
        """Number of ranks; 1 until `auto` is resolved."""
        return (1 if self.tp == "auto" else self.tp) * self.pp

    @property
    def expert_bytes(self) -> int:
        """GPU memory for experts; 0 if `expert_memory` is not a size."""
        size = re.fullmatch(r"[0-9]*\.?[0-9]+(e-?[0-9]{1,2})?", str(self.expert_memory))
        return int(float(size[0]) * 1e9) if size else 0

    @classmethod
    def make(cls, **choices: Unpack[EngineOptions]) -> "EngineConfig":
        """A config with these choices; an unknown name raises an error listing the known ones."""
        known = {item.name for item in fields(cls)}
        unknown = sorted(choices.keys() - known)
        if unknown:
            raise OptionError(
                f"unknown option {unknown[0]!r}; there are {', '.join(sorted(known))}"
            )
        return cls(**choices)
