"""Stop a process at a named point of its work, for tests that kill, cut off or continue it exactly there.

With CMDOP_MIGRATE_TEST_STOP=FLOW:NAME in the environment, the process stops itself (SIGSTOP) when FLOW reaches the
point NAME. Without the variable a point does nothing. The crash matrix is built on these points. A command with any
variable of this prefix never runs in the fork server: a test means the process that it started itself."""

from __future__ import annotations

import os
import signal

TEST_PREFIX = "CMDOP_MIGRATE_TEST_"
TEST_STOP = f"{TEST_PREFIX}STOP"
# A file with a JSON object that `plan` lays over the facts of the target host, so that a test can plan for an older
# kernel, a processor that lacks a feature, or a full disk.
TEST_FACTS = f"{TEST_PREFIX}FACTS"


def point(flow: str, name: str) -> None:
    """Stop this process if the test that started it asked for that at this point."""
    if os.environ.get(TEST_STOP) == f"{flow}:{name}":
        os.kill(os.getpid(), signal.SIGSTOP)
