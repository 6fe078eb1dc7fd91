"""From a plan to launches; this folder itself holds what users call. May import `core` and
`kernels.args`."""
