"""Tests of `heedful.distributed`: arithmetic of plans, and ranks over gloo."""
