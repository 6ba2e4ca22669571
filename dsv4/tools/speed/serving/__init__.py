"""Requests to an engine and to a server: their times, and how they arrive."""
