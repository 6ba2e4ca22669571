"""`bench decode --timeline` from made-up kernels: no GPU draws here."""

from collections import Counter
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from dsv4.cli import app
from dsv4.tools.speed.profile import (
    KernelSpan,
    LayerTrace,
    families_of,
    picture,
    split_layers,
    weight_bytes,
)

NAMES = (
    "few_update_kernel", "_mix_kernel", "linear_stream", "_state_kernel", "linear_stream",
    "_split_kernel", "_merge_kernel", "linear_stream", "linear_stream", "few_update_kernel",
    "_mix_kernel", "_gate_kernel", "up_stream", "down_stream",
)  # fmt: skip
SIZES = {
    "attn.wq_a.weight": 3_000, "attn.wkv.weight": 1_000, "attn.wq_b.weight": 20_000,
    "attn.indexer.wq_b.weight": 5_000, "attn.wo_a.weight": 18_000, "attn.wo_b.weight": 17_000,
    "attn.q_norm.weight": 10, "attn.attn_sink": 10, "hc_attn_fn": 400, "hc_ffn_fn": 400,
    "ffn.gate.weight": 2_000, "ffn.gate.bias": 8, "ffn.experts.w13": 640_000,
    "ffn.experts.w2": 320_000, "ffn.shared_experts.w13": 10_000, "ffn.shared_experts.w2": 5_000,
}  # fmt: skip


def layer(begin: float) -> list[KernelSpan]:
    """Ten microseconds each, of which the last two overlap with the next."""
    return [
        KernelSpan(name, begin + 8 * place, begin + 8 * place + 10)
        for place, name in enumerate(NAMES)
    ]


def test_layers_end_with_the_down_projection() -> None:
    spans = [
        KernelSpan("_embed_kernel", 0, 2),
        *layer(3),
        *layer(120),
        KernelSpan("_mix_kernel", 300, 301),
    ]
    layers = split_layers(list(reversed(spans)))
    assert [len(found) for found in layers] == [15, 14]
    assert layers[1][0].begin_us == 120


def test_every_byte_of_a_layer_is_read_once() -> None:
    sizes = {f"layers.7.{name}": size for name, size in SIZES.items()}
    found = weight_bytes(layer(0), {**sizes, "layers.8.attn.wq_b.weight": 10**9}, 7, 0.5)
    products = [found[place] for place, name in enumerate(NAMES) if name == "linear_stream"]
    assert products == [4_000, 25_000, 18_000, 17_000]
    assert found[NAMES.index("_gate_kernel")] == 12_000  # with the shared expert's
    assert found[NAMES.index("up_stream")] == 320_000
    assert found[NAMES.index("down_stream")] == 165_000
    assert found[0] == 400
    three = [span for span in layer(0) if span.begin_us != 16]
    spread = weight_bytes(three, sizes, 7, 0.5)
    assert sum(spread) == pytest.approx(sum(found))


A8 = (
    "few_update_kernel", "_mix_kernel", "_a8_rows_kernel", "_a8_kernel", "_prompt_kernel",
    "_state_kernel", "_a8_rows_kernel", "_a8_prompt_kernel", "_merge_kernel", "few_update_kernel",
    "_linear_kernel", "_top_k_kernel", "_a8_rows_kernel", "_a8_kernel", "an op of torch",
    "_group_kernel", "_a8_prompt_experts_kernel", "_a8_rows_kernel", "_a8_prompt_experts_kernel",
    "_combine_kernel",
)  # fmt: skip


def test_products_after_a_router_are_those_of_experts() -> None:
    """Kernels of a8 multiply for attention, for the shared expert and for routed ones; many rows
    also take a product of attention's to the router."""
    names = ["_embed_kernel", *A8, *A8, "few_update_kernel", "_linear_kernel"]
    found = families_of(names)
    assert found[1:21] == found[21:41]
    assert Counter(found[1:21]) == {
        "mhc": 3, "linear": 5, "state": 1, "attention": 1, "router": 2, "experts": 7, "other": 1
    }  # fmt: skip
    assert found[-2:] == ["mhc", "linear"]  # the head
    spans = [KernelSpan(name, 10 * place, 10 * place + 8) for place, name in enumerate(names)]
    first, last = split_layers(spans)
    assert (len(first), len(last), last[-1].name) == (21, 20, "_combine_kernel")
    sizes = {f"layers.7.{name}": size for name, size in SIZES.items()}
    read = dict(zip(range(20), weight_bytes(last, sizes, 7, 0.5), strict=True))
    assert sum(read.values()) == pytest.approx(sum(weight_bytes(layer(0), sizes, 7, 0.5)))
    assert read[10] == 2_000
    assert read[16] == pytest.approx(495_000 / 5)


def test_the_picture_says_how_long_memory_idles() -> None:
    spans = [KernelSpan("linear_stream", 100, 110), KernelSpan("_state_kernel", 110, 120)]
    trace = LayerTrace("a <layer>", spans, [40e6, 0.0], 4000.0)
    assert trace.rates(4) == pytest.approx([4000, 4000, 0, 0])
    assert trace.summary() == (
        "20.0 us, 2 kernels, 40.00 MB of weights: floor 10.0 us, x2.00; memory idle for 10.0 us"
    )
    root = ElementTree.fromstring(picture([trace, trace]))
    texts = [element.text for element in root.iter() if element.text]
    assert texts.count("a <layer>") == 2
    assert "linear_stream 10.0 us" in texts


def test_a_cpu_has_no_kernels_to_draw() -> None:
    words = ["bench", "decode", "--shape", "trial", "--device", "cpu", "--timeline", "x.svg"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code != 0
    assert "--timeline draws a GPU's kernels" in str(result.exception) + result.output
