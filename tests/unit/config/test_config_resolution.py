"""What comes out: defaults, precedence, paths, models, relay, examples (S1 2.1-2.4, 7.1, 7.2)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common import config_rules
from common.config import ConfigError, Information, ProviderKind, RuntimeConfigProfile, Secret, digest_source
from common.config_args import ARGUMENTS, HELP, information
from common.config_schema import tables
from common.messages.node_agent import EmbeddedGguf, HuggingFaceGguf, LocalPath
from tests.unit.config.config_world import API_KEY, CACHED, MODEL, REMOTE, VASTAI, World

KEYED = {"VASTAI_API_KEY": API_KEY}
EXAMPLES = Path(__file__).resolve().parents[3] / "config"
DEFAULT_MODEL = ".model-cache/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.spec("S1 7.1")
def test_defaults(world: World) -> None:
    config = world.resolve(MODEL)
    assert config.config_profile is RuntimeConfigProfile.LOCAL
    assert config.provider is ProviderKind.PROCESS
    assert config.image == "swactor-mvp-node:latest"
    assert config.docker_gpus == "all"
    assert str(config.rpc_bind) == "127.0.0.1:19777"
    assert (config.run_id, config.node_id, config.stage_index, config.pipeline_stages) == (1, 1, 0, 1)
    assert config.layer_end_exclusive is None
    assert config.model_id == "model"
    assert config.gguf_source == LocalPath(path=str(world.cwd / "model.gguf"))
    assert config.tokenizer == EmbeddedGguf()
    assert config.default_max_tokens == 0, "design.md 6 row 1"
    assert not config.dashboard
    assert config.max_context is config.vastai is config.cached_model is config.datastream_frame_log is None
    assert config.worker_bin == world.cwd / "bin" / "mvp-worker-node"
    assert (config.relay.mode, config.relay.used, config.relay.local) == ("unset", False, False)
    assert (config.on_worker_loss, config.pipeline_feedback, config.pipeline_edges) == ("fail", "gateway", "auto")
    assert not config.planned


@pytest.mark.spec("S1 2.1")
def test_the_file_is_optional_and_found_in_the_working_directory(world: World) -> None:
    with pytest.raises(ConfigError, match="no model is chosen"):
        world.resolve()
    (world.cwd / ".config").mkdir()
    (world.cwd / ".config" / "config.toml").write_text(MODEL + "[runtime]\nrun_id = 5\n")
    assert world.resolve().run_id == 5
    assert world.resolve(MODEL).run_id == 1, "--runtime-config replaces the default file, it is not added to it"


@pytest.mark.spec("S1 2.1", "S1 2.3", "S1 7.1")
def test_arguments_override_the_file(world: World) -> None:
    toml = CACHED + '[runtime]\npipeline_stages = 2\n[provider]\nkind = "docker"\n'
    config = world.resolve(toml)
    assert (config.pipeline_stages, config.provider) == (2, ProviderKind.DOCKER)
    config = world.resolve(toml, "--pipeline-stages", "3", "--provider=process")
    assert (config.pipeline_stages, config.provider) == (3, ProviderKind.PROCESS)
    assert world.resolve(toml, "--pipeline-stages", "3", "--pipeline-stages", "4").pipeline_stages == 4
    assert world.resolve(toml).pipeline_stages == 2, "for one invocation only"


@pytest.mark.spec("S1 2.2", "S1 2.3", "S1 7.1")
def test_the_environment_overrides_the_file_for_the_api_key_only(world: World) -> None:
    (world.cwd / "id2").write_text("private")
    toml = VASTAI + 'api_key = "from-the-file"\n'
    config = world.resolve(toml)
    assert config.vastai is not None
    assert config.vastai.api_key.reveal() == "from-the-file"
    assert config.vastai.ssh_identity == world.cwd / "id"
    config = world.resolve(toml, "--vastai-ssh-identity", "id2", environ=KEYED)
    assert config.vastai is not None
    assert config.vastai.api_key.reveal() == API_KEY
    assert config.vastai.ssh_identity == world.cwd / "id2"
    assert (config.vastai.ssh_public_key, config.vastai.ssh_public_fingerprint) == ("", "")
    blank = world.resolve(toml, environ={"VASTAI_API_KEY": " "})
    assert blank.vastai is not None
    assert blank.vastai.api_key.reveal() == "from-the-file"


@pytest.mark.spec("S1 2.2")
def test_values_are_parsed_only_where_they_are_needed(world: World) -> None:
    broken = {"VASTAI_API_KEY": "not usable", "HF_TOKEN": "not usable"}
    config = world.resolve(MODEL, environ=broken)
    assert config.vastai is config.hf_token is None
    assert world.resolve(CACHED, environ={"HF_TOKEN": "hf_x"}).hf_token is None
    remote = world.resolve(REMOTE, environ={"HF_TOKEN": "hf_x", "RUN_ID": "7"})
    assert remote.hf_token == Secret("hf_x")
    assert remote.run_id == 1


@pytest.mark.spec("S1 7.1")
@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        ("process", "process"),
        ("local_process", "process"),
        ("local-process", "process"),
        ("docker", "docker"),
        ("local_docker", "docker"),
        ("local-docker", "docker"),
        (" Docker ", "docker"),
        ("swarm", "swarm"),
        ("external", "external"),
        ("vastai", "vastai"),
        ("vast_ai", "vastai"),
        ("VAST-AI", "vastai"),
    ],
)
def test_provider_names(world: World, raw: str, kind: str) -> None:
    toml = VASTAI.replace('"vastai"', f'"{raw}"') if kind == "vastai" else f'{CACHED}[provider]\nkind = "{raw}"'
    assert world.resolve(toml, environ=KEYED).provider == kind


@pytest.mark.spec("S1 7.1")
def test_the_profile_decides_the_default_provider(world: World) -> None:
    deploy = VASTAI.replace('[provider]\nkind = "vastai"', '[runtime]\nprofile = " Deploy"')
    assert world.resolve(deploy, environ=KEYED).provider is ProviderKind.VASTAI
    local = CACHED + '[runtime]\nprofile = "deploy"\n'
    assert world.resolve(local, "--provider", "docker").provider is ProviderKind.DOCKER


@pytest.mark.spec("S1 2.4", "S1 7.2")
def test_cached_model(world: World) -> None:
    (world.cwd / "link.gguf").symlink_to("model.gguf")
    toml = CACHED.replace("model.gguf", "bin/../link.gguf")
    process = world.resolve(toml)
    assert process.cached_model is not None
    assert process.cached_model.host_path == world.cwd / "model.gguf"
    assert process.cached_model.container_path == "/models/cached/model.gguf"
    assert process.gguf_source == LocalPath(path=str(world.cwd / "model.gguf"))
    assert process.planned
    for provider in ("docker", "swarm", "external"):
        seen = world.resolve(toml, "--provider", provider)
        assert seen.gguf_source == LocalPath(path="/models/cached/model.gguf")
    both = world.resolve(CACHED + 'gguf_local_path = "model.gguf"')
    assert both.gguf_source == process.gguf_source


@pytest.mark.spec("S1 2.4")
@pytest.mark.parametrize("where", ["cwd", "checkout"])
def test_the_default_pipeline_model(world: World, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = world.cwd if where == "cwd" else world.cwd / "checkout"
    monkeypatch.setattr(config_rules, "CHECKOUT", world.cwd / "checkout")
    path = root / DEFAULT_MODEL
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    config = world.resolve("", "--pipeline-stages", "2")
    assert config.cached_model is not None
    assert config.cached_model.host_path == path
    assert config.notes == (f"no model is chosen; a pipeline uses {path}",)
    assert world.resolve(MODEL, "--pipeline-stages", "2").notes == ()
    with pytest.raises(ConfigError, match="no model is chosen"):
        world.resolve("")


@pytest.mark.spec("S1 2.1", "S1 2.4")
def test_paths_are_relative_to_the_working_directory(world: World) -> None:
    conf = world.cwd / "conf"
    conf.mkdir()
    (conf / "x.toml").write_text(
        MODEL + '[observability]\ndatastream_frame_log = "logs/../f.jsonl"\n[runtime]\nrun_dir = "~/run"\n'
    )
    config = world.resolve(None, "--runtime-config", "conf/x.toml", environ={"HOME": "/somewhere/home"})
    assert config.gguf_source == LocalPath(path=str(world.cwd / "model.gguf"))
    assert config.datastream_frame_log == world.cwd / "f.jsonl"
    assert config.run_dir == Path("/somewhere/home/run")
    assert config.config_file == conf / "x.toml"


def test_remote_model(world: World) -> None:
    config = world.resolve(REMOTE + 'gguf_revision = "main"\nid = "mine"\n')
    assert config.gguf_source == HuggingFaceGguf(repo="owner/repo", file="big.gguf", revision="main")
    assert config.model_id == "mine"
    assert world.resolve(REMOTE).model_id == "big"


def test_a_path_inside_an_image_is_taken_as_it_is(world: World) -> None:
    toml = VASTAI.replace(REMOTE, '[model]\ngguf_local_path = "/opt/m.gguf"\ntokenizer_local_path = "/opt/t.json"\n')
    config = world.resolve(toml, environ=KEYED)
    assert (config.gguf_source, config.tokenizer) == (LocalPath(path="/opt/m.gguf"), LocalPath(path="/opt/t.json"))


@pytest.mark.spec("S1 2.4", "S1 9.2")
def test_where_the_worker_program_is_looked_for(world: World) -> None:
    own = world.cwd / "own-worker"
    own.write_text("")
    own.chmod(0o755)
    assert world.resolve(MODEL, "--worker-bin", "own-worker").worker_bin == own
    (world.cwd / "prefix" / "bin").mkdir(parents=True)
    (world.cwd / "bin" / "mvp-worker-node").rename(world.cwd / "prefix" / "bin" / "mvp-worker-node")
    assert world.resolve(MODEL).worker_bin == world.cwd / "prefix" / "bin" / "mvp-worker-node"
    assert world.resolve(CACHED, "--provider", "docker", "--worker-bin", "gone").worker_bin is None


@pytest.mark.parametrize(
    ("toml", "used", "local"),
    [
        (MODEL, False, False),
        (MODEL + '[relay]\nmode = "default"', True, True),
        (MODEL + f'[relay]\nurl = "curve://{"A" * 64}@relay.example.org:19800"', True, False),
        (CACHED + '[provider]\nkind = "docker"', True, True),
        (CACHED + '[provider]\nkind = "docker"\n[relay]\nmode = "disabled"', False, False),
        (CACHED + '[provider]\nkind = "external"\n[relay]\nmode = "disabled"', False, False),
        (CACHED + '[provider]\nkind = "swarm"', True, True),
    ],
)
def test_who_uses_a_relay(world: World, toml: str, used: bool, local: bool) -> None:
    relay = world.resolve(toml).relay
    assert (relay.used, relay.local) == (used, local)
    if relay.url is not None:
        assert str(relay.url) == f"curve://{'a' * 64}@relay.example.org:19800"


def test_addresses_beyond_this_machine(world: World) -> None:
    (world.cwd / "token").write_text("a-token\n")
    config = world.resolve(
        MODEL
        + '[prompt]\nrpc_addr = "[::]:1"\nallow_remote = true\nhttp_addr = "0.0.0.0:2"\nhttp_token_file = "token"\n'
        + '[observability]\ndashboard_addr = "10.0.0.1:3"\nmetrics_addr = "[::1]:4"\n'
        + '[relay]\nbind_addr = "0.0.0.0:5"\nadvertise_addr = "box:6"\n'
    )
    addresses = (config.rpc_bind, config.http_addr, config.dashboard_addr, config.metrics_addr)
    assert [str(address) for address in addresses] == ["[::]:1", "0.0.0.0:2", "10.0.0.1:3", "[::1]:4"]
    assert config.dashboard
    assert config.http_token_file == world.cwd / "token"
    assert (str(config.relay.bind_addr), config.relay.advertise_addr) == ("0.0.0.0:5", "box:6")


def test_the_digest_is_of_the_content(world: World) -> None:
    first = world.resolve(MODEL)
    assert re.fullmatch("[0-9a-f]{64}", first.digest)
    assert world.resolve("# a comment\n" + MODEL, "--provider", "process").digest == first.digest
    assert world.resolve(MODEL + "[runtime]\nrun_id = 2").digest != first.digest
    one, two = (world.resolve(VASTAI, environ={"VASTAI_API_KEY": key}) for key in ("key-one-1234", "key-two-1234"))
    assert one.digest != two.digest, "another key is another configuration"
    assert b"key-one-1234" not in digest_source(one)


@pytest.mark.spec("S1 2.3")
def test_help_and_version(world: World) -> None:
    for argv in (["--help"], ["-h"], ["--provider", "docker", "--help"]):
        with pytest.raises(Information) as text:
            world.resolve(None, *argv)
        assert str(text.value) == HELP == information(argv)
    version = information(["--version"])
    assert version is not None
    assert re.fullmatch(r"mvp-orchestrator \S+\n", version)
    assert information(["--provider", "docker"]) is information(["--nonsense", "--help"]) is None
    assert all(f"  {name} " in HELP for name in (*ARGUMENTS, "--help", "--version"))


# --- the examples ---------------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 2.1")
@pytest.mark.parametrize("provider", [kind.value for kind in ProviderKind])
def test_examples(world: World, provider: str) -> None:
    """Each resolves in a folder that has what it names, and sets the archive."""
    (world.cwd / ".model-cache").mkdir()
    (world.cwd / DEFAULT_MODEL).write_bytes(b"GGUF")
    (world.cwd / ".ssh").mkdir()
    (world.cwd / ".ssh" / "id_ed25519").write_text("private")
    toml = (EXAMPLES / f"{provider}.toml").read_text()
    config = world.resolve(toml, environ={**KEYED, "HOME": str(world.cwd)})
    assert config.provider == provider
    assert config.datastream_frame_log == world.cwd / "frames.jsonl"


@pytest.mark.spec("S1 2.1")
@pytest.mark.parametrize("provider", [kind.value for kind in ProviderKind])
def test_examples_show_every_key_with_a_comment(world: World, provider: str) -> None:
    """Also what is commented out is valid by type and name: it is switched on table by table."""
    lines = (EXAMPLES / f"{provider}.toml").read_text().splitlines()
    shown: dict[str, list[str]] = {}
    table = ""
    for before, line in zip(["", *lines], lines, strict=False):
        if head := re.fullmatch(r"\[(\w+)\]", line):
            table = head.group(1)
            shown[table] = []
        elif key := re.match(r"#?(\w+) = ", line):
            assert before.startswith("# "), f"{table}.{key.group(1)} has no comment"
            shown[table].append(key.group(1))
    assert {name: sorted(keys) for name, keys in shown.items()} == {
        name: sorted(keys) for name, keys in tables().items()
    }
    switched_on = "\n".join(re.sub(r"^#(\w+ = )", r"\1", line) for line in lines)
    error = world.error(switched_on, environ=KEYED)
    assert "is not valid" not in error
    assert "is not a key" not in error
