"""Everything a process can hold (tests/support/kernel_objects.py), all in one session, through one checkpoint and one restore."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator

import pytest

from tests.support import kernel_objects
from tests.support.host import a_host, until
from tests.support.program_session import Program

# A connection accepted from a unix socket has the listener's name, which CRIU does not give it again (docs/reference/limits.md).
ALLOWED = [r"unix type 0001 state 03"]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What each holding said after the restore."""
    directory = tmp_path_factory.mktemp("holdings")
    script = directory / "script" / "holdings.py"
    script.parent.mkdir()
    shutil.copy(kernel_objects.__file__, script)
    with a_host(directory) as host:
        names = " ".join(kernel_objects.HOLDINGS)
        each = f"for n in {names}; do {sys.executable} /root/h.py $n /root/h & done"
        start = f"cp {script} /root/h.py; mkdir /root/h; {each}; exec sleep 1000"
        with Program(host, "bash", "-c", start) as session:

            def made(ending: str) -> bool:
                return all((session.path("/root/h") / f"{name}.{ending}").exists() for name in kernel_objects.HOLDINGS)

            until(lambda: made("ready"), 60, "all hold what they hold")
            early = list(session.path("/root/h").glob("*.said"))
            assert not early, [one.read_text() for one in early]
            session.through(ALLOWED)
            session.path("/root/h/go").touch()
            until(lambda: made("said"), 60, "all say how they are")
            yield {name: (session.path("/root/h") / f"{name}.said").read_text() for name in kernel_objects.HOLDINGS}


@pytest.mark.parametrize("name", list(kernel_objects.HOLDINGS))
def test_it_still_has(said: dict[str, str], name: str) -> None:
    assert said[name] == "ok"
