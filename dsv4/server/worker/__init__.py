"""The engine process, and the web process's connection to it."""
