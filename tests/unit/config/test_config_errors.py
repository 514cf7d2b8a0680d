"""Every configuration error is one whole sentence: the layer, the value, the way out (S1 9.1, 9.2, 10.2)."""

from __future__ import annotations

import os

import pytest

from tests.unit.config.config_world import API_KEY, CACHED, MODEL, REMOTE, VASTAI, World

U32 = "4294967295"
U64 = "18446744073709551615"
FIVE = "--runtime-config, --provider, --worker-bin, --pipeline-stages and --vastai-ssh-identity"
PROVIDERS = '"process", "docker", "swarm", "vastai" or "external"'
TOKEN = "one line of printable ASCII without spaces"
FETCH = "./dev fetch-model puts one into .model-cache/"
KEYED = {"VASTAI_API_KEY": API_KEY}


@pytest.mark.spec("S1 2.3", "S1 9.1", "S1 10.2")
@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--provder", "docker"], 'argument "--provder" is unknown: did you mean --provider?'),
        (["--model-id", "x"], 'argument "--model-id" is unknown: set [model].id in the configuration file instead'),
        (["--rpc-addr=x"], 'argument "--rpc-addr" is unknown: set [prompt].rpc_addr in the configuration file instead'),
        (["--zzz"], f'argument "--zzz" is unknown: mvp-orchestrator takes only {FIVE}'),
        (["serve"], f'argument "serve" is unknown: mvp-orchestrator takes only {FIVE}'),
        (["--provider"], "argument --provider has no value: write --provider NAME"),
        (["--provider", "--worker-bin", "x"], "argument --provider has no value: write --provider NAME"),
        (["--provider="], "argument --provider has no value: write --provider NAME"),
        (["--runtime-config"], "argument --runtime-config has no value: write --runtime-config PATH"),
        (["--worker-bin"], "argument --worker-bin has no value: write --worker-bin PATH"),
        (["--pipeline-stages"], "argument --pipeline-stages has no value: write --pipeline-stages COUNT"),
        (
            ["--vastai-ssh-identity"],
            "argument --vastai-ssh-identity has no value: write --vastai-ssh-identity PATH",
        ),
        (["--provider", "mock"], f'argument --provider = "mock" is not valid: it must be {PROVIDERS}'),
        (["--provider", "k8s"], f'argument --provider = "k8s" is not valid: it must be {PROVIDERS}'),
        *(
            (
                ["--pipeline-stages", bad],
                f'argument --pipeline-stages = "{bad}" is not valid: it must be a whole number from 1 to {U32}',
            )
            for bad in ("0", "-1", "two", "1.5", "4294967296", "9" * 30, "٢", "1_0")
        ),
        (
            ["--runtime-config", "none.toml"],
            'argument --runtime-config = "none.toml" names CWD/none.toml, which does not exist: '
            "name a readable TOML file",
        ),
        (
            ["--runtime-config", "bin"],
            'argument --runtime-config = "bin" names CWD/bin, which is a directory: name a readable TOML file',
        ),
        (
            ["--runtime-config", "~/c.toml"],
            'argument --runtime-config = "~/c.toml" needs the variable HOME, which is not set: '
            "set it or write the whole path",
        ),
    ],
)
def test_arguments(world: World, argv: list[str], sentence: str) -> None:
    assert world.error(None, *argv) == sentence


@pytest.mark.spec("S1 2.2", "S1 10.2")
@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("MVP_RUN_ID", "set [runtime].run_id in the configuration file and unset it"),
        ("MVP_NODE_IMAGE", "set [image].node in the configuration file and unset it"),
        ("MVP_GGUF_LOCAL_PATH", "set [model].gguf_local_path in the configuration file and unset it"),
        ("MVP_GGUF_LOCAL_PTH", "set [model].gguf_local_path in the configuration file and unset it"),
        ("MVP_VASTAI_GPU_NAME", "set [vastai].gpu_name in the configuration file and unset it"),
        ("MVP_WORKER_BIN", "use --worker-bin and unset it"),
        ("MVP_VASTAI_API_KEY", "use VASTAI_API_KEY and unset it"),
        ("MVP_TINYGRAD_WORKER", "unset it; settings belong into the configuration file"),
    ],
)
def test_variables(world: World, name: str, way_out: str) -> None:
    assert world.error(MODEL, environ={name: "value"}) == f"variable {name} is not read: {way_out}"
    world.resolve(MODEL, environ={name: "  "})


