"""How much is drafted: the plan of a request, and what changes it from step to step."""
