"""Real programs, each checkpointed, ended, restored, compared, and shown to resume with what it had in memory."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.host import Host, read_proc, until
from tests.support.program_session import Program

PYTHON = sys.executable


def need(*tools: str) -> None:
    for tool in tools:
        if shutil.which(tool, path="/usr/bin:/bin:/usr/sbin:/sbin") is None:
            pytest.skip(f"{tool} is not installed")


def test_bash_with_running_and_stopped_jobs(host: Host) -> None:
    with Program(host, "bash", "--norc", options=("--env", "KEPT=yes", "--cwd", "/usr")) as bash:
        bash.type("umask 027; nice -n 5 sleep 1001 & secret=$((6*7)); PS1='> '\n")
        bash.see(r"\[1\] \d+")
        bash.type("sleep 1002\n")
        until(lambda: b"1002" in b"".join(read_proc(p, "cmdline") for p in host.pids(bash.session)))
        bash.type("\x1a")
        bash.see("Stopped")
        bash.type("true\n")
        bash.through()
        bash.type("jobs; echo $secret-$KEPT-$PWD-$(umask)\n")
        bash.see(r"\[1\]-  Running +nice -n 5 sleep 1001 &\r\n\[2\]\+  Stopped +sleep 1002\r\n42-yes-/usr-0027")
        bash.type("fg\n")  # job control works on: to the foreground, stopped, continued, interrupted
        bash.see("sleep 1002")
        bash.type("\x1a")
        bash.see("Stopped")
        bash.type("bg; fg %1\n")
        bash.see(r"nice -n 5 sleep 1001\r\n")
        bash.type("\x03")
        bash.type("echo here > /dev/tty; jobs\n")
        bash.see(r"here\r\n\[2\]\+  Running +sleep 1002 &")


def names(host: Host, session: str) -> list[str]:
    found = []
    for pid in host.pids(session):
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/comm").read_text().strip())
    return found


def test_a_shell_in_a_shell_keeps_job_control(host: Host) -> None:
    """Not only the first one: each has its controlling terminal."""
    with Program(host, "bash", "--norc") as bash:
        bash.type("bash --norc\n")
        until(lambda: len(host.pids(bash.session)) == 3)
        bash.type("echo in=$SHLVL\n")
        bash.see(r"in=\d")
        bash.through()
        bash.type("sleep 1003\n")
        until(lambda: "sleep" in names(host, bash.session))  # only now is it the foreground job that Ctrl-Z stops
        bash.type("\x1a")
        bash.see(r"Stopped +sleep 1003")
        bash.type("kill %1; exit\n")
        bash.see("exit")


def test_python_repl(host: Host) -> None:
    with Program(host, PYTHON, "-q") as python:
        python.see(">>> ")
        python.type("import os; data = {n: os.urandom(8) for n in range(1000)}; total = hash(tuple(data.values()))\n")
        python.see(">>> ")
        python.through()
        python.type("print('same' if hash(tuple(data.values())) == total else 'other', len(data))\n")
        python.see(r"\nsame 1000")


def test_vim_mid_edit(host: Host) -> None:
    need("vim")
    with Program(host, "vim", "-u", "NONE", "-n", "/root/story.txt") as vim:
        vim.see("story.txt")
        vim.type("ionce upon\ra time")
        vim.see("a time")
        vim.through()
        assert not vim.path("/root/story.txt").exists()
        vim.type(" there was\x1b:w\r")
        assert vim.read("/root/story.txt") == "once upon\na time there was\n"
        vim.type("u:x\r")  # its undo history too
        until(lambda: not host.pids(vim.session))


def test_sqlite_in_a_transaction(host: Host) -> None:
    need("sqlite3")
    with Program(host, "sqlite3", "/root/t.db") as sqlite:
        sqlite.see("sqlite> ")
        sqlite.type("create table t(n); insert into t values (1); begin; insert into t values (2),(3);\n")
        sqlite.type("select 'sum', sum(n) from t;\n")
        sqlite.see(r"sum\|6")
        sqlite.through()
        sqlite.type("select 'sum', sum(n) from t;\n")
        sqlite.see(r"sum\|6")
        sqlite.type("rollback; select 'sum', sum(n) from t;\n")
        sqlite.see(r"sum\|1")


def test_redis_with_data_and_a_client(host: Host) -> None:
    need("redis-server", "redis-cli")
    server = "redis-server --port 7001 --save '' --daemonize no --loglevel warning --io-threads 1"
    with Program(host, "bash", "--norc", "-c", f"cd /root; {server} & exec bash --norc") as redis:
        redis.type("until redis-cli -p 7001 ping; do sleep .05; done\n")
        redis.see("PONG")
        redis.type("seq 1 5000 | sed 's/.*/set key& value&/' | redis-cli -p 7001 --pipe\n")
        redis.see("replies: 5000")
        redis.type("redis-cli -p 7001\n")
        redis.see("7001> ")
        redis.type("multi\r")
        redis.see(r"\(TX\)> ")  # what is typed before it prompts is thrown away
        redis.type("incr counter\r")
        redis.see("QUEUED")
        redis.through(allowed=[r"fd \d+: .*(?:pos|eventfd)"])
        redis.type("exec\r")  # the client's connection is the one it had, in the middle of a transaction
        redis.see(r"\(integer\) 1[^(]*7001> ")
        redis.type("dbsize\r")
        redis.see(r"\(integer\) 5001")


def test_node_with_a_timer(host: Host) -> None:
    need("node")
    script = "let n = 0; const seen = new Map();"
    script += " setInterval(() => { seen.set(n, 'x' + n); process.stdout.write(`tick ${n++} ${seen.size}\\n`) }, 50)"
    with Program(host, "node", "-e", script, options=("--env", "UV_USE_IO_URING=0")) as node:
        node.see(r"tick 5 6\r")
        node.through(still=False)
        last = int(node.output().split("tick ")[-1].split()[0])
        node.see(rf"tick {last + 5} {last + 6}\r")
        ticks = [
            int(line.split()[1])
            for line in node.output().splitlines()
            if line.startswith("tick ") and line[-1].isdigit()
        ]
        assert ticks == list(range(len(ticks)))


def test_tmux_inside(host: Host) -> None:
    need("tmux")
    # tmux takes keys that follow each other within a millisecond for a paste, and does not look for its prefix in it
    start = ("start-server", ";", "set", "-g", "assume-paste-time", "0", ";", "new-session", "bash --norc")
    with Program(host, "tmux", "-f", "/dev/null", *start) as tmux:
        tmux.see("bash-")
        tmux.type("export inner=$((40+2)); echo set=$inner\n")
        tmux.see("set=42")
        tmux.type("\x02%")  # a second pane
        until(lambda: len(host.pids(tmux.session)) >= 5, 20)
        tmux.type("echo right=$((1+1))\n")
        tmux.see("right=2")
        tmux.through()
        tmux.type("sleep 1004\n")
        until(lambda: any(b"1004" in read_proc(p, "cmdline") for p in host.pids(tmux.session)))
        tmux.type("\x1a")
        tmux.see("Stopped")
        tmux.type("\x02oecho left=$inner\n")  # the other pane
        tmux.see("left=42")


def test_a_compile_in_progress(host: Host) -> None:
    need("make", "gcc")
    setup = (
        "mkdir -p /root/src; cd /root/src; for i in $(seq 24); do for j in $(seq 150); do"
        ' echo "int f${i}_$j(int x) { return x * $j + $i; }"; done > m$i.c; done;'
        " { for i in $(seq 24); do echo \"int f${i}_7(int);\"; done; echo '#include <stdio.h>';"
        " echo 'int main() { printf(\"result %d\\n\", 0';"
        " for i in $(seq 24); do echo \"+ f${i}_7(1)\"; done; echo '); }'; } > main.c;"
        " printf 'prog: $(patsubst %%.c,%%.o,$(wildcard *.c))\\n\\tgcc -o $@ $^\\n' > Makefile;"
        " CFLAGS=-O2 make -j2 && ./prog; exec sleep 1000"
    )
    with Program(host, "bash", "-c", setup) as make:
        make.see(r"-o m1\d\.o")
        make.through(still=False)
        make.see(rf"result {sum(7 + n for n in range(1, 25))}\r", 60)
        assert "Error" not in make.output()


def test_a_pipeline_under_load_loses_no_byte(host: Host) -> None:
    size = 2_000_000_000  # some seconds' worth
    count = f"yes 0123456789abcde | head -c {size} | tee >(md5sum > /root/sum) | cat | wc -c"
    command = (
        f"until [ -e /root/start ]; do sleep .02; done; echo going; {count}; sleep .2; cat /root/sum; exec sleep 1000"
    )
    with Program(host, "bash", "-c", command) as pipeline:
        pipeline.path("/root/start").touch()
        pipeline.see("going")
        pipeline.through(still=False)
        assert str(size) not in pipeline.output()[:20], "it was over before the checkpoint"
        pipeline.see(rf"\n{size}\r\n", 60)
        digest = hashlib.md5()
        for _ in range(2000):
            digest.update(b"0123456789abcde\n" * 62_500)
        pipeline.see(digest.hexdigest())


SERVE = """
import hashlib, http.server, os, threading, sys, socket
body = bytes(os.urandom(1 << 16)) * 256
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        for at in range(0, len(body), 1 << 16):
            self.wfile.write(body[at:at + (1 << 16)])
    def log_message(self, *a): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 7002), H)
