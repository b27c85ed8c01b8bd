"""Development servers: an edit made after a restore must be noticed and served."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from tests.programs.driver import drive
from tests.programs.scenario import MODULES, Scenario, each
from tests.programs.terminal import Terminal
from tests.support.host import Host

FETCH = "curl -s --max-time 20 --noproxy '*' http://127.0.0.1:"
PAGE = "<!doctype html><title>t</title><script type=module src=/main.js></script>\n"


class DevServer(Scenario):
    """A server in the background of a shell that edits sources and fetches what is made of them."""

    start: ClassVar[str]
    url: ClassVar[str]
    env = {"PATH": "/usr/bin:/bin"}
    needs = ("node", "curl", str(MODULES / ".bin" / "vite"))
    before = f"ln -s {MODULES} node_modules"
    files = {
        "main.js": "import {v} from './value.js'; console.log(v)\n",
        "value.js": "export const v = 'edit-0'\n",
        "index.html": PAGE,
    }

    def state(self, terminal: Terminal) -> None:
        # vite ends at the end of its input, and is stopped when it reads the terminal from the background.
        terminal.type(f"sleep 100000 | {self.start} > log 2>&1 &\n")
        terminal.ask(f"until {FETCH}{self.url} | grep -o 'edit-[0]'; do sleep .2; done", "edit-0")

    def work(self, terminal: Terminal, number: int) -> None:
        edit = f"v=edit; echo \"export const v = '$v-{number}'\" > value.js"
        fetch = f"{FETCH}{self.url} | grep -o 'edit-[{number}]'"
        # Written again until it is noticed: a watcher may ignore a change that follows another within milliseconds.
        terminal.ask(f"for i in $(seq 50); do {edit}; sleep .5; {fetch} && break; done", f"edit-{number}")
        terminal.ask("jobs", r"Running")


class Vite(DevServer):
    version = f"node {MODULES}/vite/bin/vite.js --version"
    start = "node node_modules/vite/bin/vite.js --host 127.0.0.1 --port 5173 --strictPort"
    url = "5173/value.js"


class Esbuild(DevServer):
    version = f"{MODULES}/esbuild/bin/esbuild --version"
    start = "node_modules/esbuild/bin/esbuild main.js --bundle --outdir=out --watch=forever --servedir=out --serve=127.0.0.1:8001"
    url = "8001/main.js"


class Webpack(DevServer):
    name = "webpack dev server"
    version = f"node -p 'require(\"{MODULES}/webpack-dev-server/package.json\").version'"
    start = "node node_modules/webpack-cli/bin/cli.js serve"
    url = "8002/main.js"
    files = {
        **DevServer.files,
        "webpack.config.js": "module.exports = {mode: 'development', entry: './main.js', devtool: false,"
        " output: {path: __dirname + '/out', filename: 'main.js'},"
        " devServer: {host: '127.0.0.1', port: 8002}}\n",
    }


class NodeWatch(DevServer):
    """Node's own restart on change: a child process that is replaced by a new one."""

    name = "node --watch"
    version = "node --version"
    start = "node --watch serve.mjs"
    url = "8003/"
    files = {
        **DevServer.files,
        "package.json": '{"type": "module"}\n',
        "serve.mjs": "import http from 'node:http'; import {v} from './value.js';\n"
        "http.createServer((_, answer) => answer.end(v)).listen(8003, '127.0.0.1')\n",
    }


@each("Development servers", Vite, Esbuild, Webpack, NodeWatch)
def test_development_servers(scenario: Scenario, host: Host, tmp_path: Path) -> None:
    drive(scenario, host, tmp_path)
