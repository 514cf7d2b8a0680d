"""No secret stands in an error, a repr, a slice or the digest's source (S1 10.16)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.addresses import Role
from common.config import ConfigError, digest_source
from common.config_model import Secret
from common.config_slices import encode_slice
from services.config_resolver.slices import all_slices, detail, secrets_of, slice_for
from tests.unit.config.config_world import REMOTE, VASTAI, World, make_world

# Letters that stand in no key, no path and no sentence of ours, so that a hit is a leak.
token = st.text(st.sampled_from('QXZ@:/%?&#+=-_.~!"\\'), min_size=6, max_size=120).map(lambda text: f"QX{text}Q")


@pytest.fixture(scope="module")
def secret_world() -> Iterator[World]:
    with tempfile.TemporaryDirectory() as folder:
        yield make_world(Path(folder).resolve())


def toml_text(value: str) -> str:
    return json.dumps(value)


BREAKS = [
    "",
    "[runtime]\nrun_id = 'x'\n",
    "[vastai2]\nx = 1\n",
    "[runtime]\npipeline_stages = 2\n",
    "[prompt]\nrpc_addr = 'nonsense'\n",
    "[broken\n",
]
PLACES = [
    "api_key = {}\n",
    "api_key = [{}]\n",
    "apikey = {}\n",
    "onstart = {}\n",
    "onstart = [{}]\n",
    "api_key = {}\napi_key = {}\n",
    "api_key = {} oops\n",
]


@pytest.mark.spec("S1 10.16")
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(secret=token, place=st.sampled_from(PLACES), broken=st.sampled_from(BREAKS), spaced=st.booleans())
def test_secrets_of_the_file(secret_world: World, secret: str, place: str, broken: str, spaced: bool) -> None:
    value = f" {secret} \u00e9" if spaced else secret
    check(secret_world, VASTAI + place.replace("{}", toml_text(value)) + broken, {}, secret)


@pytest.mark.spec("S1 10.16")
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    secret=token,
    name=st.sampled_from(["VASTAI_API_KEY", "HF_TOKEN", "MVP_VASTAI_API_KEY", "MVP_ANYTHING"]),
    toml=st.sampled_from([VASTAI, REMOTE, VASTAI + "nonsense = 1"]),
    misplaced=st.sampled_from(["", "[image]\nnode = [{}]\n", "[prompt]\nrpc_addr = {}\n", "[relay]\nurl = {}\n"]),
    tail=st.sampled_from(["", " x", "\x00", "\udcff"]),
)
def test_secrets_of_the_environment(
    secret_world: World, secret: str, name: str, toml: str, misplaced: str, tail: str
) -> None:
    """Also where the user has copied the secret into the wrong key."""
    if name.startswith("MVP_") or tail:
        misplaced = ""
    check(secret_world, toml + "\n" + misplaced.replace("{}", toml_text(secret)), {name: secret + tail}, secret)


def check(world: World, toml: str, environ: dict[str, str], secret: str) -> None:
    try:
        config = world.resolve(toml, environ=environ)
    except ConfigError as error:
        assert secret not in str(error)
        assert json.dumps(secret)[1:-1] not in str(error)
        assert secret[:20] not in str(error), "nor a part of it"
        assert "\n" not in str(error)
        return
    texts = [repr(config), str(config), repr(secrets_of(config)), digest_source(config).decode(), config.digest]
    texts += [value.decode() for value in all_slices(config, Path("/run/secrets")).values()]
    texts += [repr(slice_for(config, role, Path("/run/secrets"))) for role in Role]
    texts.append(json.dumps(detail(config)))
    assert not [text for text in texts if secret in text]


@pytest.mark.spec("S1 10.16")
def test_presence_is_shown(secret_world: World) -> None:
    config = secret_world.resolve(
        VASTAI + 'onstart = "export TOKEN=QXQXQX"\n', environ={"VASTAI_API_KEY": "QXQXQXQX", "HF_TOKEN": "QXQXQXQX"}
    )
    shown = detail(config)
    assert shown["has_hf_token"] is True
    assert {key for key, value in shown["provider_config"].items() if key.startswith("has_") and value is True} == {
        "has_api_key",
        "has_bootstrap_command",
        "has_onstart",
        "has_ssh_identity",
    }
    assert "QXQX" not in json.dumps(shown)
    provisioner = slice_for(config, Role.PROVISIONER, Path("/s"))
    assert provisioner is not None
    assert b'"/s/vastai_api_key"' in encode_slice(provisioner)


@pytest.mark.parametrize("shown", [repr, str, "{}".format, lambda secret: f"{secret}"])
def test_a_secret_hides_itself(shown: object) -> None:
    assert callable(shown)
    assert shown(Secret("QXZ")) == "<secret>"
    assert Secret("QXZ").reveal() == "QXZ"
    assert Secret("QXZ") != "QXZ"
    assert len({Secret("QXZ"), Secret("QXZ")}) == 1
