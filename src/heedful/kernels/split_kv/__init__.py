"""Device code of the decode kernels, whose programs split the keys of a call among them.

It says how the keys are divided (`work`), how a program walks over its share (`walk`), which new
rows it appends to the cache (`append`), and how results are stored (`results`). The portable
decode, the Hopper decode and the MLA decodes all call it. The functions take tensors of indices as
arguments, so that they work in any layout.
"""
