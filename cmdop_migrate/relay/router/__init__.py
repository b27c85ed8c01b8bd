"""Route channels: events in, actions out. Decide which client channel leads to which incarnation. Pure.

Imports only the relay's frames and credentials; all I/O is in relay/server.py.
"""
