"""A module of ranks whose import takes longer than anyone waits."""

import time

time.sleep(600)
