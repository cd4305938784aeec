"""What needs shapes, data, ring or GPUs: `resolve` fills what is derived, `check` refuses what cannot run."""

from recipe.check.checks import check
from recipe.check.derive import resolve

__all__ = ["check", "resolve"]
