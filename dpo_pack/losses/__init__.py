"""Preference losses: pure functions of policy and reference log-probs, and the objective of a run."""
