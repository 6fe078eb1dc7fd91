"""From a plan to launches; this folder itself holds what users call, what a launch is (`spec`) and
what compiles it (`compiler`). May import `core` and `kernels.args`."""
