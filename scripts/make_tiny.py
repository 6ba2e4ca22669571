"""Write the embedded model `tiny`: random weights until a trained one takes its place.

    python scripts/make_tiny.py

The same files come out every time: weights are a function of the seed, the tokenizer is the 256
bytes and V4's markers.
"""

from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from dsv4.chat import texts
from dsv4.testing import as_dtype, random_weights, small_config, write_checkpoint

SEED = 20261116
FOLDER = Path(__file__).parent.parent / "dsv4" / "models" / "tiny"


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token; the markers follow under their real spellings."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    markers = [
        texts.BOS,
        texts.EOS,
        texts.PAD,
        texts.USER,
        texts.ASSISTANT,
        texts.THINK_OPEN,
        texts.THINK_CLOSE,
        texts.DSML,
        texts.LATEST_REMINDER,
        *texts.TASKS.values(),
    ]
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in markers])
    return tokenizer


def main() -> None:
    tokenizer = byte_tokenizer()
    config = replace(
        small_config(),
        vocab_size=tokenizer.get_vocab_size(),
        sliding_window=128,
        bos_id=tokenizer.token_to_id(texts.BOS),
        eos_id=tokenizer.token_to_id(texts.EOS),
        swiglu_limit=10.0,
        index_topk=16,
        max_positions=16384,
        yarn_original_len=1024,
    )
    weights = as_dtype(random_weights(config, SEED), torch.bfloat16)
    write_checkpoint(FOLDER, config, weights)
    tokenizer.save(str(FOLDER / "tokenizer.json"))


if __name__ == "__main__":
    main()
