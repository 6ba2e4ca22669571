"""The process that compiles guides, with guides that sleep, crash or eat memory."""

import os
import sys
import time
from typing import Any

from dsv4.sampling import guide_compiler_main
from dsv4.sampling.guided import compile_grammar


def compile_or_misbehave(compiler: Any, kind: str, text: str) -> Any:
    if "slow" in text:
        time.sleep(100)
    if "crash" in text:
        os.abort()
    if "greedy" in text:
        return bytearray(3 << 30)
    return compile_grammar(compiler, kind, text)


if __name__ == "__main__":
    guide_compiler_main.compile_grammar = compile_or_misbehave
    sys.exit(guide_compiler_main.main(sys.argv))
