"""Compiled code: from memory, a pack, the disk cache or the compiler. Only `triton_compat` imports
Triton. May import `launch.spec`."""
