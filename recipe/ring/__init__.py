"""The node-local ring in shared memory, through which the target's taps reach the drafters. Knows nothing of models."""

from recipe.ring.layout import RingSpec
from recipe.ring.ring import Ring
from recipe.ring.segment import ring_path
from recipe.ring.sizing import RingSize, available_shm, check_fits, derive_page_tokens, plan_ring
from recipe.ring.tickets import Lease, Misfit, RingAborted, RingStats, RingTimeout, Write

__all__ = [
    "Lease",
    "Misfit",
    "Ring",
    "RingAborted",
    "RingSize",
    "RingSpec",
    "RingStats",
    "RingTimeout",
    "Write",
    "available_shm",
    "check_fits",
    "derive_page_tokens",
    "plan_ring",
    "ring_path",
]
