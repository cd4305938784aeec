"""The drafter's training loop and what keeps it: feed, checkpoints, health, evaluation in the loop, export."""
