"""The anthropic package: one message. Needs a server: `dsv4 serve`."""

import sys

from anthropic import Anthropic

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
with Anthropic(base_url=URL, api_key="none") as client:
    message = client.messages.create(
        model="tiny",
        max_tokens=200,
        extra_body={"temperature": 0},
        messages=[{"role": "user", "content": "What is the capital of Kenya?"}],
    )
for block in message.content:
    if block.type == "text":
        print(block.text)
