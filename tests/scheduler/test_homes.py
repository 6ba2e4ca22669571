"""Several homes (`attention=dp`): where sequences run, what each home decides for itself."""

import random
from collections import Counter

import pytest

from dsv4.scheduler import SequenceState
from tests.scheduler.simulator import CONTEXT, Simulator, pages_of


def home_of(sequence: SequenceState) -> int:
    return pages_of(sequence).home


def test_sequences_are_spread_evenly() -> None:
    sim = Simulator(max_sequences=4, homes=3, prefix=False)
    sequences = [sim.add(str(i), [i + 1] * 40, 50) for i in range(9)]
    sim.step()
    assert sorted(Counter(map(home_of, sequences)).values()) == [3, 3, 3]
    assert len({pages_of(sequence).slot for sequence in sequences}) == 9  # over all homes
    sim.run()
    sim.check_idle()


def test_pages_count_more_than_sequences() -> None:
    """A long sequence weighs as much as several short ones."""
    sim = Simulator(max_sequences=8, homes=2, prefix=False)
    long = sim.add("long", [1] * 900, 50)
    short = [sim.add(str(i), [i + 2] * 30, 50) for i in range(5)]
    sim.step()
    assert {home_of(sequence) for sequence in short} == {1 - home_of(long)}


def test_a_prefix_draws_its_successors_home() -> None:
    sim = Simulator(max_sequences=4, homes=3)
    first = sim.add("first", [7] * 600)
    other = sim.add("other", [8] * 600)
    sim.step()
    homes = home_of(first), home_of(other)
    assert homes[0] != homes[1]
    sim.run()
    for name, token, home in (("a", 7, homes[0]), ("b", 8, homes[1])):
        sequence = sim.add(name, [token] * 590 + [1] * 10, 30)
        sim.step()
        assert home_of(sequence) == home
        assert sequence.num_cached == 512
    sim.check()


def test_a_short_prefix_does_not_fill_one_home() -> None:
    """All begin alike; computing that again elsewhere is cheaper than a full home."""
    sim = Simulator(max_sequences=6, homes=2)
    sim.add("first", [7] * 260)
    sim.run()
    later = [sim.add(str(i), [7] * 256 + [i + 10] * 20, 30) for i in range(8)]
    for _ in range(12):
        sim.step()
        if sim.scheduler.num_waiting == 0:
            break
    counts = Counter(home_of(sequence) for sequence in later if sequence.pages is not None)
    assert min(counts.values()) >= 2
    assert len(counts) == 2


def test_where_prompts_diverge_is_known_to_all_homes() -> None:
    """The second of two prompts that begin alike keeps that beginning, wherever it runs."""
    sim = Simulator(max_sequences=1, homes=2)
    first = sim.add("first", [5] * 300 + [1] * 90, 30)
    sim.step()
    assert sim.scheduler.num_running == 1
    second = sim.add("second", [5] * 300 + [2] * 90, 30)
    for _ in range(8):
        sim.step()
    assert home_of(first) != home_of(second)
    assert 256 in second.snapshot_lens
    prefix = sim.homes[home_of(second)].prefix
    assert prefix is not None
    assert second.keys()[1] in prefix


def test_a_full_home_preempts_its_own() -> None:
    """Not the last of all, which runs where there is room."""
    sim = Simulator(max_sequences=2, homes=2, state_tokens=CONTEXT, prefix=False)
    lengths = (480, 480, 480, 20)
    sequences = [sim.add(str(i), [i + 1] * n, 200) for i, n in enumerate(lengths)]
    for _ in range(4):
        sim.step()
    assert list(map(home_of, sequences)) == [0, 1, 0, 1]
    sim.run()
    assert {name for kind, name in sim.told if kind == "preempted"} == {"2"}
    assert sorted(sim.finished) == ["0", "1", "2", "3"]
    sim.check_idle()


def test_a_sequence_that_cannot_grow_fails_alone() -> None:
    """It is alone at its home and there are no pages: its step holds no other home's work."""
    sim = Simulator(max_sequences=2, homes=2, prefix=False)
    sequences = [sim.add(name, [ord(name)] * 200, 50) for name in "ab"]
    sim.step()
    stuck = sequences[1]
    allocators = sim.homes[home_of(stuck)].pages.allocators
    allocators["window"].take(allocators["window"].num_free)
    found = []
    for _ in range(200):
        work = sim.scheduler.next_step()
        if len(work) == 1:
            found = [item.sequence for item in work]
            break
        for item in work:
            pages_of(item.sequence).length += item.num_new
            item.sequence.token_ids.append(1)
    assert found == [stuck]


def test_each_home_has_the_budget_of_a_step() -> None:
    sim = Simulator(max_sequences=2, homes=2, chunk_tokens=256, prefix=False)
    sequences = [sim.add(str(i), [i + 1] * 900) for i in range(4)]
    work = sim.step()
    tokens: Counter[int] = Counter()
    for item in work:
        tokens[home_of(item.sequence)] += item.num_new
    assert tokens == {0: 256, 1: 256}
    assert {item.sequence.request.id for item in work} == {s.request.id for s in sequences}


@pytest.mark.parametrize("seed", range(6))
def test_any_traffic_ends(seed: int) -> None:
    rng = random.Random(seed)
    sim = Simulator(
        max_sequences=rng.choice((1, 3)),
        homes=rng.choice((2, 4)),
        state_tokens=rng.choice((None, CONTEXT)),
        prefix=rng.random() < 0.7,
    )
    beginnings = [[rng.randrange(9) for _ in range(rng.choice((130, 300)))] for _ in range(3)]
    for number in range(20):
        prompt = rng.choice(beginnings) * rng.randrange(2) + [number] * rng.choice((1, 90, 700))
        sim.add(str(number), prompt, rng.choice((1, 20)), priority=rng.randrange(-2, 3))
        for _ in range(rng.randrange(4)):
            sim.step()
        sim.check()
    sim.run()
    sim.check_idle()
    assert len(sim.finished) == 20
