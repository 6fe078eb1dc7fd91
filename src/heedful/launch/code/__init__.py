"""Compiled kernels: in packs and in the disk cache, their keys, and Triton's compiler. Only
`triton_compat` imports Triton. May import `launch.spec`."""