@pytest.mark.spec("S1 2.1", "S1 9.1", "S1 10.2")
@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("[runtime", "line 1, end of file: expected ']' at the end of a table declaration: correct that place"),
        ("\n\nrun id = 1", "line 3, column 5: expected '=' after a key in a key/value pair: correct that place"),
        ('x = "abc', "line 1, end of file: unterminated string: correct that place"),
        ("[a]\n[a]", "line 2, column 3: cannot declare ('a',) twice: correct that place"),
        (b"\n# \xff", "line 2 is not UTF-8: save the file as UTF-8"),
        ("x = " + "[" * 5000, "a value is too large or too deep: shorten it"),
        ("x = " + "9" * 5000, "a value is too large or too deep: shorten it"),
    ],
)
def test_broken_toml(world: World, toml: str | bytes, sentence: str) -> None:
    assert world.error(toml) == f"c.toml is not valid TOML: {sentence}"


@pytest.mark.spec("S1 2.1", "S1 7.1", "S1 10.2")
@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("[vastai]\ndisk_gbs = 1", "[vastai].disk_gbs is not a key of the configuration: did you mean disk_gb?"),
        (
            "[runtime]\nrun_id = true\npipline_stages = 2",
            "[runtime].pipline_stages is not a key of the configuration: did you mean pipeline_stages?",
        ),
        ("[image]\nbuild = 1", "[image].build is not a key of the configuration: valid are node"),
        ("[vastia]\n", "[vastia] is not a table of the configuration: did you mean [vastai]?"),
        (
            "[zzz]\n",
            "[zzz] is not a table of the configuration: valid are [runtime], [provider], [image], [relay], [prompt], "
            "[model], [pipeline], [docker], [swarm], [observability] and [vastai]",
        ),
        ("profile = 'local'", "profile stands outside of any table: did you mean [runtime].profile?"),
        ("image2 = 'x'", "image2 stands outside of any table: every key belongs to a table"),
        ("runtime = 3", "runtime must be a table: write [runtime] on a line of its own and its keys below"),
        ("[[runtime]]", "runtime must be a table: write [runtime] on a line of its own and its keys below"),
        (
            '[runtime]\nprofile = "prod"',
            '[runtime].profile = "prod" is not valid: it must be "local" or "deploy"',
        ),
        ('[provider]\nkind = "mock"', f'[provider].kind = "mock" is not valid: it must be {PROVIDERS}'),
        ('[runtime]\nrun_id = "1"', f'[runtime].run_id = "1" is not valid: it must be a whole number from 0 to {U64}'),
        ("[runtime]\nnode_id = -1", f"[runtime].node_id = -1 is not valid: it must be a whole number from 0 to {U64}"),
        (
            "[runtime]\nstage_index = true",
            f"[runtime].stage_index = true is not valid: it must be a whole number from 0 to {U32}",
        ),
        (
            "[runtime]\npipeline_stages = 0",
            f"[runtime].pipeline_stages = 0 is not valid: it must be a whole number from 1 to {U32}",
        ),
        (
            "[runtime]\npipeline_stages = 2.0",
            f"[runtime].pipeline_stages = 2.0 is not valid: it must be a whole number from 1 to {U32}",
        ),
        (
            "[model]\nmax_context = 0",
            f"[model].max_context = 0 is not valid: it must be a whole number from 1 to {U32}",
        ),
        ('[model]\nid = " "', '[model].id = " " is not valid: it must be a text that is not empty'),
        (
            '[model]\ncached_path = "a\\u0000b"',
            '[model].cached_path = "a\\u0000b" is not valid: it must be a path',
        ),
        ("[prompt]\nallow_remote = 1", "[prompt].allow_remote = 1 is not valid: it must be true or false"),
        (
            "[vastai]\nmin_reliability = 1.5",
            "[vastai].min_reliability = 1.5 is not valid: it must be a number from 0 to 1",
        ),
        (
            "[vastai]\nmin_down_mbps = nan",
            "[vastai].min_down_mbps = NaN is not valid: it must be a number from 0 up",
        ),
        ("[vastai]\nmax_spend = 0", "[vastai].max_spend = 0 is not valid: it must be a number above 0 (US dollars)"),
        (
            "[vastai]\napi_key = 5",
            "[vastai].api_key is not valid: it must be one line of printable ASCII without spaces",
        ),
        ("[vastai]\nonstart = 5", "[vastai].onstart is not valid: it must be a text that is not empty"),
        (
            '[docker]\ngpus = "some"',
            '[docker].gpus = "some" is not valid: it must be "none", "all", a count as "2", "device=0,1" or '
            '"cdi:<name>"',
        ),
        (
            '[swarm]\nconstraints = ["gpu"]',
            '[swarm].constraints = "gpu" is not valid: it must be a list of texts as "node.labels.gpu == true"',
        ),
        ('[relay]\nmode = "on"', '[relay].mode = "on" is not valid: it must be "default" or "disabled"'),
        ('[pipeline]\nedges = "x"', '[pipeline].edges = "x" is not valid: it must be "auto" or "relay"'),
        (
            f'[image]\nnode = ["{"x" * 200}"]',
            f'[image].node = ["{"x" * 75}... is not valid: it must be the name of an image',
        ),
    ],
)
def test_schema(world: World, toml: str, sentence: str) -> None:
    assert world.error(toml) == f"c.toml: {sentence}"


