"""The memory that a run needs on a device."""
