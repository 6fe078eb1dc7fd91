"""Programs (kernels with their arguments and scratch), and how they are bound to a device. May
import `launch.spec`, `launch.compiler`, `launch.bind`, `launch.code` and `launch.driver`."""
