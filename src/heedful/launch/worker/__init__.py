"""A compiler outside of this process: worker processes with another Triton. May import
`launch.code` and `launch.spec`."""