@pytest.mark.spec("S1 2.4", "S1 7.1", "S1 7.2", "S1 9.2", "S1 10.2")
@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        *(
            (
                MODEL + f'[prompt]\nrpc_addr = "{bad}"',
                f'c.toml: [prompt].rpc_addr = "{bad}" is not valid: it must be IP:port, as "127.0.0.1:19777"',
            )
            for bad in ("localhost:1", "127.0.0.1", "127.0.0.1:", "127.0.0.1:70000", ":1", "::1:80", "1.2.3:4", "[::1]")
        ),
        (
            MODEL + '[prompt]\nrpc_addr = "0.0.0.0:1"',
            'c.toml: [prompt].rpc_addr = "0.0.0.0:1" can be reached from other machines without any password: '
            "set [prompt].allow_remote = true or use 127.0.0.1",
        ),
        (
            MODEL + '[prompt]\nhttp_addr = "[::]:80"',
            'c.toml: [prompt].http_addr = "[::]:80" can be reached from other machines without any password: '
            "set [prompt].http_token_file or use 127.0.0.1",
        ),
        (
            MODEL + '[observability]\ndashboard_addr = "10.0.0.1:80"',
            'c.toml: [observability].dashboard_addr = "10.0.0.1:80" can be reached from other machines without any '
            "password: set [prompt].http_token_file or use 127.0.0.1",
        ),
        (
            MODEL + '[observability]\nmetrics_addr = "x:80"',
            'c.toml: [observability].metrics_addr = "x:80" is not valid: it must be IP:port, as "127.0.0.1:9090"',
        ),
        (
            MODEL + '[prompt]\nhttp_token_file = "no"',
            'c.toml: [prompt].http_token_file = "no" names CWD/no, which does not exist: write a bearer token into it',
        ),
        (
            MODEL + '[prompt]\nhttp_token_file = "blank"',
            'c.toml: [prompt].http_token_file = "blank" names CWD/blank, which is empty: write a bearer token into it',
        ),
        (
            MODEL + '[prompt]\nhttp_token_file = "two words"',
            'c.toml: [prompt].http_token_file = "two words" names CWD/two words, which holds no usable token and '
            f"is not valid: it must be {TOKEN}",
        ),
        (
            MODEL + '[relay]\nurl = "https://user:pw@host:1"',
            'c.toml: [relay].url = "https://...@host:1" is not valid: it must be '
            "curve://<server key, 64 hex digits>@host:port",
        ),
        (
            MODEL + f'[relay]\nurl = "curve://{"a" * 64}@host:65533"',
            'c.toml: [relay].url = "curve://...@host:65533" is not valid: it must be '
            "curve://<server key, 64 hex digits>@host:port",
        ),
        (
            MODEL + f'[relay]\nmode = "disabled"\nurl = "curve://{"a" * 64}@host:1"',
            'c.toml: [relay].url contradicts [relay].mode = "disabled": remove one of them',
        ),
        (
            MODEL + '[relay]\nbind_addr = "1.2.3.4:65533"',
            'c.toml: [relay].bind_addr = "1.2.3.4:65533" leaves no room for four ports: use a port from 1 to 65532',
        ),
        (
            MODEL + '[relay]\nbind_addr = "0.0.0.0:7000"',
            'c.toml: [relay].bind_addr = "0.0.0.0:7000" is no address that a worker can dial: '
            "set [relay].advertise_addr",
        ),
        (
            MODEL + '[relay]\nadvertise_addr = "a_b:1"',
            'c.toml: [relay].advertise_addr = "a_b:1" is not valid: it must be host:port, as "box.example.org:19800"',
        ),
        (
            CACHED + '[provider]\nkind = "swarm"\n[relay]\nmode = "disabled"',
            'c.toml: [relay].mode = "disabled" cannot work with provider swarm, whose workers reach this machine only '
            "through a relay: remove the key",
        ),
        (
            CACHED + '[pipeline]\nedges = "relay"',
            'c.toml: [pipeline].edges = "relay" needs a relay: set [relay].mode = "default" or use "auto"',
        ),
        (
            "",
            "no model is chosen: run ./dev fetch-model and set [model].gguf_local_path = "
            '".model-cache/SmolLM2-135M-Instruct.Q4_1.gguf" in c.toml',
        ),
        (
            '[provider]\nkind = "docker"',
            "no model is chosen: run ./dev fetch-model and set [model].cached_path = "
            '".model-cache/SmolLM2-135M-Instruct.Q4_1.gguf" in c.toml',
        ),
        (
            "[runtime]\npipeline_stages = 2",
            "no model is chosen: run ./dev fetch-model and set [model].gguf_local_path = "
            '".model-cache/SmolLM2-135M-Instruct.Q4_1.gguf" in c.toml',
        ),
        (
            '[model]\ngguf_local_path = "no.gguf"',
            f'c.toml: [model].gguf_local_path = "no.gguf" names CWD/no.gguf, which does not exist: {FETCH}',
        ),
        (
            '[model]\ngguf_local_path = "bin"',
            f'c.toml: [model].gguf_local_path = "bin" names CWD/bin, which is a directory: {FETCH}',
        ),
        (
            '[model]\ngguf_local_path = "fifo"',
            f'c.toml: [model].gguf_local_path = "fifo" names CWD/fifo, which is not a regular file: {FETCH}',
        ),
        (
            '[model]\ncached_path = "no.gguf"',
            f'c.toml: [model].cached_path = "no.gguf" names CWD/no.gguf, which does not exist: {FETCH}',
        ),
        (
            '[model]\ncached_path = "bin"',
            f'c.toml: [model].cached_path = "bin" names CWD/bin, which is a directory: {FETCH}',
        ),
        *(
            (
                MODEL + f'[provider]\nkind = "{provider}"',
                f'c.toml: [model].gguf_local_path = "model.gguf" cannot be seen by workers of provider {provider}: '
                "name the file in [model].cached_path, which is handed over to them",
            )
            for provider in ("docker", "swarm", "external")
        ),
        (
            CACHED + 'gguf_repo = "a/b"\ngguf_file = "c"',
            "c.toml: [model].cached_path and [model].gguf_repo name two models: remove one of them",
        ),
        (
            CACHED + '[provider]\nkind = "external"\n[runtime]\non_worker_loss = "restart"',
            'c.toml: [runtime].on_worker_loss = "restart" is not supported by provider external, whose workers are '
            "started by hand: remove the key",
        ),
        (
            CACHED + '[pipeline]\nfeedback = "direct"',
            'c.toml: [pipeline].feedback = "direct" needs two stages or more: set [runtime].pipeline_stages, or remove '
            "the key",
        ),
        (
            CACHED + 'gguf_local_path = "other.gguf"',
            'c.toml: [model].gguf_local_path = "other.gguf" and [model].cached_path name two models: '
            "remove one of them",
        ),
        ('[model]\ngguf_repo = "a/b"', "c.toml: [model].gguf_repo is not enough: set [model].gguf_file too"),
        ('[model]\ngguf_file = "c"', "c.toml: [model].gguf_file is not enough: set [model].gguf_repo too"),
        ('[model]\ngguf_revision = "c"', "c.toml: [model].gguf_revision is not enough: set [model].gguf_repo too"),
        (
            MODEL + 'tokenizer_local_path = "no.json"',
            'c.toml: [model].tokenizer_local_path = "no.json" names CWD/no.json, which does not exist: '
            "name a tokenizer.json, or remove the key to use the tokenizer in the GGUF",
        ),
        (
            CACHED + 'tokenizer_local_path = "t.json"\n[provider]\nkind = "docker"',
            'c.toml: [model].tokenizer_local_path = "t.json" must be a path inside the worker\'s image: '
            "write it from / on",
        ),
    ],
)
def test_rules(world: World, toml: str, sentence: str) -> None:
    (world.cwd / "blank").write_text(" \n")
    (world.cwd / "two words").write_text("two words\n")
    os.mkfifo(world.cwd / "fifo")
    assert world.error(toml) == sentence


