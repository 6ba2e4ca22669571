"""The data: the real encoding, a clean split, right answers."""

import random
import re

import pytest

from dsv4.chat import V4_PREVIEW, Tokenizer, encode_prompt, texts
from dsv4.tools.quality.text import NAMES, WORDS, is_held_out
from training import working
from training.batches import Packer
from training.evaluate import held_out, retrieval_samples, updates_samples
from training.sample import ANSWER, AROUND, TOOLS, Encoder, Sample
from training.shape import CONFIG, SKILLS, TOKENIZER, VOCAB_SIZE
from training.skills import MAKERS, make, retrieval, updates


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(Tokenizer.from_file(TOKENIZER))


def _prompt_ids(sample: Sample, encoder: Encoder) -> list[int]:
    prompt = encode_prompt(
        list(sample.messages[:-1]),
        dialect=V4_PREVIEW,
        tools=[TOOLS[n] for n in sample.tools] or None,
        mode=sample.mode,
    )
    return prompt.ids(encoder.tokenizer)


@pytest.mark.parametrize("skill", MAKERS)
def test_prompts_are_the_real_encoding(skill: str, encoder: Encoder) -> None:
    rng = random.Random(7)
    for number in range(60):
        sample = make(skill, rng, held_out=number % 2 == 0)
        ids, weights = encoder.sample(sample)
        prompt = _prompt_ids(sample, encoder)
        assert ids[: len(prompt)] == prompt
        assert all(weight == ANSWER for weight in weights[len(prompt) :])
        assert ids[-1] == encoder.tokenizer.special.eos


def test_retrieval_is_the_real_encoding(encoder: Encoder) -> None:
    sample = retrieval(random.Random(3), 900, encoder.count)
    ids, _ = encoder.sample(sample)
    prompt = _prompt_ids(sample, encoder)
    assert ids[: len(prompt)] == prompt
    assert 850 < len(ids) < 950


def test_history_of_a_call_is_the_real_encoding(encoder: Encoder) -> None:
    rng = random.Random(5)
    samples = [make("tools", rng) for _ in range(40)]
    assert any(len(sample.messages) == 4 for sample in samples)
    for sample in samples:
        whole = encode_prompt(
            list(sample.messages),
            dialect=V4_PREVIEW,
            tools=[TOOLS[n] for n in sample.tools],
            mode=sample.mode,
            at_server=False,
        )
        assert encoder.sample(sample)[0] == whole.ids(encoder.tokenizer)


def test_the_split_is_clean() -> None:
    for skill in MAKERS:
        samples = held_out(skill, 50)
        assert len(samples) == 50
        assert all(is_held_out(sample.key) for sample in samples)
        rng = random.Random(1)
        assert not any(is_held_out(make(skill, rng).key) for _ in range(50))


def test_held_out_retrieval_states_a_pair_never_trained(encoder: Encoder) -> None:
    for sample in retrieval_samples(500, 10, encoder):
        text, answer = sample.messages[0]["content"], sample.messages[1]["content"]
        name, word = answer.removesuffix(".").split(" of ")[1].split(" is ")
        assert is_held_out(f"{name} {word}")
        assert text.count(f" of {name} is ") == 1
        assert answer in text
    trained = retrieval(random.Random(2), 900, encoder.count)
    for message in trained.messages[1::2]:
        name, word = message["content"].removesuffix(".").split(" of ")[1].split(" is ")
        assert not is_held_out(f"{name} {word}")


def test_updates_ask_for_the_newest_word(encoder: Encoder) -> None:
    rng = random.Random(6)
    for size in (450, 1000, 3000):
        sample = updates(rng, size, encoder.count)
        ids, _ = encoder.sample(sample)
        assert ids[: len(_prompt_ids(sample, encoder))] == _prompt_ids(sample, encoder)
        assert 0.8 * size < len(ids) < 1.2 * size
        text = sample.messages[0]["content"]
        for message in sample.messages[1::2]:
            subject, _, word = message["content"].removesuffix(".").partition(" is ")
            stated = re.findall(f"{subject} is ([a-z]+)", text)
            assert stated[-1] == word
            assert word not in stated[:-1]
            assert not any(is_held_out(f"{subject.split()[-1]} {each}") for each in stated)


def test_held_out_updates_exceed_the_selection_and_the_window(encoder: Encoder) -> None:
    for sample in updates_samples(2000, 10, encoder):
        text, answer = sample.messages[0]["content"], sample.messages[1]["content"]
        subject, _, word = answer.removesuffix(".").partition(" is ")
        assert is_held_out(f"{subject.split()[-1]} {word}")
        assert text.count(f"{subject} is ") > 1.8 * CONFIG.index_topk
        assert text.count(answer) == 1
        assert encoder.count(text[text.index(answer) :]) > CONFIG.sliding_window + 16
        assert 1850 < encoder.count(text) < 2050


def test_words_change_in_the_last_leg_only() -> None:
    number = SKILLS.index("updates")
    for length in (1024, 2048):
        for progress, wanted in ((0.6, False), (0.7, True)):
            packer = Packer(4)
            packer.progress = progress
            assert (number in packer.batch(length, 20).skills) == wanted


def test_working_leads_to_the_right_result() -> None:
    rng = random.Random(4)
    for _ in range(300):
        a, b = sorted((rng.randrange(10000), rng.randrange(10000)), reverse=True)
        for work, value, expected in (
            (*working.add(a, b), a + b),
            (*working.subtract(a, b), a - b),
            (*working.multiply(a % 1000, b % 10), a % 1000 * (b % 10)),
        ):
            assert value == expected
            assert work.endswith(f"result: {value}")
            for line in work.splitlines()[:-1]:
                for step in line.partition(": ")[2].removesuffix(" borrow").split(", "):
                    left, _, right = step.partition("=")
                    assert eval(left) == int(right)


def test_numbers_in_words() -> None:
    assert working.number_words(472) == "four hundred seventy-two"
    assert working.number_words(9010) == "nine thousand ten"
    assert working.number_words(13) == "thirteen"


def test_words_to_find_are_single_tokens(encoder: Encoder) -> None:
    assert encoder.tokenizer.vocab_size == VOCAB_SIZE
    assert encoder.tokenizer.special.bos == 0
    assert encoder.tokenizer.special.eos == 1
    assert encoder.tokenizer.marker_id(texts.DSML)
    assert all(len(encoder.tokenizer.encode(f" {word}")) == 1 for word in (*NAMES, *WORDS))


@pytest.mark.parametrize("length", [512, 1024, 2048])
def test_rows_are_full(length: int) -> None:
    batch = Packer(3).batch(length, 4)
    assert batch.ids.shape == batch.weights.shape == batch.skills.shape == (4, length)
    assert (batch.ids == 2).mean() < 0.06
    assert (batch.weights >= AROUND).mean() > 0.05
    assert batch.skills.max() < len(SKILLS)
