"""Programs from plans: the arguments of every kernel, in one module for each family. No other code
knows a kernel's parameters. May import `launch.spec`."""
