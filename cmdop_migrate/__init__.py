"""cmdop-migrate: move live sessions between hosts under one identity.

Kept empty of imports: the holder, a process that lives beside every session,
imports this package and pays for whatever is loaded here.
"""

__version__ = "0.1.0"
