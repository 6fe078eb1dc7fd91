"""The caller's arguments, checked and prepared for kernels. May import `torch.base`."""
