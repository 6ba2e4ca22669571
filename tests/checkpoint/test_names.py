"""Names: every family is located and spelled back; components are never mistaken."""

import pytest

from dsv4.checkpoint.names import Place, families_in, locate, parameters, spell
from dsv4.config import ModelConfig
from tests.checkpoint import tiny, writers


def places() -> list[Place]:
    """Every tensor of the tiny model that is not a draft's, as an official place."""
    found = []
    for name in tiny.random_model(draft=False):
        place = locate(name, "official")
        assert place is not None
        found.append(place)
    return found


@pytest.mark.parametrize("family", ["official", "transformers", "hybrid"])
def test_spelling_and_locating_are_inverse(family) -> None:
    for place in places():
        assert locate(spell(place, family), family) == place


def test_transformers_names_are_those_of_the_spec() -> None:
    for name in tiny.random_model(draft=False):
        place = locate(name, "official")
        assert place is not None
        assert spell(place, "transformers") == writers.transformers_name(name)


@pytest.mark.parametrize(
    ("name", "module", "suffix", "expert"),
    [
        ("model.layers.3.self_attn.compressor.indexer.weights_proj.weight_scale_2",
         "layers.3.attn.indexer.weights_proj", "weight_scale_2", None),
        ("model.layers.3.self_attn.compressor.indexer.kv_proj.weight",
         "layers.3.attn.indexer.compressor.wkv", "weight", None),
        ("model.layers.3.self_attn.compressor.kv_proj.weight",
         "layers.3.attn.compressor.wkv", "weight", None),
        ("model.layers.3.self_attn.kv_proj.weight", "layers.3.attn.wkv", "weight", None),
        ("model.layers.12.mlp.experts.255.up_proj.input_scale",
         "layers.12.ffn.experts.w3", "input_scale", 255),
        ("model.layers.0.mlp.experts.gate_up_proj", "layers.0.ffn.experts.w13", "weight", None),
        ("model.layers.0.mlp.experts.down_proj_scale_inv",
         "layers.0.ffn.experts.w2", "weight_scale_inv", None),
        ("lm_head.weight", "head", "weight", None),
        ("model.hc_head.hc_fn", "hc_head_fn", "", None),
    ],
)  # fmt: skip
def test_transformers_names(name, module, suffix, expert) -> None:
    assert locate(name, "transformers") == Place(module, suffix, expert)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.wkv.weight",
        "model.layers.0.self_attn.kv_proj.weight_scale_3",
        "model.layers.0.mlp.experts.gate_proj.weight",
        "model.layers.x.self_attn.kv_proj.weight",
        "layers.0.self_attn.kv_proj.weight",
        "model.rotary.inv_freq",
        "",
    ],
)
def test_names_that_belong_nowhere(name: str) -> None:
    assert locate(name, "transformers") is None


def test_families() -> None:
    for layout, family in (
        ("official", "official"),
        ("modelopt-full", "transformers"),
        ("plain-hybrid", "hybrid"),
    ):
        assert families_in(list(writers.made(layout).disk)) == [family]
    assert families_in(["a", "b"]) == []


def test_parameters_are_the_canonical_model() -> None:
    wanted = writers.canonical(tiny.random_model())
    found = parameters(ModelConfig.from_dict(tiny.CONFIG))
    assert {name: p.shape for name, p in found.items()} == {n: w.shape for n, w in wanted.items()}
    kinds = {name: p.kind for name, p in found.items()}
    assert kinds["layers.0.ffn.gate.tid2eid"] == "table"
    assert kinds["layers.1.ffn.gate.weight"] == kinds["embed.weight"] == "plain"
    assert kinds["layers.1.attn.compressor.ape"] == "fp32"
