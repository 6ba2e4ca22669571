"""An answer that is always valid JSON for a given schema. Needs the extra `dsv4[guided]`."""

import json

from dsv4 import Engine, SamplingParams
from dsv4.request import Guide

SCHEMA = {
    "type": "object",
    "properties": {"country": {"enum": ["France", "Peru"]}, "capital": {"type": "string"}},
    "required": ["country", "capital"],
    "additionalProperties": False,
}

engine = Engine.load("tiny")
params = SamplingParams(temperature=0, max_tokens=64, guide=Guide("json_schema", SCHEMA))
[answer] = engine.generate("Write as JSON: country France, capital Paris", params)
print(json.loads(answer.text))
