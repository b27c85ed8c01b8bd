"""One session under test: what is done with it, by us and by the rivals, and what each step cost."""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cmdop_migrate.criu.install.find import Criu
from cmdop_migrate.images.format import layout
from cmdop_migrate.model import Record
from cmdop_migrate.snapshot.mounts import shared_mounts
from cmdop_migrate.storage.registry import open_store
from scripts.benchlib import common, rivals, stream
from tests.support.host import CM, Host, until
from tests.support.servers import S3Server

NAME = "subject"
_TICK = re.compile(r"^t \d+ (\d+\.\d+)\r?$", re.MULTILINE)


@dataclass
class Stores:
    """An empty store of its own for each round, so that every first checkpoint is a first one."""

    kind: str
    folder: Path
    server: S3Server | None
    bucket: str = ""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        if self.kind == "s3":
            assert self.server is not None
            self.bucket = self.server.new_bucket()
            # What is new to the server is made at the first write, in half a second: neither side is to wait for that.
            self.server.client().put_object(Bucket=self.bucket, Key="first", Body=b"1")

    @property
    def url(self) -> str:
        if self.kind == "file":
            return f"file://{self.folder}/store"
        assert self.server is not None
        return self.server.url(self.bucket, "ours")

    @property
    def archive(self) -> Path:
        return self.folder / "script.tar.zst"

    def server_cpu(self) -> float:
        """Seconds that the store's own process has used so far; a directory has none."""
        if self.server is None or self.server.process is None or self.kind != "s3":
            return 0.0
        times = psutil.Process(self.server.process.pid).cpu_times()
        return times.user + times.system

    def remove(self) -> None:
        shutil.rmtree(self.folder)
        if self.server is not None and self.bucket:
            client = self.server.client()
            for page in client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket):
                for one in page.get("Contents", []):
                    client.delete_object(Bucket=self.bucket, Key=one["Key"])


class Subject:
    def __init__(self, host: Host, criu: Criu, memory: Path, payload: rivals.Payload, name: str = NAME) -> None:
        self.host, self.criu, self.memory, self.program, self.name = host, criu, memory, payload.program, name
        self.session = ""
        self.asked = 0

    def start(self) -> None:
        python = CM[0]
        started = self.host.start(python, *self.program(), name=self.name)
        self.session = started["session"]
        self._wait("ready")

    def end(self) -> None:
        self.host.ok("kill", self.name)

    def tell(self, word: str) -> None:
        self._ask(word)

    def digest(self) -> str:
        mark = self._ask("digest", r" [0-9a-f]+\.")
        found: str = re.findall(rf"done {mark}\. ([0-9a-f]+)\.", self.host.output(self.name))[-1]
        return found

    def raw_dump(self) -> float:
        common.settle()
        took = rivals.dump(self.criu, self.target(), self.memory / "raw")
        shutil.rmtree(self.memory / "raw")
        return took

    def script(self, places: Stores, key: str) -> dict[str, float]:
        common.settle()
        put = None
        if places.kind == "s3":
            assert places.server is not None
            put = rivals.copier("up", places.server, places.bucket, "script.tar.zst")
        done = rivals.script(self.criu, self.target(), self.memory, put, places.archive)
        return {
            f"{key}_total": done.total,
            f"{key}_dump": done.dump,
            f"{key}_pack": done.pack,
            f"{key}_send": done.send,
            f"{key}_cpu": done.cpu,
            f"{key}_stored": done.stored,
        }

    def stream(self, places: Stores, key: str) -> dict[str, float]:
        """Memory and nothing else, with nothing done to it but what cannot be left out."""
        store = open_store(places.url)
        store.put(layout.pack_name(layout.new_id()), bytes(stream.PIPE))  # what a first use costs is over
        common.settle()
        before = places.server_cpu()
        done = stream.stream(self.criu, self.target(), self.memory / "stream", store)
        cpu = done.cpu + places.server_cpu() - before
        return {f"{key}_total": done.total, f"{key}_cpu": cpu}

    def fetch_script(self, places: Stores) -> dict[str, float]:
        """What brings the script's archive back, and what unpacks it."""
        here = self.memory / "fetched"
        if places.kind == "file":
            rivals.forget(places.archive)
        common.settle()
        began = time.monotonic()
        if places.kind == "s3":
            assert places.server is not None
            rivals.copier("down", places.server, places.bucket, "script.tar.zst")(here)
        else:
            shutil.copyfile(places.archive, here)
        fetch = time.monotonic() - began
        unpack = rivals.unpack(here, self.memory)
        here.unlink()
        return {"script_fetch": fetch, "script_unpack": unpack}

    def checkpoint(self, places: Stores, key: str, park: bool = False) -> dict[str, float]:
        cost = self._call(places, "checkpoint", self.name, *([] if park else ["--leave-running"]))
        answer = cost.answer
        found = {f"{key}_phase_{name}": seconds for name, seconds in answer["phases"].items()}
        return found | {
            f"{key}_total": cost.wall,
            f"{key}_cpu": cost.cpu,
            f"{key}_frozen": answer["frozen_s"],
            f"{key}_new": answer["bytes"]["new"],
            f"{key}_stored": answer["bytes"]["stored"],
            f"{key}_peak": cost.peak_rss,
        }

    def restore(self, places: Stores, key: str, lazy: bool) -> dict[str, float]:
        """Restore it once it is parked. The session itself reports when it ran again."""
        before = len(self._completions())
        cost = self._call(places, "restore", self.name, *(["--lazy"] if lazy else []))
        phases = cost.answer["phases"]
        first = min(until(lambda: self._printed_since(cost.began), 30, "it prints"))
        whole = until(lambda: self._completions()[before:] or phases.get("memory") is None, 120, "all memory is there")
        found = {f"{key}_phase_{name}": seconds for name, seconds in phases.items()}
        found |= {
            f"{key}_first_output": first - cost.began,
            f"{key}_total": cost.wall,
            f"{key}_cpu": cost.cpu,
            f"{key}_peak": cost.peak_rss,
        }
        if isinstance(whole, list):
            found[f"{key}_complete"] = whole[0] - cost.began
        return found

    def _printed_since(self, began: float) -> list[float]:
        return [stamp for stamp in map(float, _TICK.findall(self.host.output(self.name))) if stamp > began]

    def _completions(self) -> list[float]:
        path = self.host.state / "events.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [_stamp(row) for row in rows if row.get("event") == "memory_complete"]

    def target(self) -> rivals.Target:
        path = self.host.state / "sessions" / self.session / "session.json"
        record = Record.from_json(json.loads(path.read_text()))
        group = self.host.group(self.session)
        pid = next(pid for pid in self.host.pids(self.session) if self._inner(pid) == 1)
        return rivals.Target(group, pid, shared_mounts(record, ""))

    def _inner(self, pid: int) -> int:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
        return 0

    def _call(self, places: Stores, *words: str) -> common.Cost:
        common.settle()
        env = self.host.env(CMDOP_MIGRATE_STORE=places.url)
        return common.call([*CM, "--json", *words], env)

    def _ask(self, word: str, more: str = "") -> str:
        """Until the program says it is done; -> the mark its answer has."""
        self.asked += 1
        mark = f"q{self.asked}"
        self.host.ok("send", self.name, f"{word} {mark}", "--enter")
        self._wait(rf"done {mark}\.{more}")
        return mark

    def _wait(self, pattern: str, *more: str) -> None:
        self.host.cm_json("wait", self.name, "--for", pattern, "--timeout", "120s", *more, timeout=130)


def _stamp(row: dict[str, Any]) -> float:
    return float(row["time"])
