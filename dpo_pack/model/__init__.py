"""A row of tokens -> log-probs: layout, attention, scorer, adapters, shards."""
