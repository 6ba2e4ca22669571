"""A model on several ranks: rank 0 starts the others and sends them each step; they follow."""

FOLLOWER = "dsv4.runner.ranks.follower"  # the module that a rank above 0 runs
