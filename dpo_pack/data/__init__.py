"""From files on disk to token ids and rows. Nothing in this folder imports torch."""
