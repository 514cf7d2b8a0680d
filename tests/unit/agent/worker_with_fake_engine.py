"""A whole worker process whose engine is tests/unit/agent/fake_engine.py: LAUNCH_FILE HOW."""

from __future__ import annotations

import sys
from pathlib import Path

from common.launch_file import LaunchFile
from worker.agent.service import Worker

if __name__ == "__main__":
    fake = Path(__file__).with_name("fake_engine.py")
    command = (sys.executable, str(fake), sys.argv[2])
    sys.exit(Worker(LaunchFile.read(Path(sys.argv[1])), engine_command=command).run())
