"""Device code that several families of kernels share. These are `triton.jit` functions of scalars
or of tensors in any layout, so that Triton and Gluon kernels both call them."""
