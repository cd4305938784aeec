"""The batched drafter against a naive one, and the quiet errors of docs/algorithm.md one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recipe.drafter.attention import TILE, EagerAttention, Visibility, _tiles, flex_block_mask
from recipe.drafter.batch import MicroBatch, assemble
from recipe.drafter.config import SLIDING, DrafterConfig
from tests.numerics.drafter_oracle import all_hidden, random_batch, random_drafter, tiny_config

LENGTHS = (23, 9, 40, 2, 31)
CAUSAL = (True, True, False)


def embedding_of(config: DrafterConfig) -> torch.Tensor:
    return torch.randn(config.vocab_size, config.hidden_size, generator=torch.Generator().manual_seed(5))


def real(hidden: torch.Tensor, batch: MicroBatch, config: DrafterConfig) -> torch.Tensor:
    return hidden.view(-1, config.block_size, config.hidden_size)[batch.keep]


@pytest.mark.parametrize("attention", ["eager", "flex"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"window": 7}, {"window": 12, "in_block_causal": CAUSAL}, {"in_block_causal": (True,) * 3}],
    ids=["full", "window", "window-causal", "causal"],
)
def test_equals_the_naive_drafter(attention: str, changes: dict[str, object]) -> None:
    config = tiny_config(**changes)
    drafter, batch, embedding = (
        random_drafter(config, attention),
        random_batch(config, LENGTHS, 6),
        embedding_of(config),
    )
    with torch.no_grad():
        ours = real(drafter(batch, embedding), batch, config)
        naive = all_hidden(drafter, batch, embedding)
    assert (ours - naive).abs().max() < 1e-5 * naive.abs().max()


@pytest.mark.parametrize("window", [6, 7, 8])
def test_window_edge(window: int) -> None:
    """The oldest visible row is anchor + offset - window + 1: it matters, the one before it does not."""
    config = tiny_config(num_hidden_layers=1, layer_types=(SLIDING,), in_block_causal=(False,), sliding_window=window)
    drafter, embedding, anchor = random_drafter(config), embedding_of(config), 20
    base = random_batch(config, [30], 0)
    ids, mask = base.input_ids.numpy(), base.host.loss_mask

    def first_changed_slot(row: int) -> int | None:
        outputs = []
        for shift in (0.0, 1.0):
            taps = [tap.clone() for tap in base.taps]
            for tap in taps:
                tap[row] += shift
            outputs.append(drafter(assemble(ids, mask, [30], [np.array([anchor])], taps), embedding))
        same = [bool(torch.equal(a, b)) for a, b in zip(*outputs, strict=True)]
        seeing = [o for o, equal in enumerate(same) if not equal]
        return max(seeing) if seeing else None

    with torch.no_grad():
        assert first_changed_slot(anchor - window) is None
        assert first_changed_slot(anchor - window + 1) == 0  # slot 0 alone still reaches it
        assert first_changed_slot(anchor - 1) == config.block_size - 1


@pytest.mark.parametrize("attention", ["eager", "flex"])
def test_nothing_at_or_after_the_anchor_leaks(attention: str) -> None:
    config = tiny_config()
    drafter, embedding, anchor = random_drafter(config, attention), embedding_of(config), 11
    base = random_batch(config, [12, 25, 8], 3)
    lengths, start = [12, 25, 8], 12
    ids, mask = base.input_ids.numpy(), base.host.loss_mask
    picks = [np.array([4]), np.array([anchor, 17]), np.array([2])]

    def outputs(rows: slice | None) -> torch.Tensor:
        taps = [tap.clone() for tap in base.taps]
        if rows is not None:
            for tap in taps:
                tap[rows] = 7.0 * torch.randn_like(tap[rows])
        hidden = drafter(assemble(ids, mask, lengths, picks, taps), embedding)
        return hidden.view(4, config.block_size, -1)[1]

    with torch.no_grad():
        reference = outputs(None)
        assert torch.equal(reference, outputs(slice(start + anchor, None))), "a row at or after the anchor was seen"
        assert torch.equal(reference, outputs(slice(0, start))), "another document was seen"
        changed = outputs(slice(start + anchor - 1, start + anchor))
        assert not torch.isclose(reference, changed).all(-1).any(), "the row before the anchor must matter to all slots"


def test_packed_equals_separate_documents() -> None:
    config = tiny_config(window=9)
    drafter, embedding, batch = random_drafter(config), embedding_of(config), random_batch(tiny_config(), LENGTHS, 4)
    with torch.no_grad():
        packed, alone = drafter(batch, embedding), []
        for start, stop in batch.host.spans:
            own = batch.host.starts == start
            anchors = batch.host.anchors[own] - start
            ids, mask = batch.input_ids[start:stop].numpy(), batch.host.loss_mask[start:stop]
            single = assemble(ids, mask, [stop - start], [anchors], [tap[start:stop] for tap in batch.taps])
            alone.append(drafter(single, embedding))
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_only_relative_positions_matter_and_offsets_do() -> None:
    """Adding a constant to all positions changes nothing; block-relative positions would change everything."""
    from dataclasses import replace

    config = tiny_config()
    drafter, embedding, batch = random_drafter(config), embedding_of(config), random_batch(config, [40], 5)
    with torch.no_grad():
        reference = drafter(batch, embedding)
        moved = drafter(replace(batch, position_ids=batch.position_ids + 1000), embedding)
        scaled = drafter(replace(batch, position_ids=batch.position_ids * 2), embedding)
    torch.testing.assert_close(reference, moved, rtol=2e-4, atol=2e-4)
    assert not torch.allclose(reference, scaled, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projection_by_tap_equals_the_concatenated_one(dtype: torch.dtype) -> None:
    config = tiny_config()
    drafter, batch = random_drafter(config).to(dtype), random_batch(config, [50], 3)
    ours = drafter.context(batch.taps)
    weight, features = drafter.fc.weight.double(), torch.cat(batch.taps, 1).to(dtype).double()
    naive = drafter.hidden_norm.double()(features @ weight.T)
    assert (ours.double() - naive).abs().max() < (1e-5 if dtype == torch.float32 else 3e-2) * naive.abs().max()
    shuffled = random_drafter(config).to(dtype).context(list(reversed(batch.taps)))
    assert not torch.allclose(ours, shuffled, atol=0.1), "the order of the taps must matter"


def test_rotary_tables_survive_a_bf16_cast() -> None:
    config = tiny_config(rope_theta=1e7, head_dim=128, max_position_embeddings=65536)
    drafter = random_drafter(config).to(torch.bfloat16)
    assert not [name for name, _ in drafter.named_buffers()], "a buffer would be cast"
    position = torch.tensor([0, 1000, 30000, 60000])
    cos, sin = drafter.rotary(position)
    angle = position.double()[:, None] * 1e7 ** (-torch.arange(64).double() / 64)
    assert cos.dtype == torch.float32
    # fp32 angles near 6e4 are exact to 4e-3; inv_freq rounded to bf16 would be off by whole turns.
    assert (cos[:, 0, :64].double() - angle.cos()).abs().max() < 5e-3
    assert (sin[:, 0, 64:].double() - angle.sin()).abs().max() < 5e-3
    rounded = (1e7 ** (-torch.arange(64).float() / 64)).bfloat16().double() * position.double()[:, None]
    assert (rounded.cos() - angle.cos()).abs().max() > 0.5


def test_mixed_precision_is_close_far_out() -> None:
    """bf16 weights at position 30,000 stay as close to fp32 as at position 0."""
    from dataclasses import replace

    config = tiny_config(max_position_embeddings=65536)
    batch, embedding, errors = random_batch(config, [40], 6), embedding_of(config), []
    for shift in (0, 30000):
        far = replace(batch, position_ids=batch.position_ids + shift)
        with torch.no_grad():
            exact = random_drafter(config)(far, embedding)
            half = random_drafter(config).to(torch.bfloat16)(far, embedding.bfloat16())
        errors.append(((half.float() - exact).norm() / exact.norm()).item())
    assert errors[0] < 0.05
    assert errors[1] < 1.5 * errors[0]


def test_batch_without_an_anchor_has_gradients_of_zero_for_all() -> None:
    config = tiny_config()
    drafter, batch = random_drafter(config), random_batch(config, [7], 0)
    batch = assemble(batch.input_ids.numpy(), batch.host.loss_mask, [7], [np.zeros(0, np.int64)], batch.taps, slots=3)
    hidden = drafter(batch, embedding_of(config))
    assert torch.isfinite(hidden).all()
    (0.0 * hidden.sum()).backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.count_nonzero() == 0


def random_visibility(block_size: int, blocks: int, rows: int, seed: int) -> Visibility:
    rng = np.random.default_rng(seed)
    upper = np.sort(rng.integers(0, rows, blocks))
    starts = np.array([0, rows // 5, rows // 2, rows - 40])
    lower = starts[np.searchsorted(starts, upper, side="right") - 1]
    lower[-2:] = upper[-2:] = rows
    return Visibility(lower, upper, block_size, rows)


@pytest.mark.parametrize("window,causal", [(None, False), (None, True), (150, False), (40, True)])
@pytest.mark.parametrize("block_size", [8, 32, 256])
def test_flex_mask_and_tiles_match_the_definition(block_size: int, window: int | None, causal: bool) -> None:
    seen = random_visibility(block_size, 1536 // block_size, 512, seed=block_size)
    dense = seen.dense(window, causal)
    mask = flex_block_mask(seen, window, causal, torch.device("cpu"))
    q, k = torch.meshgrid(torch.arange(dense.shape[0]), torch.arange(dense.shape[1]), indexing="ij")
    assert torch.equal(mask.mask_mod(0, 0, q, k), dense)
    some, full = _tiles(seen, window, causal)
    tiles = dense.view(dense.shape[0] // TILE, TILE, dense.shape[1] // TILE, TILE)
    assert not (full & ~tiles.all(3).all(1).numpy()).any(), "a tile with something hidden would be shown whole"
    assert not (tiles.any(3).any(1).numpy() & ~some).any(), "a visible tile would be skipped"
    needed, kept = int(tiles.any(3).any(1).sum()), int(some.sum())
    assert kept <= 1.3 * needed, "tiles with nothing visible cost time"


def test_eager_reads_only_what_is_visible() -> None:
    """Cost is what is visible, not blocks x packed context."""
    lengths, anchors = [64] * 16, 16
    starts = np.repeat(np.arange(16) * 64, anchors)
    upper = starts + np.tile([*np.arange(4, 64, 4)[:15].tolist(), 63], 16)
    seen = Visibility(starts, upper, 8, sum(lengths))
    eager = EagerAttention.build(seen, None, False, torch.float32, torch.device("cpu"))
    context = sum((chunk.stop - chunk.start) * chunk.blocks * 8 for piece in eager.chunks for chunk in piece)
    assert context < 16 * (64 * anchors * 8) * 1.01 < len(upper) * 8 * sum(lengths) / 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("changes", [{}, {"window": 200}], ids=["full", "window"])
def test_flex_equals_eager_on_gpu(changes: dict[str, object]) -> None:
    """Forward and gradients, over changing lengths with one compiled kernel."""
    config = tiny_config(head_dim=64, hidden_size=256, num_attention_heads=8, block_size=16, **changes)
    embedding, device = embedding_of(config).cuda(), torch.device("cuda")
    for seed, lengths in enumerate([(300, 700, 90), (512, 512), (1000, 33, 450, 211), (129,)]):
        batch, results = random_batch(config, lengths, 20, seed=seed, slots=96).to(device), []
        for attention in ("eager", "flex"):
            drafter = random_drafter(config, attention).to(device)
            hidden = drafter(batch, embedding)[: int(batch.keep.sum()) * config.block_size]
            hidden.square().sum().backward()
            results.append([hidden, *(p.grad for p in drafter.parameters())])
        for exact, ours in zip(*results, strict=True):
            assert (exact - ours).abs().max() < 1e-4 * exact.abs().max()
