"""Check that facts round-trip between hosts as JSON, and that invalid JSON is refused."""

from __future__ import annotations

import json
import os
import stat
import struct
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cmdop_migrate.preflight.facts import cpu, processes
from cmdop_migrate.preflight.facts.cpu import Cpu
from cmdop_migrate.preflight.facts.host import HostFacts, HostProblem, HostQuery, LeaseFacts, Port, Service
from tests.unit.plan_facts import a_host, a_session

COUNT = st.integers(0, 1 << 63)
TEXT = st.text(max_size=12)
TEXTS = st.frozensets(TEXT, max_size=4)
PORT = st.builds(Port, TEXT, TEXT, st.integers(0, 65535))
SERVICE = st.builds(Service, TEXT, TEXT, st.none() | TEXT)
CPU = st.builds(Cpu, TEXT, COUNT, TEXTS, st.none() | COUNT, st.none() | COUNT)
FILE = st.tuples(TEXT, COUNT, st.integers(), st.none() | TEXT, st.none() | TEXT)
ASKS = st.builds(
    HostQuery,
    session=TEXT,
    name=TEXT,
    files=st.lists(FILE, max_size=3).map(tuple),
    uids=st.lists(COUNT, max_size=3).map(tuple),
    ports=st.lists(PORT, max_size=3).map(tuple),
    directories=st.lists(TEXT, max_size=3).map(tuple),
)
HOSTS = st.builds(
    HostFacts,
    host=TEXT,
    instance=TEXT,
    version=TEXT,
    protocol=COUNT,
    cpu=CPU,
    kernel=TEXT,
    criu=st.none() | TEXT,
    criu_features=TEXTS,
    memory_available=COUNT,
    state_dir=TEXT,
    disk_free=COUNT,
    store=SERVICE,
    lease=SERVICE,
    needs=st.lists(st.builds(HostProblem, TEXT, TEXT, TEXT, st.booleans()), max_size=3).map(tuple),
    wanting=st.dictionaries(TEXT, st.sampled_from(("missing", "different")), max_size=3),
    users=st.dictionaries(COUNT, TEXT, max_size=3),
    listening=st.lists(PORT, max_size=3).map(tuple),
    addresses=TEXTS,
    directories=TEXTS,
    keys=TEXTS,
    key=st.none() | TEXT,
    standing=st.none() | st.builds(LeaseFacts, TEXT, TEXT, TEXT, COUNT),
    relay=st.none() | SERVICE,
    name_taken=st.booleans(),
)


@given(HOSTS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_host_facts_round_trip_through_json(facts: HostFacts) -> None:
    assert HostFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


@given(ASKS)
@settings(max_examples=60)
def test_host_query_round_trips_through_json(ask: HostQuery) -> None:
    assert HostQuery.from_json(json.loads(json.dumps(ask.to_json()))) == ask


def test_path_that_is_not_utf8_round_trips() -> None:
    ask = HostQuery("s", "n", directories=(os.fsdecode(b"/\xff"),))
    assert HostQuery.from_json(json.loads(json.dumps(ask.to_json()))) == ask


@pytest.mark.parametrize("name", [one.name for one in fields(HostFacts)])
@pytest.mark.parametrize("value", [object, -1, [[]], {"a": -1}], ids=["absent", "negative", "nested", "object"])
def test_invalid_host_facts_raise_value_error(name: str, value: Any) -> None:
    data = a_host("a").to_json()
    if value is object:
        del data[name]
    else:
        data[name] = value
    with pytest.raises(ValueError):
        HostFacts.from_json(data)


@pytest.mark.parametrize(
    "data",
    [None, [], "x", {}, {"format": 2}, {"format": 1}, {"format": 1, "session": "a", "name": "b", "files": [[1]]}],
)
def test_invalid_host_query_raises_value_error(data: Any) -> None:
    with pytest.raises(ValueError):
        HostQuery.from_json(data)


def test_file_of_before_1970_round_trips() -> None:
    query = HostQuery("s", "n", files=(("/old", 1, -5, None, "aa"),))
    assert HostQuery.from_json(json.loads(json.dumps(query.to_json()))) == query


@pytest.mark.parametrize(
    "row", [["/f", 1, 2, None], ["/f", -1, 2, None, None], ["/f", True, 2, None, None], ["/f", 1, 2, 3, None], "/f"]
)
def test_invalid_file_of_a_host_query_raises_value_error(row: Any) -> None:
    with pytest.raises(ValueError):
        HostQuery.from_json({**HostQuery("s", "n").to_json(), "files": [row]})


def test_session_queries_all_its_dependencies() -> None:
    ask = a_session().ask()
    assert [row[0] for row in ask.files] == ["/lib/libc.so.6", "/srv/data.csv"]
    assert ask.uids == (0,) and ask.directories == ("/", "/home", "/data")


def test_cpu_flags_are_those_of_every_processor() -> None:
    text = "processor : 0\nflags\t\t: fpu sse avx2\n\nprocessor : 1\nflags\t\t: fpu sse\n"
    assert cpu.parse_flags(text) == {"fpu", "sse"}
    assert cpu.parse_flags("Features\t: fp asimd\n") == {"fp", "asimd"}
    assert cpu.parse_flags("nothing") == frozenset()


def test_truncated_auxiliary_vector_is_read_to_its_last_whole_pair() -> None:
    assert cpu.parse_auxv(struct.pack("@LLLL", 51, 3632, 0, 0) + b"\1") == {51: 3632, 0: 0}


def test_read_facts_of_this_processor() -> None:
    here = cpu.read()
    assert here.machine == os.uname().machine and here.page_size >= 4096
    if here.machine == "x86_64":
        assert {"fpu", "sse2"} <= cpu.for_programs(here)
        assert here.xfeatures is None or here.xfeatures & 3 == 3  # x87 and SSE
        assert here.frame is None or here.frame > 512


@pytest.mark.parametrize(
    ("mode", "number", "odd"),
    [
        (stat.S_IFCHR, os.makedev(1, 3), False),
        (stat.S_IFCHR, os.makedev(136, 0), False),
        (stat.S_IFCHR, os.makedev(5, 2), False),
        (stat.S_IFCHR, os.makedev(10, 200), False),
        (stat.S_IFCHR, os.makedev(4, 1), False),
        (stat.S_IFCHR, os.makedev(4, 64), True),
        (stat.S_IFCHR, os.makedev(10, 229), True),
        (stat.S_IFCHR, os.makedev(226, 0), True),
        (stat.S_IFBLK, os.makedev(8, 0), True),
        (stat.S_IFREG, 0, False),
    ],
)
def test_devices_that_criu_cannot_open_again(mode: int, number: int, odd: bool) -> None:
    assert processes.is_odd_device(mode, number) is odd


@pytest.mark.parametrize(
    ("link", "deleted"),
    [("/tmp/x (deleted)", True), ("/memfd:x (deleted)", False), ("/tmp/x", False), ("/SYSV0 (deleted)", False)],
)
def test_nameless_memory_is_not_a_deleted_file(link: str, deleted: bool) -> None:
    assert processes.is_deleted_file(link) is deleted


def test_read_facts_of_this_process() -> None:
    (own,) = processes.read([os.getpid()], os.getpid())
    assert own.pid == os.getpid() and own.uid == os.getuid() and not own.inner_namespace and not own.io_uring
    assert processes.read([1 << 22], None) == ()
