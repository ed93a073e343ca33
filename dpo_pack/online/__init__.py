"""Online DPO: the policy answers prompts, a judge scores the answers, training uses pairs of answers."""
