"""The loss."""
