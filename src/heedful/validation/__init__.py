"""The record of what was validated on this machine: a grid of problems against the oracle. The
record of it, which lets the planner use kernels that nobody had run on such hardware before, is
launch/validations.py."""
