"""Check the explanation of CRIU logs. The logs are in tests/golden/criu-logs.

Those named `public-…` are lines from public reports (github.com/checkpoint-restore/criu issues 650, 772, 1470, 2190,
2266, 2367, 2522, 68, 505; NVIDIA/cuda-checkpoint 40; podman 17496). All others were provoked for real, with CRIU
4.2.1 (`vdso` with 3.17.1, `socket_options` with 4.1.1) on Linux 6.18, and shortened. `public-pid_mismatch` is known
from the title of its report only: the leading "Error: " is ours. Rules without a log here are guesses at CRIU's words.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cmdop_migrate.criu.failures.diagnosis import explain, failure
from cmdop_migrate.criu.failures.table import RULES

LOGS = Path(__file__).parents[1] / "golden" / "criu-logs"
EXPECTED = {
    "anon_inode": ("anon_inode", "descriptor 3 of a process is a [userfaultfd]"),
    "build_id": ("build_id", "/srv/prog"),
    "cwd_missing": ("file_missing", "/srv/dd does not exist here"),
    "device": ("device", "chr 10:229"),
    "file_missing": ("file_missing", "/srv/data does not exist here"),
    "file_mode": ("file_mode", "mode 0100700"),
    "file_size": ("file_size", "/srv/data has 1 bytes here and had 5"),
    "ghost_limit": ("ghost_limit", "/root/big is deleted but still open"),
    "image_cut": ("image_damaged", "damaged"),
    "image_damaged": ("image_damaged", "damaged"),
    "image_missing": ("image_missing", "missing"),
    "inotify": ("inotify", "inotify"),
    "io_uring": ("io_uring", "io_uring"),
    "lazy_socket": ("lazy_socket", "not running"),
    "link_taken": ("link_taken", "exists already"),
    "lo_down": ("lo_down", "loopback"),
    "memory_kind": ("memory_kind", "/secretmem"),
    "mount_host": ("mount_mapping", "/nonexistent/x"),
    "mount_mapping": ("mount_mapping", "shares with its host"),
    "mount_root": ("mount_root", "/mnt is a mount of the host"),
    "nested_pidns": ("nested_pidns", "pid namespace of its own"),
    "no_space": ("no_space", "no space left"),
    "outside_cgroup": ("outside_cgroup", "has left its cgroup"),
    "page_server": ("page_server", "failed before CRIU had sent all"),
    "pages_missing": ("pages_missing", "memory pages are missing"),
    "perf_event": ("anon_inode", "[perf_event]"),
    "public-build_id": ("build_id", "/usr/lib/x86_64-linux-gnu/libc-2.31.so"),
    "public-cpu": ("cpu", "CPU lacks features"),
    "public-pid_mismatch": ("pid_taken", "17550"),
    "public-pid_taken": ("pid_taken", "pid 2158017"),
    "public-tty": ("tty", "whose other end CRIU did not find"),
    "public-tty_index": ("tty_index", "terminal"),
    "public-tty_sid": ("tty", "terminal"),
    "public-unix_external": ("unix_external", "unix socket"),
    "public-unix_stream": ("unix_stream", "(/tmp/f87d80b1"),
    "public-unix_stream_old": ("unix_stream", "unix socket"),
    "rlimit": ("rlimit", "CAP_SYS_RESOURCE"),
    "session_gone": ("session_gone", "has ended"),
    "socket_kind": ("socket_kind", "family CRIU cannot dump (40)"),
    "socket_options": ("socket_options", "too old for this kernel"),
    "traced": ("traced", "traced by another program"),
    "vdso": ("vdso", "too old for this kernel"),
}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_golden_log(name: str) -> None:
    rule, words = EXPECTED[name]
    text = (LOGS / f"{name}.log").read_text()
    found = explain(text)
    assert found.rule == rule
    assert words in found.cause and "\n" not in found.cause
    assert found.fix.endswith(".")
    assert found.tail.endswith("\n".join(text.splitlines()[-12:]))


def test_every_golden_log_has_an_expectation_and_twenty_rules_are_covered() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == set(EXPECTED)
    assert len({rule for name, (rule, _) in EXPECTED.items() if not name.startswith("public-")}) >= 20


def test_rule_names_are_unique_and_fixes_are_sentences() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.fix.endswith(".") and not rule.cause.endswith(".")
        rule.cause.format(*[""] * rule.pattern.groups)


def test_harmless_errors_are_not_reported_as_cause() -> None:
    healthy = (
        "(00.1) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n"
        "Error: ipv4: Address already assigned.\n"
        'Error (criu/util.c:642): execvp("iptables-save", ...) failed: No such file or directory\n'
        "(00.2) Error (criu/cgroup.c:2055): cg: cgroupd: recv req error: No such file or directory\n"
    )
    assert explain(healthy).cause == "CRIU's log names no error"
    found = explain(healthy + "(00.3)      1: Error (criu/new.c:1): new: A thing nobody knows\n")
    assert found.rule == "" and found.cause == "CRIU reports: new: A thing nobody knows"


def test_first_error_is_the_cause() -> None:
    trap = "(00.1) Error (compel/src/lib/infect.c:1): Can't dump the 77 thread with a pending SIGTRAP\n"
    left = "(00.2) Error (criu/seize.c:1): Unseizable non-zombie 77 found, state R, err -1/10\n"
    assert explain(trap + left).rule == "pending_trap"
    unknown = "(00.1) Error (criu/new.c:1): new: A thing that is not known\n"
    assert explain(unknown + left).cause == "CRIU reports: new: A thing that is not known"


def test_passing_failure_is_marked() -> None:
    traced = "(00.1) Error (a.c:1): Unable to interrupt task: 7 (Operation not permitted)\n"
    assert explain(traced).passing and failure("x", Path("/nowhere"), traced).passing
    assert not explain("(00.1) Error (a.c:1): No space left on device\n").passing


def test_tail_always_includes_the_line_of_the_cause() -> None:
    text = "(00.1) Error (a.c:1): No space left on device\n" + "".join(f"(00.2) line {i}\n" for i in range(99))
    assert explain(text).tail.splitlines()[0] == text.splitlines()[0]
    assert explain(text).tail.splitlines()[-1] == "(00.2) line 98"


def test_failure_reads_the_log_and_works_without_one(tmp_path: Path) -> None:
    error = failure("dump of demo", LOGS / "io_uring.log")
    assert error.message.startswith("dump of demo: a process uses io_uring")
    assert "Dumping FAILED" in error.message and "io_uring.log" in error.hint
    assert "Can't open file a/b" in str(failure("x", tmp_path / "none", "Error (a.c:1): Can't open file a/b: whatever"))
    assert failure("x", tmp_path / "none").hint


@given(st.text())
def test_any_text_gets_a_diagnosis(text: str) -> None:
    found = explain(text)
    assert found.cause and found.fix
