"""Move live terminal sessions between hosts under one identity.

    from cmdop_migrate import Session

This module imports nothing until a name of the SDK is used: every holder process, of which each session has one,
imports this package and pays for what is loaded here.
"""

__version__ = "0.1.0"
__all__ = ["AsyncSession", "Match", "Session", "__version__"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cmdop_migrate.sdk import AsyncSession, Match, Session


def __getattr__(name: str) -> object:
    if name in ("AsyncSession", "Match", "Session"):
        from cmdop_migrate import sdk

        return getattr(sdk, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
