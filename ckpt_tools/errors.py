"""Errors that reach a person: one line, with an exit code that means something.

Exit codes of every command: 0 proven right, 1 found wrong, 2 usage.
"""

from __future__ import annotations


class Fault(Exception):
    """Something was found wrong. The message says what, where, why likely, and what to do next, in one line."""

    exit_code = 1


class UsageFault(Fault):
    """The request itself cannot be served: no such folder, a target that is not ours, a pattern that is none."""

    exit_code = 2
