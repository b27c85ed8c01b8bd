"""Hold one module per command, named after it, in a folder per subject.

A command parses its options, calls one function of an engine and prints the result. cli/main.py lists all of them and
imports a command's module only when that command is used.
"""
