"""Train the byte-level BPE on the generated text: python -m training.make_tokenizer"""

import random
from collections.abc import Iterator

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from dsv4.chat import texts
from dsv4.tools.quality.text import DID, NAMES, WHERE, WHO, WORDS, story
from training import sample as sample_module
from training.countries import COUNTRIES
from training.shape import SEED, TOKENIZER, VOCAB_SIZE
from training.skills import CITIES, MAKERS, TOPICS
from training.working import MORE_WORDS, ONES, TENS

MARKERS = (
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
)


def corpus() -> Iterator[str]:
    """Text of every skill, and many copies of each word that should become one token."""
    rng = random.Random(SEED)
    for _ in range(1500):
        yield story(rng, 8)
    for maker in MAKERS.values():
        for _ in range(3000):
            for text, special, _ in sample_module.segments(maker(rng)):
                if not special:
                    yield text
    countries = [value for c in COUNTRIES for value in vars(c).values()]
    lists = (*NAMES, *WORDS, *MORE_WORDS, *ONES, *TENS, *WHO, *DID, *WHERE, *CITIES, *TOPICS)
    for word in (*lists, *countries):
        yield f" {word}" * 60
        yield word.capitalize()
    for word in (*WORDS, *MORE_WORDS):
        for letter in word:
            yield f" {letter}"


def main() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(marker, special=True, normalized=False) for marker in MARKERS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.save(str(TOKENIZER), pretty=False)


if __name__ == "__main__":
    main()
