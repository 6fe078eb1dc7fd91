"""A compiler apart from the process: worker processes with a Triton of their own. May import
`launch.code` and `launch.spec`."""
