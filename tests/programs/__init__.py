"""Programs that people run, each taken through every way a session can be parked, restored, copied and forked.

`driver` runs one `Scenario` (tests/programs/scenario.py); `report` writes docs/compatibility.md from what the runs found.
"""
