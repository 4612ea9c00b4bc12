"""`layerbisect doctor` run as a user does."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own, with these variables beside the present ones."""
    return subprocess.run(
        [sys.executable, "-m", "layerbisect", "doctor", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
