"""Start the command line: in a fork of the fork server where one is ready, else in this process."""

from __future__ import annotations

import os

from cmdop_migrate.cli.forkserver import client, compat


def main() -> None:
    """Run the command of sys.argv and exit with its status."""
    try:
        client.run_in_fork()
    except KeyboardInterrupt:  # before the fork began: once it has begun, it decides what Ctrl-C does
        os._exit(compat.INTERRUPTED)
    from cmdop_migrate.cli.main import main as run_here

    try:
        run_here()
    except SystemExit as end:
        if end.code == compat.INTERRUPTED:  # do not join threads, which may wait for a far-away host
            os._exit(compat.INTERRUPTED)
        raise
