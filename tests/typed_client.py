"""A program of somebody else, as a type checker sees it. Not run.

`# E: code` marks a line that must be an error of this code; every other line must be none.
"""

from typing import assert_type

import dsv4
from dsv4 import (
    Completion,
    Dsv4Error,
    Engine,
    EngineConfig,
    FinishReason,
    Output,
    Request,
    RequestError,
    SamplingParams,
)

engine = Engine.load("tiny", device="cpu", max_context=512)
assert_type(engine, Engine)
assert_type(engine.generate(["One"], SamplingParams(max_tokens=3)), list[Completion])
assert_type(engine.generate("One")[0].finish_reason, FinishReason)
for output in engine.stream([1, 2, 3]):
    assert_type(output, Output)
    assert_type(output.token_ids, tuple[int, ...])
    assert_type(output.finish_reason, FinishReason | None)
try:
    engine.add(Request("mine", (1, 2), priority=1))
except RequestError as error:
    assert_type(error.exit_code, int)
    refused: Dsv4Error = error
assert_type(engine.step(), list[Output])
assert_type(EngineConfig(device="cpu").max_context, int | None)
EngineConfig(dtype="float32", kv_format="bf16", index_format="fp8", draft="mtp", attention="dp")
assert_type(dsv4.__version__, str)

SamplingParams(max_tokns=3)  # E: call-arg
SamplingParams(max_tokens="3")  # E: arg-type
EngineConfig(devise="cpu")  # E: call-arg
Engine.load("tiny", max_contxt=512)  # E: call-arg
Engine.load("tiny", max_context="512")  # E: arg-type
Engine.load("tiny", kv_format="fp9")  # E: arg-type
EngineConfig(activations="a6")  # E: arg-type
EngineConfig(comm="mpi")  # E: arg-type
Request("mine", "text")  # E: arg-type
engine.generat("One")  # E: attr-defined
print(engine.generate("One")[0].txt)  # E: attr-defined
print(dsv4.Enginee)  # E: attr-defined
