"""Train a DFlash drafter for a frozen target language model in one DeepSpeed launch."""

__version__ = "0.1.0"
