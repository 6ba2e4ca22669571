r"""A file of prompts in, a file of answers out: one JSON object a line, any number of lines.

printf '{"prompt": "What is the capital of Peru?"}\\n' > in.jsonl
python examples/06_batch_file.py in.jsonl out.jsonl
"""

import json
import sys
from pathlib import Path

from dsv4 import Engine, SamplingParams

BATCH = 64  # written out after each

if len(sys.argv) != 3:
    sys.exit(f"expected two files: {sys.argv[0]} in.jsonl out.jsonl")
source, target = map(Path, sys.argv[1:3])
engine = Engine.load("tiny")
params = SamplingParams(temperature=0, max_tokens=64)
items = [json.loads(line) for line in source.read_text().splitlines()]
with target.open("w") as out:
    for start in range(0, len(items), BATCH):
        batch = items[start : start + BATCH]
        answers = engine.generate([item["prompt"] for item in batch], params)
        for item, answer in zip(batch, answers, strict=True):
            out.write(json.dumps({**item, "answer": answer.text}) + "\n")
print(f"answers in {target}")
