"""Files that a session has open but that no longer have the name they were opened by."""

from __future__ import annotations

from tests.support.host import Host
from tests.support.program_session import Program

# Opened, linked under a second name, and unlinked under the first: the descriptor and the second name are one file.
LINKED = """
import os
os.makedirs('/root/d', exist_ok=True)
f = open('/root/d/a', 'w+'); f.write('first,'); f.flush()
os.link('/root/d/a', '/root/d/b'); os.unlink('/root/d/a')
print('rea' + 'dy')
"""
MORE = "f.write('{},'); f.flush(); print('b=' + open('/root/d/b').read(), sorted(os.listdir('/root/d')))\n"


def test_unlinked_file_with_another_hard_link_is_restored(host: Host) -> None:
    with Program(host, "python3", "-q") as python:
        for line in LINKED.strip().splitlines():
            python.type(line + "\n")
        python.see("ready")
        for number in range(2):
            python.through()
            python.type(MORE.format(number))
            said = ",".join(map(str, range(number + 1)))
            python.see(rf"b=first,{said}, \['b'\]")
        host.ok("checkpoint", "p", "--leave-running")
        python.type(MORE.format(2))
        python.see(r"b=first,0,1,2, \['b'\]")
