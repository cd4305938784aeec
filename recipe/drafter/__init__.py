"""The drafter: its model, anchors, masks, objective and micro-batches. Never imports the target."""
