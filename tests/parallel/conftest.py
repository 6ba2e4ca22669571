from pathlib import Path

import pytest

from dsv4.testing import random_weights, small_config, write_checkpoint
from tests.models import BYTE_TOKENIZER


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight groups, so that eight ranks can share a layer."""
    config = small_config(
        vocab_size=271, num_layers=3, num_hash_layers=1, compress_ratios=(0, 4, 128), num_heads=8,
        o_groups=8, o_lora_rank=16, num_experts=8, hc_sinkhorn_iters=3, bos_id=256, eos_ids=(257,),
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, config, random_weights(config, 1))
    (path / "tokenizer.json").write_bytes(BYTE_TOKENIZER.read_bytes())
    return path
