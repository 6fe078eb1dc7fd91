"""Tests of `heedful.torch.operands`."""
