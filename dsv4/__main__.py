"""`python -m dsv4`: the same as the command `dsv4`."""

from dsv4.cli import main

main()
