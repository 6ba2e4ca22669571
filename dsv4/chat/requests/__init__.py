"""Convert the three HTTP request shapes to a `Conversation`. Usable without a server."""

from dsv4.chat.requests.chat_completions import read_chat_completions
from dsv4.chat.requests.messages_api import read_messages_api
from dsv4.chat.requests.responses import read_responses

__all__ = ["read_chat_completions", "read_messages_api", "read_responses"]
