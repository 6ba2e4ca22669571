"""Every parameter of the model by its canonical name, and the three name families on disk.

Canonical names are the official ones, except that the routed experts of a layer are stacked
(`layers.N.ffn.experts.w13` [E, 2I, D] with the gate's rows first, `...experts.w2` [E, D, I]) and
the shared expert's gate and up are joined (`...shared_experts.w13`). No torch here.

Renames apply to whole dotted components: `wkv` and `norm` occur in several modules.
"""

import re
from dataclasses import dataclass
from typing import Literal

from dsv4.config import ModelConfig

Kind = Literal["linear", "plain", "norm", "fp32", "table"]
Family = Literal["official", "transformers", "hybrid"]


@dataclass(frozen=True)
class Parameter:
    """`kind`: "linear" may be quantised; "plain" is a matrix that never is (embedding, router);
    "norm" and "fp32" are returned in float32; "table" holds expert ids (int64)."""

    shape: tuple[int, ...]
    kind: Kind
    group: str  # for reports: embedding, attention, compressor, indexer, experts, ...
    limit: int = 0  # a table's ids are below this
    is_optional: bool = False


def parameters(config: ModelConfig) -> dict[str, Parameter]:
    """Canonical name -> the parameter that the model expects."""
    c = config
    vocab = Parameter((c.vocab_size, c.hidden_size), "plain", "embedding and head")
    out = {"embed.weight": vocab, "head.weight": vocab}
    out["norm.weight"] = Parameter((c.hidden_size,), "norm", "norms and mixing")
    out.update(_head_mix(c, ""))
    for layer, ratio in enumerate(c.compress_ratios):
        out.update(_block(c, f"layers.{layer}.", ratio, hashed=layer < c.num_hash_layers))
    return out


def draft_parameters(config: ModelConfig) -> dict[str, Parameter]:
    """The same for the draft blocks `mtp.i.`."""
    c, markov_rank = config, config.dspark.rank
    out: dict[str, Parameter] = {}
    norm = Parameter((c.hidden_size,), "norm", "draft")
    for index in range(c.num_draft_layers):
        prefix = f"mtp.{index}."
        block = _block(c, prefix, 0, hashed=False)
        out.update({name: Parameter(p.shape, p.kind, "draft") for name, p in block.items()})
        if c.draft_kind == "mtp":
            square = Parameter((c.hidden_size, c.hidden_size), "linear", "draft")
            out[prefix + "e_proj.weight"] = out[prefix + "h_proj.weight"] = square
            for name in ("enorm", "hnorm", "norm"):
                out[f"{prefix}{name}.weight"] = norm
            out.update(_head_mix(c, prefix))
        elif index == 0:
            taps = len(c.dspark.targets) * c.hidden_size  # outputs of these blocks, side by side
            out[prefix + "main_proj.weight"] = Parameter((c.hidden_size, taps), "linear", "draft")
            out[prefix + "main_norm.weight"] = norm
        if c.draft_kind == "dspark" and index == c.num_draft_layers - 1:
            out[prefix + "norm.weight"] = norm
            out.update(_head_mix(c, prefix))
            markov = Parameter((c.vocab_size, markov_rank), "plain", "draft")
            out[prefix + "markov_head.markov_w1.weight"] = markov
            out[prefix + "markov_head.markov_w2.weight"] = markov
            confidence = Parameter(
                (1, c.hidden_size + markov_rank), "plain", "draft", is_optional=True
            )
            out[prefix + "confidence_head.proj.weight"] = confidence
    return out


def _head_mix(c: ModelConfig, prefix: str) -> dict[str, Parameter]:
    group = "norms and mixing"
    width = c.hc_mult * c.hidden_size
    return {
        prefix + "hc_head_fn": Parameter((c.hc_mult, width), "fp32", group),
        prefix + "hc_head_base": Parameter((c.hc_mult,), "fp32", group),
        prefix + "hc_head_scale": Parameter((1,), "fp32", group),
    }


