"""Several streams at once on one event loop; the engine batches them."""

import asyncio

from dsv4 import Engine, SamplingParams

COUNTRIES = ("France", "Japan", "Peru", "Kenya")


async def ask(engine: Engine, country: str) -> str:
    prompt = f"What is the capital of {country}?"
    params = SamplingParams(temperature=0, max_tokens=64)
    return "".join([output.text async for output in engine.astream(prompt, params)])


async def main() -> None:
    engine = Engine.load("tiny")
    for answer in await asyncio.gather(*(ask(engine, country) for country in COUNTRIES)):
        print(answer)


asyncio.run(main())
