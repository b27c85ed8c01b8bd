"""Benchmarks. Each module named here has `main(arguments) -> exit code`."""
