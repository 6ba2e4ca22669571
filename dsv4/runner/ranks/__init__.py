"""A model over several ranks: rank 0 starts the others and tells each step; they follow."""

FOLLOWER = "dsv4.runner.ranks.follower"  # the module that a rank above 0 runs
