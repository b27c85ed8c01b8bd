"""Guard a dump against the death of CRIU: the guard process, and the repair of what a killed CRIU left in a session.
Standard library, `criu/ptrace.py`, `util/proc.py` and `holder/cgroup.py` only, because the guard starts beside every
dump."""
