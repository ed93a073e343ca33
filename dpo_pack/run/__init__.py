"""One run, from recipe to files: the code that prepares, saves, resumes and exports it."""
