"""What callers gave, checked and made ready for kernels. May import `torch.base`."""
