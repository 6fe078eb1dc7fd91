"""From a plan to launches. The modules of this folder itself define a launch (`spec`), compile it
(`compiler`), and have the functions that users call. May import `core` and `kernels.args`."""
