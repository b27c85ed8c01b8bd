"""Connect this host's sessions and the relay: the host's link, the relay's client, credentials, and `relay serve`.

Owns everything in which sessions, records or leases of a host meet the relay. May import `host` and what is below it;
`relay` and `session` do not know each other.
"""
