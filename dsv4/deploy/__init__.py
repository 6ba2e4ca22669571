"""Several engines behind one address, on Ray Serve. Start reading at `ray.py`.

The ingress is the HTTP application of `dsv4/server`; it sends requests to engine replicas, each
with one engine process. Ray routes, queues, scales and replaces them. How to run it:
`docs/deploy.md`.
"""
