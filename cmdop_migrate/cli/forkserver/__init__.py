"""Run most commands in forks of a process that has all modules loaded.

The client (client.py) is what a user starts; the server is a child of the agent; child.py runs in the fork, and takes
over the client's process attributes (inherit.py). client and compat import only what the interpreter has loaded anyway.
docs/decisions/0007-ready.md has the reasons and the figures.
"""
