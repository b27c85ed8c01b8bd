"""Encode and decode CRIU's RPC messages, wire-compatible, as plain dicts.

The field numbers are those of CRIU's public rpc.proto. Unknown fields are skipped when reading: a newer CRIU may send
fields that are not in this table.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from cmdop_migrate.criu.protobuf import BYTES, Malformed, Value, bytes_field, fields, number_field

Fields = Mapping[str, Any]


class ReqType(IntEnum):
    """List types of requests and responses (criu_req_type)."""

    EMPTY = 0
    DUMP = 1
    RESTORE = 2
    CHECK = 3
    PRE_DUMP = 4
    PAGE_SERVER = 5
    NOTIFY = 6
    CPUINFO_DUMP = 7
    CPUINFO_CHECK = 8
    FEATURE_CHECK = 9
    VERSION = 10
    WAIT_PID = 11
    PAGE_SERVER_CHLD = 12
    SINGLE_PRE_DUMP = 13


class CgroupMode(IntEnum):
    """List ways to dump and restore cgroups (criu_cg_mode)."""

    IGNORE = 0
    NONE = 1
    PROPS = 2
    SOFT = 3
    FULL = 4
    STRICT = 5
    DEFAULT = 6


class NetworkLock(IntEnum):
    """List ways to keep packets out during a dump (criu_network_lock_method)."""

    IPTABLES = 1
    NFTABLES = 2
    SKIP = 3


class _Field(NamedTuple):
    number: int
    kind: str  # bool, int (signed or not), str, or the name of a message
    many: bool


def _table(**kinds: str) -> dict[str, dict[str, _Field]]:
    """Parse `field=number:kind` words, `*` for a repeated field; one message for each keyword argument."""
    result: dict[str, dict[str, _Field]] = {}
    for message, text in kinds.items():
        table = result.setdefault(message, {})
        for word in text.split():
            name, _, rest = word.partition("=")
            number, _, kind = rest.partition(":")
            table[name] = _Field(int(number), kind.rstrip("*"), kind.endswith("*"))
    return result


SCHEMA = _table(
    page_server_info="address=1:str port=2:int pid=3:int fd=4:int",
    veth_pair="if_in=1:str if_out=2:str",
    ext_mount_map="key=1:str val=2:str",
    join_namespace="ns=1:str ns_file=2:str extra_opt=3:str",
    inherit_fd="key=1:str fd=2:int",
    cgroup_root="ctrl=1:str path=2:str",
    unix_sk="inode=1:int",
    opts="""
        images_dir_fd=1:int pid=2:int leave_running=3:bool ext_unix_sk=4:bool tcp_established=5:bool
        evasive_devices=6:bool shell_job=7:bool file_locks=8:bool log_level=9:int log_file=10:str
        ps=11:page_server_info notify_scripts=12:bool root=13:str parent_img=14:str track_mem=15:bool
        auto_dedup=16:bool work_dir_fd=17:int link_remap=18:bool veths=19:veth_pair* cpu_cap=20:int
        force_irmap=21:bool exec_cmd=22:str* ext_mnt=23:ext_mount_map* manage_cgroups=24:bool
        cg_root=25:cgroup_root* rst_sibling=26:bool inherit_fd=27:inherit_fd* auto_ext_mnt=28:bool
        ext_sharing=29:bool ext_masters=30:bool skip_mnt=31:str* enable_fs=32:str* unix_sk_ino=33:unix_sk*
        manage_cgroups_mode=34:int ghost_limit=35:int irmap_scan_paths=36:str* external=37:str*
        empty_ns=38:int join_ns=39:join_namespace* cgroup_props=41:str cgroup_props_file=42:str
        cgroup_dump_controller=43:str* freeze_cgroup=44:str timeout=45:int tcp_skip_in_flight=46:bool
        weak_sysctls=47:bool lazy_pages=48:bool status_fd=49:int orphan_pts_master=50:bool config_file=51:str
        tcp_close=52:bool lsm_profile=53:str tls_cacert=54:str tls_cacrl=55:str tls_cert=56:str tls_key=57:str
        tls=58:bool tls_no_cn_verify=59:bool cgroup_yard=60:str pre_dump_mode=61:int pidfd_store_sk=62:int
        lsm_mount_context=63:str network_lock=64:int mntns_compat_mode=65:bool skip_file_rwx_check=66:bool
        unprivileged=67:bool images_dir=68:str leave_stopped=69:bool display_stats=70:bool log_to_stderr=71:bool
        allow_uprobes=72:bool ghost_fiemap=73:bool file_validation_method=74:int""",
    dump_resp="restored=1:bool",
    restore_resp="pid=1:int",
    notify="script=1:str pid=2:int",
    features="mem_track=1:bool lazy_pages=2:bool pidfd_store=3:bool",
    version="major_number=1:int minor_number=2:int gitid=3:str sublevel=4:int extra=5:int name=6:str",
    req="type=1:int opts=2:opts notify_success=3:bool keep_open=4:bool features=5:features pid=6:int",
    resp="""
        type=1:int success=2:bool dump=3:dump_resp restore=4:restore_resp notify=5:notify ps=6:page_server_info
        cr_errno=7:int features=8:features cr_errmsg=9:str version=10:version status=11:int""",
)
_BY_NUMBER = {
    message: {field.number: (name, field) for name, field in table.items()} for message, table in SCHEMA.items()
}


def encode(message: str, values: Fields) -> bytes:
    """Return the encoded message. Raise KeyError for a field that the message does not have: a typo must not be
    ignored."""
    table, out = SCHEMA[message], bytearray()
    for name in sorted(values, key=lambda name: table[name].number):
        field = table[name]
        for value in values[name] if field.many else (values[name],):
            if field.kind in ("int", "bool"):
                out += number_field(field.number, int(value))
            else:
                data = os.fsencode(value) if field.kind == "str" else encode(field.kind, value)
                out += bytes_field(field.number, data)
    return bytes(out)


def decode(message: str, data: bytes) -> dict[str, Any]:
    """Return the fields that are present, repeated ones as lists. Raise Malformed."""
    table = _BY_NUMBER[message]
    result: dict[str, Any] = {}
    for number, wire, value, _ in fields(data):
        if number in table:
            name, field = table[number]
            decoded = _typed(message, field, wire, value)
            if field.many:
                result.setdefault(name, []).append(decoded)
            else:
                result[name] = decoded
    return result


def _typed(message: str, field: _Field, wire: int, value: Value) -> Any:
    if isinstance(value, int) and field.kind in ("int", "bool"):
        return bool(value) if field.kind == "bool" else value - (1 << 64) if value >> 63 else value
    if isinstance(value, int) or wire != BYTES or field.kind in ("int", "bool"):
        raise Malformed(f"field {field.number} of {message} has wire type {wire}")
    return value.decode(errors="replace") if field.kind == "str" else decode(field.kind, value)
