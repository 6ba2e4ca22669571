"""Print an answer as it comes, with the speed at the end."""

import time

from dsv4 import Engine, SamplingParams

engine = Engine.load("tiny")
begin, count = time.perf_counter(), 0
for output in engine.stream(
    "What is the capital of Japan?", SamplingParams(temperature=0, max_tokens=64)
):
    print(output.text, end="", flush=True)
    count += len(output.token_ids)
print(f"\n{count / (time.perf_counter() - begin):.0f} tokens/s")
