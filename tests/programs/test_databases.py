"""Databases with a client's transaction or watch open while they are parked."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from tests.conftest import CAP_SYS_RESOURCE, has_capability
from tests.programs.driver import drive
from tests.programs.scenario import Scenario, each
from tests.programs.terminal import Terminal
from tests.programs.test_http_servers import Nginx
from tests.support.host import Host

# Hosts whose root has every capability can dump such sessions today.
OTHER_USERS = (
    "" if has_capability(CAP_SYS_RESOURCE) else "3 of 8: root lacks CAP_SYS_RESOURCE here, processes of other users"
)
IO_URING = "3 of 8: it holds io_uring descriptors, which CRIU cannot dump"


class Redis(Scenario):
    """A connection in the middle of MULTI, and new ones."""

    version = "redis-server --version"
    needs = ("redis-server", "redis-cli")

    def state(self, terminal: Terminal) -> None:
        terminal.type("redis-server --port 6380 --save '' --appendonly yes --dir $PWD > log 2>&1 < /dev/null &\n")
        terminal.ask("until redis-cli -p 6380 set base $((6*7)); do sleep .1; done", r"^OK")
        terminal.type("exec 7<>/dev/tcp/127.0.0.1/6380\n")
        terminal.ask(r"printf 'MULTI\r\n' >&7; read -r a <&7; echo got=$a", r"got=\+OK")

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.ask(r"printf 'INCR base\r\n' >&7; read -r a <&7; echo got=$a", r"got=\+QUEUED")
        terminal.ask(f"redis-cli -p 6380 rpush list {number}", rf"\(integer\) {number}|^{number}")
        terminal.ask("redis-cli -p 6380 get base", r"\b42\b")

    def finish(self, terminal: Terminal) -> None:
        terminal.type(r"printf 'EXEC\r\n' >&7; read -r a <&7; echo got=$a" + "\n")
        terminal.see(r"got=\*4")
        terminal.ask("redis-cli -p 6380 get base", r"\b46\b")


class Etcd(Scenario):
    """A watch that was open before must report what is put after."""

    version = "etcd --version"
    needs = ("etcd", "curl")

    def state(self, terminal: Terminal) -> None:
        terminal.type("etcd --data-dir data > log 2>&1 < /dev/null &\n")
        terminal.type("api() { curl -s --noproxy '*' http://127.0.0.1:2379/v3/\"$@\"; }\n")
        terminal.ask(
            'until api kv/put -d \'{"key":"YQ==","value":"MA=="}\' | grep -o \'revision\'; do sleep .2; done',
            "revision\r",
        )
        terminal.type('api watch -N -d \'{"create_request":{"key":"YQ=="}}\' > watch 2>&1 &\n')
        terminal.ask("until grep -o 'creat[e]d' watch; do sleep .1; done", "created\r")

    def work(self, terminal: Terminal, number: int) -> None:
        value = ("MQ==", "Mg==", "Mw==", "NA==")[number - 1]
        terminal.type(f'api kv/put -d \'{{"key":"YQ==","value":"{value}"}}\' > put\n')
        shown = f"until grep -o '{value[:1]}[{value[1]}]==' watch; do sleep .1; done"
        terminal.ask(shown, f"{value}\r")
        terminal.ask('api kv/range -d \'{"key":"YQ=="}\' | grep -o \'version":"[0-9]*\'', f'version":"{number + 1}')


SQLITE = """
import sqlite3, sys
mode = sys.argv[1]
before = sqlite3.connect("kept.db", isolation_level=None)
before.execute(f"pragma journal_mode={mode}")
before.execute("create table t (n int)")
for line in sys.stdin:
    try:
        before.execute("insert into t values (?)", (int(line),))
        after = sqlite3.connect("kept.db", isolation_level=None)  # another connection in the same process
        after.execute("begin immediate"); after.execute("insert into t values (?)", (10 * int(line),))
        try: before.execute("pragma busy_timeout=0"); before.execute("begin immediate"); print("lock ignored"); break
        except sqlite3.OperationalError as error: locked = "locked" in str(error)
        after.execute("commit"); after.close()
        print("locked", locked, "rows", 100 + before.execute("select count(*) from t").fetchone()[0], flush=True)
    except sqlite3.Error as error: print("failed:", error, flush=True)
