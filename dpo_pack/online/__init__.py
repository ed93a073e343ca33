"""Online DPO: the policy answers prompts, a judge scores the answers, training uses pairs of answers.

`interface.py` defines generators and judges, `phases.py` turns prompts into pairs, and `source.py` puts the
pairs into global batches. Online and offline batches go through the same training loop.
"""
