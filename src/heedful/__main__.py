"""`python -m heedful`: the command line, where no script of it is on the path."""

from heedful.cli import main

main()
