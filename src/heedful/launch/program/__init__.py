"""Programs: kernels with their arguments and scratch, and what binds them to a device. May import
`launch.spec`, `launch.compiler`, `launch.bind`, `launch.code` and `launch.driver`."""
