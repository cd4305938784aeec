"""Conversations to tokenised rows with an exact loss mask; the target's own answers."""
