"""Log lines that clients cannot forge."""

import logging


def escape(text: str) -> str:
    """Escape line breaks and control characters as Python does."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def escape_arguments(record: logging.LogRecord) -> bool:
    """A handler filter: messages are trusted, their arguments may come from clients."""
    if isinstance(record.args, tuple):
        record.args = tuple(escape(a) if isinstance(a, str) else a for a in record.args)
    return True


def log_requests() -> None:
    """One line per request on stderr, independent of the log level."""
    logger = logging.getLogger("dsv4.requests")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    handler.addFilter(escape_arguments)
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
