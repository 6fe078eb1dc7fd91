"""The forward: a producer warp and consumer warpgroups. May import `hopper.sm90`
and `hopper.fp8`."""
