"""Who runs, with how many tokens: fairness, priorities, shortage. No tensors."""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsv4.cache.pages import StatePages
from dsv4.errors import StallError
from dsv4.scheduler import Home, ScheduledTokens, Scheduler, SequenceState, home
from dsv4.scheduler.scheduler import PRIORITY_STEPS
from tests.scheduler.simulator import CONTEXT, Simulator


def shares(work: list[ScheduledTokens]) -> dict[str, int]:
    return {item.sequence.request.id: item.num_new for item in work}


def test_a_long_prompt_never_stalls_a_stream() -> None:
    sim = Simulator()
    sim.add("stream", [1], max_tokens=20)
    sim.step()
    sim.add("long", [2] * 1000)
    while "long" in {s.request.id for s in sim.scheduler.sequences()} and not sim.finished:
        work = sim.step()
        assert shares(work)["stream"] == 1
        assert sum(item.num_new for item in work) <= 256 + 3
    assert sim.finished


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    sim = Simulator()
    sim.add("long", [2] * 1000)
    sim.step()
    sim.add("short", [3] * 100)
    assert shares(sim.step())["short"] == 100


def test_every_prompt_gets_its_turn() -> None:
    """More prompts than blocks in a chunk: none waits for ever."""
    sim = Simulator(max_sequences=4, chunk_tokens=128)
    for name in "abcd":
        sim.add(name, [ord(name)] * 400)
    served = [next(iter(shares(sim.step()))) for _ in range(8)]
    assert served == list("abcdabcd")