@pytest.mark.spec("S1 9.2", "S1 10.2")
@pytest.mark.parametrize(
    ("toml", "environ", "sentence"),
    [
        (
            VASTAI,
            {},
            "provider vastai needs an API key: set the variable VASTAI_API_KEY or [vastai].api_key in c.toml",
        ),
        (
            VASTAI,
            {"VAST_API_KEY": "x"},
            "provider vastai needs an API key: set the variable VASTAI_API_KEY or [vastai].api_key in c.toml; "
            "VAST_API_KEY is not read",
        ),
        (
            VASTAI,
            {"VASTAI_API_KEY": "two words"},
            "variable VASTAI_API_KEY is not valid: it must be one line of printable ASCII without spaces",
        ),
        (
            VASTAI + 'api_key = "a\\nb"',
            {},
            "c.toml: [vastai].api_key is not valid: it must be one line of printable ASCII without spaces",
        ),
        (
            VASTAI.replace('bootstrap_command = "mvp-worker-node"', ""),
            KEYED,
            "provider vastai needs the command that starts the worker: set [vastai].bootstrap_command in c.toml",
        ),
        (
            VASTAI.replace('"id"', '"nokey"'),
            KEYED,
            'c.toml: [vastai].ssh_identity = "nokey" names CWD/nokey, which does not exist: make one with '
            "ssh-keygen -t ed25519 or name another with --vastai-ssh-identity",
        ),
        (
            VASTAI.replace('ssh_identity = "id"', ""),
            KEYED,
            'default of [vastai].ssh_identity = "~/.ssh/id_ed25519" needs the variable HOME, which is not set: '
            "set it or write the whole path",
        ),
        (
            VASTAI + "[runtime]\npipeline_stages = 2",
            KEYED,
            "c.toml: [runtime].pipeline_stages = 2 is not supported by provider vastai, which runs one stage: "
            "use 1 or another provider",
        ),
        (
            VASTAI.replace(REMOTE, CACHED),
            KEYED,
            'c.toml: [model].cached_path = "model.gguf" is not supported by provider vastai, only by process, docker, '
            "swarm and external: set [model].gguf_repo and [model].gguf_file",
        ),
        (
            VASTAI.replace(REMOTE, MODEL),
            KEYED,
            'c.toml: [model].gguf_local_path = "model.gguf" must be a path inside the worker\'s image: '
            "write it from / on",
        ),
        (
            VASTAI.replace(REMOTE, ""),
            KEYED,
            "no model is chosen: set [model].gguf_repo and [model].gguf_file in c.toml",
        ),
        (
            VASTAI + '[relay]\nmode = "disabled"',
            KEYED,
            'c.toml: [relay].mode = "disabled" cannot work with provider vastai, whose workers reach this machine only '
            "through a relay: remove the key",
        ),
        (
            REMOTE,
            {"HF_TOKEN": "hf\x00token"},
            "variable HF_TOKEN is not valid: it must be one line of printable ASCII without spaces",
        ),
    ],
)
def test_vastai_and_tokens(world: World, toml: str, environ: dict[str, str], sentence: str) -> None:
    assert world.error(toml, environ=environ) == sentence


