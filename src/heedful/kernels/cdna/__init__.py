"""Parts that the Gluon kernels of CDNA3 and CDNA4 share. Both need Triton 3.9. May import
`kernels.cdna3` and `kernels.cdna4`: the forward of each is chosen here."""
