"""Makers of the demo's committed target (recipe/demo/assets): its text, tokenizer, training and answers."""
