"""mvp-chat before it spends money: the plan with its price, the question, and nothing rented without a yes."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.vastai.server import FakeVast
from tools import chat
from tools.chat_rent import agree
from tools.chat_run import RunError


class Person(io.StringIO):
    """Somebody at a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def market() -> Iterator[FakeVast]:
    fake = FakeVast(real=False)
    for price in (0.9, 0.31, 0.22, 0.4, 7.0):
        fake.offer(price=price)
    yield fake
    fake.close()


def config(folder: Path, limits: str = "max_dph_total = 1.0\nmax_hours = 2", *, confirm: bool = True) -> Path:
    (folder / "identity").write_text("a key")
    path = folder / "run.toml"
    path.write_text(
        '[provider]\nkind = "vastai"\n[model]\nid = "tiny"\ngguf_repo = "o/r"\ngguf_file = "f.gguf"\n'
        f"[vastai]\nssh_identity = {json.dumps(str(folder / 'identity'))}\nbootstrap_command = 'worker'\n"
        f"confirm_lease = {str(confirm).lower()}\n{limits}\n"
    )
    return path


def ask(market: FakeVast, path: Path, answer: str, *, yes: bool = False) -> tuple[bool, str]:
    log = io.StringIO()
    environ = {"VASTAI_BASE_URL": market.url, "VASTAI_API_KEY": market.key, "HOME": str(path.parent), "PATH": ""}
    agreed = agree(["--runtime-config", str(path)], yes=yes, source=Person(answer), log=log, environ=environ, pace=0)
    return agreed, log.getvalue()


def test_the_plan_with_its_price_comes_before_the_question(market: FakeVast, tmp_path: Path) -> None:
    agreed, told = ask(market, config(tmp_path), "y\n")
    assert agreed and told.splitlines() == [
        "to be rented on vast.ai: 1 machine with 50 GB of disk for tiny",
        "  $0.220 an hour, RTX 4090, 24 GB, Norway, NO",
        "  $0.310 an hour, RTX 4090, 24 GB, Norway, NO",
        "  $0.400 an hour, RTX 4090, 24 GB, Norway, NO",
        "  and 1 more within the limits, from the cheapest up",
        "  at most $2.00 by the limits of [vastai]; traffic is extra",
        "Rent it? [y/N]: ",
    ]
    assert not market.created


@pytest.mark.parametrize("answer", ["n\n", "", "\n", "maybe\n"])
def test_anything_but_yes_is_no(market: FakeVast, tmp_path: Path, answer: str) -> None:
    with pytest.raises(RunError, match="nothing was rented"):
        ask(market, config(tmp_path), answer)


@pytest.mark.parametrize(
    ("limits", "bound"),
    [
        ("max_spend = 0.5", "at most $0.50 by the limits"),
        ("max_hours = 10", "about $2.31 in the 10 hours"),
        ("", "it costs until this chat ends"),
    ],
)
def test_what_it_costs_at_most(market: FakeVast, tmp_path: Path, limits: str, bound: str) -> None:
    agreed, told = ask(market, config(tmp_path, limits), "", yes=True)
    assert agreed and bound in told and "[y/N]" not in told


def test_no_offer_no_price_and_no_consent_end_it(market: FakeVast, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no machine within the limits"):
        ask(market, config(tmp_path, "max_dph_total = 0.01"), "y\n")
    with pytest.raises(RunError, match="confirm_lease = true"):
        ask(market, config(tmp_path, confirm=False), "y\n")
    market.key = "another"
    with pytest.raises(RunError, match="nothing was rented"):
        environ = {"VASTAI_BASE_URL": market.url, "VASTAI_API_KEY": "wrong", "HOME": str(tmp_path), "PATH": ""}
        agree(
            ["--runtime-config", str(config(tmp_path))],
            yes=True,
            source=Person(""),
            log=io.StringIO(),
            environ=environ,
            pace=0,
        )


def test_a_configuration_that_rents_asks_although_no_argument_says_so(
    market: FakeVast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VASTAI_BASE_URL", market.url)
    monkeypatch.setenv("VASTAI_API_KEY", market.key)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert chat.main(["--config", str(config(tmp_path))]) == 1
    assert "costs money: add --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", Person("n\n"))
    assert chat.main(["--config", str(config(tmp_path))]) == 1
    told = capsys.readouterr().err
    assert "$0.220 an hour" in told and told.endswith("Rent it? [y/N]: mvp-chat: nothing was rented\n")
    assert not market.created and not market.instances


def test_other_providers_are_not_asked_about(market: FakeVast, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    (tmp_path / "m.gguf").write_text("")
    path.write_text(f'[provider]\nkind = "process"\n[model]\nid = "x"\ngguf_local_path = "{tmp_path}/m.gguf"\n')
    agreed, told = ask(market, path, "")
    assert (agreed, told) == (False, "") and not market.requests
