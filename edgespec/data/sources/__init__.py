"""Published data sets: the table of them, and one file each. Knows their columns and no network."""
