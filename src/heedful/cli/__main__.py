"""`python -m heedful.cli`, for a checkout that is not installed."""

from heedful.cli import main

main()
