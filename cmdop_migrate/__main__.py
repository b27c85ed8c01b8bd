"""`python -m cmdop_migrate`."""

from cmdop_migrate.cli.main import main

main()
