"""The Hub: checkpoints that are converted without being held, and files that are published with proof."""
