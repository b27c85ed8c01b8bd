"""Talk to a holder and look at its session from outside: attach, requests, files, sockets, threads, network.

It owns the client side of the holder protocol and everything that is read from /proc or set up in the kernel for one
session. It imports `holder` and the ground below it, and none of the other nouns (`images`, `criu`, `preflight`,
`remote`, `relay`).
"""
