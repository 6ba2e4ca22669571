"""Whole steps timed: a model of random weights and a filled state made on the device."""
