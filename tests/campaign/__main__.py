"""`python -P -m tests.campaign`: the whole fault campaign, or a part of it; prints one line per case that fails.

The exit status is 0 when nothing was left anywhere. Needs root (network namespaces' sshd, dockerd).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.campaign.cases import WITH_ENGINE, Case, cases
from tests.campaign.world import World
from tests.docker.engine import HABIT_IMAGE, SWARM_HABIT_IMAGE, TestEngine, why_not
from tests.docker.swarm_engines import TestManager, copy_image


def run(wanted: list[Case], say: bool = True) -> dict[str, object]:
    """{"fault_cases": n, "leaked": m, "failed": [...]}, and the seconds per provider."""
    failed: list[dict[str, object]] = []
    seconds: dict[str, float] = {}
    for provider in dict.fromkeys(case.provider for case in wanted):
        began = time.monotonic()
        mine = [case for case in wanted if case.provider == provider]
        failed += _on_engine(mine, say) if provider in WITH_ENGINE else _play(World(), mine, say)
        seconds[provider] = round(time.monotonic() - began, 1)
    return {"fault_cases": len(wanted), "leaked": len(failed), "failed": failed, "seconds": seconds}


def _on_engine(wanted: list[Case], say: bool) -> list[dict[str, object]]:
    """All of one provider."""
    if why := why_not():
        return [{"case": str(case), "left": [why]} for case in wanted]
    folder = Path(tempfile.mkdtemp(prefix="smq-docker-", dir="/tmp"))
    habits = Path(__file__).parents[1] / "docker" / "habits"
    engine, manager = TestEngine(folder / "engine"), None
    try:
        engine.start()
        engine.clear()
        engine.build_base()
        if wanted[0].provider == "docker":
            engine.build("Dockerfile", HABIT_IMAGE, habits)
            return _play(World(engine), wanted, say)
        engine.build("Dockerfile", SWARM_HABIT_IMAGE, habits, RUN_AS="4711:4711")
        manager = TestManager(folder / "manager")
        manager.begin()
        copy_image(SWARM_HABIT_IMAGE, engine, manager)
        return _play(World(manager, swarm=True), wanted, say)
    finally:
        if manager is not None:
            manager.close()
        engine.close()
        shutil.rmtree(folder, ignore_errors=True)


def _play(world: World, wanted: list[Case], say: bool) -> list[dict[str, object]]:
    failed: list[dict[str, object]] = []
    try:
        for case in wanted:
            began = time.monotonic()
            if left := world.play(case):
                failed.append({"case": str(case), "left": left})
            if say:
                took = time.monotonic() - began
                print(f"{case} {'FAILED ' + '; '.join(left) if left else 'ok'} ({took:.1f} s)", flush=True)
    finally:
        world.close()
    return failed


def main() -> int:
    """By hand."""
    parser = argparse.ArgumentParser(prog="python -P -m tests.campaign", description=__doc__)
    parser.add_argument("--provider", help="only this one's cases")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each Nth case")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="where --every begins")
    parser.add_argument("--case", type=int, action="append", metavar="NUMBER", help="only this case; may be repeated")
    parser.add_argument("--wrong", help="only where this goes wrong")
    arguments = parser.parse_args()
    wanted = [
        case
        for case in cases()[arguments.first :: arguments.every]
        if (arguments.provider in (None, case.provider))
        and (not arguments.case or case.number in arguments.case)
        and (arguments.wrong in (None, case.wrong))
    ]
    result = run(wanted)
    print(json.dumps({key: value for key, value in result.items() if key != "failed"}))
    return 1 if result["leaked"] else 0


if __name__ == "__main__":
    sys.exit(main())
