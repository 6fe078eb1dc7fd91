"""Tests of `heedful.core.planning`, and of plans that `heedful.core.registry` decides."""
