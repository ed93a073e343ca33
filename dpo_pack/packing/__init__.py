"""Makes a plan from the lengths of pairs: the row, the rank and the step of each pair. Imports only numpy."""
