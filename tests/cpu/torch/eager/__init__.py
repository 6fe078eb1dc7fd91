"""Tests of `heedful.torch.eager`."""
