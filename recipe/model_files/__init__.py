"""A model folder on disk: its shape, its tensors, which model it is."""
