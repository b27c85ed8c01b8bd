"""The relay's pure core: events in, actions out. Decides which client channel leads to which incarnation of a session.

Imports only the relay's frames and credentials; all I/O is in relay/server.py.
"""
