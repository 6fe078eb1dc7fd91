"""The parameters of all kernels, declared once: groups that host and device share.

A group is a NamedTuple, and each of its fields that is not a group is a leaf. On the host, a leaf
is an `Argument` (a pointer, a number or a tensor map) whose value comes with the launch; or it is a
constant that the kernel is compiled for; or it is None, for an absent operand. On the device, a
kernel reads the leaf by the same name. Launchers name leaves by dotted paths: mask.left, io.q.ptr.

A field's annotation says what it holds. `Num` is a number. `Const`, always an upper-case name, is a
constant. `In`, `Out` and `InOut` are memory. A kernel reads `In` and writes `Out`. `InOut` must
keep its old contents: the kernel reads and writes it, or writes a part and keeps the rest. On a
group, they hold for each `Ptr` in it. Memory that must start at zero is declared by a `Workspace`
of the launch program, not here.
"""
