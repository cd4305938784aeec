"""Everything that knows about processes: roles, the control store, per-role worlds, the watchdog, DeepSpeed."""
