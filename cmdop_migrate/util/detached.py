"""Work that must be finished even when the command that began it is gone: Ctrl-C, a closed terminal, a lost SSH."""

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
    """Runs `work` in a process of its own session and returns what it answers; it may go on after its answer.

    Call it before any thread is started. The error `work` fails with before its answer is raised here.
    """
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
    lock = threading.Lock()  # a long line is not written in one piece

    def say(message: dict[str, Any]) -> None:
        try:
            with lock:
                os.write(writer, json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            return  # nobody listens any more; the work goes on

    code = 1
    try:
        os.setsid()
        # Whoever reads what the command prints, over SSH or in $(…), must not wait for us: its end is the command's.
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        work(lambda text: say({"progress": text}), lambda answer: say({"answer": answer}))
        code = 0
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
        _log.log(logging.INFO if full else logging.ERROR, "failed", exc_info=True)
        hint = "Free some space where state_dir is, then try again." if full else traceback.format_exc()[-600:]
        words = f"{error.strerror}: {error.filename}" if error.filename else str(error)
        say({"error": {"code": "blocked" if full else "unexpected", "message": words, "hint": hint}})
    except CmdopError as error:
        _log.info("failed: %s", error.message)
        say({"error": {"code": error.code, "message": error.message, "hint": error.hint}})
    except BaseException as error:  # noqa: BLE001 - a forked child must never run on into its parent's code
        _log.error("unexpected", exc_info=True)
        say({"error": {"code": "unexpected", "message": f"{error!r}", "hint": traceback.format_exc()[-600:]}})
    finally:
        os._exit(code)
