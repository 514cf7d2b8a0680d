"""Slices, secret files and the ssh identity (S1 7.1-7.3, 10.16)."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from common.addresses import Role
from common.config import ConfigError, Secret
from common.config_slices import (
    CachedModelSlice,
    CollectorSlice,
    GatewaySlice,
    MembershipSlice,
    OrchestratorSlice,
    ProvisionerSlice,
    RelaySlice,
    decode_slice,
)
from common.messages.node_agent import EmbeddedGguf, LocalPath
from services.config_resolver.identity import derive_public_key, fingerprint, prepare_identity
from services.config_resolver.secret_files import write_secrets
from services.config_resolver.slices import all_slices, detail, secrets_of, slice_for
from tests.unit.config.config_world import CACHED, MODEL, REMOTE, VASTAI, World, make_world

SECRETS = Path("/s")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path.resolve())


# --- slices -----------------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 7.1")
def test_slices_of_a_process_run(world: World) -> None:
    config = world.resolve(MODEL + '[prompt]\nmax_tokens = 9\n[observability]\ndatastream_frame_log = "f"\n')
    assert slice_for(config, Role.GATEWAY, SECRETS) == GatewaySlice(
        rpc_bind="127.0.0.1:19777", max_tokens=9, model_id="model"
    )
    assert slice_for(config, Role.COLLECTOR, SECRETS) == CollectorSlice(frame_log=str(world.cwd / "f"))
    assert slice_for(config, Role.MEMBERSHIP, SECRETS) == MembershipSlice(profile="lan")
    assert slice_for(config, Role.ROUTER, SECRETS) == slice_for(config, Role.RELAY, SECRETS) == RelaySlice()
    assert slice_for(config, Role.PROVISIONER, SECRETS) == ProvisionerSlice(
        provider="process",
        image="swactor-mvp-node:latest",
        worker_bin=str(world.cwd / "bin" / "mvp-worker-node"),
    )
    orchestrator = slice_for(config, Role.ORCHESTRATOR, SECRETS)
    assert isinstance(orchestrator, OrchestratorSlice)
    assert orchestrator.gguf_source == LocalPath(path=str(world.cwd / "model.gguf"))
    assert orchestrator.tokenizer == EmbeddedGguf()
    assert orchestrator.cached_model is None
    assert slice_for(config, Role.AGENT, SECRETS) is slice_for(config, Role.TAP, SECRETS) is None


@pytest.mark.spec("S1 7.2")
def test_the_cached_model_reaches_the_orchestrator(world: World) -> None:
    orchestrator = slice_for(world.resolve(CACHED, "--provider", "docker"), Role.ORCHESTRATOR, SECRETS)
    assert isinstance(orchestrator, OrchestratorSlice)
    assert orchestrator.cached_model == CachedModelSlice(
        host_path=str(world.cwd / "model.gguf"), container_path="/models/cached/model.gguf"
    )
    assert orchestrator.relay


@pytest.mark.spec("S1 2.2")
def test_the_token_reaches_the_orchestrator_only_where_it_plans_a_model_on_a_hub(world: World) -> None:
    token = {"HF_TOKEN": "hf-hf-hf-hf"}
    planned = slice_for(world.resolve(REMOTE, "--pipeline-stages", "2", environ=token), Role.ORCHESTRATOR, SECRETS)
    assert isinstance(planned, OrchestratorSlice) and planned.hf_token_file == "/s/hf_token"
    for toml, args in ((REMOTE, ()), (CACHED, ("--pipeline-stages", "2"))):
        other = slice_for(world.resolve(toml, *args, environ=token), Role.ORCHESTRATOR, SECRETS)
        assert isinstance(other, OrchestratorSlice) and other.hf_token_file == ""


def test_slices_survive_the_wire(world: World) -> None:
    kinds = {
        Role.ORCHESTRATOR: OrchestratorSlice,
        Role.PROVISIONER: ProvisionerSlice,
        Role.GATEWAY: GatewaySlice,
        Role.COLLECTOR: CollectorSlice,
        Role.MEMBERSHIP: MembershipSlice,
        Role.ROUTER: RelaySlice,
        Role.RELAY: RelaySlice,
    }
    for config in (world.resolve(CACHED), world.resolve(VASTAI, environ={"VASTAI_API_KEY": "key-key-key"})):
        encoded = all_slices(config, SECRETS)
        assert set(encoded) == set(kinds)
        for role, kind in kinds.items():
            assert decode_slice(encoded[role], kind) == slice_for(config, role, SECRETS)


@pytest.mark.spec("S1 10.16")
def test_slices_of_a_vastai_run(world: World) -> None:
    (world.cwd / "http").write_text("token")
    toml = VASTAI + "max_spend = 5\n[prompt]\nhttp_token_file = 'http'\n"
    config = world.resolve(toml, environ={"VASTAI_API_KEY": "key-key-key", "HF_TOKEN": "hf-hf-hf-hf"})
    assert slice_for(config, Role.MEMBERSHIP, SECRETS) == MembershipSlice(profile="wan")
    provisioner = slice_for(config, Role.PROVISIONER, SECRETS)
    assert isinstance(provisioner, ProvisionerSlice)
    assert provisioner.vastai is not None
    assert provisioner.hf_token_file == "/s/hf_token"
    assert provisioner.vastai.api_key_file == "/s/vastai_api_key"
    assert provisioner.vastai.bootstrap_command_file == "/s/vastai_bootstrap_command"
    assert provisioner.vastai.onstart_file == ""
    assert provisioner.vastai.max_spend == 5
    assert sorted(provisioner.secrets_files) == ["/s/hf_token", "/s/vastai_api_key", str(world.cwd / "http")]
    assert {name: secret.reveal() for name, secret in secrets_of(config).items()} == {
        "hf_token": "hf-hf-hf-hf",
        "vastai_api_key": "key-key-key",
        "vastai_bootstrap_command": "mvp-worker-node",
    }


@pytest.mark.parametrize(
    ("toml", "shown"),
    [
        (MODEL, {"worker_bin"}),
        (CACHED + '[provider]\nkind = "docker"', {"gpus", "pull"}),
        (CACHED + '[provider]\nkind = "swarm"', {"constraints"}),
        (CACHED + '[provider]\nkind = "external"', set()),
    ],
)
def test_detail_of_the_config_record(world: World, toml: str, shown: set[str]) -> None:
    found = detail(world.resolve(toml))
    assert set(found["provider_config"]) == shown
    wanted = {"config_profile", "image", "provider", "rpc_bind", "model_id", "stage_index", "relay_mode"}
    assert wanted | {"legacy_layer_end_exclusive", "pipeline_stages", "digest", "notes"} <= set(found)


# --- secret files -----------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 10.16")
def test_secret_files_are_private_and_replaced_whole(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "secrets"
    write_secrets({"a": Secret("first")}, folder)
    write_secrets({"a": Secret("second")}, folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "a").stat().st_mode) == 0o600
    assert (folder / "a").read_text() == "second"
    assert os.listdir(folder) == ["a"]


def test_a_secret_is_not_written_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_text("untouched")
    folder = tmp_path / "secrets"
    folder.mkdir()
    (folder / "a").symlink_to(target)
    (folder / f".a.{os.getpid()}").symlink_to(target)
    write_secrets({"a": Secret("value")}, folder)
    assert target.read_text() == "untouched"
    assert (folder / "a").read_text() == "value"
    assert not (folder / "a").is_symlink()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as error:
        write_secrets({"a": Secret("hide me")}, tmp_path / "file" / "secrets")
    assert str(error.value) == (
        f"the secrets folder {tmp_path}/file/secrets cannot be written: Not a directory: make it writable for this user"
    )


# --- the ssh identity -------------------------------------------------------------------------------------------
def keygen(path: Path, passphrase: str = "") -> Path:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("ssh-keygen is not installed")
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", "comment", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return path


WAY_OUT = "name a private key without passphrase in [vastai].ssh_identity or with --vastai-ssh-identity"


def test_the_public_key_is_derived(world: World) -> None:
    identity = keygen(world.cwd / "real")
    expected = (world.cwd / "real.pub").read_text().split()[:2]
    (world.cwd / "real.pub").unlink()
    config = world.resolve(
        VASTAI, "--vastai-ssh-identity", "real", environ={"VASTAI_API_KEY": "key-key-key", "PATH": os.environ["PATH"]}
    )
    prepared = prepare_identity(config).vastai
    assert prepared is not None
    assert prepared.ssh_public_key == " ".join(expected)
    shown = subprocess.run(["ssh-keygen", "-l", "-f", str(identity)], capture_output=True, text=True, check=True)
    assert prepared.ssh_public_fingerprint == shown.stdout.split()[1]
    assert prepared == replace(
        config.vastai,  # type: ignore[type-var]
        ssh_public_key=prepared.ssh_public_key,
        ssh_public_fingerprint=prepared.ssh_public_fingerprint,
    )
    assert prepare_identity(world.resolve(REMOTE)) == world.resolve(REMOTE)


@pytest.mark.spec("S1 10.2")
def test_identities_that_cannot_be_used(tmp_path: Path) -> None:
    protected = keygen(tmp_path / "protected", "secret phrase")
    with pytest.raises(ConfigError) as error:
        derive_public_key(protected)
    assert str(error.value) == (
        f"the ssh identity {protected} cannot be used: it is protected by a passphrase: {WAY_OUT}"
    )
    opened = keygen(tmp_path / "opened")
    opened.chmod(0o644)
    with pytest.raises(ConfigError) as error:
        derive_public_key(opened)
    assert str(error.value) == (
        f"the ssh identity {opened} cannot be used: other users may read it (chmod 600 it): {WAY_OUT}"
    )
    garbage = tmp_path / "garbage"
    garbage.write_text("no key at all, but private: QXQX")
    garbage.chmod(0o600)
    with pytest.raises(ConfigError) as error:
        derive_public_key(garbage)
    assert str(error.value).startswith(f"the ssh identity {garbage} cannot be used: ssh-keygen says")
    assert str(error.value).endswith(WAY_OUT)
    assert "QXQX" not in str(error.value)
    assert "\n" not in str(error.value)


def test_no_ssh_keygen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError) as error:
        derive_public_key(tmp_path / "id")
    assert str(error.value) == (
        "provider vastai needs the program ssh-keygen, which is not installed: install the OpenSSH client"
    )


def test_what_is_no_public_key() -> None:
    with pytest.raises(ConfigError, match="ssh-keygen printed no public key"):
        fingerprint("ssh-ed25519 !!!")
    with pytest.raises(ConfigError, match="ssh-keygen printed no public key"):
        fingerprint("ssh-ed25519")
