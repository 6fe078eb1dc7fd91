"""The public functions of PyTorch. May import all of `heedful.torch`."""
