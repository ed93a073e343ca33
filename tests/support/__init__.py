"""What several tests share: tiny models and runs, oracles, stand-ins."""
