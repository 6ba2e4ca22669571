"""One layer, plainly: the expected result of each engine op, from the results of earlier ops.

A *station* is a place in the layer where the engine calls an op; a *tap* is a named result there.
Each method below computes a station's taps from other taps. With the engine's taps as input, an
error stays where it arose; with its own, the plain model runs end to end.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.tools import formulas
from dsv4.tools.doctor.plain.weights import PlainWeights

NEAR_TIE = 1e-5  # two correct implementations may choose either
# taps of earlier tokens that later tokens need
_KEPT = ("values", "gates", "index_values", "index_gates", "key", "entries", "index_keys")
# bound memory: rows of attention and of the vocabulary at a time; elements of a cached expert
_ROWS, _VOCABULARY, _SMALL_EXPERT = 128, 16384, 1 << 20


@dataclass(frozen=True)
class Formats:
    """How the engine rounds: activations, keys, index keys; and whether weights may differ."""

    dtype: torch.dtype
    kv: str
    index: str
    lossy: bool = False  # the correct weights come from another checkpoint of the model
    widths: Mapping[str, str] = field(default_factory=dict)  # of weights with rounded inputs

    @property
    def is_exact(self) -> bool:
        """Whether small differences stay small, so logits can be compared end to end."""
        return self.dtype == torch.float32 and not (self.lossy or self.widths)


@dataclass
class Taps:
    """One layer's values for one sequence, by name; one row per token (or per entry)."""

    start: int = 0
    stop: int = 0
    token_ids: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    new: dict[str, Tensor] = field(default_factory=dict)
    old: dict[str, Tensor] = field(default_factory=dict)
    given: dict[str, Tensor] = field(default_factory=dict)  # by the op under comparison
    choices: dict[str, Tensor] = field(default_factory=dict)  # used where as good as our own

    def begin(self, start: int, token_ids: Tensor) -> None:
        """A step with the tokens from position `start` on."""
        self.old = {name: self.all(name) for name in _KEPT if name in self.new or name in self.old}
        self.start, self.stop = start, start + token_ids.shape[0]
        self.token_ids, self.new, self.given, self.choices = token_ids, {}, {}, {}

    def forget(self) -> None:
        """Keep only what later tokens need; the next layer has consumed the rest."""
        self.new = {name: value for name, value in self.new.items() if name in _KEPT}

    def all(self, name: str) -> Tensor:
        parts = [table[name] for table in (self.old, self.new) if name in table]
        if not parts:
            raise KeyError(name)
        return torch.cat(parts)

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.start, self.stop, device=self.token_ids.device)


