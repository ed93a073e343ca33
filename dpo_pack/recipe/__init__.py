"""The YAML recipe: the schema of a recipe, rules between keys, and errors."""
