"""The command `dsv4`, and `python -m dsv4`."""

import signal
import sys


def main() -> None:
    sys.argv[0] = "dsv4"  # the name that help and benchmark records show
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handled:  # not where a shell has Ctrl-C ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during imports: no traceback
    from dsv4.cli import main as run

    if handled:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
