"""Programs that people run, each taken through every way a session can be parked, restored, copied and forked.

`driver` runs one `Scenario` (tests/programs/scenario.py) and keeps what it found; `report` writes docs/reference/compatibility.md.

    pytest tests/programs --all -k less     one program
    scripts/compatibility                   all of them, then docs/reference/compatibility.md
"""

from tests.support.program_session import Program

__all__ = ["Program"]
