"""The Gluon forward of CDNA3 and CDNA4: a main loop for each, and the parts that both share. Both
need Triton 3.9."""
