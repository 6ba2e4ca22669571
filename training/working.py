"""Arithmetic worked column by column, and simple instructions about words and numbers."""

import json
import random

from dsv4.tools.quality.text import NAMES, WORDS, is_held_out, listed, sentence
from training.countries import COUNTRIES
from training.sample import Sample, assistant, user

PLACES = ("ones", "tens", "hundreds", "thousands", "next")
MORE_WORDS = listed(
    """able acid army aunt baby back ball bank barn bath bean bear bed bike bird boat body book
    boot bowl box boy bread brick brown bus cake calm card cart cat chair city clay clean
    cloud coat coin cold cook cool corn cow cup dark day deep deer desk dog door down dream
    dress dry duck dust ear earth east egg face farm fast field fire fish flag flat floor
    flour fog food foot fork frog fruit game garden gate girl glass goat gold grass green
    hair hand happy hat head heart hill home horse hot house ice iron jar joke juice jump
    key king knee knife lake lamp land leaf leg light lion lip lock long loud luck map mask
    milk moon mouse mouth music nail neck nest night nose nut ocean oil open oven owl page
    park path pear pen pet pig pink pipe plane plant plate pond pool queen quick rain red
    rice ring road rock roof room rope rose round salt sand school sea seed sheep ship shirt
    shoe shop silk sky sleep slow snow soap sock soft soup south star stick storm street
    sugar sun table tail tall tea tent toast tooth town train tree truck wall warm watch
    water wave west wet wheel white wind wing wolf wood wool world yard young"""
)
LETTER_WORDS = tuple(word for word in (*WORDS, *MORE_WORDS) if 3 <= len(word) <= 7)
ONES = listed(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
TENS = listed("- - twenty thirty forty fifty sixty seventy eighty ninety")


def add(a: int, b: int) -> tuple[str, int]:
    lines, carry, digits = [], 0, max(len(str(a)), len(str(b)))
    for place in range(digits):
        x, y = a // 10**place % 10, b // 10**place % 10
        plus = f"+{carry}" if carry else ""
        total = x + y + carry
        lines.append(f"{PLACES[place]}: {x}+{y}{plus}={total}")
        carry = total // 10
    return _finish(lines, a + b)


def subtract(a: int, b: int) -> tuple[str, int]:
    """`a` is at least `b`."""
    lines, borrow = [], False
    for place in range(len(str(a))):
        x, y = a // 10**place % 10, b // 10**place % 10
        text, lends = f"{PLACES[place]}: ", False
        if borrow:
            lends = x == 0
            top = 10 if lends else x
            text += f"{top}-1={top - 1}, "
            x = top - 1
        if x < y:
            x, lends = x + 10, True
        lines.append(f"{text}{x}-{y}={x - y}{' borrow' if lends else ''}")
        borrow = lends
    return _finish(lines, a - b)


def multiply(a: int, b: int) -> tuple[str, int]:
    """`b` has one digit."""
    lines, carry = [], 0
    for place in range(len(str(a))):
        x = a // 10**place % 10
        plus = f"+{carry}" if carry else ""
        total = x * b + carry
        lines.append(f"{PLACES[place]}: {x}*{b}{plus}={total}")
        carry = total // 10
    return _finish(lines, a * b)


def _finish(lines: list[str], value: int) -> tuple[str, int]:
    return "\n".join([*lines, f"result: {value}"]), value


def _number(rng: random.Random) -> int:
    digits = rng.choices((1, 2, 3, 4), (10, 38, 40, 12))[0]
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


_SUMS = {
    "+": ("What is {a} + {b}?", "Compute {a} + {b}.", "{a} + {b} = ?", "How much is {a} plus {b}?"),
    "-": (
        "What is {a} - {b}?",
        "Compute {a} - {b}.",
        "{a} - {b} = ?",
        "How much is {a} minus {b}?",
    ),
    "*": (
        "What is {a} * {b}?",
        "Compute {a} * {b}.",
        "{a} * {b} = ?",
        "How much is {a} times {b}?",
    ),
}


def problem(rng: random.Random) -> tuple[str, int, int]:
    operation = rng.choices("+-*", (45, 35, 20))[0]
    a, b = _number(rng), _number(rng)
    if operation == "-" and a < b:
        a, b = b, a
    if operation == "*":
        a, b = rng.choice((rng.randrange(2, 13), rng.randrange(10, 1000))), rng.randrange(2, 10)
    return operation, a, b


def arithmetic(rng: random.Random, thinking_share: float = 0.75) -> Sample:
    operation, a, b = problem(rng)
    work, value = {"+": add, "-": subtract, "*": multiply}[operation](a, b)
    question = rng.choice(_SUMS[operation]).format(a=a, b=b)
    final = f"{a} {operation} {b} = {value}."
    key = f"{a}{operation}{b}"
    if rng.random() < thinking_share:
        messages = (user(question), assistant(final, work))
        return Sample("arithmetic", messages, "thinking", key=key)
    return Sample("arithmetic", (user(question), assistant(f"{work}\n{final}")), key=key)


def number_words(value: int) -> str:
    if value < 20:
        return ONES[value]
    if value < 100:
        rest = value % 10
        return TENS[value // 10] + (f"-{ONES[rest]}" if rest else "")
    size, name = (100, "hundred") if value < 1000 else (1000, "thousand")
    rest = value % size
    text = f"{number_words(value // size)} {name}"
    return f"{text} {number_words(rest)}" if rest else text


def _made_up(rng: random.Random) -> str:
    syllables = rng.randint(1, 2)
    text = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(syllables))
    return text + rng.choice("bdgklmnprst")


def _letters(rng: random.Random) -> tuple[str, str, str, str]:
    """Task, question, working, answer of a task about the letters of a word."""
    task = rng.choice(("reverse", "sort", "letters"))
    word = _made_up(rng) if rng.random() < 0.15 else rng.choice(LETTER_WORDS)
    spelled = " ".join(word)
    if task == "reverse":
        question = rng.choice(
            ("Reverse the word {w}.", "Spell {w} backwards.", "Write the word {w} backwards.")
        )
        work, final = spelled, f"Reversed: {' '.join(word[::-1])}"
    elif task == "sort":
        question = rng.choice(
            ("Sort the letters of {w}.", "Put the letters of {w} in order.", "Sort the word {w}.")
        )
        work, final = spelled, f"Sorted: {' '.join(sorted(word))}"
    else:
        question = rng.choice(
            (
                "How many letters has the word {w}?",
                "Count the letters of {w}.",
                "How long is the word {w}?",
            )
        )
        counted = " ".join(f"{n} {letter}" for n, letter in enumerate(word, 1))
        work, final = counted, f"{len(word)} letters"
    return f"{task} {word}", question.format(w=word), work, final


def _words(rng: random.Random) -> tuple[str, str, str, str]:
    words = sentence(rng).rstrip(".").replace(",", "").lower().split()[: rng.randint(3, 9)]
    text = " ".join(words)
    question = rng.choice(("Count the words: {t}", "How many words are in this: {t}"))
    counted = " ".join(f"{n} {word}" for n, word in enumerate(words, 1))
    return text, question.format(t=text), counted, f"{len(words)} words"


def _in_words(rng: random.Random) -> tuple[str, str, str, str]:
    value = rng.randrange(1, 1000) if rng.random() < 0.8 else rng.randrange(1000, 10000)
    question = rng.choice(("Write {v} in words.", "Spell the number {v}.", "{v} in words, please."))
    return f"words {value}", question.format(v=value), "", number_words(value)


def _as_json(rng: random.Random) -> tuple[str, str, str, str]:
    fields: dict[str, str | int] = {
        "name": rng.choice(NAMES),
        "age": rng.randrange(1, 100),
        "city": rng.choice(COUNTRIES).capital,
        "country": rng.choice(COUNTRIES).name,
        "animal": rng.choice(("cat", "dog", "horse", "fox", "lion", "tiger", "eagle", "rabbit")),
        "color": rng.choice(("red", "green", "blue", "yellow", "black", "white", "brown")),
    }
    keys = rng.sample(list(fields), rng.randint(2, 3))
    chosen = {key: fields[key] for key in keys}
    listed = ", ".join(f"{key} {value}" for key, value in chosen.items())
    question = rng.choice(("Write as JSON: {t}", "Format as JSON: {t}", "Make a JSON object: {t}"))
    return f"json {listed}", question.format(t=listed), "", json.dumps(chosen)


def instruction(rng: random.Random) -> Sample:
    make = rng.choices((_letters, _words, _in_words, _as_json), (55, 12, 18, 15))[0]
    key, question, work, final = make(rng)
    if rng.random() < 0.35:
        messages = (user(question), assistant(final, work))
        return Sample("instructions", messages, "thinking", key=key)
    text = f"{work}\n{final}" if work else final
    return Sample("instructions", (user(question), assistant(text)), key=key)


def draw(make: object, rng: random.Random, held_out: bool) -> Sample:
    """A sample whose key is on the wanted side of the split."""
    while True:
        sample: Sample = make(rng)  # type: ignore[operator]
        if is_held_out(sample.key) == held_out:
            return sample