def test_chunks_end_where_prefixes_are_shared() -> None:
    sim = Simulator(max_sequences=1, chunk_tokens=300)
    sequence = sim.add("a", list(range(256)) * 3 + [1, 2, 3])
    ends = []
    while not sim.finished:
        sim.step()
        if sequence.num_computed < 771:
            ends.append(sequence.num_computed)
    assert ends[:2] == [256, 512]
    assert 768 not in ends  # the last boundary lies inside the last chunk
    assert sim.prefix is not None
    assert sequence.keys()[768 // 128 - 1] in sim.prefix


@pytest.mark.parametrize(("num_tokens", "admitted"), [(257, True), (300, False)])
def test_who_is_admitted_finds_a_page_to_grow(num_tokens: int, admitted: bool) -> None:
    """Six csa pages of 128 tokens: 3 for the first prompt, so that 2 and one to grow are left."""
    sim = Simulator(max_sequences=2, state_tokens=512, chunk_tokens=1000)
    assert sim.pages.allocators["csa"].num_pages == 6
    sim.add("a", [1] * 300, max_tokens=50)
    sim.step()
    sim.add("b", [2] * num_tokens, max_tokens=300)
    assert ("b" in shares(sim.step())) == admitted


@pytest.mark.parametrize("prefix", [True, False])
def test_every_slot_is_used(prefix: bool) -> None:
    """State for every slot at full length: nobody waits for a page that nobody can need."""
    sim = Simulator(max_sequences=3, prefix=prefix)
    for name in "abc":
        sim.add(name, [ord(name)] * (CONTEXT - 10))
    sim.step()
    assert sim.scheduler.num_running == 3
    sim.run()
    assert sim.scheduler.num_preemptions == 0


@pytest.mark.parametrize(
    ("bug", "says"),
    [
        # a prefix that reaches to the last token leaves nothing to compute
        ((home, "usable_keys", lambda sequence: sequence.keys()), "'b' .* .256 of 256 tokens"),
        ((Home, "has_room", lambda *args: False), "'a' waits for pages .0 of 256 tokens"),
        ((Scheduler, "_plan", lambda self: []), "'a' waits for its turn .*; 'b' waits for a slot"),
        (
            (Scheduler, "_prefix_in_flight", lambda *args: True),
            "although nothing is in their way: 'a' waits",
        ),
    ],
)
def test_requests_that_can_never_run_are_named(
    bug: tuple[Any, str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*bug)
    sim = Simulator(max_sequences=1)
    for name in "ab":
        sim.add(name, [5] * 256)
    with pytest.raises(StallError, match=says):
        sim.run()


def test_preempting_without_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the waiting one were always the more urgent one."""
    sim = Simulator(max_sequences=2)
    for name in "abc":
        sim.add(name, [ord(name)] * 300)
    sim.step()
    monkeypatch.setattr(Home, "has_room", lambda self, sequence, found, running: not running)
    rank = property(lambda self: (0, 0) if self.pages is None else (1, 1))
    monkeypatch.setattr(SequenceState, "rank", rank, raising=False)
    with pytest.raises(StallError, match=r"preempts without end: .*'[abc]' .* preempted \d+ times"):
        sim.step()


def test_steps_that_compute_nothing_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Simulator(chunk_tokens=128)
    sim.add("a", [1] * 1000)
    for _ in range(3):
        sim.step()
    monkeypatch.setattr(StatePages, "apply", lambda *args: None)
    with pytest.raises(StallError, match=r"steps brought no request further: 'a' .*384 of 1000"):
        sim.run(100)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 128, 1000])
def test_any_chunk_size_gets_to_the_end(chunk_tokens: int) -> None:
    sim = Simulator(chunk_tokens=chunk_tokens)
    for i in range(4):
        sim.add(str(i), [i] * (1 + 97 * i))
    sim.run()
    assert sorted(sim.finished) == list("0123")
    sim.check_idle()


def test_priorities_overtake_and_preempt() -> None:
    sim = Simulator(max_sequences=2)
    sim.add("a", [1] * 10, max_tokens=50)
    sim.add("b", [2] * 10, max_tokens=50)
    sim.step()
    sim.add("c", [3] * 10, max_tokens=5)
    urgent = sim.add("urgent", [4] * 10, max_tokens=5, priority=1)
    assert set(shares(sim.step())) == {"a", "urgent"}  # the last arrival gave way
    assert sim.scheduler.num_preemptions == 1
    sim.run()
    assert sim.finished == ["urgent", "a", "b", "c"]
    assert urgent.num_preemptions == 0
    sim.check_idle()


def test_a_low_priority_is_not_starved() -> None:
    """Urgent requests without end: after PRIORITY_STEPS steps the old one is before new ones."""
    sim = Simulator(max_sequences=1)
    sim.add("old", [1] * 10, max_tokens=2)
    for number in range(2 * PRIORITY_STEPS):
        if sim.scheduler.num_unfinished < 2:
            sim.add(f"new{number}", [2], max_tokens=1, priority=1)
        sim.step()
        if "old" in sim.finished:
            return
    raise AssertionError("the old request starved")


def test_shortage_preempts_the_last_and_it_finishes_later() -> None:
    sim = Simulator(max_sequences=3, state_tokens=CONTEXT, prefix=False)
    for name in "abc":
        sim.add(name, [ord(name)] * 300, max_tokens=500)
    sim.run()
    assert sim.scheduler.num_preemptions > 0
    assert sorted(sim.finished) == list("abc")
    assert sim.finished[0] == "a"  # the first never gives way
    assert ("preempted", "a") not in sim.told
    sim.check_idle()


def test_admission_waits_for_pages_without_preempting() -> None:
    sim = Simulator(max_sequences=3, state_tokens=CONTEXT, prefix=False)
    sim.add("big", [1] * 1000, max_tokens=5)
    sim.step()
    sim.add("too much", [2] * 900, max_tokens=5)
    sim.add("small", [3] * 10, max_tokens=5)
    work = sim.step()
    assert set(shares(work)) == {"big"}  # nobody overtakes the one that waits
    sim.run()
    assert sim.scheduler.num_preemptions == 0
    sim.check_idle()


def test_the_cache_gives_way_to_sequences() -> None:
    sim = Simulator(max_sequences=2, state_tokens=CONTEXT)
    for number in range(6):
        sim.add(f"fill{number}", [number] * 400)
    sim.run()
    assert sim.prefix is not None
    assert len(sim.prefix) > 0
    sim.add("big", [99] * 1000)
    sim.run()
    assert sim.finished[-1] == "big"
    assert sim.scheduler.num_preemptions == 0
    assert sim.prefix.num_evicted > 0
    sim.check_idle()


def test_a_common_beginning_is_computed_once() -> None:
    """Four equal prompts at once: one computes, three wait for it; a stranger does not."""
    sim = Simulator(max_sequences=5)
    twins = [sim.add(f"twin{i}", [7] * 600, max_tokens=2) for i in range(4)]
    stranger = sim.add("stranger", [8] * 200, max_tokens=2)
    assert set(shares(sim.step())) == {"twin0", "stranger"}
    sim.run()
    assert [twin.num_cached for twin in twins] == [0, 512, 512, 512]
    assert stranger.num_cached == 0
    assert sim.scheduler.num_preemptions == 0


def test_who_waits_for_another_goes_on_when_that_one_is_gone() -> None:
    sim = Simulator(max_sequences=2)
    first = sim.add("first", [7] * 600)
    second = sim.add("second", [7] * 600)
    sim.step()
    assert second.pages is None
    sim.scheduler.remove(first)
    sim.run()
    assert sim.finished == ["second"]


def test_a_preempted_sequence_waits_for_its_token_in_flight() -> None:
    sim = Simulator(max_sequences=2)
    sequence = sim.add("a", [1] * 20)
    sim.step()
    sim.scheduler.preempt(sequence)
    sequence.num_pending = 1  # sampled, not read yet
    assert sim.scheduler.next_step() == []
    assert sequence.waits_for == "its token in flight"
    sequence.token_ids.append(7)
    sequence.num_pending = 0
    assert shares(sim.step()) == {"a": 22}
    sim.run()


def test_a_growing_sequence_keeps_its_newest_prefix_and_those_that_were_used() -> None:
    sim = Simulator()
    first = sim.add("first", [1] * 100, max_tokens=300)
    while first.num_computed < 2 * 128 + 1:
        sim.step()
    sim.add("second", first.token_ids[:257], max_tokens=2)  # begins with the first 256
    sim.run()
    assert sim.prefix is not None
    keys = first.keys()
    kept = [key in sim.prefix for key in keys]
    assert kept == [False, True, True]  # 128 nobody wanted, 256 was used, 384 is the newest


def test_the_same_arrivals_give_the_same_steps() -> None:
    def history() -> list[dict[str, int]]:
        rng, steps = random.Random(5), []
        sim = Simulator(max_sequences=3, state_tokens=CONTEXT)
        for number in range(200):
            if rng.random() < 0.2:
                length = rng.choice((5, 130, 500))
                sim.add(f"r{number}", [rng.randrange(3)] * length, priority=rng.randrange(3))
            steps.append(shares(sim.step()))
        return steps

    assert history() == history()


class SchedulerMachine(RuleBasedStateMachine):
    """Any arrivals, aborts and shortages: everybody finishes, nothing is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.sim = Simulator(max_sequences=3, chunk_tokens=256, state_tokens=CONTEXT)
        self.num_added = 0
        self.aborted: set[str] = set()

    @rule(
        head=st.integers(0, 2),
        blocks=st.integers(0, 5),
        tail=st.integers(1, 130),
        max_tokens=st.sampled_from((1, 2, 140)),
        priority=st.integers(-1, 1),
    )
    def add(self, head: int, blocks: int, tail: int, max_tokens: int, priority: int) -> None:
        prompt = [head] * (128 * blocks) + [self.num_added % 5] * tail
        self.sim.add(f"r{self.num_added}", prompt, max_tokens, priority=priority)
        self.num_added += 1

    @precondition(lambda self: self.sim.scheduler.num_unfinished)
    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            first = min(self.sim.scheduler.sequences(), key=lambda s: s.rank, default=None)
            work = self.sim.step()
            if first is not None and self.sim.pages.num_free_slots == 0:
                served = [item.sequence for item in work]
                assert first in served or first.num_left > 1 or first.pages is None
            assert sum(i.num_new for i in work if not i.samples) <= 256

    @precondition(lambda self: self.sim.scheduler.num_unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sim.scheduler.sequences()))
        self.sim.scheduler.remove(sequence)
        self.aborted.add(sequence.request.id)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.sim.check()
        ranks = [s.rank for s in self.sim.scheduler._waiting]
        assert ranks == sorted(ranks)

    def teardown(self) -> None:
        self.sim.run()
        self.sim.check_idle()
        assert len(self.sim.finished) + len(self.aborted) == self.num_added


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=30,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)
