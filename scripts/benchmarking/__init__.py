"""The parts of scripts/benchmark.py: workloads, models, contenders, measurements, report."""
