"""Which training pairs are wrong, or only long: facts of each, and what models say that have not seen it."""
