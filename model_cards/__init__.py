"""Model cards of retrofitted checkpoints."""
