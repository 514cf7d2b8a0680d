"""The client's command line and its configuration file; what renting costs at most (S2 5, 8)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tidy.rules import ROOT
from tools.single_gpu_inference import CONFIG_KEYS, UsageError, _arguments, parse_seed
from tools.single_gpu_inference_vastai import plan, worst_case_ms

KEY = "ab" * 32


@pytest.mark.spec("S2 8")
def test_seeds() -> None:
    assert parse_seed(KEY) == (KEY, "", 0)
    assert parse_seed(f" {KEY.upper()}@127.0.0.1:5000\n") == (KEY, "127.0.0.1", 5000)
    for bad in ("", "ab", KEY + "00", "zz" * 32, f"{KEY}@", f"{KEY}@h", f"{KEY}@:5", f"{KEY}@h:0", f"{KEY}@h:65533"):
        with pytest.raises(UsageError):
            parse_seed(bad)


def test_the_example_configuration_is_read_and_the_command_line_counts_more(tmp_path: Path) -> None:
    example = ROOT / "config" / "single-gpu.toml"
    arguments = _arguments(["--prompt", "x", "--config", str(example)])
    assert arguments.max_dph == 0.5 and arguments.model.startswith("hf://") and arguments.max_tokens == 64
    assert _arguments(["--prompt", "x", "--config", str(example), "--max-dph", "0.2"]).max_dph == 0.2
    # What is commented out is the default, spelt right.
    whole = "".join(line.removeprefix("#") for line in example.read_text().splitlines(True) if " = " in line)
    path = tmp_path / "all.toml"
    path.write_text("[single_gpu_inference]\n" + whole)
    assert all(f"\n{key} = " in path.read_text() for key in CONFIG_KEYS)
    everything, defaults = _arguments(["--prompt", "x", "--config", str(path)]), _arguments(["--prompt", "x"])
    for key in ("disk_gb", "max_tokens", "temperature", "limit_s", "max_dph"):
        assert getattr(everything, key) == getattr(defaults, key), key


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[single_gpu_inference]\ngpus = 1", "there is no key 'gpus'; the keys are gpu, max_dph"),
        ("[single_gpu_inference]\ndisk_gb = 'x'", "disk_gb must be a whole number"),
        ("[single_gpu_inference]\nmax_dph = true", "max_dph must be a number"),
        ("[", "is no TOML"),
    ],
)
def test_configuration_errors_are_one_sentence(
    tmp_path: Path, text: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(SystemExit) as caught:
        _arguments(["--prompt", "x", "--config", str(path)])
    said = capsys.readouterr().err
    assert caught.value.code == 1 and sentence in said and said.count("\n") == 1


def test_the_plan_names_the_most_that_it_can_cost() -> None:
    assert worst_case_ms() == 3 * (600 + 120 + 60 + 300 + 120) * 1000
    arguments = _arguments(["--prompt", "x", "--max-dph", "0.4", "--gpu", "RTX_4090"])
    assert "one RTX_4090 on vast.ai at $0.4 an hour or less" in plan(arguments)
    assert "at most 60 minutes, $0.40" in plan(arguments)
