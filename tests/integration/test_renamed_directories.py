"""Directories of the host that a session renames: carried by checkpoints, forks and restores, the host's untouched."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from cmdop_migrate.host import talk
from tests.support.host import Host, pair
from tests.support.program_session import WITHIN, Program

# One command a line; os.rename, unlike mv, does not copy where the kernel refuses to rename.
DRIVER = r"""
import os, subprocess, sys
held = {}
for line in sys.stdin:
    word, *more = line.split()
    try:
        if word == "rename":
            os.rename(*more)
            answer = "renamed"
        elif word == "mkdir":
            os.mkdir(*more)
            answer = "made"
        elif word == "open":
            held[more[0]] = open(more[0])
            answer = held[more[0]].readline().strip()
        elif word == "next":
            answer = held[more[0]].readline().strip()
        elif word == "read":
            answer = open(more[0]).read().replace("\n", ";")
        elif word == "append":
            with open(more[0], "a") as file:
                file.write(more[1] + "\n")
            answer = "appended"
        elif word == "list":
            answer = ",".join(sorted(os.listdir(more[0])))
        elif word == "start":
            answer = bool(subprocess.Popen(more))
    except OSError as error:
        answer = error
    print("<", word, *more, "=", answer, ">", sep="", flush=True)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory of the host."""
    place = tmp_path / "project"
    (place / "src" / "deep").mkdir(parents=True)
    (place / "src" / "deep" / "main").write_text("one\ntwo\nthree\nfour\n")
    (place / "src" / "util").write_text("util\n")
    (place / "bin").mkdir()
    shutil.copy(shutil.which("sleep") or "/bin/sleep", place / "bin" / "tool")
    return place


class Driver(Program):
    def __init__(self, host: Host, project: Path, *options: str) -> None:
        super().__init__(host, sys.executable, "-c", DRIVER, options=("--cwd", str(project), *options))

    def do(self, command: str, answer: str) -> None:
        self.type(f"{command}\n")
        self.see(f"<{command.replace(' ', '')}={answer}>")


def listing(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob("*"))


def test_renamed_directories_come_back_through_rounds_and_in_a_fork(host: Host, project: Path) -> None:
    before = listing(project)
    with Driver(host, project) as driver:
        driver.do("start bin/tool 1000", "True")
        driver.do("rename src lib", "renamed")  # the redirect is a name
        driver.do("mkdir new", "made")
        driver.do("rename lib/deep new/deeper", "renamed")  # … a path
        driver.do("rename bin sbin", "renamed")
        driver.do("mkdir bin", "made")  # takes the name of what was renamed
        driver.do("open new/deeper/main", "one")
        driver.through()
        driver.do("next new/deeper/main", "two")
        driver.do("list .", "bin,lib,new,sbin")
        driver.do("list bin", "")
        driver.do("list new/deeper", "main")
        driver.do("list lib", "util")
        driver.do("rename lib new/lib", "renamed")  # again, in what was restored
        driver.do("append new/lib/util more", "appended")
        driver.through()
        driver.do("read new/lib/util", "util;more;")
        driver.do("next new/deeper/main", "three")
        driver.do("list .", "bin,new,sbin")
        host.cm_json("fork", "p", "branch")
        host.cm_json("send", "branch", "next new/deeper/main", "--enter")
        found = talk.wait(driver.records, "branch", "<nextnew/deeper/main=four>", WITHIN, driver.seq)
        assert "matched" in found, talk.output(driver.records, "branch", None)
        host.cm("kill", "--signal", "KILL", "branch")
        shown = {one["path"]: one["change"] for one in host.cm_json("show", "p")["files"]}
        assert shown[f"{project}/src"] == "deleted" and shown[f"{project}/new/deeper"] == "added"
    assert listing(project) == before
    assert (project / "src" / "util").read_text() == "util\n"


def test_what_is_held_in_a_renamed_directory_is_compared_and_carried(host: Host, project: Path) -> None:
    with Driver(host, project) as driver:
        driver.do("start bin/tool 1000", "True")
        driver.do("open src/deep/main", "one")
        driver.do("rename bin sbin", "renamed")
        driver.do("rename src/deep deeper", "renamed")
        driver.park()
        (project / "src" / "deep" / "main").write_text("another\n")  # as on a host that has another
        error = host.fails("restore", "p", status=4, code="blocked")
        assert str(project / "src/deep/main") in error["message"]
        (project / "src" / "deep" / "main").write_text("one\ntwo\nthree\nfour\n")
        shutil.rmtree(project / "bin")  # as on a host that lacks it; programs are carried
        assert driver.back()["carried"] == [f"{project}/sbin/tool"]
        driver.do("next src/deep/main", "two")
        driver.park("--carry", "opened")
        (project / "src" / "deep" / "main").write_text("another\n")
        assert driver.back()["carried"] == [f"{project}/deeper/main"]
        driver.do("next src/deep/main", "three")
        driver.do("read deeper/main", "one;two;three;four;")


def test_accepted_files_in_a_renamed_directory_are_opened_as_they_are(host: Host, project: Path) -> None:
    with Driver(host, project) as driver:
        driver.do("open src/deep/main", "one")
        driver.do("rename src/deep deeper", "renamed")
        driver.park()
        (project / "src" / "deep" / "main").write_text("ONE\n" * 20)
        assert driver.back("--accept-files")["accepted"] == [f"{project}/deeper/main"]
        driver.do("next src/deep/main", "two")


def test_what_is_hidden_stays_hidden_where_its_parent_is_renamed(host: Host, project: Path) -> None:
    parent = host.state.parent
    with Driver(host, project, "--cwd", "/") as driver:
        assert host.state.name in os.listdir(parent)
        driver.do(f"rename {parent} {parent}2", "renamed")
        driver.do(f"list {parent}2/{host.state.name}", ".Errno 2. No such file or directory.*")
        driver.through(still=False)
        driver.do(f"list {parent}2/{host.state.name}", ".Errno 2. No such file or directory.*")
        driver.do(f"read {parent}2/project/src/util", "util;")


def test_a_rename_above_a_shared_directory_is_refused_until_it_is_undone(host: Host, project: Path) -> None:
    (project / "src" / "shared").mkdir()
    (project / "src" / "shared" / "file").write_text("one\ntwo\n")
    with Driver(host, project, "--share", f"{project}/src/shared") as driver:
        driver.do("open src/shared/file", "one")
        driver.do("rename src lib", "renamed")
        error = host.fails("checkpoint", "p", status=4, code="blocked")
        assert f"{project}/src/shared" in error["message"] and f"{project}/lib/shared" in error["message"]
        driver.do("rename lib src", "renamed")
        driver.through(still=False)
        driver.do("next src/shared/file", "two")


def test_a_renamed_directory_comes_back_on_another_host(tmp_path: Path, project: Path) -> None:
    with pair(tmp_path) as (a, b), Driver(a, project) as driver:
        driver.do("rename src lib", "renamed")
        driver.do("append lib/util more", "appended")
        driver.do("open lib/deep/main", "one")
        driver.park()
        b.cm_json("restore", "p")
        b.cm_json("send", "p", "next lib/deep/main", "--enter")
        b.wait_for("p", "<nextlib/deep/main=two>")
        b.cm_json("send", "p", "read lib/util", "--enter")
        b.wait_for("p", "<readlib/util=util;more;>")
        b.cm("kill", "--signal", "KILL", "p")
