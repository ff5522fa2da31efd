"""Converting checkpoints: `python -m checkpoints_convert`."""
