"""The engine in a process of its own, and the web process's end of the line to it."""
