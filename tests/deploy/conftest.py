"""Ray is optional; its own warnings while it is imported are not ours to fail on."""

import importlib.util
import warnings

if importlib.util.find_spec("ray") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray.serve  # noqa: F401
