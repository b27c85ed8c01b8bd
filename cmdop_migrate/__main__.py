"""Run the command line, as `python -m cmdop_migrate`."""

from cmdop_migrate.entry import main

main()
