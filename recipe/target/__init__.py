"""The frozen target: shard plan, sharded model, streaming load, tap capture."""
