"""The generation loop: with a scripted model for every way to end, and with the real one for sense."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from common.gguf import GgufFile
from common.gguf_quants import dequantise
from tests.unit.engine.tiny_model import TinySpec, log_softmax, reference_logits, write_model
from worker.engine.engine import Engine
from worker.engine.errors import EngineError
from worker.engine.generate import Finished, Generation, TokenText
from worker.engine.sampler import Sampling
from worker.engine.tokenizer import EngineTokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> EngineTokenizer:
    path = tmp_path_factory.mktemp("generate") / "tiny.gguf"
    write_model(path, TinySpec(layers=1))
    with GgufFile.open(path) as file:
        return EngineTokenizer.from_gguf(file)


class Script:
    """A model that says the given ids one after the other, whatever it is asked; records what it was fed."""

    chunk = 4

    def __init__(self, say: list[int], max_context: int = 1000, prompt: int = 0, vocabulary: int = 263) -> None:
        self.say, self.max_context, self.prompt, self.size = list(say), max_context, prompt, vocabulary
        self.fed: list[tuple[list[int], int]] = []

    def reusable(self, ids: Sequence[int]) -> int:
        return 0

    def logits(self, ids: Sequence[int], start: int, tick: Callable[[], None] | None) -> np.ndarray:
        self.fed.append((list(ids), start))
        out = np.zeros(self.size, np.float32)
        answered = start + len(ids) - self.prompt
        if answered >= 0:
            out[self.say[min(answered, len(self.say) - 1)]] = 1
        return out


def generation(
    tokenizer: EngineTokenizer, text: str, *, prompt: int = 3, context: int = 1000, end: bool = True, **options: object
) -> tuple[Generation, Script]:
    script = Script(tokenizer.encode(text) + ([2] if end else []), context, prompt)
    return Generation(script, tokenizer, [5] * prompt, **options), script  # type: ignore[arg-type]


def last(events: list[TokenText | Finished]) -> Finished:
    assert [isinstance(event, Finished) for event in events] == [False] * (len(events) - 1) + [True]
    end = events[-1]
    assert isinstance(end, Finished)
    assert end.final_text == "".join(event.text for event in events[:-1] if isinstance(event, TokenText))
    return end


@pytest.mark.spec("S1 2.5")
def test_eos_ends_it_without_its_text_or_count(tokenizer: EngineTokenizer) -> None:
    end = last(list(generation(tokenizer, "abc")[0].events()))
    assert (end.finish_reason, end.final_text, end.tokens_generated, end.prompt_tokens) == ("stop", "abc", 3, 3)


@pytest.mark.spec("S1 2.5")
def test_max_tokens(tokenizer: EngineTokenizer) -> None:
    end = last(list(generation(tokenizer, "abcdef", max_tokens=2)[0].events()))
    assert (end.finish_reason, end.final_text, end.tokens_generated) == ("length", "ab", 2)
    for none in (0, None):
        assert last(list(generation(tokenizer, "abcdef", max_tokens=none)[0].events())).final_text == "abcdef"


def test_stop_strings(tokenizer: EngineTokenizer) -> None:
    end = last(list(generation(tokenizer, "one STOP two", stop=["STOP"])[0].events()))
    assert (end.finish_reason, end.final_text) == ("stop", "one ")
    end = last(list(generation(tokenizer, "one ST", stop=["STOP"])[0].events()))
    assert end.final_text == "one ST"  # what was held back comes out at EOS


def test_the_end_of_the_context_is_said(tokenizer: EngineTokenizer) -> None:
    run, script = generation(tokenizer, "abcdefgh", context=8)
    end = last(list(run.events()))
    assert (end.finish_reason, end.final_text, end.tokens_generated) == ("context", "abcde", 5)
    assert max(at + len(batch) for batch, at in script.fed) < 8


def test_prefill_comes_in_chunks_and_the_answer_in_single_tokens(tokenizer: EngineTokenizer) -> None:
    run, script = generation(tokenizer, "ab", prompt=10)
    counts = [len(run.step()) for _ in range(5)]
    assert counts == [0, 0, 1, 1, 1] and run.finished and run.step() == []
    assert [(len(batch), at) for batch, at in script.fed] == [(4, 0), (4, 4), (2, 8), (1, 10), (1, 11)]


def test_characters_of_several_tokens_come_out_whole(tokenizer: EngineTokenizer) -> None:
    events = list(generation(tokenizer, "é漢🔥")[0].events())
    assert "\ufffd" not in last(events).final_text and last(events).final_text == "é漢🔥"
    assert [event.text for event in events[:2] if isinstance(event, TokenText)] == ["", "é"]
    cut = last(list(generation(tokenizer, "a🔥", max_tokens=3)[0].events()))
    assert (cut.final_text, cut.tokens_generated) == ("a", 3)


@pytest.mark.parametrize("steps", [0, 1, 3, 4])
def test_a_cancel_takes_effect_at_the_next_step(tokenizer: EngineTokenizer, steps: int) -> None:
    run, script = generation(tokenizer, "abcdef", prompt=10)
    for _ in range(steps):
        run.step()
    run.cancel()
    events = run.step()
    assert len(script.fed) == steps and run.finished
    assert [event.finish_reason for event in events if isinstance(event, Finished)] == ["cancelled"]


def test_what_cannot_be_generated_is_said(tokenizer: EngineTokenizer) -> None:
    for prompt, options, words in (
        ([], {}, "the prompt is empty"),
        ([5] * 8, {}, "the prompt has 8 tokens, but the context holds 8"),
        ([5, 9999], {}, "prompt token 9999 is outside the vocabulary"),
        ([5], {"max_tokens": -1}, "max_tokens is -1"),
    ):
        with pytest.raises(EngineError, match=words):
            Generation(Script([2], 8), tokenizer, prompt, **options)  # type: ignore[arg-type]


@pytest.mark.engine
def test_the_real_model_answers_sensibly_and_the_same_twice(smollm: Engine) -> None:
    ids = smollm.prompt_ids("Name three primary colors.")
    first = last(list(smollm.generate(ids).events()))
    assert first.finish_reason == "stop"
    assert all(color in first.final_text.lower() for color in ("red", "blue", "yellow"))
    again = last(list(smollm.generate(ids).events()))
    assert (again.final_text, again.tokens_generated) == (first.final_text, first.tokens_generated)
    france = smollm.generate(smollm.encode("The capital of France is"), max_tokens=3)
    assert "Paris" in last(list(france.events())).final_text


@pytest.mark.engine
def test_the_real_model_with_a_seed(smollm: Engine) -> None:
    ids = smollm.prompt_ids("Write a sentence about the sea.")
    hot = Sampling(temperature=1.0, top_p=0.95, seed=11)
    texts = {last(list(smollm.generate(ids, sampling=hot, max_tokens=12).events())).final_text for _ in range(2)}
    assert len(texts) == 1


@pytest.mark.engine
def test_chat_and_raw_prompts(smollm: Engine) -> None:
    assert smollm.prompt_ids("Hi") == smollm.prompt_ids(None, [{"role": "user", "content": "Hi"}])
    assert smollm.prompt_ids("Hi", raw=True) == smollm.encode("Hi")
    rendered = smollm.render_chat([{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}])
    assert rendered == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.engine
def test_the_context_of_the_real_model_ends_with_its_reason(smollm: Engine) -> None:
    ids = (smollm.encode("The cat sat on the mat. ", False) * 100)[:500]
    end = last(list(smollm.generate(ids).events()))
    assert end.finish_reason in ("context", "stop") and end.tokens_generated <= 12


PROMPTS = (
    "Explain why the sky is blue.",
    "def fibonacci(n):",
)


@pytest.fixture(scope="module")
def float_weights(smollm: Engine) -> dict[str, np.ndarray]:
    return {name: dequantise(smollm._file, name) for name in smollm._file.tensors}


@pytest.mark.engine
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_real_model_computes_what_float32_computes(
    smollm: Engine, float_weights: dict[str, np.ndarray], prompt: str
) -> None:
    """Teacher-forced over 64 of its own tokens, within the limits of issue 3 (reference/engine.md 6)."""
    ids = smollm.prompt_ids(prompt)
    rows = []
    logits = smollm.logits(ids[:32], 0)
    for at in range(32, len(ids)):
        logits = smollm.logits([ids[at]], at)
    sequence = list(ids)
    for _ in range(64):
        rows.append(logits)
        sequence.append(int(logits.argmax()))
        logits = smollm.logits([sequence[-1]], len(sequence) - 1)
    h = smollm.header
    spec = TinySpec(
        layers=h.block_count,
        width=h.embedding_length,
        ffn=h.feed_forward_length,
        heads=h.head_count,
        kv_heads=h.head_count_kv,
        eps=h.rms_eps,
        theta=h.rope_theta,
    )
    expected = reference_logits(spec, float_weights, sequence)[len(ids) - 1 : -1]
    ours = np.stack(rows)
    assert int((ours.argmax(-1) == expected.argmax(-1)).sum()) >= 58
    top = np.argsort(-expected, axis=-1)[:, :5]
    difference = np.take_along_axis(log_softmax(ours), top, 1) - np.take_along_axis(log_softmax(expected), top, 1)
    assert float(np.sqrt((difference**2).mean())) <= 0.2


@pytest.mark.engine
def test_a_prompt_that_begins_like_the_last_one_reuses_its_cache(smollm: Engine) -> None:
    """The bits are the same as without it: only the cut into chunks differs."""
    ids = smollm.prompt_ids("Name three primary colors.")
    smollm.model.run_blocks([1], 0)  # rows that are no tokens: nothing is known of the cache
    assert smollm.reusable(ids) == 0
    first = last(list(smollm.generate(ids, max_tokens=10).events()))
    assert smollm.reusable(ids) >= len(ids)
    longer = [*ids[:-3], *smollm.encode(" of a rainbow, please")]
    assert smollm.reusable(longer) == len(ids) - 3
    steps: list[int] = []
    again = last(list(smollm.generate(ids, max_tokens=10, tick=lambda: steps.append(1)).events()))
    assert again.final_text == first.final_text and len(steps) == 10
    with_cache = last(list(smollm.generate(longer, max_tokens=10).events())).final_text
    smollm.model.run_blocks([1], 0)
    assert last(list(smollm.generate(longer, max_tokens=10).events())).final_text == with_cache