class PlainLayer:
    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: PlainWeights,
        formats: Formats,
        device: str,
        examined: PlainWeights | None = None,
    ) -> None:
        """`examined`: the file that the engine read, if another one counts as correct."""
        self.config, self.layer, self.formats, self.device = config, layer, formats, device
        self.ratio = config.compress_ratios[layer]
        self.table = formulas.frequencies(config, self.ratio).to(device)
        self._weights, self._examined = weights, examined or weights
        self._read: dict[tuple[str, int | None], Tensor] = {}

    def full_name(self, name: str) -> str:
        whole = name in ("embed.weight", "head.weight", "norm.weight") or name.startswith("hc_head")
        return name if whole else f"layers.{self.layer}.{name}"

    def weight(self, name: str, expert: int | None = None) -> Tensor:
        if (name, expert) in self._read:
            return self._read[name, expert]
        value = self._weights.tensor(self.full_name(name), expert).to(self.device)
        if expert is None or value.numel() <= _SMALL_EXPERT:
            self._read[name, expert] = value  # a layer's large experts would fill the memory
        return value

    def width(self, name: str) -> str:
        return self.formats.widths.get(self.full_name(name), "a16")

    def product(self, x: Tensor, name: str) -> Tensor:
        return formulas.as_multiplied(x, self.width(name)) @ self.weight(name).T

    def misreadings(self, name: str, expert: int | None) -> Iterator[tuple[str, Tensor]]:
        """Misreadings of one of the layer's weights, and correct readings of its neighbours."""
        full = self.full_name(name)
        yield from self._examined.misreadings(full, expert, self.config.rope_head_dim)
        for other in (self.layer - 1, self.layer + 1):
            beside = full.replace(f"layers.{self.layer}.", f"layers.{other}.", 1)
            if beside != full and beside in self._examined:
                yield f"from layer {other}", self._examined.tensor(beside, expert)

    def rope(self, x: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        return formulas.rope(x, formulas.angles(positions, self.table), back=back)

    def round(self, x: Tensor) -> Tensor:
        return x.to(self.formats.dtype).double()

    # --- streams ----------------------------------------------------------------------------------

    def embed(self, t: Taps) -> dict[str, Tensor]:
        rows = self._weights.rows("embed.weight", t.token_ids.cpu()).to(self.device)
        return {"embedded": rows.unsqueeze(1).repeat(1, self.config.hc_mult, 1)}

    def _mix(self, streams: Tensor, half: str) -> dict[str, Tensor]:
        fn, base, scale = (self.weight(f"hc_{half}_{part}") for part in ("fn", "base", "scale"))
        pre, post, comb = formulas.mixing(streams, fn, base, scale, self.config)
        row = self.round(formulas.collapse(streams, pre))
        x = formulas.rms(row, self.weight(f"{half}_norm.weight"), self.config.rms_norm_eps)
        return {f"{half}_x": x, f"{half}_post": post, f"{half}_comb": comb}

    def mix_attention(self, t: Taps) -> dict[str, Tensor]:
        if self.layer == 0:
            return {**self._mix(t.new["embedded"], "attn"), "attn_streams": t.new["embedded"]}
        before = (t.new[f"before_{name}"] for name in ("streams", "y", "post", "comb"))
        streams = self.round(formulas.spread(*before))
        return {"attn_streams": streams, **self._mix(t.given.get("attn_streams", streams), "attn")}

    def mix_ffn(self, t: Taps) -> dict[str, Tensor]:
        update = (t.new[n] for n in ("attn_streams", "attn_y", "attn_post", "attn_comb"))
        streams = self.round(formulas.spread(*update))
        return {"ffn_streams": streams, **self._mix(t.given.get("ffn_streams", streams), "ffn")}

    def head_mix(self, t: Taps) -> dict[str, Tensor]:
        update = (t.new[n] for n in ("ffn_streams", "ffn_y", "ffn_post", "ffn_comb"))
        streams, c = self.round(formulas.spread(*update)), self.config
        fn, base, scale = (self.weight(f"hc_head_{part}") for part in ("fn", "base", "scale"))
        row = formulas.collapse(streams, formulas.head_weights(streams, fn, base, scale, c))
        return {
            "head_x": formulas.rms(self.round(row), self.weight("norm.weight"), c.rms_norm_eps),
            "final_streams": streams,
        }

    def head(self, t: Taps) -> dict[str, Tensor]:
        x, size, parts = t.new["head_x"], self.config.vocab_size, []
        for start in range(0, size, _VOCABULARY):
            numbers = torch.arange(start, min(start + _VOCABULARY, size))
            matrix = self._weights.rows("head.weight", numbers).to(self.device)
            parts.append(x @ matrix.T)
        return {"logits": torch.cat(parts, dim=1)}

    # --- attention --------------------------------------------------------------------------------

    @property
    def input_matrices(self) -> dict[str, str]:
        """Taps of the input projection and their matrices, in the op's order."""
        names = {"latent_raw": "attn.wq_a", "kv_raw": "attn.wkv"}
        if self.ratio:
            names |= {"values": "attn.compressor.wkv", "gates": "attn.compressor.wgate"}
        if self.ratio == 4:
            index = "attn.indexer."
            names |= {
                "index_values": f"{index}compressor.wkv",
                "index_gates": f"{index}compressor.wgate",
                "head_weights": f"{index}weights_proj",
            }
        return {tap: f"{name}.weight" for tap, name in names.items()}

    @property
    def query_matrices(self) -> dict[str, str]:
        names = {"q_raw": "attn.wq_b.weight"}
        return names | ({"index_q_raw": "attn.indexer.wq_b.weight"} if self.ratio == 4 else {})

    def project(self, t: Taps) -> dict[str, Tensor]:
        x = t.new["attn_x"]
        return {tap: self.product(x, name) for tap, name in self.input_matrices.items()}

    def window_key(self, t: Taps) -> dict[str, Tensor]:
        norm, c = self.weight("attn.kv_norm.weight"), self.config
        key = self.round(formulas.rms(t.new["kv_raw"], norm, c.rms_norm_eps))
        key = self.round(self.rope(key, t.positions))
        return {"key": formulas.stored_key(key, self.formats.kv, c.rope_head_dim)}

    def latent_norm(self, t: Taps) -> dict[str, Tensor]:
        weight, eps = self.weight("attn.q_norm.weight"), self.config.rms_norm_eps
        return {"latent": formulas.rms(t.new["latent_raw"], weight, eps)}

    def query(self, t: Taps) -> dict[str, Tensor]:
        latent = t.new["latent"]
        return {tap: self.product(latent, name) for tap, name in self.query_matrices.items()}

    def _entries(self, t: Taps, prefix: str, tap: str) -> Tensor:
        ratio, ape = self.ratio, self.weight(f"{prefix}ape")
        blocks = range(t.start // ratio, t.stop // ratio)
        norm = self.weight(f"{prefix}norm.weight")
        if not blocks:
            return norm.new_zeros(0, norm.shape[0])
        before = max(blocks.start - 1, 0)  # a block of four reads the one before
        tokens = slice(before * ratio, blocks.stop * ratio)
        values, gates = t.all(f"{tap}values")[tokens], t.all(f"{tap}gates")[tokens]
        gates = gates + ape.repeat(blocks.stop - before, 1)
        rows = formulas.compress(values, gates, ratio)[blocks.start - before :]
        rows = self.round(formulas.rms(self.round(rows), norm, self.config.rms_norm_eps))
        first = torch.tensor(blocks, device=rows.device) * ratio
        return self.round(self.rope(rows, first))

    def tail(self, t: Taps) -> Tensor:
        """Positions of the newest tokens, which a compressor stores for the next step."""
        rows = 8 if self.ratio == 4 else 128
        return torch.arange(max(t.stop - rows, 0), t.stop, device=t.token_ids.device)

    def _tail(self, t: Taps, prefix: str, tap: str) -> Tensor:
        last, ape = self.tail(t), self.weight(f"{prefix}ape")
        gates = t.all(f"{tap}gates")[last] + ape[last % self.ratio]
        return torch.cat((t.all(f"{tap}values")[last], gates), dim=1)

    def entries(self, t: Taps) -> dict[str, Tensor]:
        under, c = "attn.compressor.", self.config
        entries = formulas.stored_key(self._entries(t, under, ""), self.formats.kv, c.rope_head_dim)
        return {"entries": entries, "entries_tail": self._tail(t, under, "")}

    def index_keys(self, t: Taps) -> dict[str, Tensor]:
        under, formats = "attn.indexer.compressor.", self.formats
        keys = formulas.stored_index(
            self._entries(t, under, "index_"), formats.index, formats.dtype
        )
        return {"index_keys": keys, "index_keys_tail": self._tail(t, under, "index_")}

    def index_query(self, t: Taps) -> dict[str, Tensor]:
        q = _heads(t.new["index_q_raw"], self.config.index_num_heads)
        q = self.round(self.rope(q, t.positions))
        return {"index_q": formulas.stored_index(q, self.formats.index, self.formats.dtype)}

    @property
    def index_scale(self) -> float:
        return float((self.config.index_head_dim * self.config.index_num_heads) ** -0.5)

    def scored(self, t: Taps) -> Tensor:
        """Which scores are meaningful: visible entries in rows that must select."""
        visible = (t.positions + 1) // 4
        numbers = torch.arange(t.stop // 4, device=visible.device)
        return (numbers < visible[:, None]) & (visible > self.config.index_topk)[:, None]

    def index_scores(self, t: Taps) -> dict[str, Tensor]:
        weights = t.new["head_weights"] * self.index_scale
        scores = formulas.index_scores(t.new["index_q"], weights, t.all("index_keys"))
        return {"scores": scores.masked_fill(~self.scored(t), 0.0)}

    def index_select(self, t: Taps) -> dict[str, Tensor]:
        visible, topk = (t.positions + 1) // 4, self.config.index_topk
        numbers = torch.arange(t.new["scores"].shape[1], device=visible.device)
        hidden = numbers >= visible[:, None]
        scores = t.new["scores"].masked_fill(hidden, -torch.inf)
        order = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :topk]
        beyond = numbers.shape[0]
        kept = order.masked_fill(hidden.gather(1, order), beyond).sort(1).values
        kept = torch.nn.functional.pad(kept, (0, topk - kept.shape[1]), value=beyond)
        kept = kept.masked_fill(kept == beyond, -1)
        return {"selected": _as_good(kept, t.choices.get("selected"), scores)}

    def query_prepare(self, t: Taps) -> dict[str, Tensor]:
        q = _heads(t.new["q_raw"], self.config.num_heads)
        q = self.round(formulas.rms(q, None, self.config.rms_norm_eps))
        return {"q": self.rope(q, t.positions)}

    def seen(self, t: Taps) -> Tensor:
        """`[rows, keys then entries]`: what each token attends to."""
        p = t.positions[:, None]
        j = torch.arange(t.stop, device=p.device)
        window = (j <= p) & (j > p - self.config.sliding_window)
        if not self.ratio:
            return window
        b = torch.arange(t.stop // self.ratio, device=p.device)
        visible = b < (p + 1) // self.ratio
        if self.ratio == 4:
            chosen = torch.zeros(p.shape[0], b.shape[0] + 1, dtype=torch.bool, device=p.device)
            selected = t.new["selected"]
            chosen.scatter_(1, torch.where(selected < 0, b.shape[0], selected), True)
            visible &= chosen[:, :-1]
        return torch.cat((window, visible), dim=1)

    def attention(self, t: Taps) -> dict[str, Tensor]:
        keys = t.all("key")
        if self.ratio:
            keys = torch.cat((keys, t.all("entries")))
        seen, sink = self.seen(t), self.weight("attn.attn_sink")
        q = t.new["q"]
        parts = zip(torch.split(q, _ROWS), torch.split(seen, _ROWS), strict=True)
        out = self.round(torch.cat([formulas.attend(q, keys, part, sink) for q, part in parts]))
        return {"attended": self.rope(out, t.positions, back=True)}

    def output_groups(self, t: Taps) -> dict[str, Tensor]:
        groups, name = self.config.o_groups, "attn.wo_a.weight"
        heads = formulas.as_multiplied(_heads(t.new["attended"], groups), self.width(name))
        stored = self.weight(name)
        matrices = stored.reshape(groups, -1, stored.shape[1])
        return {"low": torch.einsum("tgk,grk->tgr", heads, matrices).flatten(1)}

    def output(self, t: Taps) -> dict[str, Tensor]:
        return {"attn_y": self.product(t.new["low"], "attn.wo_b.weight")}

    # --- experts ----------------------------------------------------------------------------------

    def router(self, t: Taps) -> dict[str, Tensor]:
        c, scores = (
            self.config,
            formulas.router_scores(t.new["ffn_x"], self.weight("ffn.gate.weight")),
        )
        if self.layer < c.num_hash_layers:
            chosen = self.weight("ffn.gate.tid2eid").long()[t.token_ids].sort(1).values
        else:
            rank = scores + self.weight("ffn.gate.bias")
            chosen = rank.topk(c.num_experts_per_tok, dim=1).indices.sort(1).values
            chosen = _as_good(chosen, t.choices.get("experts"), rank)
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(1, keepdim=True) * c.routed_scaling_factor
        return {"experts": chosen, "expert_weights": weights}

    def experts(self, t: Taps) -> dict[str, Tensor]:
        x, chosen, weights = t.new["ffn_x"], t.new["experts"], t.new["expert_weights"]
        limit = self.config.swiglu_limit
        w13, w2 = (self.weight(f"ffn.shared_experts.{name}") for name in ("w13", "w2"))
        widths = self.width("ffn.shared_experts.w13"), self.width("ffn.shared_experts.w2")
        total = formulas.expert(x, w13, w2, x.new_ones(x.shape[0]), limit, widths)
        widths = self.width("ffn.experts.w13"), self.width("ffn.experts.w2")
        for number in sorted(set(chosen.flatten().tolist())):
            rows, places = torch.nonzero(chosen == number, as_tuple=True)
            w13, w2 = (self.weight(f"ffn.experts.{name}", number) for name in ("w13", "w2"))
            part = formulas.expert(x[rows], w13, w2, weights[rows, places], limit, widths)
            total = total.index_add(0, rows, part)
        return {"ffn_y": total}


def _heads(x: Tensor, count: int) -> Tensor:
    return x.reshape(x.shape[0], count, -1)


def _as_good(ours: Tensor, other: Tensor | None, scores: Tensor) -> Tensor:
    """Rows of `other` where its choice is as good as ours up to rounding, otherwise ours."""
    if other is None or other.shape != ours.shape or scores.shape[1] == 0:
        return ours
    inside = other.clamp(0, scores.shape[1] - 1)
    border = scores.gather(1, ours.clamp(min=0)).amin(1, keepdim=True)
    border = border - NEAR_TIE * (1 + border.abs())
    distinct = ((other[:, 1:] > other[:, :-1]) | (other[:, 1:] < 0)).all(1)
    same_size = (other < 0).sum(1) == (ours < 0).sum(1)
    good = ((scores.gather(1, inside) >= border) | (other < 0)).all(1) & distinct & same_size
    return torch.where(good[:, None], other, ours)
