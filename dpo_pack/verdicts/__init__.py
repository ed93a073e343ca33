"""Is the new model better than its start? Judged answers, tasks and commands of both, and what they show."""
