"""Move sessions between hosts: plan, migrate, resume interrupted moves, restore or fork on another host.

This package owns both sides of a migration (`migrate.py` and `target.py` on the source, `standby.py` and `prefetch.py`
on the target), the decision which host has a session (`ownership.py`), and the checks of other hosts. It may import
`snapshot`, `host`, `remote`, `preflight` and the packages below them, not `drain` or `agent`.
"""
