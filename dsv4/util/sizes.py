"""Sizes and times in readable units."""


def size_text(nbytes: float) -> str:
    """At least three digits at any size: known bytes never print as "0.0 GB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:,.2f} {unit}"
    return f"{nbytes:,.0f} B"


def time_text(seconds: float) -> str:
    """ "8 s", "2:05 min", "1:30 h"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"
