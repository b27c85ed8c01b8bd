"""An operator beside a person: it works in a session until the person takes over, and continues in its next turn.

    python docs/examples/beside_a_person.py SESSION --credential agent.credential -- 'make' 'make test'

Each line is sent, and its end waited for; an AI agent would think in between. It
asks for the write turn first. A person who wants to type asks for it too, or an
admin takes it (`cmdop-migrate turn SESSION seize`): then the session refuses
`send`, regardless of what this program does, and the program waits for its next turn.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from cmdop_migrate import AsyncSession
from cmdop_migrate.errors import NotAdmitted

TURN = 120.0  # seconds without input after which another actor may have the turn


async def work(session: AsyncSession, lines: list[str]) -> None:
    for number, line in enumerate(lines):
        while True:
            await session.turn("request", timeout=TURN, wait=3600.0)
            try:
                await session.send(f"{line}; echo step-$(({number}))-status-$?")
                break
            except NotAdmitted as refused:
                print(f"taken over: {refused.message}", flush=True)
        done = await session.expect(rf"^step-{number}-status-\d+", timeout=3600.0)
        print(f"{line}: {done.text.rpartition('-')[2]}", flush=True)
    await session.turn("release")


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("session")
    parser.add_argument("lines", nargs="+")
    parser.add_argument("--relay")
    parser.add_argument("--credential")
    parser.add_argument("--actor", default="operator")
    given = parser.parse_args()
    who = {"credential": given.credential, "relay": given.relay} if given.credential else {"actor": given.actor}
    await work(await AsyncSession.attach(given.session, **who), given.lines)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
