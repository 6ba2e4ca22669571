"""Text <-> tokens: tokenizer, prompt encoding, streaming parse of the model's output.

Imports no torch. Start at `encode.py` (messages to prompt) and `parse.py` (output to parts).
"""

from dsv4.chat.dialect import DIALECTS, V4_OFFICIAL, V4_PREVIEW, V41, Dialect, choose_dialect
from dsv4.chat.encode import Conversation, Prompt, encode_prompt
from dsv4.chat.output.parse import Delta, OutputParser, Parsed, ParsedCall, new_call_id, parse
from dsv4.chat.tokenizer import Detokenizer, SpecialIds, Tokenizer

__all__ = [
    "DIALECTS",
    "V4_OFFICIAL",
    "V4_PREVIEW",
    "V41",
    "Conversation",
    "Delta",
    "Detokenizer",
    "Dialect",
    "OutputParser",
    "Parsed",
    "ParsedCall",
    "Prompt",
    "SpecialIds",
    "Tokenizer",
    "choose_dialect",
    "encode_prompt",
    "new_call_id",
    "parse",
]
