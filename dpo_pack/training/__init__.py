"""The parts of a training step: batches, metrics, optimizers and guards."""
