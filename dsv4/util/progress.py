"""How long-running work reports its progress."""

from collections.abc import Callable

Progress = Callable[[int, int], None]  # pieces or bytes done, of how many
