"""Check terminals across a checkpoint: foreground groups, /dev/tty, stopped jobs, controlling terminals of inner
shells."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.integration.test_programs import need
from tests.support.host import Host, until
from tests.support.program_session import Program

RENAMED = [r"fd \d+: /dev/(tty|pts/\d+) "]  # a descriptor of /dev/tty comes back as one of the terminal it was


def command_lines(program: Program) -> str:
    found = []
    for pid in program.host.pids(program.session):
        try:
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return "\n".join(found)


def rounds(program: Program, allowed: Sequence[str] = (), parks: int = 1) -> Iterator[str]:
    """Copy the session while it runs on, then park and restore it; after each the caller has a turn."""
    program.host.cm_json("checkpoint", program.name, "--leave-running")
    yield "a"
    for word in "bcd"[:parks]:
        program.through(allowed=allowed)
        yield word


def test_less_reads_keys_after_restore(host: Host) -> None:
    need("less")
    (host.dir / "lines").write_text("".join(f"line {n}\n" for n in range(1, 2000)))
    with Program(host, "less", str(host.dir / "lines")) as less:
        less.see("line 20")
        at = 20
        for _ in rounds(less, RENAMED, parks=2):
            at += 500
            less.type(f"{at}g")
            less.see(f"line {at}")


def test_git_log_in_bash_stays_in_the_foreground(host: Host) -> None:
    need("git", "less")
    with Program(host, "bash", "--norc", options=("--cwd", "/root")) as bash:
        bash.type("git init -q r; cd r; git config user.email a@b; git config user.name a; stty -echo\n")
        bash.type("for i in $(seq 60); do git commit -q --allow-empty -m message-$i; done; git log --oneline\n")
        bash.see("message-60")
        at = 30
        for _ in rounds(bash, RENAMED):
            at += 5
            bash.type(f"/message-{60 - at}\n")
            bash.see(f"message-{60 - at}")
        bash.type("qecho back=$((1+1))\n")
        bash.see("back=2")


def stopped(program: Program) -> list[str]:
    """Return the names of its stopped processes."""
    found = []
    for pid in program.host.pids(program.session):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
            continue
        if stat.rpartition(")")[2].split()[0] == "T":
            found.append(stat.partition("(")[2].rpartition(")")[0])
    return sorted(found)


THREADED = """
import sys, threading, time
def tick():
    while True:
        time.sleep(.01)
