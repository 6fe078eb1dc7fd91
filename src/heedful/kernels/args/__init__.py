"""What kernels are given, declared once: groups of parameters that host and device share.

On the host a leaf is an `Argument` (a pointer, a number or a tensor map) that is given at run time;
any other leaf is a constant that the kernel is compiled for, and None stands for an absent operand.
A kernel reads a leaf by the same name; one that is a constant is known when compiling. Launchers
know leaves by dotted names: mask.left, io.q.ptr.

A field says what it holds. `Num` is a number, `Const` (an upper-case name) always a constant. `In`,
`Out` and `InOut` are memory that the kernel reads, writes, or has to find as it was: because it
reads and writes it, or because it writes a part and keeps the rest. Said of a group, they hold for
the `Ptr` in it. What must start at zero is said by a `Workspace`.
"""
