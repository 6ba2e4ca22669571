"""A tools loop: the model calls functions until it has its answer. Needs a server: `dsv4 serve`."""

import json
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
FUNCTIONS = {
    "get_weather": lambda city: {"sky": "sunny", "temperature": 21},
    "get_time": lambda city: {"time": "12:30"},
    "calculator": lambda expression: {"value": 0},
}

tools: Any = json.loads(Path(__file__).with_name("tools.json").read_text())
messages: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
with OpenAI(base_url=f"{URL}/v1", api_key="none") as client:
    while True:
        done = client.chat.completions.create(
            model="tiny", messages=messages, tools=tools, temperature=0
        )
        message = done.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            print(f"{call.function.name}({call.function.arguments}) -> {result}")
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)}
            )
print(message.content)
