"""`mvp-orchestrator plan`: what would run and how fast, with no side effect (issue 4)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.config_slices import CachedModelSlice, OrchestratorSlice
from common.messages.node_agent import LocalPath
from services.orchestrator import plan_command
from services.orchestrator.plan_command import CPU_BYTES_S, HOP_S, hops, report, stage_size, tokens_per_second
from services.orchestrator.planner import RunPlan
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
    for line in (
        "0      2     0..0",
        "1      3     1..1",
        "2      4     2..3",
        "1     TokenIn        gateway  stage 0",
    ):
        assert line in out.out, out.out
    assert "4     TokenOut       stage 2  gateway" in out.out
    assert "tokens/s = 1 / (sum over stages" in out.out
    assert "one stage is faster where the model fits one machine" in out.out
    assert plan_command.main(["--runtime-config", str(toml), "--pipeline-stages", "9"], environ) == 1
    error = capsys.readouterr().err
    assert error == (
        "mvp-orchestrator plan: pipeline_stages = 9 exceeds GGUF layer count 4; choose pipeline_stages <= 4\n"
    )
    assert plan_command.main(["--frobnicate"], environ) == 1
    capsys.readouterr()

    def interrupted(*_: object) -> RunPlan:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_command, "make_plan", interrupted)
    assert plan_command.main(["--runtime-config", str(toml)], environ) == 130 and capsys.readouterr().err == ""


def planned(tmp_path: Path, **changes: Any) -> tuple[RunPlan, OrchestratorSlice]:
    """Of a tiny model of four layers in two stages."""
    model = tmp_path / "tiny.gguf"
    if not model.exists():
        write_model(model, TinySpec(layers=4))
    source = msgspec.structs.replace(config().gguf_source, path=str(model))
    asked = config(**{"gguf_source": source, "pipeline_stages": 2, "node_id": 1, **changes})
    return make_plan(asked), asked


def test_what_does_not_fit_says_so_and_why(tmp_path: Path) -> None:
    plan, asked = planned(tmp_path)
    need = sum(size.packed + size.cache for size in (stage_size(plan, stage) for stage in plan.stages))
    assert "does not fit" not in report(plan, asked, need) and "does not fit" not in report(plan, asked, 0)
    text = report(plan, asked, need - 1)
    assert "does not fit: the stages need" in text and "smaller [model] max_context" in text
    assert "of weights and" in text and "one stage is faster" not in text


def test_the_prediction_is_the_printed_formula(tmp_path: Path) -> None:
    plan, _ = planned(tmp_path)
    read = sum(stage_size(plan, stage).packed for stage in plan.stages)
    assert tokens_per_second(plan) == pytest.approx(1 / (read / CPU_BYTES_S + 3 * HOP_S))
    fed, asked = planned(tmp_path, pipeline_feedback="direct")
    assert (hops(plan), hops(fed)) == (3, 2) and tokens_per_second(fed) > tokens_per_second(plan)
    assert "4     TokenFeedback  stage 1  stage 0" in report(fed, asked, 0)


def test_sizes_of_a_stage_are_those_that_leave_it_and_stay(tmp_path: Path) -> None:
    plan, asked = planned(tmp_path)
    half, asked_half = planned(tmp_path, activation_dtype="float16")
    first, last = (stage_size(plan, stage) for stage in plan.stages)
    assert (first.out, last.out) == (4 * plan.facts.hidden_dim, 4)
    assert stage_size(half, half.stages[0]).out == first.out // 2
    assert f"activation rows f16: {first.out // 2} bytes a token" in report(half, asked_half, 0)
    assert first.cache == last.cache == 2 * plan.facts.kv_bytes_per_layer
    assert last.packed - first.packed == plan.facts.head_bytes
    assert f"{first.out} B" in report(plan, asked, 0)


def test_a_placement_by_measure_says_that_these_are_not_the_last_layers(tmp_path: Path) -> None:
    plan, asked = planned(tmp_path, pipeline_placement="measured")
    assert "the run places them by what its workers measure" in report(plan, asked, 0)


def test_several_stages_on_docker_read_the_mounted_model(tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    cached = CachedModelSlice(host_path=str(model), container_path="/models/cached/tiny.gguf")
    plan, asked = planned(tmp_path, provider="docker", cached_model=cached)
    assert plan.facts.gguf_source == LocalPath(path="/models/cached/tiny.gguf") and len(plan.stages) == 2
    text = report(plan, asked, 1)
    assert "2 stage(s) on docker" in text and "each worker's machine must have as much" in text
