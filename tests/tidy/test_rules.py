"""Each rule finds what it is there to find: a rule that is blind would keep the tree green for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.tidy import rules


@pytest.mark.parametrize(
    "source",
    [
        "import socket",
        "import zmq.backend",
        "from time import monotonic",
        "import random as r",
        "from uuid import uuid4",
        "def f():\n  import threading",
        "from concurrent.futures import ThreadPoolExecutor",
        "import common.bus",
        "from common import loop",
        "from common.bus import Link",
        "import os\nx = os.environ['A']",
        "from os import environ",
        "import os\nx = os.urandom(8)",
        "from datetime import datetime\nx = datetime.now()",
        "import datetime\nx = datetime.datetime.now()",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  pass\nelse:\n  import time",
    ],
)
def test_impure(source: str) -> None:
    assert rules.impure("common/link.py", source)


@pytest.mark.parametrize(
    "source",
    [
        "import msgspec\nfrom common.codec import Message",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  from random import Random",
        "import os.path",
        "from common.business import x",
        "class A:\n  time = 1\na = A().time",
    ],
)
def test_pure(source: str) -> None:
    assert rules.impure("common/link.py", source) == []


@pytest.mark.parametrize(
    ("name", "pure"),
    [
        ("services/router/core.py", True),
        ("worker/agent/core.py", True),
        ("common/session.py", True),
        ("common/swim/member.py", True),
        ("common/messages/bus.py", True),
        ("common/bus.py", False),
        ("services/router/service.py", False),
        ("services/gateway/session.py", False),
        ("tests/sim/core.py", False),
    ],
)
def test_which_modules_are_pure(name: str, pure: bool) -> None:
    assert rules.is_pure(name) is pure


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (rules.imports_zmq, "services/x/service.py", "import zmq"),
        (rules.imports_zmq, "worker/x.py", "from zmq.utils import z85"),
        (rules.dangerous, "tools/x.py", "import pickle"),
        (rules.dangerous, "tools/x.py", "from marshal import loads"),
        (rules.dangerous, "tools/x.py", "eval('1')"),
        (rules.dangerous, "tools/x.py", "exec('1')"),
        (rules.dangerous, "tests/x.py", "import zmq.asyncio"),
        (rules.dangerous, "tests/x.py", "from zmq import asyncio"),
        (rules.dangerous, "tools/x.py", "import subprocess\nsubprocess.run('ls', shell=True)"),
        (rules.dangerous, "tools/x.py", "import os\nos.system('ls')"),
        (rules.prints, "services/x/service.py", "print('hello')"),
        (rules.too_long, "tools/x.py", "\n" * (rules.FILE_LINES_MAX + 1)),
        (rules.left_for_later, "README.md", "TO" + "DO: this"),
        (rules.left_for_later, "a.py", "x = 1  # FIX" + "ME"),
        (rules.own_paths, "a.py", "x = '/ro" + "ot/x'"),
        (rules.own_paths, "config/a.toml", "path = /wo" + "rk/main"),
        (rules.undocumented_messages, "common/messages/x.py", "class A(Message, tag=1):\n  x: int"),
        (rules.undocumented_messages, "common/messages/x.py", "class A(Message):\n  '''A to B.'''"),
        (rules.undocumented_messages, "common/messages/x.py", "class A(codec.Message, tag=T):\n  '''A.'''"),
    ],
)
def test_forbidden(rule: Callable[[str, str], list[str]], name: str, source: str) -> None:
    assert len(rule(name, source)) == 1


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (rules.imports_zmq, "common/bus.py", "import zmq"),
        (rules.imports_zmq, "tools/tap.py", "import zmq"),
        (rules.dangerous, "tools/x.py", "model.eval()\nimport subprocess\nsubprocess.run(['ls'], shell=False)"),
        (rules.prints, "services/x/__main__.py", "print('hello')"),
        (rules.prints, "tools/chat.py", "print('hello')"),
        (rules.own_paths, "a.sh", "$HOME/wo" + "rk/x services/wo" + "rk/x"),
        (rules.undocumented_messages, "common/messages/x.py", "class A(Message, tag=1):\n  '''A to B.'''"),
    ],
)
def test_allowed(rule: Callable[[str, str], list[str]], name: str, source: str) -> None:
    assert rule(name, source) == []


def test_tags_are_append_only() -> None:
    recorded = rules.recorded_tags('Hello = 1\n[config]\n50 = "ConfigGet"\n')
    assert recorded == {1: "Hello", 50: "ConfigGet"}
    assert rules.tag_changes(recorded, {1: "Hello", 50: "ConfigGet"}) == []
    assert len(rules.tag_changes(recorded, {1: "Hello"})) == 1
    assert len(rules.tag_changes(recorded, {1: "Welcome", 50: "ConfigGet"})) == 1
    assert len(rules.tag_changes(recorded, {1: "Hello", 50: "ConfigGet", 51: "New"})) == 1
