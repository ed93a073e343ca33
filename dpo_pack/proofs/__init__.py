"""Proofs, before the first step, that packed rows are exact on this model and machine."""
