"""Keep one session alive: the process beside it, its terminal, output, input, cgroup, sandbox and lease watchdog.

A holder is started with neither the virtual environment nor the rest of the package loaded, and runs as long as its
session: this package imports the standard library, `util`, `clock` and `events` only. `process` is the entry point,
`state` decides what a holder may do, `protocol` is the border to its clients.
"""
