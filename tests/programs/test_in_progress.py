"""Tools parked in the middle of their work: each continues, step by step, and comes to its right end.

Each step waits for a file `go.N`, which the shell makes; so the tool is known to be in the middle whenever it is parked.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import ClassVar

from tests.programs.driver import drive
from tests.programs.scenario import CACHE, WORK, Scenario, each
from tests.programs.terminal import Terminal
from tests.support.host import Host

STEPS = 5
GATE = f"#!/bin/sh\nuntil [ -e {WORK}/go.$1 ]; do sleep .05; done; echo step-$1 >> {WORK}/steps\n"
# Serves the files of WORK/served, each in STEPS pieces, piece N when go.N exists.
SLOW_SERVER = f"""
import http.server, os, subprocess
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = open("served/" + os.path.basename(self.path), "rb").read()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        size = len(body) // {STEPS} + 1
        for n in range({STEPS}):
            subprocess.run(["sh", "gate", str(n + 1)])
            self.wfile.write(body[n * size:(n + 1) * size]); self.wfile.flush()
http.server.ThreadingHTTPServer(("127.0.0.1", 8005), Handler).serve_forever()
"""


class InProgress(Scenario):
    tool: ClassVar[str]  # what runs in the background, its output in `log`
    proof: ClassVar[str]  # prints "proof=1" when the tool has done all of its work
    proof_shows: ClassVar[str] = "proof=1"
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}

    def command(self, directory: Path) -> tuple[str, ...]:
        (directory / "gate").write_text(GATE)
        return super().command(directory)

    def state(self, terminal: Terminal) -> None:
        terminal.type(f"{self.tool} > log 2>&1 < /dev/null &\n")
        terminal.type('touch go.1; watched() { until grep -s "^step-$1" steps; do sleep .1; done; }\n')
        terminal.ask("watched 1", "step-1\r", 120)

    def work(self, terminal: Terminal, number: int) -> None:
        if number < STEPS - 1:  # the last step is for `finish`
            terminal.type(f"touch go.{number + 1}\n")
            terminal.ask(f"watched {number + 1}", f"step-{number + 1}\r", 120)
        terminal.ask("jobs", "Running")

    def finish(self, terminal: Terminal) -> None:
        terminal.ask(f"touch go.{STEPS}; wait %1; echo status=$((0 + $?))", r"status=0", 120)
        terminal.ask(self.proof, self.proof_shows)


class Make(InProgress):
    """A build with two jobs at a time."""

    sample = True
    tool = "make -j2"
    version = "make --version"
    needs = ("make", "gcc")
    proof = "./program | sed s/^/proof=/"
    proof_shows = "proof=15"
    files = {
        "Makefile": "objects = $(foreach n,1 2 3 4 5,part$(n).o)\n"
        "program: main.c $(objects)\n\tgcc -o $@ $^\n"
        "part%.o: part%.c\n\tsh gate $*\n\tgcc -c -o $@ $<\n",
        "main.c": "#include <stdio.h>\nint p1(),p2(),p3(),p4(),p5();\n"
        'int main() { printf("%d\\n", p1() + p2() + p3() + p4() + p5()); }\n',
        **{f"part{n}.c": f"int p{n}() {{ return {n}; }}\n" for n in range(1, STEPS + 1)},
    }


class Download(InProgress):
    """A download from a server inside the session: the connection is kept."""

    def command(self, directory: Path) -> tuple[str, ...]:
        (directory / "server.py").write_text(SLOW_SERVER)
        (directory / "served").mkdir()
        return super().command(directory)

    def state(self, terminal: Terminal) -> None:
        terminal.type("/usr/bin/python3 server.py > server.log 2>&1 < /dev/null & disown\n")
        terminal.ask("until (: < /dev/tcp/127.0.0.1/8005) 2>&-; do sleep .1; done; echo up=$((1+1))", "up=2")
        super().state(terminal)


class Pip(Download):
    name = "pip install"
    version = f"{CACHE}/jupyter/bin/pip --version"
    needs = (str(CACHE / "jupyter" / "bin" / "pip"),)
    tool = f"{needs[0]} --timeout 600 install --no-index --target out http://127.0.0.1:8005/slow-1.0-py3-none-any.whl"
    proof = "PYTHONPATH=out /usr/bin/python3 -c 'import slow; print(f\"proof={len(slow.text)}\")'"
    proof_shows = "proof=1000000"

    def prepare(self, directory: Path) -> None:
        with zipfile.ZipFile(directory / "served" / "slow-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("slow.py", f"text = {'x' * 1_000_000!r}\n")
            wheel.writestr("slow-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: slow\nVersion: 1.0\n")
            wheel.writestr("slow-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            names = ("slow.py", "slow-1.0.dist-info/METADATA", "slow-1.0.dist-info/WHEEL", "slow-1.0.dist-info/RECORD")
            wheel.writestr("slow-1.0.dist-info/RECORD", "".join(f"{name},,\n" for name in names))


class Npm(Download):
    name = "npm install"
    version = "npm --version"
    needs = ("npm", "node")
    tool = "npm install --no-audit --no-fund --fetch-timeout=600000 http://127.0.0.1:8005/slow-1.0.0.tgz"
    proof = "node -e 'console.log(`proof=${require(\"slow\").length}`)'"
    proof_shows = "proof=1000000"
    files = {"package.json": '{"private": true}\n'}

    def prepare(self, directory: Path) -> None:
        package = directory / "package"
        package.mkdir()
        (package / "package.json").write_text('{"name": "slow", "version": "1.0.0", "main": "index.js"}\n')
        (package / "index.js").write_text(f"module.exports = '{'x' * 1_000_000}'\n")
        (package / "noise").write_bytes(os.urandom(500_000))  # so that the archive has pieces worth the name
        with tarfile.open(directory / "served" / "slow-1.0.0.tgz", "w:gz") as archive:
            archive.add(package, "package")


class Pytest(InProgress):
    tool = f"{sys.executable} -m pytest -p no:cacheprovider -v test_steps.py"
    version = f"{sys.executable} -m pytest --version"
    proof = "grep -o '[5] passed' log | sed s/^/proof=/"
    proof_shows = "proof=5 passed"
    files = {
        "test_steps.py": "import subprocess, pytest\n"
        "@pytest.fixture(scope='session')\n"
        "def seen(): return []\n"
        f"@pytest.mark.parametrize('n', range(1, {STEPS + 1}))\n"
        "def test_step(n, seen):\n"
        " seen.append(n)\n"
        " subprocess.run(['sh', 'gate', str(n)], check=True)\n"
        " assert seen == list(range(1, n + 1))\n",
        "pytest.ini": "[pytest]\n",
    }


class Git(InProgress):
    """A rebase that runs a command after each commit."""

    name = "git rebase --exec"
    version = "git --version"
    needs = ("git",)
    tool = "git -c user.name=a -c user.email=a@b rebase --exec 'sh gate $(cat n)' main topic"
    proof = "git status --short --branch | head -1; echo proof=$(git rev-list --count main..topic)"
    proof_shows = "proof=5"

    def prepare(self, directory: Path) -> None:
        script = "git init -qb main .; echo .gitignore > .gitignore; printf '%s\\n' gate 'go.*' steps log > .gitignore"
        script += "; git add .gitignore; git commit -qm base; git checkout -qb topic"
        script += f"; for i in $(seq {STEPS}); do echo $i > n; git add n; git commit -qm c$i; done"
        script += "; git checkout -q main; echo x > other; git add other; git commit -qm other"
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        script = script.replace("git commit", f"git {' '.join(identity)} commit")
        subprocess.run(["bash", "-ec", script], cwd=directory, check=True)


class Apt(InProgress):
    """A package whose set-up script takes its time: apt, dpkg in a terminal of apt's own, and the script below them."""

    name = "apt-get install"
    version = "apt-get --version"
    needs = ("apt-get", "dpkg-deb")
    tool = "DEBIAN_FRONTEND=noninteractive apt-get install -y -o APT::Sandbox::User=root ./slow.deb"
    proof = "dpkg-query -W -f '${db:Status-Status}' slow-steps | sed s/^/proof=/"
    proof_shows = "proof=installed"

    def prepare(self, directory: Path) -> None:
        control = directory / "tree" / "DEBIAN"
        control.mkdir(parents=True)
        (control / "control").write_text(
            "Package: slow-steps\nVersion: 1.0\nArchitecture: all\nMaintainer: a <a@example.org>\nDescription: steps\n"
        )
        steps = " ".join(str(n) for n in range(1, STEPS + 1))
        (control / "postinst").write_text(f"#!/bin/sh\nset -e\nfor n in {steps}; do sh {WORK}/gate $n; done\n")
        (control / "postinst").chmod(0o755)
        build = ["dpkg-deb", "--root-owner-group", "--build", directory / "tree", directory / "slow.deb"]
        subprocess.run(build, check=True, capture_output=True)


@each("Work in progress", Make, Pip, Npm, Pytest, Git, Apt)
def test_in_progress(scenario: Scenario, host: Host, tmp_path: Path) -> None:
    drive(scenario, host, tmp_path)