print("digest", hashlib.sha256(body).hexdigest(), flush=True)  # before anybody is answered
threading.Thread(target=server.serve_forever, daemon=True).start()
threading.Event().wait()
"""

FETCH = """
import hashlib, urllib.request, time, os
answer = urllib.request.urlopen("http://127.0.0.1:7002/")
h = hashlib.sha256(); size = 0
while part := answer.read(1 << 14):
    h.update(part); size += len(part)
    if size == 1 << 20:
        print("half", flush=True)
        while not os.path.exists("/root/go"): time.sleep(.02)
print("fetched", size, h.hexdigest(), flush=True)
"""


def test_a_download_over_loopback_resumes(host: Host, tmp_path: Path) -> None:
    (tmp_path / "serve.py").write_text(SERVE)
    (tmp_path / "fetch.py").write_text(FETCH)
    command = f"cp {tmp_path}/*.py /root; cd /root; {PYTHON} serve.py &"
    command += f" until {PYTHON} fetch.py 2>/dev/null; do sleep .1; done; exec sleep 1000"
    with Program(host, "bash", "-c", command) as web:
        digest = web.see("digest [0-9a-f]{64}").split()[1]
        web.see("half")
        web.through(allowed=[r"queued"])
        web.path("/root/go").touch()
        web.see(f"fetched {256 << 16} {digest}")


def test_nginx(host: Host, tmp_path: Path) -> None:
    need("nginx", "curl")
    configuration = (
        "user root; worker_processes 2; pid /run/n.pid; error_log /root/e.log; events {} "
        "http { access_log off; server { listen 127.0.0.1:7003; "
        'location / { return 200 "nginx $connection_requests\\n"; } } }'
    )
    with Program(host, "bash", "--norc") as nginx:
        nginx.type(f"cat > /root/n.conf <<'E'\n{configuration}\nE\n")
        nginx.type("nginx -c /root/n.conf && curl -s localhost:7003; PS1='> '\n")
        nginx.see("nginx 1")
        nginx.through()
        nginx.type("curl -s http://127.0.0.1:7003 http://127.0.0.1:7003\n")
        nginx.see("nginx 1\r\nnginx 2")
        nginx.type("nginx -c /root/n.conf -s quit; while pidof nginx; do sleep .05; done; echo quit\n")
        nginx.see("\nquit")
