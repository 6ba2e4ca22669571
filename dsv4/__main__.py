"""`python -m dsv4`: the same as the command `dsv4`."""

import sys

from dsv4.cli import main

sys.argv[0] = "dsv4"  # the name that help and benchmark records show
main()