def _block(c: ModelConfig, prefix: str, ratio: int, *, hashed: bool) -> dict[str, Parameter]:
    out: dict[str, Parameter] = {}

    def add(name: str, shape: tuple[int, ...], kind: Kind, group: str) -> None:
        out[prefix + name] = Parameter(shape, kind, group)

    d, heads = c.hidden_size, c.num_heads * c.head_dim
    add("attn_norm.weight", (d,), "norm", "norms and mixing")
    add("ffn_norm.weight", (d,), "norm", "norms and mixing")
    for half in ("hc_attn", "hc_ffn"):
        add(f"{half}_fn", (c.mix_rows, c.hc_mult * d), "fp32", "norms and mixing")
        add(f"{half}_base", (c.mix_rows,), "fp32", "norms and mixing")
        add(f"{half}_scale", (3,), "fp32", "norms and mixing")
    add("attn.attn_sink", (c.num_heads,), "fp32", "attention")
    add("attn.wq_a.weight", (c.q_lora_rank, d), "linear", "attention")
    add("attn.q_norm.weight", (c.q_lora_rank,), "norm", "attention")
    add("attn.wq_b.weight", (heads, c.q_lora_rank), "linear", "attention")
    add("attn.wkv.weight", (c.head_dim, d), "linear", "attention")
    add("attn.kv_norm.weight", (c.head_dim,), "norm", "attention")
    low = c.o_groups * c.o_lora_rank
    add("attn.wo_a.weight", (low, heads // c.o_groups), "linear", "attention")
    add("attn.wo_b.weight", (d, low), "linear", "attention")
    if ratio:
        _compressor(out, f"{prefix}attn.compressor.", c.head_dim, d, ratio, "compressor")
    if ratio == 4:
        rows = c.index_num_heads * c.index_head_dim
        add("attn.indexer.wq_b.weight", (rows, c.q_lora_rank), "linear", "indexer")
        add("attn.indexer.weights_proj.weight", (c.index_num_heads, d), "linear", "indexer")
        inner = f"{prefix}attn.indexer.compressor."
        _compressor(out, inner, c.index_head_dim, d, ratio, "indexer")
    experts, inter = c.num_experts, c.moe_intermediate_size
    add("ffn.gate.weight", (experts, d), "plain", "router")
    if hashed:
        shape = (c.vocab_size, c.num_experts_per_tok)
        out[prefix + "ffn.gate.tid2eid"] = Parameter(shape, "table", "router", limit=experts)
    else:
        add("ffn.gate.bias", (experts,), "fp32", "router")
    add("ffn.experts.w13", (experts, 2 * inter, d), "linear", "routed experts")
    add("ffn.experts.w2", (experts, d, inter), "linear", "routed experts")
    add("ffn.shared_experts.w13", (2 * inter, d), "linear", "shared expert")
    add("ffn.shared_experts.w2", (d, inter), "linear", "shared expert")
    return out


def _compressor(
    out: dict[str, Parameter], prefix: str, width: int, d: int, ratio: int, group: str
) -> None:
    wide = width * (2 if ratio == 4 else 1)  # ratio 4 overlaps: two halves
    out[prefix + "wkv.weight"] = Parameter((wide, d), "linear", group)
    out[prefix + "wgate.weight"] = Parameter((wide, d), "linear", group)
    out[prefix + "ape"] = Parameter((ratio, wide), "fp32", group)
    out[prefix + "norm.weight"] = Parameter((width,), "norm", group)


# --- from a name on disk to the official module it belongs to ---------------------------------

# suffixes that may follow a module's name
SUFFIXES = frozenset(
    (
        "weight",
        "scale",
        "weight_scale",
        "weight_scale_2",
        "weight_scale_inv",
        "weight_packed",
        "weight_global_scale",
        "input_scale",
        "input_global_scale",
        "activation_scale",
    )
)

_MODULES = {  # transformers -> official, inside a layer
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attn.wq_a",
    "self_attn.q_a_norm": "attn.q_norm",
    "self_attn.q_b_proj": "attn.wq_b",
    "self_attn.kv_proj": "attn.wkv",
    "self_attn.kv_norm": "attn.kv_norm",
    "self_attn.o_a_proj": "attn.wo_a",
    "self_attn.o_b_proj": "attn.wo_b",
    "self_attn.compressor.kv_proj": "attn.compressor.wkv",
    "self_attn.compressor.gate_proj": "attn.compressor.wgate",
    "self_attn.compressor.kv_norm": "attn.compressor.norm",
    "self_attn.compressor.indexer.q_b_proj": "attn.indexer.wq_b",
    "self_attn.compressor.indexer.scorer.weights_proj": "attn.indexer.weights_proj",
    "self_attn.compressor.indexer.weights_proj": "attn.indexer.weights_proj",  # older files
    "self_attn.compressor.indexer.kv_proj": "attn.indexer.compressor.wkv",
    "self_attn.compressor.indexer.gate_proj": "attn.indexer.compressor.wgate",
    "self_attn.compressor.indexer.kv_norm": "attn.indexer.compressor.norm",
    "mlp.gate": "ffn.gate",
    "mlp.experts.gate_proj": "ffn.experts.w1",
    "mlp.experts.up_proj": "ffn.experts.w3",
    "mlp.experts.down_proj": "ffn.experts.w2",
    "mlp.shared_experts.gate_proj": "ffn.shared_experts.w1",
    "mlp.shared_experts.up_proj": "ffn.shared_experts.w3",
    "mlp.shared_experts.down_proj": "ffn.shared_experts.w2",
}
_LEAVES = {  # parameters that are not a module's weight
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.compressor.position_bias": "attn.compressor.ape",
    "self_attn.compressor.indexer.position_bias": "attn.indexer.compressor.ape",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.gate.tid2eid": "ffn.gate.tid2eid",
    **{f"attn_hc.{part}": f"hc_attn_{part}" for part in ("fn", "base", "scale")},
    **{f"ffn_hc.{part}": f"hc_ffn_{part}" for part in ("fn", "base", "scale")},
}
_STACKED = {"gate_up_proj": "ffn.experts.w13", "down_proj": "ffn.experts.w2"}
_STACK = re.compile(
    r"(layers\.\d{1,4}\.)(?:mlp|ffn)\.experts\.(gate_up_proj|down_proj)"
    r"(?:_(scale_inv|activation_scale))?"
)
_STACK_SUFFIXES = {None: "weight", "scale_inv": "weight_scale_inv"}
# llmcompressor splits transformers' stacks and writes the parts under these hybrid names
_EXPERT_PARTS = {"wgate": "w1", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_TOP_MODULES = {"model.embed_tokens": "embed", "lm_head": "head", "model.norm": "norm"}
_HYBRID_TOP_MODULES = {"model.embed_tokens": "embed", "head": "head", "model.norm": "norm"}
_TOP_LEAVES = {f"model.hc_head.hc_{part}": f"hc_head_{part}" for part in ("fn", "base", "scale")}
_LAYER = re.compile(r"layers\.(\d{1,4})\.(.+)")
_EXPERT = re.compile(r"(.*\.experts)\.(\d{1,5})\.([^.]+)")


@dataclass(frozen=True)
class Place:
    """Where a tensor on disk belongs: `module` is an official name without its suffix."""

    module: str
    suffix: str  # "" for parameters that are not a module's weight (sinks, ape, tables)
    expert: int | None = None


def families_in(names: list[str]) -> list[Family]:
    """Every family present; more than one means two checkpoints in one folder."""
    tests: tuple[tuple[Family, re.Pattern[str]], ...] = (
        ("transformers", re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.")),
        ("hybrid", re.compile(r"model\.layers\.\d+\.(attn|ffn)\.")),
        ("official", re.compile(r"layers\.\d+\.(attn|ffn)\.")),
    )
    return [family for family, test in tests if any(test.match(name) for name in names)]


_TOP_NAMES = frozenset(
    f"{module}.weight" for module in (*_TOP_MODULES, "embed", "head", "norm")
) | frozenset(_TOP_LEAVES)


def is_draft(name: str) -> bool:
    """Whether a tensor belongs to draft blocks, in any family."""
    return name.startswith(("mtp.", "model.mtp."))


def is_ours(name: str) -> bool:
    """Whether a tensor of this name could belong to a model, in any family."""
    inner = name.removeprefix("model.")
    block = re.match(r"(layers|mtp)\.\d+\.", inner)
    return block is not None or name in _TOP_NAMES or name.startswith("hc_head_")


def locate(name: str, family: Family) -> Place | None:
    """The place of a tensor under this family's names, or None."""
    if family == "official":
        return _official(name)
    if name in _TOP_LEAVES:
        return Place(_TOP_LEAVES[name], "")
    module, _, suffix = name.rpartition(".")
    top = _HYBRID_TOP_MODULES if family == "hybrid" else _TOP_MODULES
    if module in top and suffix in SUFFIXES:
        return Place(top[module], suffix)
    if not name.startswith("model.layers."):
        return None
    inner = name.removeprefix("model.")
    stack = _STACK.fullmatch(inner)
    if stack:
        suffix = _STACK_SUFFIXES.get(stack[3], stack[3])
        return Place(stack[1] + _STACKED[stack[2]], suffix)
    if family == "hybrid":
        layer = _LAYER.fullmatch(inner)
        if layer and layer[2] == "attn.norm.weight":  # save_pretrained's spelling of kv_norm
            inner = f"layers.{layer[1]}.attn.kv_norm.weight"
        return _official(inner)
    return _transformers_layer(inner)


def _official(name: str) -> Place | None:
    module, _, suffix = name.rpartition(".")
    if suffix in SUFFIXES and module:
        expert = _EXPERT.fullmatch(module)
        if expert:
            part = _EXPERT_PARTS.get(expert[3], expert[3])
            return Place(f"{expert[1]}.{part}", suffix, int(expert[2]))
        return Place(module, suffix)
    return Place(name, "")


def _transformers_layer(name: str) -> Place | None:
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return None
    prefix, inner = f"layers.{layer[1]}.", layer[2]
    if inner in _LEAVES:
        return Place(prefix + _LEAVES[inner], "")
    module, _, suffix = inner.rpartition(".")
    expert = _EXPERT.fullmatch(module)
    if expert:
        module = f"{expert[1]}.{expert[3]}"
    if suffix not in SUFFIXES or module not in _MODULES:
        return None
    if expert is None and module.startswith("mlp.experts."):
        return None
    return Place(prefix + _MODULES[module], suffix, int(expert[2]) if expert else None)


_SPELL_MODULES: dict[str, str] = {}
for _theirs, _ours in _MODULES.items():
    _SPELL_MODULES.setdefault(_ours, _theirs)  # the first spelling is the newer one
_SPELL_LEAVES = {ours: theirs for theirs, ours in _LEAVES.items()}
_SPELL_TOP = {ours: theirs for theirs, ours in (_TOP_MODULES | _TOP_LEAVES).items()}
_SPELL_HYBRID_TOP = {ours: theirs for theirs, ours in (_HYBRID_TOP_MODULES | _TOP_LEAVES).items()}


def spell(place: Place, family: Family) -> str:
    """The name of a place in a family: the inverse of `locate`."""
    module = place.module
    if family == "transformers" and module.startswith("layers."):
        _, layer, inner = module.split(".", 2)
        theirs = _SPELL_MODULES[inner] if place.suffix else _SPELL_LEAVES[inner]
        module = f"model.layers.{layer}.{theirs}"
    elif family == "hybrid" and module.startswith("layers."):
        module = "model." + module
        if module.endswith(".attn.kv_norm"):
            module = module.removesuffix("kv_norm") + "norm"
    elif family != "official":
        module = (_SPELL_HYBRID_TOP if family == "hybrid" else _SPELL_TOP)[module]
    if place.expert is not None:
        parent, _, leaf = module.rpartition(".")
        module = f"{parent}.{place.expert}.{leaf}"
    return f"{module}.{place.suffix}" if place.suffix else module
