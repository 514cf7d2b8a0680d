"""`mvp-orchestrator plan`: what would run and how fast, with no side effect (issue 4)."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from services.orchestrator import plan_command
from services.orchestrator.plan_command import report, stage_bytes, tokens_per_second
from services.orchestrator.planner_facts import make_plan
from tests.unit.engine.tiny_model import TinySpec, write_model
from tests.unit.planner.test_planner import config


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_the_command_prints_stages_edges_and_speed_and_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "tiny.gguf"
    write_model(model, TinySpec(layers=4))
    toml = tmp_path / "run.toml"
    archive = tmp_path / "frames.jsonl"
    toml.write_text(
        f'[provider]\nkind = "process"\n[model]\nid = "tiny"\ngguf_local_path = {json.dumps(str(model))}\n'
        f"[observability]\ndatastream_frame_log = {json.dumps(str(archive))}\n"
    )
    monkeypatch.chdir(tmp_path)
    before = files(tmp_path)
    environ = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state"), "PATH": "/usr/bin"}
    worker = tmp_path / "worker"
    status = plan_command.main(["--runtime-config", str(toml), "--pipeline-stages", "3"], environ)
    out = capsys.readouterr()
    assert (status, out.err) == (0, ""), out.err
    assert files(tmp_path) == before and not worker.exists()
    for line in ("0      2     0..0", "1      3     1..1", "2      4     2..3", "1     TokenIn     gateway  stage 0"):
        assert line in out.out, out.out
    assert "4     TokenOut    stage 2  gateway" in out.out
    assert "tokens/s = 1 / (sum over stages" in out.out
    assert "one stage is faster where the model fits one machine" in out.out
    assert plan_command.main(["--runtime-config", str(toml), "--pipeline-stages", "9"], environ) == 1
    error = capsys.readouterr().err
    assert error == (
        "mvp-orchestrator plan: pipeline_stages = 9 exceeds GGUF layer count 4; choose pipeline_stages <= 4\n"
    )
    assert plan_command.main(["--frobnicate"], environ) == 1


def test_what_does_not_fit_says_so_and_why(tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    write_model(model, TinySpec(layers=4))
    asked = config(
        gguf_source=msgspec.structs.replace(config().gguf_source, path=str(model)), pipeline_stages=2, node_id=1
    )
    plan = make_plan(asked)
    need = sum(memory + cache for _, memory, cache in (stage_bytes(plan, stage) for stage in plan.stages))
    assert "does not fit" not in report(plan, asked, need) and "does not fit" not in report(plan, asked, 0)
    text = report(plan, asked, need - 1)
    assert "does not fit: the stages need" in text and "smaller [model] max_context" in text
    assert tokens_per_second(plan) > 0
