"""Mutation testing: small planted bugs, each of which some test should notice.

    mutants.py    the bugs that can be planted, and samples of them
    semantic.py   of these, the bugs of attention code
    covering.py   which test runs which line, kept between runs
    server.py     processes that have imported torch and fork for every run of tests
    trees.py      copies of the sources, one for each worker
    __main__.py   the command: see CONTRIBUTING.md

Why not a library: mutmut leaves out decorated functions and module-level tables, which here decide
the plan; cosmic-ray's operators know no arguments, statements or conditions, and bring a database
and a web server along. What is left is Python's own `ast`, and coverage.py for the lines.
"""
