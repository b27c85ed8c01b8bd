"""The holder package needs the standard library only."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import cmdop_migrate
from cmdop_migrate import holder


def test_every_holder_module_loads_without_site_packages() -> None:
    """As a holder is started: -S keeps site-packages, and with it every outside package, off the path."""
    names = [f"{holder.__name__}.{module.name}" for module in pkgutil.iter_modules(holder.__path__)]
    assert "cmdop_migrate.holder.process" in names
    home = str(Path(cmdop_migrate.__file__).parent.parent)
    program = (
        f"import sys; sys.path.insert(0, {home!r}); import importlib; [importlib.import_module(n) for n in {names}]"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
