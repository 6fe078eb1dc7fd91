"""What was validated on this machine: a grid of problems against the oracle, and the record that
lets the planner use kernels that nobody had run on such hardware before."""
