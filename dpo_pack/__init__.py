"""dpo-pack: DPO fine-tuning that spends its compute on real tokens only."""

__version__ = "0.1.0"
