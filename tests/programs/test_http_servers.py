"""HTTP servers in five languages: a counter in memory, a connection that was open before, and new connections."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from tests.programs.driver import drive
from tests.programs.scenario import Scenario, each
from tests.programs.terminal import Terminal
from tests.support.host import Host

# A client made of bash alone: `connect FD PORT`, then `request FD PATH` prints the body in brackets.
CLIENT = r"""
connect() { until eval "exec $1<>/dev/tcp/127.0.0.1/$2" 2> /dev/null; do sleep .1; done; }
request() {
    local line length=0
    printf 'GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n' "$2" >&$1
    while read -r line <&$1; do
        line=${line%$'\r'}
        case ${line,,} in content-length:*) length=${line##* } ;; '') break ;; esac
    done
    read -r -N "$length" line <&$1
    echo "[$line]"
}
"""


class HttpServer(Scenario):
    """A server in the background of the shell that is its client."""

    start: ClassVar[str]
    env = {"PATH": "/usr/sbin:/usr/bin:/bin"}

    def command(self, directory: Path) -> tuple[str, ...]:
        (directory / "client.sh").write_text(CLIENT)
        return super().command(directory)

    def state(self, terminal: Terminal) -> None:
        terminal.type(f". ./client.sh; {self.start} > log 2>&1 < /dev/null &\n")
        terminal.type("connect 7 8080\n")
        terminal.ask("request 7 /", r"\[count=1\]", 120)

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.ask("request 7 /", rf"\[count={2 * number}\]")
        terminal.type("connect 8 8080\n")
        terminal.ask("request 8 /; exec 8>&-", rf"\[count={2 * number + 1}\]")
        terminal.ask("jobs", r"Running")


class PythonHttp(HttpServer):
    name = "HTTP server in Python"
    version = "/usr/bin/python3 --version"
    sample = True
    start = "/usr/bin/python3 serve.py"
    files = {
        "serve.py": """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version, count = "HTTP/1.1", 0
    def do_GET(self):
        Handler.count += 1
        body = b"count=%d" % Handler.count
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", 8080), Handler).serve_forever()
"""
    }


class NodeHttp(HttpServer):
    name = "HTTP server in Node.js"
    version = "node --version"
    needs = ("node",)
    start = "node serve.js"
    files = {
        "serve.js": """
let count = 0
const server = require('http').createServer((_, answer) => {
    const body = 'count=' + ++count
    answer.writeHead(200, {'Content-Length': body.length}); answer.end(body)
})
server.keepAliveTimeout = server.requestTimeout = server.headersTimeout = 0
server.listen(8080, '127.0.0.1')
"""
    }


class RubyHttp(HttpServer):
    name = "HTTP server in Ruby (WEBrick)"
    version = "ruby --version"
    needs = ("ruby",)
    start = "ruby serve.rb"
    files = {
        "serve.rb": """
require 'webrick'
count = 0
server = WEBrick::HTTPServer.new(BindAddress: '127.0.0.1', Port: 8080, RequestTimeout: 100_000)
server.mount_proc('/') { |_, answer| answer.body = "count=#{count += 1}" }
server.start
"""
    }


class JavaHttp(HttpServer):
    name = "HTTP server in Java"
    version = "java --version"
    needs = ("java",)
    start = "java -Dsun.net.httpserver.idleInterval=100000 Serve.java"
    files = {
        "Serve.java": """
import com.sun.net.httpserver.HttpServer;
import java.net.InetSocketAddress;
public class Serve {
    static int count;
    public static void main(String[] words) throws Exception {
        var server = HttpServer.create(new InetSocketAddress("127.0.0.1", 8080), 0);
        server.createContext("/", exchange -> {
            var body = ("count=" + ++count).getBytes();
            exchange.sendResponseHeaders(200, body.length);
            try (var out = exchange.getResponseBody()) { out.write(body); }
        });
        server.start();
    }
}
"""
    }


class PerlHttp(HttpServer):
    name = "HTTP server in Perl"
    version = "perl -e 'print $^V'"
    needs = ("perl",)
    start = "perl serve.pl"
    files = {
        "serve.pl": r"""
use IO::Socket::INET; use IO::Select; use strict;
my $listener = IO::Socket::INET->new(LocalAddr => "127.0.0.1", LocalPort => 8080, Listen => 5, ReuseAddr => 1) or die;
my $ready = IO::Select->new($listener); my $count = 0; my %text;
while (1) {
    for my $one ($ready->can_read) {
        if ($one == $listener) { $ready->add($listener->accept); next }
        if (!sysread($one, $text{$one}, 4096, length($text{$one} // ""))) { $ready->remove($one); close $one; next }
        next unless $text{$one} =~ s/^.*?\r\n\r\n//s;
        my $body = "count=" . ++$count;
        syswrite $one, "HTTP/1.1 200 OK\r\nContent-Length: " . length($body) . "\r\n\r\n$body";
    }
}
"""
    }


class Nginx(HttpServer):
    """Master and workers; a reload after each restore brings new workers with a new configuration."""

    name = "nginx, workers as root"
    version = "nginx -v"
    needs = ("nginx",)
    user: ClassVar[str] = "root"
    start = "nginx -p $PWD -c nginx.conf -g 'daemon off;'"

    def prepare(self, directory: Path) -> None:
        (directory / "nginx.conf").write_text(
            f"user {self.user};\nworker_processes 2;\npid nginx.pid;\nerror_log error.log;\nevents {{}}\n"
            "http { access_log off; keepalive_timeout 100000;\n"
            " server { listen 127.0.0.1:8080; location / { return 200 count=1; } } }\n"
        )

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.ask("request 7 /", rf"\[count={number}\]")
        terminal.type(f"sed -i s/count=[0-9]*/count={number + 1}/ nginx.conf; old=$(pgrep -P $(cat nginx.pid))\n")
        terminal.type("nginx -p $PWD -c nginx.conf -s reload\n")
        terminal.ask("for p in $old; do while kill -0 $p; do sleep .1; done; done 2>&-; echo new=$((1+1))", "new=2")
        terminal.type("exec 7>&-; connect 7 8080\n")
        terminal.ask("request 7 /", rf"\[count={number + 1}\]")


@each("HTTP servers", PythonHttp, NodeHttp, RubyHttp, JavaHttp, PerlHttp, Nginx)
def test_http_servers(scenario: Scenario, host: Host, tmp_path: Path) -> None:
    drive(scenario, host, tmp_path)
