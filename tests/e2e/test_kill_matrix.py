"""A sample of the kill matrix on real processes (tests/kill_matrix.toml); `./dev kill-matrix` plays the whole.

The sample is fixed by its seed, so that a change that breaks a cell breaks the same test again: each process once by
KILL or TERM, each phase at least once, and three STOPs, which take half a minute each and run beside the others.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.e2e.kill_cell import Outcome, play
from tests.kill_matrix import MATRIX, Cell, cells

SEED = int(os.environ.get("SMQ_KILL_MATRIX_SEED", "2"))
STOPS = 2
AT_A_TIME = 2


def sample(seed: int) -> list[Cell]:
    """The cells of one sample."""
    rng = random.Random(seed)
    phases = list(MATRIX["phases"])
    rng.shuffle(phases)
    chosen = [("orchestrator", "KILL", "prompt")]  # nobody is left who could clean up
    for at, process in enumerate(MATRIX["processes"][1:]):
        known = [cell for cell in cells() if cell[0] == process and cell[1] != "STOP"]
        wanted = [cell for cell in known if cell[2] == phases[at % len(phases)]]
        chosen.append(rng.choice(wanted or known))
    return [*rng.sample([cell for cell in cells() if cell[1] == "STOP"], STOPS), *chosen]


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest) -> Iterator[dict[Cell, Future[Outcome]]]:
    """All selected cells under way, two at a time: most of a cell is waiting."""
    selected = [getattr(item, "callspec", None) for item in request.session.items]
    chosen = [spec.params["cell"] for spec in selected if spec is not None and "cell" in spec.params]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        yield {cell: pool.submit(play, cell) for cell in chosen}
        pool.shutdown(cancel_futures=True)


def test_the_sample_has_every_process_and_phase() -> None:
    chosen = sample(SEED)
    assert {cell[0] for cell in chosen} == set(MATRIX["processes"])
    assert {cell[2] for cell in chosen} == set(MATRIX["phases"])


@pytest.mark.spec("S1 9.10", "S1 9.15", "S1 9.16", "S1 10.7", "S1 10.12", "S1 10.14", "S1 4.13")
@pytest.mark.parametrize("cell", sample(SEED), ids=" ".join)
def test_a_cell(cell: Cell, played: dict[Cell, Future[Outcome]]) -> None:
    outcome = played[cell].result()
    print(outcome.line)
    assert not outcome.error, outcome.line
