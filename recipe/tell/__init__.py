"""All that a run tells: log, metrics, status, report, W&B, GPU samples."""
