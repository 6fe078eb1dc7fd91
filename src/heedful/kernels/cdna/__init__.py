"""What the Gluon kernels of CDNA3 and CDNA4 share. Both take Triton 3.9."""
