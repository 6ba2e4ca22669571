"""Every error a user can meet.

    Dsv4Error
    ├── OptionError       a choice of the user that cannot work (exit code 2)
    ├── ConfigError       a config.json that is wrong or not supported
    ├── CheckpointError   files or tensors that are missing, broken or contradict the config
    ├── CapacityError     not enough pages, slots or memory; back-pressure, never corruption
    ├── RequestError      one request that cannot be served (exit code 2); others are untouched
    ├── StallError        requests that would wait for ever; a bug of the scheduler
    └── KernelError       an op got arguments it cannot take, or no kernel fits this device

A message says what was found, what was expected and what to do. `assert` is for our own
invariants only.
"""


class Dsv4Error(Exception):
    """Base of all errors that are shown to the user without a traceback."""

    exit_code = 1


class OptionError(Dsv4Error):
    exit_code = 2


class ConfigError(Dsv4Error):
    pass


class CheckpointError(Dsv4Error):
    pass


class CapacityError(Dsv4Error):
    pass


class RequestError(Dsv4Error):
    exit_code = 2


class StallError(Dsv4Error):
    pass


class KernelError(Dsv4Error):
    pass
