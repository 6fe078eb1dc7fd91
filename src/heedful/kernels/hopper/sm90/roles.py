"""Starts the roles of a program."""

from triton.experimental.gluon import language as gl


def arranged(consumers, roles):
    """(functions with arguments, warps of all but the first, registers of these), from the
    arguments of `start_roles`."""
    (consumer, arguments, *resources), *others = roles
    numbers = [gl.constexpr(i) for i in range(gl.constexpr(consumers).value)]
    started = [(consumer, (*arguments, number), *resources) for number in numbers]
    started += [role for role in others if gl.constexpr(role[2]).value]
    warps, registers = ([role[i] for role in started[1:]] for i in (2, 3))
    return [role[:2] for role in started], warps, registers


def start_roles(consumers, roles, _semantic=None, _generator=None):
    """Runs the roles of a program side by side, each compiled separately.

    roles: (function, arguments, warps, registers of a thread) each; one of 0 warps is left out.
    There are `consumers` of the first role, whose number is its last argument; number 0 has the
    registers that the others leave.
    """
    started = arranged(consumers, roles)
    gl.warp_specialize(*started, _semantic=_semantic, _generator=_generator)


start_roles.__triton_builtin__ = True
