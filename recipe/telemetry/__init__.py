"""What a run tells about itself: its folder, log, metrics, status, GPU samples, W&B, report and summary table."""
