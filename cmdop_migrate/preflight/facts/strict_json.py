"""Decode JSON from another host strictly into frozen dataclasses, guided by their type hints.

Supported hints: str, bool, int, X | None, Literal, tuple, frozenset, Mapping with text or number keys, and dataclasses.
An int must not be negative, unless it is hinted `Signed`. Keys that the dataclass does not have are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
Signed = Annotated[int, "may be negative"]


def decode(kind: type[T], data: Any) -> T:
    """Return `data`, as `json.loads` returns it, as a value of `kind`. Raise ValueError if it is not one."""
    return cast(T, _decode(kind, data))


def _decode(kind: Any, data: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Signed or kind is int:
        return _checked(int, data) if kind is Signed else _count(data)
    if origin is UnionType:
        (inner,) = (argument for argument in arguments if argument is not NoneType)
        return None if data is None else _decode(inner, data)
    if origin is Literal:
        if not isinstance(data, str) or data not in arguments:
            raise ValueError(f"expected one of {', '.join(arguments)}: {data!r:.80}")
        return data
    if origin is tuple and arguments[-1] is not Ellipsis:
        values = _checked(list, data)
        if len(values) != len(arguments):
            raise ValueError(f"expected {len(arguments)} values: {data!r:.80}")
        return tuple(_decode(argument, value) for argument, value in zip(arguments, values, strict=True))
    if origin in (tuple, frozenset):
        return origin(_decode(arguments[0], value) for value in _checked(list, data))
    if origin is Mapping:
        return {_key(arguments[0], key): _decode(arguments[1], value) for key, value in _checked(dict, data).items()}
    if is_dataclass(kind):
        return _object(kind, _checked(dict, data))
    return _checked(kind, data)


def _object(kind: Any, data: dict[str, Any]) -> Any:
    hints = get_type_hints(kind, include_extras=True)
    names = [field.name for field in fields(kind)]
    if missing := [name for name in names if name not in data]:
        raise ValueError(f"{kind.__name__} has no {missing[0]!r}")
    return kind(**{name: _decode(hints[name], data[name]) for name in names})


def _checked(kind: type[Any], data: Any) -> Any:
    if kind is list and isinstance(data, tuple):
        return list(data)
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise ValueError(f"expected {kind.__name__}: {data!r:.80}")
    return data


def _count(data: Any) -> int:
    number: int = _checked(int, data)
    if number < 0:
        raise ValueError(f"expected a number of at least 0: {data!r:.80}")
    return number


def _key(kind: Any, text: str) -> Any:
    if kind is int:
        if not text.isdecimal():
            raise ValueError(f"expected a number as key: {text!r:.80}")
        return int(text)
    return _checked(kind, text)
