"""Fuzz the output parser: random damaged outputs, every promise checked on each.

    python scripts/fuzz_chat.py --seconds 60 --seed 1

A failing case is shrunk and printed as one line of JSON. Add it to tests/chat/corpus.jsonl to keep
it as a test.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checks live in tests/

from dsv4.chat import Tokenizer
from tests.chat.fuzz import Case, check, make_case, tiny_tokenizer


def failure(case: Case, tokenizer: Tokenizer) -> str | None:
    try:
        check(case, tokenizer)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return None


def shrink(case: Case, tokenizer: Tokenizer) -> Case:
    """Drop pieces of the text while the case still fails."""
    size = len(case["text"]) // 2
    while size:
        at = 0
        while at < len(case["text"]):
            smaller = {**case, "text": case["text"][:at] + case["text"][at + size :]}
            if failure(smaller, tokenizer) is not None:
                case = smaller
            else:
                at += size
        size //= 2
    return case


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--seconds", type=float, default=60.0, help="CPU time to spend")
    options.add_argument("--seed", type=int, default=None)
    options.add_argument("--max-failures", type=int, default=5)
    chosen = options.parse_args()
    seed = random.SystemRandom().randint(0, 2**32) if chosen.seed is None else chosen.seed
    rng = random.Random(seed)
    tokenizer = tiny_tokenizer()
    num_cases = num_failures = 0
    start = time.process_time()
    while time.process_time() - start < chosen.seconds:
        case = make_case(rng)
        num_cases += 1
        reason = failure(case, tokenizer)
        if reason is not None:
            num_failures += 1
            case = shrink(case, tokenizer)
            sys.stdout.write(json.dumps({"why": failure(case, tokenizer), **case}) + "\n")
            if num_failures >= chosen.max_failures:
                break
    spent = time.process_time() - start
    sys.stdout.write(
        f"{num_cases} outputs in {spent:.0f} s of CPU, seed {seed}: {num_failures} failures\n"
    )
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
