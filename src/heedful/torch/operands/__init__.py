"""The callers' arguments, checked and made ready for kernels. May import `torch.base`."""
