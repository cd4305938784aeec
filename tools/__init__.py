"""Run by hand; nothing of `recipe` needs them."""
