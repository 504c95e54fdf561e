"""One script per performance claim; each prints a table and writes JSON."""
