"""Code about the process and its machine: ranks, signals, files, errors, console."""
