"""Example configurations of training runs, under `train/`."""
