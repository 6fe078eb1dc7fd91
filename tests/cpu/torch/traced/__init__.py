"""Tests of `heedful.torch.traced`."""
