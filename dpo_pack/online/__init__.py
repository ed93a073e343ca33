"""Online DPO: the policy answers prompts, a judge scores the answers, pairs of them are trained on.

`interface.py` says what a generator and a judge are, `phases.py` goes from prompts to pairs, `source.py`
makes global batches of them for the same training loop as offline pairs, `build.py` reads the recipe.
"""
