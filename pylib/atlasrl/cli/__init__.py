"""Click commands, one module per verb: parse, call one function, print. No decisions.

Importing a command must stay cheap (`bin/* --help` answers in under 0.5 s), so pydantic, torch, ray and verl are
imported inside the functions that need them.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable

import click

from atlasrl.errors import Fault

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def command(function: Callable) -> click.Command:
    """Turn a function into a command that prints a `Fault` as one line and exits with its code.

    `--debug` (or ATLASRL_DEBUG=1) shows the traceback instead.
    """

    @click.option("--debug", is_flag=True, envvar="ATLASRL_DEBUG", help="Show the traceback of an error.")
    @functools.wraps(function)
    def run(debug: bool, **options):
        if debug:
            os.environ["ATLASRL_DEBUG"] = "1"
        try:
            return function(**options)
        except Fault as fault:
            if debug:
                raise
            click.echo(f"error: {fault}", err=True)
            sys.exit(fault.exit_code)

    return click.command(context_settings=CONTEXT)(run)
