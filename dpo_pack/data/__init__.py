"""Turns data files into tables of token ids. Nothing in this folder imports torch."""
