"""Times whole steps: random weights and a filled state, generated on the device."""
