"""Computes reference log-probs once, keeps them on disk, and finds them by a hash of the token ids."""
