"""Every error a user can see.

    Dsv4Error
    ├── OptionError       an invalid user option (exit code 2)
    ├── ConfigError       a config.json that is wrong or unsupported
    ├── CheckpointError   files or tensors that are missing, damaged or contradict the config
    ├── CapacityError     not enough pages, slots or memory; back-pressure, never corruption
    ├── RequestError      a single request that cannot be served (exit code 2)
    ├── StallError        requests that would wait indefinitely; a scheduler bug
    ├── NumericsError     a request whose logits are NaN or infinite
    ├── KernelError       an op got unsupported arguments, or no kernel fits this device
    └── RankError         one of several ranks failed, so all of them end (exit code 70)

A message says what was found, what was expected and what to do. `assert` is only for internal
invariants.
"""


class Dsv4Error(Exception):
    """Base of all errors shown to the user without a traceback."""

    exit_code = 1
    code: str | None = None  # by which a server names it to clients


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


class NumericsError(Dsv4Error):
    code = "numerics_error"

    def __init__(self) -> None:
        super().__init__(
            "the model gave NaN or infinities for this request, expected finite logits; "
            "`dsv4 doctor MODEL` finds out whether the checkpoint or a kernel is at fault"
        )


class KernelError(Dsv4Error):
    pass


class RankError(Dsv4Error):
    exit_code = 70
