from cmdop_migrate.cli.main import main

main()
