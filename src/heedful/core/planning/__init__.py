"""From a problem to a plan: kernels, sizes, splits, and the reasons against other kernels. May
import all of `core`."""
