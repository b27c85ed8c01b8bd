"""Finish work even if the command that began it is gone: after Ctrl-C, a closed terminal, a lost SSH connection."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from cmdop_migrate import log
from cmdop_migrate.errors import CmdopError, Unexpected, from_code

Progress = Callable[[str], None]
Answer = Callable[[dict[str, Any]], None]
_log = log.get("background")


def run(work: Callable[[Progress, Answer], None], progress: Progress) -> dict[str, Any]:
    """Run `work` in a process with its own session, and return its answer; it may continue after its answer.

    Call this before any thread is started. Raise here the error with which `work` fails before its answer; Unexpected
    if its process was killed."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork() == 0:
        os.close(reader)
        _work(work, writer)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as lines:
        for line in lines:
            message = json.loads(line)
            if "answer" in message:
                answer: dict[str, Any] = message["answer"]
                return answer
            if "error" in message:
                raise from_code(**message["error"])
            progress(message["progress"])
    raise Unexpected("the process that did the work was killed", "See: cmdop-migrate ls, and the log.")


def _work(work: Callable[[Progress, Answer], None], writer: int) -> None:
    """Run `work` in this fork, send progress, answer or error to `writer`, and exit."""
    lock = threading.Lock()  # a long line is written in several pieces

    def send(message: dict[str, Any]) -> None:
        try:
            with lock:
                os.write(writer, json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            return  # the command is gone; the work continues

    code = 1
    try:
        os.setsid()
        # A reader of the command's output, over SSH or in $(…), waits until every copy of stdout is closed: close ours.
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        work(lambda text: send({"progress": text}), lambda answer: send({"answer": answer}))
        code = 0
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
        _log.log(logging.INFO if full else logging.ERROR, "failed", exc_info=True)
        hint = "Free some space in state_dir, then try again." if full else traceback.format_exc()[-600:]
        message = f"{error.strerror}: {error.filename}" if error.filename else str(error)
        send({"error": {"code": "blocked" if full else "unexpected", "message": message, "hint": hint}})
    except CmdopError as error:
        _log.info("failed: %s", error.message)
        send({"error": {"code": error.code, "message": error.message, "hint": error.hint}})
    except BaseException as error:  # noqa: BLE001 - a forked child must never return into its parent's code
        _log.error("unexpected", exc_info=True)
        send({"error": {"code": "unexpected", "message": f"{error!r}", "hint": traceback.format_exc()[-600:]}})
    finally:
        os._exit(code)
