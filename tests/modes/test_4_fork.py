"""Mode 4: a branch is a new identity on a shared base."""

from __future__ import annotations

from pathlib import Path

from tests.modes import record
from tests.modes.conftest import Sign
from tests.support.host import Host


def test_two_identities_one_parent_and_chunks_in_common(quick: Host, tmp_path: Path, sign: Sign) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    script = f"x=$(head -c 4M /dev/urandom | base64); n=0; echo ready; while read -r w; do n=$((n+w)); echo at $n {'${#x}'}; echo $n >> {outside}/sent; done"
    session = quick.start("bash", "-c", script, name="w", options=("--share", str(outside)))["session"]
    quick.wait_for("w", "ready")
    quick.ok("send", "w", "1", "--enter")
    quick.wait_for("w", r"at 1 \d+")
    made = quick.cm_json("fork", "w", "branch")
    forked, born = record.one(quick, session, "forked"), record.one(quick, made["session"], "restored")
    assert made["session"] != session and (made["parent"], born["parent"]) == (session, session)
    assert (forked["branch"], forked["checkpoint"]) == (made["session"], made["checkpoint"])
    assert forked["shared_chunks"] == made["shared_chunks"] > 0
    for name, word, state in (("w", "10", "at 11"), ("branch", "100", "at 101")):
        quick.ok("send", name, word, "--enter")
        quick.wait_for(name, state)
    own = quick.cm_json("checkpoint", "branch", "--leave-running")
    assert (
        own["chunks"]["shared"] > own["chunks"]["new"]
        and own["chunks"] == record.one(quick, made["session"], "checkpointed")["chunks"]
    ), "what the two share is in the store once"
    assert sorted((outside / "sent").read_text().split()) == ["1", "101", "11"], "each branch acts outside: handed back"
    ids = {"parent": session, "branch": made["session"]}
    sign(**ids, at_birth={"shared_chunks": forked["shared_chunks"]}, later=own["chunks"])
