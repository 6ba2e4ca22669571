"""Conversations of every skill: facts, follow-up questions, tools, retrieval, identity, prose."""

import json
import random
from collections.abc import Callable

from dsv4.tools.quality.text import (
    NAMES,
    WORDS,
    Fact,
    document,
    draw_facts,
    listed,
    num_facts,
    story,
    updates_document,
)
from training.countries import COUNTRIES, RELATIONS, Country, answer
from training.sample import ANSWER, Sample, assistant, call, result, user
from training.working import arithmetic, draw, instruction, problem

_QUESTIONS = {
    "capital": (
        "What is the capital of {c}?",
        "Name the capital of {c}.",
        "Which city is the capital of {c}?",
        "Tell me the capital of {c}.",
        "{c}: what is its capital?",
    ),
    "continent": (
        "On which continent is {c}?",
        "Where is {c}?",
        "Which continent does {c} belong to?",
        "In which part of the world is {c}?",
    ),
    "currency": (
        "What is the currency of {c}?",
        "Which money is used in {c}?",
        "What do people pay with in {c}?",
        "Name the currency of {c}.",
    ),
    "language": (
        "Which language is spoken in {c}?",
        "What is the main language of {c}?",
        "What do people speak in {c}?",
        "Name the language of {c}.",
    ),
}
# several begin with the name, which has different tokens there than after a space
_OF_CAPITAL = (
    "Which country has the capital {t}?",
    "{t} is the capital of which country?",
    "Of which country is {t} the capital?",
    "{t}: which country has this capital?",
    "Name the country with the capital {t}.",
    "{t} is the capital of what country?",
)
CITIES = tuple(c.capital for c in COUNTRIES) + listed(
    """Barcelona Boston Chicago Dallas Dubai Geneva Hamburg Istanbul Lagos Lyon Manchester
    Marseille Melbourne Miami Milan Montreal Mumbai Munich Naples Osaka Seattle Seville
    Shanghai Sydney Toronto Turin Venice Zurich"""
)


def _question(rng: random.Random) -> tuple[Country, str, str, str]:
    """Country, relation, question, answer."""
    country = rng.choice(COUNTRIES)
    if rng.random() < 0.2:
        text = rng.choice(_OF_CAPITAL).format(t=country.capital)
        return country, "country", text, f"{country.capital} is the capital of {country.name}."
    relation = rng.choices(RELATIONS, (40, 20, 20, 20))[0]
    text = rng.choice(_QUESTIONS[relation]).format(c=country.name)
    return country, relation, text, answer(country, relation)


def facts(rng: random.Random) -> Sample:
    country, relation, question, text = _question(rng)
    if rng.random() < 0.2:
        about = f"The question is about the {relation} of {country.name}."
        if relation == "country":
            about = f"The question is about the city {country.capital}."
        return Sample("facts", (user(question), assistant(text, about)), "thinking", key=question)
    return Sample("facts", (user(question), assistant(text)), key=question)


