"""Computes reference log-probs once, keeps them on disk and finds them by content."""
