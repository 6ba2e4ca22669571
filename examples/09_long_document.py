"""Questions about one long document: it is read once, later questions find it in the cache."""

import time

from dsv4 import Engine, SamplingParams

FACTS = {"Nora": "walnut", "Hugo": "saffron"}
filler = "The baker carried a heavy box. The teacher read a long letter. "
document = "".join(
    filler * 12 + f"The password of {name} is {word}. " for name, word in FACTS.items()
)

engine = Engine.load("tiny")
for name in FACTS:
    begin = time.perf_counter()
    prompt = f"{document}\n\nWhat is the password of {name}?"
    [answer] = engine.generate(prompt, SamplingParams(temperature=0, max_tokens=32))
    seconds = time.perf_counter() - begin
    print(f"{answer.text} ({answer.num_cached} prompt tokens from the cache, {seconds:.1f} s)")