@pytest.mark.spec("S1 9.2")
def test_arguments_of_vastai_are_named_as_arguments(world: World) -> None:
    assert world.error(VASTAI, "--pipeline-stages", "3", environ=KEYED) == (
        "argument --pipeline-stages = 3 is not supported by provider vastai, which runs one stage: "
        "use 1 or another provider"
    )
    assert world.error(VASTAI, "--vastai-ssh-identity", "gone", environ=KEYED) == (
        'argument --vastai-ssh-identity = "gone" names CWD/gone, which does not exist: make one with '
        "ssh-keygen -t ed25519 or name another with --vastai-ssh-identity"
    )


@pytest.mark.spec("S1 2.4", "S1 9.1", "S1 9.2", "S1 10.2")
def test_worker_program(world: World) -> None:
    (world.cwd / "plain").write_text("")
    assert world.error(MODEL, "--worker-bin", "gone") == (
        'argument --worker-bin = "gone" names CWD/gone, which does not exist: name the mvp-worker-node program'
    )
    assert world.error(MODEL, "--worker-bin", "plain") == (
        'argument --worker-bin = "plain" names CWD/plain, which is not executable: name the mvp-worker-node program'
    )
    (world.cwd / "bin" / "mvp-worker-node").unlink()
    assert world.error(MODEL) == (
        "provider process needs the program mvp-worker-node, which is not in CWD/bin: "
        "install swactor-mq there or name it with --worker-bin"
    )


def test_unreadable_files(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    assert world.error(MODEL) == (
        'argument --runtime-config = "c.toml" names CWD/c.toml, which cannot be read: name a readable TOML file'
    )


@pytest.mark.spec("S1 2.1")
def test_default_file_that_is_none(world: World) -> None:
    (world.cwd / ".config" / "config.toml").mkdir(parents=True)
    assert world.error() == ".config/config.toml is a directory: make it a readable TOML file or remove it"


def test_default_file_is_named(world: World) -> None:
    (world.cwd / ".config").mkdir()
    (world.cwd / ".config" / "config.toml").write_text("[runtime]\nx = 1")
    assert world.error().startswith(".config/config.toml: [runtime].x is not a key of the configuration: ")
