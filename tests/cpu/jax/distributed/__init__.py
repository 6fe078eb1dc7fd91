"""Tests of `heedful.jax.distributed` over the CPU devices of one process."""
