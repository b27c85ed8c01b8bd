"""Parse the command line, call one function of an engine, print its result.

This package owns the commands, their output for people and as JSON, the exit codes, and the fork server that runs
commands without loading Python anew. It is the only package that imports click, and it may import every other one.
"""
