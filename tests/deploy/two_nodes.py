"""A cluster of this machine for a test: `two_nodes.py HOME OTHER_HOME`.

Starts a node whose home folder is HOME and prints the cluster's address; after a line on its input,
starts a second node whose home folder is OTHER_HOME. Ends when its input ends.
"""

import sys

from ray.cluster_utils import Cluster


def main(home: str, other_home: str) -> None:
    common = {"object_store_memory": 150 << 20, "include_dashboard": False}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "env_vars": {"HOME": home}, **common}
    )
    try:
        sys.stdout.write(f"{cluster.address}\n")
        sys.stdout.flush()
        if sys.stdin.readline():
            cluster.add_node(num_cpus=1, env_vars={"HOME": other_home}, **common)
            sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
