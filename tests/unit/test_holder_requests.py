"""Requests to a holder are parsed once, at the border: right ones into typed fields, malformed ones into an error."""

from __future__ import annotations

from typing import Any

import pytest

from cmdop_migrate.holder import protocol
from cmdop_migrate.holder.requests import OPERATIONS

REQUESTS: dict[str, dict[str, Any]] = {
    "attach": {"actor": "ann", "read_only": False, "from": 3, "terminal": True, "rows": 24, "cols": 80, "token": 2,
               "stream": "a" * 16},
    "type": {"at": 0, "data": "x\xff"},
    "resize": {"rows": 24, "cols": 80},
    "send": {"actor": "ann", "data": "ls\r", "stream": "a" * 16},
    "turn": {"do": "request", "actor": "ann", "admin": True, "lasts": 60.0, "to": "bob", "wait": True},
    "status": {},
    "kill": {"signal": 15, "grace": 5, "only_idle": None},
    "fresh": {"token": 1, "until": 10.5, "since": 9},
    "superseded": {"token": 2, "host": "host-b"},
    "doubt": {},
    "parked": {"checkpoint": "c"},
    "freeze": {"only_idle": 60},
    "thaw": {},
    "typeahead": {},
    "committing": {},
    "saved": {"checkpoint": "c"},
    "park": {"checkpoint": "c"},
    "hand_over": {"checkpoint": "c"},
    "take_back": {"token": 2, "until": 10.5, "since": 9.0},
    "moved": {"why": "moved to host-b (token 2)", "to": "host-b", "token": 2},
}  # fmt: skip
OPTIONAL = {"read_only", "from", "terminal", "stream", "admin", "lasts", "to", "wait", "only_idle"}
FLAGS = {"read_only", "terminal", "admin", "wait"}


def parse(name: str, message: dict[str, Any]) -> Any:
    return OPERATIONS[name][0](protocol.Fields({"op": name, **message}))


def required(name: str) -> list[str]:
    # Without rows no cols; and without to and token as in requests of older versions.
    also = {"attach": {"token", "rows", "cols"}, "moved": {"to", "token"}}.get(name, set())
    return [field for field in REQUESTS[name] if field not in OPTIONAL | also]


def test_every_operation_has_a_sample() -> None:
    assert set(REQUESTS) == set(OPERATIONS)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_is_parsed_with_and_without_its_optional_fields(name: str) -> None:
    parse(name, REQUESTS[name])
    parse(name, {field: REQUESTS[name][field] for field in required(name)})


@pytest.mark.parametrize(("name", "field"), [(name, field) for name in REQUESTS for field in required(name)])
def test_a_missing_field_is_refused(name: str, field: str) -> None:
    with pytest.raises(KeyError):
        parse(name, {key: value for key, value in REQUESTS[name].items() if key != field})


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, one in REQUESTS.items() for field in one if field not in FLAGS]
)
@pytest.mark.parametrize("wrong", [[], {}, True, 1.5, "1", float("nan")])
def test_a_field_of_another_type_is_refused(name: str, field: str, wrong: Any) -> None:
    right = REQUESTS[name][field]
    is_time = field in ("lasts", "grace", "only_idle", "until", "since")
    fits = isinstance(wrong, str) if isinstance(right, str) else is_time and wrong == 1.5
    if fits or ((name, field) == ("attach", "rows") and not wrong):  # no size
        parse(name, {**REQUESTS[name], field: wrong})
    else:
        with pytest.raises(ValueError, match=r"not a|no such signal"):
            parse(name, {**REQUESTS[name], field: wrong})


@pytest.mark.parametrize("number", [0, -1, 65, 1 << 40])
def test_a_signal_that_does_not_exist_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match="no such signal"):
        parse("kill", {"signal": number, "grace": 1})


@pytest.mark.parametrize("claim", [1, "true", [True], None, False])
def test_only_json_true_makes_an_admin(claim: Any) -> None:
    assert parse("turn", {"do": "seize", "actor": "ann", "admin": claim}).is_admin is False


def test_attach_without_cols_is_refused_if_it_has_rows() -> None:
    with pytest.raises(KeyError):
        parse("attach", {"actor": "ann", "rows": 24})
