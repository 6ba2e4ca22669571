"""Log lines that clients cannot forge."""

import logging


def escape(text: str) -> str:
    """Line breaks and control characters as Python writes them."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def escape_arguments(record: logging.LogRecord) -> bool:
    """A filter for handlers: messages are ours, their arguments may come from anywhere."""
    if isinstance(record.args, tuple):
        record.args = tuple(escape(a) if isinstance(a, str) else a for a in record.args)
    return True
