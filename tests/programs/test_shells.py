"""Shells with jobs, and multiplexers with shells in shells: job control must work at every level."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from tests.programs.driver import drive
from tests.programs.scenario import Scenario, each
from tests.programs.terminal import Terminal
from tests.support.host import Host, until

PROMPT = r"bash-\S+[#$]"


def job_control(terminal: Terminal, seconds: int) -> None:
    """Start a foreground job, stop it with Ctrl-Z, see it listed, continue it, and interrupt it."""
    terminal.type(f"sleep {seconds}\n")
    foreground(terminal, seconds)
    terminal.mark()
    terminal.type("\x1a")
    terminal.see("Stopped")
    terminal.type("fg\n")
    terminal.see(f"sleep {seconds}")
    foreground(terminal, seconds)
    terminal.type("\x03")
    terminal.ask(f"echo after=$(({seconds}+1))", f"after={seconds + 1}")


def foreground(terminal: Terminal, seconds: int) -> None:
    """Wait until the job has its terminal: a key pressed earlier would go to the shell."""

    def has_terminal() -> bool:
        for pid in terminal.host.pids(terminal.session):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if words[:2] == [b"sleep", str(seconds).encode()]:
                return fields[2] == fields[5]  # process group, the terminal's foreground group
        return False

    until(has_terminal, 60, f"sleep {seconds} in the foreground")


class BashJobs(Scenario):
    """A running job, one stopped by Ctrl-Z, one stopped because it reads the terminal, and a pipeline."""

    name = "bash with jobs"
    version = "bash --version"
    sample = True
    stopped = 3

    def state(self, terminal: Terminal) -> None:
        terminal.type("sleep 5001 &\n")
        terminal.see(r"\[1\] \d+")
        terminal.type("cat &\n")
        terminal.see(r"\[2\] \d+")
        terminal.type("sleep 5002 | cat\n")
        foreground(terminal, 5002)
        terminal.type("\x1a")
        terminal.see("Stopped")
        terminal.ask("secret=$((6*7)); echo =$secret=", "=42=")

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.ask(
            "jobs", r"\[1\].? +Running +sleep 5001 &\s+\[2\]. +Stopped.* cat\s+\[3\]. +Stopped +sleep 5002 \| cat"
        )
        terminal.ask(f"echo $secret-{number}", f"42-{number}")
        job_control(terminal, 6000 + number)


class NestedBash(Scenario):
    name = "bash in bash in bash"
    version = "bash --version"

    def state(self, terminal: Terminal) -> None:
        for level in (1, 2):
            terminal.ask(f"level{level}=yes bash --norc", PROMPT)
        terminal.ask("inner=5; echo =$((inner*5))=", "=25=")

    def work(self, terminal: Terminal, number: int) -> None:
        job_control(terminal, 6000 + number)
        terminal.ask("echo =$level1$level2$((inner*5))=", "=yesyes25=")

    def finish(self, terminal: Terminal) -> None:
        terminal.type("exit\n")
        terminal.ask("echo =$level1$level2=", "=yes=")
        job_control(terminal, 6010)


class LessInBash(Scenario):
    """A pager that is the foreground job of a shell: it must not come back as a stopped job."""

    name = "less in bash"
    version = "less --version"
    needs = ("less",)
    files = {"text": "".join(f"line-{number:05d}\n" for number in range(1, 2001))}

    def state(self, terminal: Terminal) -> None:
        terminal.ask("kept=$((6*7)); echo =$kept=", "=42=")
        terminal.type("less text\n")
        terminal.shows(r"\Aline-00001")

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.type("j")
        terminal.shows(rf"\Aline-{1 + number:05d}")

    def finish(self, terminal: Terminal) -> None:
        terminal.type("q")
        terminal.ask("echo =$((kept+1))=$(jobs)=", "=43==")


class Tmux(Scenario):
    """Two panes, in one of them a shell in a shell."""

    argv = ("tmux", "-f", "/dev/null", "new-session", "bash --norc")
    version = "tmux -V"
    nested: ClassVar[str] = "bash --norc"

    def state(self, terminal: Terminal) -> None:
        terminal.shows(PROMPT)
        terminal.type(f"{self.nested}\n")
        terminal.type("inner=$((40+2)); echo set=$inner\n")
        terminal.shows("set=42")
        terminal.type("\x02%")
        until(lambda: len(terminal.host.pids(terminal.session)) >= 6, 60, "the second pane's shell")
        terminal.type("right=$((1+1)); echo set=$right\n")
        terminal.shows("set=2")

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.type(f"clear; echo right=$right-{number}\n")
        terminal.shows(f"right=2-{number}$")
        terminal.type("\x02o")  # the other pane
        pane_job_control(terminal, 6000 + number)
        terminal.type(f"clear; echo left=$inner-{number}\n")
        terminal.shows(f"^left=42-{number}")
        terminal.type("\x02o")


class TmuxSu(Tmux):
    name = "su in tmux"
    nested = "su root"


def pane_job_control(terminal: Terminal, seconds: int) -> None:
    """`job_control` where the multiplexer paints the screen."""
    terminal.type(f"clear; sleep {seconds}\n")
    foreground(terminal, seconds)
    terminal.type("\x1a")
    terminal.shows(r"Stopped +sleep")
    terminal.type("clear; fg\n")
    foreground(terminal, seconds)
    terminal.type("\x03")
    terminal.type(f"clear; echo after=$(({seconds}+1))\n")
    terminal.shows(f"after={seconds + 1}")


class Screen(Scenario):
    """Two windows, in one of them a shell in a shell."""

    argv = ("screen", "-c", "rc")
    files = {"rc": "startup_message off\nshell bash\ndefscrollback 100\nscreen -t one bash --norc\n"}
    version = "screen --version"
    env = {"SCREENDIR": "/root/home/screens"}
    before = "mkdir -m 700 /root/home/screens"

    def state(self, terminal: Terminal) -> None:
        terminal.shows(PROMPT)
        terminal.type("bash --norc\n")
        terminal.type("inner=$((40+2)); echo set=$inner\n")
        terminal.shows("set=42")
        terminal.type("\x01:screen bash --norc\n")
        terminal.hides("set=42")
        terminal.type("second=$((1+1)); echo set=$second\n")
        terminal.shows("set=2")

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.type(f"clear; echo second=$second-{number}\n")
        terminal.shows(f"second=2-{number}$")
        terminal.type("\x010")
        terminal.hides("second=")
        pane_job_control(terminal, 6000 + number)
        terminal.type(f"clear; echo first=$inner-{number}\n")
        terminal.shows(f"^first=42-{number}")
        terminal.type("\x011")
        terminal.hides("first=")


@each("Shells and multiplexers", BashJobs, NestedBash, LessInBash, Tmux, TmuxSu, Screen)
def test_shells(scenario: Scenario, host: Host, tmp_path: Path) -> None:
    drive(scenario, host, tmp_path)
