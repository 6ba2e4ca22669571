"""The openai package: chat, streamed, with separate reasoning. Needs a server: `dsv4 serve`."""

import sys

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
with OpenAI(base_url=f"{URL}/v1", api_key="none") as client:
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "What is 347 + 585?"}],
        reasoning_effort="high",
        temperature=0,
        stream=True,
    )
    for chunk in stream:
        delta = chunk.choices[0].delta
        thought = getattr(delta, "reasoning_content", None)
        print(thought or delta.content or "", end="", flush=True)
print()
