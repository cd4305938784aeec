"""Block-speculative decoding with a frozen target, and the measurements made of it. See ``speculative.py``."""
