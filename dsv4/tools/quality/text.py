"""Seeded texts: short stories, and long documents with facts to retrieve.

The embedded model was trained on such texts; the evaluation generates new ones. Everything is a
function of a `random.Random`, so long prompts need not be stored.
"""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace


def listed(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = listed(
    """Ada Agnes Alba Albert Alma Amir Andrea Anita Anton Arno Astrid August Aurora Basil
    Beatrice Bela Benno Bianca Boris Bruno Camilla Carla Carlos Casper Cecil Celia Clara
    Claudia Conrad Cora Cyril Dagmar Dalia Damian Daria Dora Edgar Edith Edwin Elena Elias
    Elisa Elmar Elsa Emil Emma Erik Erwin Esther Eugene Eva Fabian Felix Fiona Flora Frank
    Frida Gerda Gisela Greta Gustav Hanna Harold Hector Hedwig Helga Henry Hilda Hugo Ida
    Igor Ilse Ingrid Irene Iris Isaac Ivan Ivo Jana Jasper Joel Jonas Josef Julia Karin Karl
    Kira Klaus Lars Laura Lea Leo Leon Lida Lina Linus Lisa Livia Lola Lorenz Louis Lucas
    Lucia Luisa Lydia Magda Manuel Marco Maria Marta Martin Maya Mila Milan Miriam Monica
    Nadia Nestor Nico Nina Nora Norman Olga Oliver Omar Oscar Otto Pablo Paula Pedro Petra
    Philip Quentin Rafael Ramona Regina Rita Robert Roland Rosa Rudolf Ruth Samuel Sara
    Silvia Simon Sofia Stefan Stella Susan Sven Tamara Tanja Theo Thomas Tina Tobias Ulrich
    Ursula Valeria Vera Victor Viola Walter Wanda Werner Xenia Yvonne Zeno Zoe"""
)
WORDS = listed(
    """anchor apple arrow badge bamboo banana barrel basket beacon bell berry blanket bottle
    bridge bronze brush bucket button cabin cactus camel candle canyon carpet castle cedar
    chain chalk cherry circle clover cobalt coffee comet copper coral cotton crane crystal
    curtain daisy desert diamond dolphin donkey dragon drum eagle ember engine falcon
    feather fence fiddle flute forest fossil fox garlic garnet ginger glacier glove granite
    guitar hammer harbor hazel helmet heron honey hornet island ivory jacket jasmine jungle
    kettle kite ladder lantern laurel lemon lentil lily lizard magnet mango maple marble
    meadow melon meteor mint mirror monkey morning moss needle nickel oasis olive onion opal
    orange orchid otter oyster paddle palace panther paper parrot pebble pencil pepper piano
    pigeon pillow planet plum pocket poppy potato prism pumpkin puzzle quartz rabbit raven
    ribbon river rocket ruby saddle saffron salmon sandal satin saturn shadow shell shovel
    silver spider spiral spoon spring squirrel stable statue stone summer sunset tablet
    temple thistle thunder tiger timber tomato topaz trumpet tulip tunnel turtle valley
    vanilla velvet violet walnut whistle willow window winter wizard yellow zebra zipper"""
)
KINDS = ("password", "code word", "secret word")
_APART = 160  # tokens after the last change of a word, more than a window

_WHO = """the baker;the old sailor;a young doctor;the teacher;the gardener;a tired farmer;
    the painter;two children;the postman;a quiet woman;the miller;her brother;
    his sister;the captain;the cook;a small boy;the carpenter;the shepherd;an old man;
    the librarian;the driver;my neighbour;the watchmaker;a stranger;the fisherman;
    the nurse;the musician;the twins"""
_DID = """carried a heavy box;looked for a lost dog;read a long letter;repaired the roof;
    sold fresh bread;waited for the train;told a funny story;drank a cup of tea;
    planted three trees;cleaned the kitchen;opened the big door;counted the sheep;
    wrote a short poem;painted the wall;cut the wood;washed the windows;
    found a golden coin;listened to the rain;cooked a hot soup;watched the birds;
    built a little boat;closed the shop early;learned a new song;packed a large bag;
    called a friend;fed the horses;mended an old coat;drew a map;lost a key;
    bought some cheese"""
_WHERE = """in the garden;near the river;at the market;behind the church;on the hill;by the sea;
    in the town;at the station;under the bridge;in the forest;beside the road;
    in front of the school;at home;in a small village;on the farm;next to the mill;
    in the library;at the harbour"""
_WHEN = """in the morning;at noon;in the evening;after dinner;before sunrise;on Monday;
    on a cold day;late at night;during the storm;in early spring;last summer;
    every Friday;after the rain;on the way home;while it was snowing;
    at the end of the week"""
_THEN = """It was a good day.;Nobody said a word.;The sun was warm.;The wind was strong.;
    Everyone laughed.;The street was empty.;It took a long time.;That made them happy.;
    The dog slept by the fire.;There was much to do.;The clouds were grey.;
    Soon it was dark.;The air smelled of flowers.;It happened again the next day.;
    The work was almost done.;No one had seen it before."""


def _choices(text: str) -> tuple[str, ...]:
    return tuple(" ".join(part.split()) for part in text.split(";"))


WHO, DID, WHERE, WHEN, THEN = map(_choices, (_WHO, _DID, _WHERE, _WHEN, _THEN))


def is_held_out(key: str) -> bool:
    """One in ten keys is never trained on; a key identifies what makes a prompt unique."""
    return zlib.crc32(key.encode()) % 10 == 0


def sentence(rng: random.Random) -> str:
    """One sentence of a story."""
    kind = rng.randrange(5)
    if kind == 0:
        return rng.choice(THEN)
    who, did, where, when = map(rng.choice, (WHO, DID, WHERE, WHEN))
    if kind == 1:
        text = f"{when} {who} {did} {where}."
    elif kind == 2:
        text = f"{who} {did} {where} {when}."
    elif kind == 3:
        text = f"{who} {did} and then {rng.choice(DID)}."
    else:
        text = f"{when} {who} {did}, and {rng.choice(WHO)} {rng.choice(DID)} {where}."
    return text[0].upper() + text[1:]


def story(rng: random.Random, num_sentences: int) -> str:
    return " ".join(sentence(rng) for _ in range(num_sentences))


@dataclass(frozen=True)
class Fact:
    """A person's word: stated in a document, asked for later."""

    kind: str
    name: str
    word: str

    @property
    def statement(self) -> str:
        return f"The {self.kind} of {self.name} is {self.word}."

    @property
    def question(self) -> str:
        return f"What is the {self.kind} of {self.name}?"

    @property
    def question_now(self) -> str:
        return f"What is the {self.kind} of {self.name} now?"


def draw_facts(rng: random.Random, count: int) -> list[Fact]:
    """Facts about different people; none of them is held out."""
    facts = []
    for name in rng.sample(NAMES, count):
        word = rng.choice(WORDS)
        while is_held_out(f"{name} {word}"):
            word = rng.choice(WORDS)
        facts.append(Fact(rng.choice(KINDS), name, word))
    return facts


def _held_out(rng: random.Random, fact: Fact) -> Fact:
    """The fact with a word that this name never had in training."""
    words = [word for word in WORDS if is_held_out(f"{fact.name} {word}")]
    return replace(fact, word=rng.choice(words))


def num_facts(rng: random.Random, num_tokens: int) -> int:
    """About one fact in 60 to 250 tokens, and never more than there are names for."""
    return max(3, min(num_tokens // rng.randint(60, 250), 100))


def document(
    rng: random.Random, facts: list[Fact], num_tokens: int, count: Callable[[str], int]
) -> str:
    """A story of about `num_tokens` interspersed with facts, single or several in a row.

    `count` returns the tokens of a sentence including its leading space.
    """
    groups: list[str] = []
    left = rng.sample(facts, len(facts))
    while left:
        size = rng.choice((1, 1, 2, 3, 5))
        groups.append(" ".join(fact.statement for fact in left[:size]))
        left = left[size:]
    used = sum(count(" " + group) for group in groups)
    sentences: list[str] = []
    while used < num_tokens:
        text = sentence(rng)
        used += count(" " + text)
        if used <= num_tokens:
            sentences.append(text)
    places = sorted(rng.randint(0, len(sentences)) for _ in groups)
    for group, place in zip(reversed(groups), reversed(places), strict=True):
        sentences.insert(place, group)
    return " ".join(sentences)


def retrieval_prompts(
    seed: int, num_tokens: int, count: Callable[[str], int], num_questions: int = 1
) -> list[tuple[str, Fact]]:
    """Messages of about `num_tokens`: one document, each time followed by another question.

    The facts asked for are held out; their statements are the answers.
    """
    rng = random.Random(seed)
    facts = draw_facts(rng, num_facts(rng, num_tokens))
    wanted = [_held_out(rng, fact) for fact in facts[:num_questions]]
    text = document(rng, [*wanted, *facts[num_questions:]], num_tokens - 24, count)
    return [(f"{text}\n\n{fact.question}", fact) for fact in wanted]


def updates_document(
    rng: random.Random, newest: dict[Fact, int], num_tokens: int, count: Callable[[str], int]
) -> str:
    """A story in which words change, each as often as `newest` says and finally to its word.

    The last changes are separated from the earlier ones and more than a window before the end.
    """
    old = [_other_word(rng, fact) for fact, num_old in newest.items() for _ in range(num_old)]
    names = {fact.name for fact in newest}
    others = [fact for fact in draw_facts(rng, 8) if fact.name not in names]
    room = num_tokens - _APART
    past = int(room * rng.uniform(0.55, 0.75))
    return " ".join(
        (
            document(rng, [*old, *others[:4]], past, count),
            document(rng, [*newest, *others[4:]], room - past, count),
            document(rng, [], _APART, count),
        )
    )


def _other_word(rng: random.Random, fact: Fact) -> Fact:
    word = fact.word
    while word == fact.word or is_held_out(f"{fact.name} {word}"):
        word = rng.choice(WORDS)
    return replace(fact, word=word)


def updates_prompt(seed: int, num_tokens: int, count: Callable[[str], int]) -> tuple[str, Fact]:
    """A message of about `num_tokens` that asks for a word after many changes, and the answer.

    There are more changes than a small indexer selects entries, so it must prefer new ones.
    """
    rng = random.Random(f"updates {seed}")
    newest = _held_out(rng, draw_facts(rng, 1)[0])
    num_old = min(rng.randint(60, 110), num_tokens // 20)
    text = updates_document(rng, {newest: num_old}, num_tokens - 24, count)
    return f"{text}\n\n{newest.question_now}", newest