threading.Thread(target=tick, daemon=True).start()
print("threaded", input())
"""


def test_jobs_stopped_by_the_terminal(host: Host) -> None:
    """Check SIGTTIN, SIGTTOU and SIGTSTP: jobs are stopped as before, by the same signal as their shell says, and `fg`
    works."""
    (host.dir / "threaded.py").write_text(THREADED)
    with Program(host, "bash", "--norc") as bash:
        bash.type("PS1='> '; stty tostop; cat &\n")
        until(lambda: stopped(bash) == ["cat"])
        bash.type("head -n 1 /etc/passwd &\n")
        until(lambda: stopped(bash) == ["cat", "head"])
        bash.type(f"{sys.executable} {host.dir}/threaded.py &\n")
        until(lambda: len(stopped(bash)) == 3)
        bash.type("sleep 1007\n")
        until(lambda: "sleep 1007" in command_lines(bash))
        bash.type("\x1a")
        until(lambda: len(stopped(bash)) == 4)
        for _ in rounds(bash, ["ShdPnd"], parks=2):  # CRIU stops once more what is stopped; SIGCONT clears that
            assert len(stopped(bash)) == 4
            bash.type("jobs -l\n")
            bash.see(r"\[1\].* Stopped \(tty input\) +cat\r\n\[2\].* Stopped \(tty output\) +head")
            bash.see(r"\[3\].* Stopped \(tty input\).*\r\n\[4\].* Stopped +sleep")
        bash.type("fg 1\n")
        bash.see(r"fg 1\r\n.*cat\r\n")
        bash.type("mewed\n\x04")
        bash.see(r"mewed\r\nmewed\r\n")
        bash.type("fg 2\n")
        bash.see("root:x:")
        bash.type("fg 3\n")
        bash.see("threaded.py")
        bash.type("spoken\n")
        bash.see("threaded spoken")
        bash.type("fg 4\n")
        until(lambda: not stopped(bash), 20, "it is continued, after it was given the terminal")
        bash.type("\x03")
        bash.type("echo jobs=$(jobs)=none\n")
        bash.see("jobs==none")


def test_vim_started_in_the_background(host: Host) -> None:
    need("vim")
    with Program(host, "bash", "--norc") as bash:
        bash.type("vim -u NONE -n /root/story &\n")
        until(lambda: stopped(bash) == ["vim"])
        for _ in rounds(bash):
            assert stopped(bash) == ["vim"]
        bash.type("fg\n")
        bash.see("story")
        bash.type("ionce upon\x1b:x\r")
        assert bash.read("/root/story") == "once upon\n"


# One description of /dev/tty that two processes share, and one that is not blocking.
DEVTTY = """
import os, sys
shared = os.open("/dev/tty", os.O_RDWR)
alone = os.open("/dev/tty", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
read, write = os.pipe()
if os.fork() == 0:
    while word := os.read(read, 99):
        os.set_blocking(shared, word == b"block")
        os.write(shared, b"child:" + word + b"\\n")
os.write(shared, b"ready\\n")
for at in range(3):
    key = os.read(shared, 99).strip()
    try:
        found = os.read(alone, 99)
    except BlockingIOError:
        found = b"nothing"
    os.write(shared, b"%s %s %d\\n" % (key, found, os.get_inheritable(alone)))
    for word in (b"free", b"block"):
        os.write(write, word)
        while os.get_blocking(shared) != (word == b"block"):
            pass
    os.write(shared, b"done %d\\n" % at)
"""


def test_descriptors_of_dev_tty_keep_flags_and_sharing(host: Host) -> None:
    with Program(host, sys.executable, "-c", DEVTTY) as program:
        program.see("ready")
        for at, word in enumerate(rounds(program, RENAMED, parks=2)):
            program.type(f"{word}\n")
            program.see(rf"{word} nothing 0\r\n")
            program.see(rf"done {at}")


def test_fork_of_a_session_with_dev_tty_open(host: Host) -> None:
    need("fzf")
    with Program(host, "bash", "--norc", "-c", "seq 1000 | fzf > /root/chosen; exec sleep 1000") as fzf:
        fzf.see("1000/1000")
        host.cm_json("fork", "p", "q")
        fzf.type("777")
        fzf.see("1/1000")
        fzf.type("\r")
        assert fzf.read("/root/chosen") == "777\n"
        host.cm("kill", "--signal", "KILL", "p")
        host.cm_json("kill", "--signal", "KILL", "q")


TMUX, SCREEN, BASH = "tmux -f /dev/null new-session 'bash --norc'", "screen -c /dev/null bash --norc", "bash --norc"


@pytest.mark.parametrize(
    ("program", "inner"),
    [
        (TMUX, "bash --norc"),
        pytest.param(TMUX, "su", marks=pytest.mark.heavy),
        pytest.param(TMUX, "sudo -i", marks=pytest.mark.heavy),
        (SCREEN, "bash --norc"),
        (BASH, "sudo -i"),
        (BASH, "setsid -wc bash --norc"),  # another leader has the session's own terminal, as with dumb-init
    ],
)
def test_shell_in_a_shell_keeps_job_control(host: Host, program: str, inner: str) -> None:
    """Check that `less` in an inner shell stays in the foreground; Ctrl-Z, fg and Ctrl-C work after each checkpoint."""
    need(program.split()[0], inner.split()[0], "less")
    (host.dir / "lines").write_text("".join(f"{n} lines\n" for n in range(1, 4000)))
    with Program(host, "bash", "-c", f"exec {program}", options=("--env", "TERM=xterm")) as shell:
        shell.see("bash-")
        shell.type(f"{inner}\r")
        shell.type("echo inner=$((1+1))\r")
        shell.see("inner=2")
        shell.type(f"less {host.dir}/lines\r")
        shell.see("20 lines")
        at = 1000
        for word in rounds(shell, RENAMED):
            assert stopped(shell) == []
            at += 500
            shell.type(f"{at}g")
            shell.see(f"{at + 9}")
            shell.type("\x1a")
            until(lambda: stopped(shell) == ["less"])
            shell.type(f"echo to={word} > /dev/tty\r")
            shell.see(f"\\bto={word}\\s")
            shell.type("sleep 1005\r")
            until(lambda: "sleep 1005" in command_lines(shell))
            shell.type("\x03")
            until(lambda: "sleep 1005" not in command_lines(shell))
            shell.type("fg\r")
            until(lambda: stopped(shell) == [])


@pytest.mark.heavy
def test_many_windows_of_tmux_each_with_a_shell_in_a_shell(host: Host) -> None:
    """Check gaps in the numbers of the terminals, and more terminals than numbers that CRIU tries (32)."""
    need("tmux")
    windows = 36
    with Program(host, "bash", "-c", f"exec {TMUX}", options=("--env", "TERM=xterm")) as tmux:
        tmux.see("bash-")
        script = "for i in $(seq 40); do tmux new-window -d \"sh -c 'bash --norc; true'\"; done"
        tmux.type(f"{script}; for i in 1 3 5 7; do tmux kill-window -t $i; done\r")
        until(lambda: command_lines(tmux).count("sh -c bash --norc; true") == windows, 60)
        until(lambda: command_lines(tmux).splitlines().count("bash --norc ") == windows + 1, 60)
        tmux.park()
        tmux.back()
        tmux.type("tmux select-window -t 38\r")
        tmux.see(r"38:\w+\*")
        tmux.type("clear; sleep 1006\r")
        until(lambda: "sleep 1006" in command_lines(tmux))
        tmux.type("\x1a")
        until(lambda: stopped(tmux) == ["sleep"])


# Process 1 has the master; the child's session has lost its terminal with the last descriptor of the slave.
NO_SLAVE = """
import fcntl, os, termios, time
master, slave = os.openpty()
if os.fork() == 0:
    os.setsid()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    os.fork()
    os.closerange(0, 99)
    while True:
        time.sleep(1)
os.close(slave)
print("ready", flush=True)
while True:
    print("got:" + input(), flush=True)
"""


def test_terminal_whose_slaves_are_all_closed(host: Host) -> None:
    with Program(host, sys.executable, "-c", NO_SLAVE) as program:
        program.see("ready")
        for word in rounds(program):
            program.type(f"{word}\n")
            program.see(f"got:{word}")


# The program outlives its window, and reads from the closed terminal at each request.
OUTLIVES = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
tty = os.open("/dev/tty", os.O_RDWR)
os.mkfifo("/root/asked"), os.mkfifo("/root/answered")
os.write(tty, b"open\\n")
null = os.open("/dev/null", os.O_RDWR)
[os.dup2(null, fd) for fd in range(3)]
while word := open("/root/asked").read():
    try:
        found = os.read(tty, 9)
        os.write(tty, b"x")
    except OSError as error:
        found = error.strerror.encode()
    open("/root/answered", "w").write(word.strip() + ":" + str(found) + chr(10))
"""


def test_dev_tty_of_a_terminal_that_was_closed(host: Host) -> None:
    need("tmux")
    (host.dir / "outlives.py").write_text(OUTLIVES)
    with Program(host, "tmux", "-f", "/dev/null", "new-session", "bash --norc") as tmux:
        tmux.see("bash-")
        tmux.type(f"tmux new-window -d '{sys.executable} {host.dir}/outlives.py'\n")
        until(lambda: tmux.path("/root/answered").exists())
        tmux.type("tmux kill-window -t 1; echo killed=$((0))\n")
        tmux.see("killed=0")
        for word in rounds(tmux, RENAMED):
            tmux.type(f"clear; echo {word} > /root/asked; cat /root/answered\n")
            tmux.see(f"{word}:.*Input/output error")


def test_process_one_with_many_descriptors_beside_an_inner_terminal(host: Host) -> None:
    need("tmux")
    script = f"for fd in {{10..520}}; do eval exec $fd\\< /dev/null; done; {TMUX}"
    with Program(host, "bash", "-c", script, options=("--env", "TERM=xterm")) as tmux:
        tmux.see("bash-")
        tmux.type("bash --norc\r")
        until(lambda: command_lines(tmux).splitlines().count("bash --norc ") == 2)
        for _ in rounds(tmux):
            tmux.type("clear; sleep 1004\r")
            until(lambda: "sleep 1004" in command_lines(tmux))
            tmux.type("\x03")
            until(lambda: "sleep 1004" not in command_lines(tmux))


def test_inner_terminal_that_is_open_as_dev_tty_only(host: Host) -> None:
    need("tmux")
    script = "exec 3<> /dev/tty 0< /dev/null > /dev/null 2>&1; echo ready >&3; while read -u 3 key; do echo got:$key >&3; done"
    with Program(host, "tmux", "-f", "/dev/null", "new-session", f"bash -c '{script}'") as tmux:
        tmux.see("ready")
        for word in rounds(tmux, RENAMED):
            tmux.type(f"{word}\r")
            tmux.see(f"got:{word}")


def test_restore_without_the_foreground_group(host: Host) -> None:
    """Restore a terminal whose foreground process group has ended, before a shell has taken the terminal."""
    script = """
import os, signal, sys, time
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
if (child := os.fork()) == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    os._exit(0)
os.waitpid(child, 0)
print("alone", flush=True)
while True:
    time.sleep(.05)
    print("tick", flush=True)
"""
    with Program(host, sys.executable, "-c", script) as program:
        program.see("alone")
        program.park()
        program.back()
        program.see("tick")


@pytest.mark.parametrize(
    ("command", "ready", "keys", "shown"),
    [
        ("nvim -u NONE -n /root/story", "story", "i{word}-typed\x1b", "{word}-typed"),
        ("emacs -nw -Q /root/story", "story", "{word}-typed", "{word}-typed"),
        ("mc -d", "Quit", "echo {word}-typed\r", "{word}-typed"),
    ],
)
def test_full_screen_program_reads_keys_after_restore(
    host: Host, command: str, ready: str, keys: str, shown: str
) -> None:
    need(command.split()[0])
    with Program(host, *command.split(), options=("--env", "TERM=xterm")) as program:
        program.see(ready)
        for word in rounds(program, [*RENAMED, "map", "ShdPnd"]):
            program.type(keys.format(word=word))
            program.see(shown.format(word=word))
