"""`dpopack recipe --from`: recipes from settings of TRL, axolotl and LLaMA-Factory, the peers of dpo-pack."""
