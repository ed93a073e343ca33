"""Checkpoints: their content, and the code that writes, keeps and reads them."""