"""


class Sqlite(Scenario):
    """A database that is open for writing, and a second connection made after the restore."""

    name = "SQLite, rollback journal"
    argv = ("/usr/bin/python3", "write.py", "delete")
    version = "/usr/bin/python3 -c 'import sqlite3; print(sqlite3.sqlite_version)'"
    files = {"write.py": SQLITE}
    expected = "3 of 8: SQLite compares inode numbers, which a restore changes"

    def state(self, terminal: Terminal) -> None:
        terminal.ask("0", "locked True rows 102")

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.ask(str(number), f"locked True rows {102 + 2 * number}")


class SqliteWal(Sqlite):
    name = "SQLite, WAL"
    argv = ("/usr/bin/python3", "write.py", "wal")
    expected = "3 of 8: SQLite knows its own locks by the inode number, which a restore changes"


class SqlClient(Scenario):
    """A client with an open transaction, fed by the shell through a coprocess."""

    server: ClassVar[str]
    ready: ClassVar[str]
    client: ClassVar[str]
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}

    def state(self, terminal: Terminal) -> None:
        terminal.type(f"{self.server} > log 2>&1 < /dev/null &\n")
        terminal.ask(f"until {self.ready} > /dev/null 2>&1; do sleep .2; done; echo up=$((1+1))", "up=2", 120)
        terminal.type(f'coproc P {{ {self.client}; }}; sql() {{ echo "$1" >&${{P[1]}}; }}\n')
        terminal.type("sql 'create table t (n int); begin; insert into t values (0);'\n")

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.type(f"sql 'insert into t values ({number}); select 1000 + sum(n) from t;'\n")
        total = 1000 + number * (number + 1) // 2
        terminal.ask(f'while read -r a <&${{P[0]}} && [ "$a" != {total} ]; do :; done; echo sum=$a', f"sum={total}")
        terminal.ask(f"echo 'select 40 + count(*) from t;' | {self.client} | grep -o '4[0]'", r"40\r")

    def finish(self, terminal: Terminal) -> None:
        terminal.type("sql 'commit; select 777;'\n")
        terminal.ask('while read -r a <&${P[0]} && [ "$a" != 777 ]; do :; done; echo end=$a', "end=777")
        terminal.ask(f"echo 'select 40 + count(*) from t;' | {self.client} | grep -o '4[5]'", r"45\r")


class Postgres(SqlClient):
    """As its own user: it refuses to run as root."""

    name = "PostgreSQL"
    version = "psql --version"
    needs = ("pg_ctlcluster", "psql", "setpriv")
    expected = OTHER_USERS
    AS = "setpriv --reuid postgres --regid postgres --clear-groups "
    before = (
        "mkdir -m 755 -p /root/work; chmod 755 /root /root/work; install -d -o postgres /root/work/db;"
        f" cd db; export PGBIN=$(echo /usr/lib/postgresql/*/bin); {AS} $PGBIN/initdb -D . -A trust -N > ../init.log 2>&1"
    )
    server = AS + "$PGBIN/postgres -D . -k /root/work/db"
    ready = "psql -h /root/work/db -U postgres -c 'select 1'"
    client = "psql -h /root/work/db -U postgres -At"


class MariaDb(SqlClient):
    """With its default input and output, which is io_uring where the kernel has it."""

    name = "MariaDB"
    version = "mariadbd --version"
    needs = ("mariadbd", "mariadb", "mariadb-install-db")
    expected = IO_URING
    before = "mkdir db; mariadb-install-db --no-defaults --user=root --datadir=$PWD/db > install.log 2>&1"
    server = "mariadbd --no-defaults --user=root --datadir=$PWD/db --socket=$PWD/sock --skip-networking"
    client = "mariadb --no-defaults --socket=$PWD/sock -N --unbuffered test"
    ready = "mariadb --no-defaults --socket=$PWD/sock -e 'create database if not exists test'"


class MariaDbPlain(MariaDb):
    name = "MariaDB without native AIO"
    expected = ""
    server = MariaDb.server + " --innodb-use-native-aio=0"
    advice = "`innodb_use_native_aio=0`"


class NginxUser(Nginx):
    name = "nginx, workers as www-data"
    user = "www-data"
    expected = OTHER_USERS


@each("Databases and daemons", Redis, Etcd, Sqlite, SqliteWal, Postgres, MariaDb, MariaDbPlain, NginxUser)
def test_databases(scenario: Scenario, host: Host, tmp_path: Path) -> None:
    drive(scenario, host, tmp_path)
