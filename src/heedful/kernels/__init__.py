"""Device code by family, and the declarations of its arguments. Imports Triton alone; every family
may import `kernels.args` and `kernels.common`."""
