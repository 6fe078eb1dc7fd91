"""Device code that several families of kernels share: `triton.jit` functions of scalars or of
tensors in any layout, which Gluon kernels call as their own."""