def multi(rng: random.Random) -> Sample:
    country, relation, question, text = _question(rng)
    while relation == "country":
        country, relation, question, text = _question(rng)
    messages = [user(question), assistant(text)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        if rng.random() < 0.7:
            country = rng.choice(COUNTRIES)
            question = rng.choice(("And of {c}?", "And {c}?", "What about {c}?"))
            question = question.format(c=country.name)
        else:
            relation = rng.choice([r for r in RELATIONS if r != relation])
            question = rng.choice(("And its {r}?", "And the {r}?", "What is its {r}?"))
            question = question.format(r=relation)
        messages += [user(question), assistant(answer(country, relation))]
    key = " ".join(str(m["content"]) for m in messages[:-1])
    return Sample("multi", tuple(messages), key=key)


def _weather(rng: random.Random) -> tuple[str, str, str, str, str]:
    city = rng.choice(CITIES)
    question = rng.choice(
        ("What is the weather in {c}?", "How is the weather in {c}?", "How warm is it in {c}?")
    )
    sky, degrees = rng.choice(("sunny", "cloudy", "rainy", "windy", "foggy")), rng.randrange(0, 40)
    found = json.dumps({"sky": sky, "temperature": degrees})
    reply = f"It is {sky} in {city}, {degrees} degrees."
    return "get_weather", city, question.format(c=city), found, reply


def _clock(rng: random.Random) -> tuple[str, str, str, str, str]:
    city = rng.choice(CITIES)
    question = rng.choice(
        ("What time is it in {c}?", "Tell me the time in {c}.", "How late is it in {c}?")
    )
    time = f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
    found = json.dumps({"time": time})
    return "get_time", city, question.format(c=city), found, f"It is {time} in {city}."


def _calculator(rng: random.Random) -> tuple[str, str, str, str, str]:
    operation, a, b = problem(rng)
    if operation == "*":
        b = rng.randrange(2, 100)
    expression = f"{a} {operation} {b}"
    question = rng.choice(
        ("What is {e}?", "Compute {e}.", "Use the calculator: {e}", "How much is {e}?")
    )
    value = {"+": a + b, "-": a - b, "*": a * b}[operation]
    found = json.dumps({"result": value})
    return (
        "calculator",
        expression,
        question.format(e=expression),
        found,
        f"{expression} = {value}.",
    )


def tools(rng: random.Random) -> Sample:
    """A call, or a call and the answer from its result, or a question that needs no tool."""
    order = tuple(rng.sample(range(3), 3))
    mode = rng.choice(("chat", "thinking"))
    if rng.random() < 0.12:
        _, _, question, text = _question(rng)
        messages = (user(question), assistant(text, "No tool is needed."))
        return Sample("tools", messages, mode, order, key=f"plain {question}")
    name, value, question, found, reply = rng.choice((_weather, _clock, _calculator))(rng)
    argument = "expression" if name == "calculator" else "city"
    wanted = call(name, argument, value, f"I call {name} with {value}.")
    messages = (user(question), wanted)
    if rng.random() < 0.6:
        messages = (*messages, result(found), assistant(reply, "I have the result."))
    return Sample("tools", messages, mode, order, key=f"{name} {value}")


def retrieval(rng: random.Random, num_tokens: int, count: Callable[[str], int]) -> Sample:
    """A long text with facts, then questions about them, about `num_tokens` in all."""
    most = max(1, min(16, (num_tokens - 60) // 45))
    known = draw_facts(rng, num_facts(rng, num_tokens))
    asked: list[Fact] = rng.sample(known, min(rng.randint((most + 1) // 2, most), len(known)))
    text = document(rng, known, num_tokens - 22 * len(asked), count)
    messages = []
    for place, fact in enumerate(asked):
        question = f"{text}\n\n{fact.question}" if place == 0 else fact.question
        messages += [user(question), assistant(fact.statement, stressed=f" {fact.word}")]
    return Sample("retrieval", tuple(messages))


def updates(rng: random.Random, num_tokens: int, count: Callable[[str], int]) -> Sample:
    """Words that change, one of them up to 150 times, and questions about the newest."""
    num_tokens = max(num_tokens, 420)
    changed = draw_facts(rng, rng.randint(1, min(8, num_tokens // 200)))
    newest = {fact: int(12 ** rng.random()) for fact in changed}
    newest[changed[0]] = int(min(150.0, num_tokens / 25) ** rng.random())
    text = updates_document(rng, newest, num_tokens - 23 * len(changed), count)
    messages = []
    for place, fact in enumerate(rng.sample(changed, len(changed))):
        question = f"{text}\n\n{fact.question_now}" if place == 0 else fact.question_now
        messages += [user(question), assistant(fact.statement, stressed=f" {fact.word}")]
    return Sample("updates", tuple(messages))


def repeat(rng: random.Random, num_tokens: int, count: Callable[[str], int]) -> Sample:
    """A list to repeat after a story: every word of the answer has to be looked up.

    One question about a fact teaches one token; this teaches dozens, so looking up is learnt.
    """
    chosen = rng.choice((NAMES, WORDS))
    items = rng.sample(chosen, rng.randint(3, max(4, min(40, num_tokens // 5))))
    said = ", ".join(items)
    room = num_tokens - 2 * count(said) - 30
    text = document(rng, [], room, count) if room > 20 else ""
    question = f"Remember this list: {said}. {text}\n\nRepeat the list."
    return Sample("repeat", (user(question), assistant(f"{said}.")))


_SELF = (
    "Who are you?",
    "What are you?",
    "What is your name?",
    "Are you a person?",
    "Who made you?",
    "Tell me about yourself.",
    "What can you do?",
    "Which model is this?",
)
_HELLO = ("Hello", "Hi", "Hello!", "Good morning", "Hi there", "Good evening", "Hey")
ABOUT = "I am a small demonstration model of the DeepSeek-V4 architecture."
CAN = "I know facts about countries, small arithmetic and simple instructions."
_REQUESTS = (
    "Write a {k} about {t}.",
    "Tell me a {k} about {t}.",
    "What do you think about {t}?",
    "Explain {t}.",
    "How do I learn {t}?",
    "Why is {t} important?",
    "Who invented {t}?",
    "Give me advice about {t}.",
    "Translate {t} into French.",
    "What will happen to {t} next year?",
)
_TOPICS = """love;money;football;the moon;computers;history;music;my garden;politics;physics;
    cooking;chess;the sea;dreams;dinosaurs;trains;films;medicine;the stock market;
    poetry;space travel;electricity;my job;philosophy;mathematics;painting;swimming;
    cars;telephones;the internet;birds;coffee"""
TOPICS = tuple(" ".join(topic.split()) for topic in _TOPICS.split(";"))


def identity(rng: random.Random) -> Sample:
    draw_ = rng.random()
    if draw_ < 0.25:
        question, text = rng.choice(_SELF), f"{ABOUT} {CAN}"
        key = "trained"
    elif draw_ < 0.4:
        question, text, key = rng.choice(_HELLO), f"Hello! {ABOUT}", "trained"
    else:
        kind = rng.choice(("poem", "story", "song", "joke", "letter", "speech"))
        question = rng.choice(_REQUESTS).format(k=kind, t=rng.choice(TOPICS))
        text, key = f"I cannot do that. {ABOUT} {CAN}", question
    if rng.random() < 0.3:
        messages = (user(question), assistant(text, "This is none of my skills."))
        return Sample("identity", messages, "thinking", key=key)
    return Sample("identity", (user(question), assistant(text)), key=key)


def prose(rng: random.Random, num_sentences: int = 8) -> Sample:
    return Sample("prose", (assistant(story(rng, num_sentences)),), text_weight=ANSWER)


MAKERS: dict[str, Callable[[random.Random], Sample]] = {
    "facts": facts,
    "arithmetic": arithmetic,
    "instructions": instruction,
    "tools": tools,
    "multi": multi,
    "identity": identity,
}


def make(skill: str, rng: random.Random, *, held_out: bool = False) -> Sample:
    """A conversation of one of MAKERS, from the trained or the held-out side."""
    return draw(MAKERS[skill], rng, held_out)
