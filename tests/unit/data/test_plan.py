"""The plan against brute force: complete, disjoint, deterministic, little padding, and an exact count of pages."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from recipe.data.hashing import hash64, key_of, mix_word
from recipe.data.plan import plan_delivery, plan_epoch
from recipe.errors import ConfigError


def chat_lengths(n: int, seed: int = 0, longest: int = 8192) -> np.ndarray:
    """A ShareGPT-like mix: log-normal, median about 800 tokens, a long tail cut at ``longest``."""
    draw = np.random.default_rng(seed).lognormal(6.7, 1.0, n)
    return np.clip(draw, 8, longest).astype(np.int32)


def test_hash_is_splitmix64() -> None:
    # Published first outputs of splitmix64 from state 0: the vectorised form must be the real generator.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert hash64(0, np.arange(3, dtype=np.uint64)).tolist() == expected
    assert mix_word(0x9E3779B97F4A7C15) == expected[0]
    assert key_of(1, 2) != key_of(2, 1)


@pytest.mark.parametrize("nodes", [1, 2, 3, 7])
@pytest.mark.parametrize("n", [1, 2, 5, 4096, 10_000])
def test_epoch_is_complete_disjoint_and_within_budget(n: int, nodes: int) -> None:
    lengths = chat_lengths(n)
    plan = plan_epoch(lengths, seed=3, epoch=1, token_budget=16384, max_batch_size=24, nodes=nodes)
    seen = [row for node in range(nodes) for batch in plan.batches(node) for row in batch.tolist()]
    assert sorted(seen) == list(range(n))
    for node in range(nodes):
        for batch in plan.batches(node):
            assert 1 <= len(batch) <= 24
            assert len(batch) * lengths[batch].max() <= 16384
    counts = [len(plan.batches(node)) for node in range(nodes)]
    assert max(counts) - min(counts) <= 1


def test_nodes_get_equal_work() -> None:
    lengths = chat_lengths(50_000)
    plan = plan_epoch(lengths, 0, 0, 49152, 64, nodes=4)
    tokens = [sum(int(lengths[b].sum()) for b in plan.batches(node)) for node in range(4)]
    assert max(tokens) - min(tokens) <= 49152


def test_padding_on_a_chat_mix() -> None:
    lengths = chat_lengths(100_000)
    plan = plan_epoch(lengths, 0, 0, 49152, 64)
    padded = sum(len(b) * int(lengths[b].max()) for b in plan.batches(0))
    assert plan.padding == pytest.approx(1 - lengths.sum() / padded)
    assert plan.padding <= 0.05


def test_order_is_not_by_length() -> None:
    lengths = chat_lengths(100_000)
    means = np.array([lengths[b].mean() for b in plan_epoch(lengths, 0, 0, 49152, 64).batches(0)])
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.1
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.1


def test_plan_depends_on_seed_and_epoch_only() -> None:
    lengths = chat_lengths(3000)

    def digest(seed: int, epoch: int) -> str:
        plan = plan_epoch(lengths, seed, epoch, 16384, 64, nodes=2)
        drawn = plan_delivery(plan.batches(1), lengths, seed, epoch, 2, 3, 16384)
        parts = [*plan.batches(0), *plan.batches(1), drawn.rows, drawn.reuse, drawn.starts]
        return hashlib.sha256(b"".join(p.astype("<i8").tobytes() for p in parts)).hexdigest()[:16]

    assert digest(1, 0) == digest(1, 0)
    assert len({digest(1, 0), digest(2, 0), digest(1, 1)}) == 3


def test_plan_is_frozen_across_versions() -> None:
    """The exact order of a small epoch, so that another numpy or another machine cannot change a run unnoticed."""
    lengths = np.array([5, 9, 3, 7, 7, 2, 8, 4, 6, 1], dtype=np.int32)
    plan = plan_epoch(lengths, 42, 0, 16, 3)
    drawn = plan_delivery(plan.batches(0), lengths, 42, 0, 2, 2, 16)
    assert [b.tolist() for b in plan.batches(0)] == FROZEN_BATCHES
    assert [list(zip(r.tolist(), u.tolist(), strict=True)) for r, u in drawn] == FROZEN_DELIVERY


@pytest.mark.parametrize("reuse,min_ready,n", [(1, 1, 50), (1, 30, 3000), (2, 3, 400), (4, 1, 60), (3, 2, 5)])
def test_delivery_is_exactly_once_and_within_budget(reuse: int, min_ready: int, n: int) -> None:
    lengths = chat_lengths(n, longest=4000)
    batches = plan_epoch(lengths, 7, 2, 8192, 16).batches(0)
    drawn = plan_delivery(batches, lengths, 7, 2, reuse, min_ready, 8192)
    pairs = [(int(r), int(u)) for rows, uses in drawn for r, u in zip(rows, uses, strict=True)]
    assert sorted(pairs) == [(r, u) for r in range(n) for u in range(reuse)]
    for j, (rows, _) in enumerate(drawn.micro_batches):
        assert len(set(rows.tolist())) == len(rows) > 0
        assert lengths[rows].sum() == drawn.tokens[j] <= 8192


@pytest.mark.parametrize("reuse", [1, 3])
def test_delivery_fills_micro_batches(reuse: int) -> None:
    lengths = chat_lengths(20_000)
    drawn = plan_delivery(plan_epoch(lengths, 0, 0, 49152, 64).batches(0), lengths, 0, 0, reuse, 8, 49152)
    assert drawn.tokens[:-4].mean() > 0.93 * 49152


@pytest.mark.parametrize("reuse,min_ready,in_flight", [(1, 2, 0), (1, 5, 3), (2, 2, 2), (3, 1, 1), (2, 4, 1000)])
def test_peak_pages_equals_a_simulation(reuse: int, min_ready: int, in_flight: int) -> None:
    lengths = chat_lengths(300, longest=2000)
    batches = plan_epoch(lengths, 1, 0, 4096, 8).batches(0)
    drawn = plan_delivery(batches, lengths, 1, 0, reuse, min_ready, 4096)
    pages_of = {int(r): -(-int(lengths[r]) // 128) for b in batches for r in b}
    home = {int(r): i for i, b in enumerate(batches) for r in b}
    uses = dict.fromkeys(pages_of, reuse)
    occupied, peak, produced, held = 0, 0, 0, []
    for rows, _ in drawn:
        if len(held) > in_flight:
            occupied -= held.pop(0)
        for row in rows.tolist():
            while produced <= home[row]:
                occupied += sum(pages_of[int(r)] for r in batches[produced])
                produced += 1
        peak = max(peak, occupied)
        for row in rows.tolist():
            uses[row] -= 1
        held.append(sum(pages_of[row] for row in rows.tolist() if uses[row] == 0))
    assert drawn.peak_pages(128, in_flight) == peak


def test_the_reservoir_mixes_batches() -> None:
    """A micro-batch draws from many target batches, and no further back than 2·min_ready of them."""
    lengths = np.full(8000, 100, dtype=np.int32)
    drawn = plan_delivery(plan_epoch(lengths, 0, 0, 1000, 10).batches(0), lengths, 0, 0, 1, 20, 1000)
    spread = [np.ptp(drawn.batch[drawn.starts[j] : drawn.starts[j + 1]]) for j in range(100, 700)]
    assert 25 < np.mean(spread) <= 40
    assert max(spread) <= 41


@pytest.mark.parametrize(
    "lengths,budget,field", [([], 10, "path"), ([11], 10, "token_budget"), ([0], 10, "path"), ([1], 0, "data")]
)
def test_bad_input_is_named(lengths: list[int], budget: int, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan_epoch(np.array(lengths, dtype=np.int32), 0, 0, budget, 4)
    assert field in error.value.field


@pytest.mark.slow
def test_ten_million_rows() -> None:
    import resource
    import time

    lengths = chat_lengths(10_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    plan = plan_epoch(lengths, 0, 0, 49152, 64, nodes=2)
    deliveries = [plan_delivery(plan.batches(node), lengths, 0, 0, 1, 30, 49152) for node in range(2)]
    assert all(map(len, deliveries)) and time.process_time() - start <= 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before <= 1 << 20  # KiB


FROZEN_BATCHES = [[3, 8], [1], [5, 9], [0, 7, 2], [6, 4]]
FROZEN_DELIVERY = [
    [(1, 0), (9, 0), (5, 0)],
    [(1, 1), (3, 0)],
    [(8, 0), (2, 0), (5, 1)],
    [(2, 1), (3, 1), (9, 1)],
    [(8, 1), (0, 0)],
    [(6, 0), (7, 1)],
    [(7, 0), (6, 1)],
    [(0, 1), (4, 0)],
    [(4, 1)],
]
