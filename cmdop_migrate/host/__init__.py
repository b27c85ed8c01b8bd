"""Own the sessions of this host: their records and locks, starting, listing, talking to and killing them, their leases,
hooks, journals and drain flag. Imports the nouns below it (session, holder, images, criu, preflight, remote, relay) and
the ground (lease, storage, config, util); never another engine.
"""
