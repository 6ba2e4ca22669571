"""What a step looks like to the host: its shape, and the line of integers that describes it."""
