import gc
import os
import resource
from collections.abc import Iterator
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


@pytest.fixture
def many_open() -> Iterator[None]:
    """As in a server with many clients: new descriptors are above those `select.select` takes."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 2048:
        pytest.skip("this system allows fewer descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2048, limits[0]), limits[1]))
    gc.collect()  # what is closed later would make room below
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] < 1100:
        taken.append(os.dup(taken[0]))
    yield
    for descriptor in taken:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
