"""The context-parallel plans that a program has entered (`with plan:`), the current one last.

They are the process's, not a thread's: layers that are checkpointed are computed again on threads
of autograd.
"""

from typing import Any

PLANS: list[Any] = []
