"""Sampling: greedy, filters, penalty, and the same tokens for the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from worker.engine.errors import EngineError
from worker.engine.sampler import Sampler, Sampling

LOGITS = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05], np.float32))


def draws(sampling: Sampling, count: int = 4000, logits: np.ndarray = LOGITS) -> np.ndarray:
    sampler = Sampler(sampling)
    return np.bincount([sampler.next(logits) for _ in range(count)], minlength=len(logits)) / count


def test_greedy_is_the_default_and_takes_the_first_of_equals() -> None:
    assert Sampler(Sampling()).next(LOGITS) == 0
    assert Sampler(Sampling()).next(np.array([1, 3, 3], np.float32)) == 1


def test_a_seed_repeats_and_another_differs() -> None:
    def sequence(seed: int) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        return [sampler.next(LOGITS) for _ in range(50)]

    assert sequence(7) == sequence(7) != sequence(8)


def test_temperature_one_draws_the_distribution() -> None:
    assert np.allclose(draws(Sampling(temperature=1.0, seed=1)), np.exp(LOGITS), atol=0.03)
    cold = draws(Sampling(temperature=0.1, seed=1))
    assert cold[0] > 0.9


def test_filters_keep_what_they_say() -> None:
    assert set(np.nonzero(draws(Sampling(temperature=1.0, top_k=2, seed=1)))[0]) == {0, 1}
    assert set(np.nonzero(draws(Sampling(temperature=1.0, top_p=0.75, seed=1)))[0]) == {0, 1, 2}
    assert set(np.nonzero(draws(Sampling(temperature=1.0, top_p=0.0, seed=1)))[0]) == {0}
    assert set(np.nonzero(draws(Sampling(temperature=1.0, min_p=0.5, seed=1)))[0]) == {0, 1}
    assert set(np.nonzero(draws(Sampling(temperature=1.0, min_p=1.0, seed=1)))[0]) == {0}
    assert set(np.nonzero(draws(Sampling(temperature=1.0, top_k=1, seed=1)))[0]) == {0}


def test_repetition_penalty_lowers_what_was_seen() -> None:
    logits = np.array([2.0, 1.9, -1.0], np.float32)
    sampler = Sampler(Sampling(repetition_penalty=1.2), prompt_ids=[0])
    assert sampler.next(logits) == 1
    assert sampler.next(logits) == 0
    assert logits[0] == 2.0


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("seed", -1),
        ("repetition_penalty", 0.0),
        ("top_k", -1),
    ],
)
def test_nonsense_is_refused(field: str, value: float) -> None:
    with pytest.raises(EngineError, match=field):
        Sampling(**{field: value})
