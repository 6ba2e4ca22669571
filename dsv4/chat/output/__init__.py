"""What the model wrote, taken apart: `parse.py` is the door, `block.py` reads tool calls."""
